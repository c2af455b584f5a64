/* okernel.h: the whole interface of libokernel.
 *
 * A model is a list of kernel calls; this library owns memory and knows kernels, and knows no models. Every build (CPU,
 * HIP, CUDA) exports exactly the functions below. Each fallible function returns an ok_status; on failure
 * ok_last_error() says function, argument, value and what was expected. No function ends the process or prints.
 *
 * Conventions
 * - Pointers are device pointers unless said otherwise (in the CPU build: ordinary memory). `host` marks host pointers.
 * - Matrices are row-major. `rows` counts token rows. Activations are f32 throughout.
 * - An operation runs now or is recorded, as its queue says. Arguments are checked in both cases, before any work.
 * - A weight matrix and a KV cache lie in a layout of the backend's own ("packed"): made by ok_matrix_pack and
 *   ok_kv_append, sized by ok_matrix_bytes and ok_kv_cache_bytes, never read by the caller.
 * - One row, one result: a row of output depends on its own inputs alone, not on how many rows travel with it, on the
 *   number of threads, or on recording. Bit for bit on the CPU.
 * - Thread safety: a queue is used by one thread at a time; different queues may be used from different threads.
 *
 * Grammar, kept small so that scripts/gen_bindings.py can read it: fixed-width scalars, pointers, opaque structs, enums
 * with explicit values, `OK_API type name(arguments);`.
 */
#ifndef OKERNEL_H
#define OKERNEL_H

#include <stdint.h>

#if defined(OK_BUILDING)
#define OK_API __attribute__((visibility("default")))
#else
#define OK_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ------------------------------------------------------------------------------------------------------ */

typedef enum ok_status {
    OK_SUCCESS = 0,
    OK_ERR_INVALID_ARGUMENT = 1, /* a value outside the function's contract; nothing was done */
    OK_ERR_OUT_OF_MEMORY = 2,    /* the message gives needed, free and total bytes */
    OK_ERR_DEVICE = 3,           /* the runtime or driver failed; the message carries its text */
    OK_ERR_UNAVAILABLE = 4,      /* no runtime, no device, no permission, no code object for this card, or after fork */
    OK_ERR_UNSUPPORTED = 5       /* this build cannot do that, and says what can */
} ok_status;

/* Storage types. q8_0: 32 int8 along the reduction dimension and one f16 scale (ggml's numbers). */
typedef enum ok_dtype { OK_F32 = 0, OK_F16 = 1, OK_BF16 = 2, OK_Q8_0 = 3, OK_I32 = 4 } ok_dtype;

/* Where an arena's memory lies. Host memory of a GPU build is pinned. */
typedef enum ok_memory { OK_MEMORY_DEVICE = 0, OK_MEMORY_HOST = 1 } ok_memory;

typedef enum ok_activation {
    OK_SILU = 0,      /* x * sigmoid(x) */
    OK_GELU_TANH = 1, /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) */
    OK_GELU_ERF = 2,  /* 0.5 x (1 + erf(x / sqrt 2)) */
    OK_RELU = 3
} ok_activation;

/* What ok_matmul_fused does to its input and its product. */
typedef enum ok_norm { OK_NORM_NONE = 0, OK_NORM_RMS = 1, OK_NORM_LAYER = 2 } ok_norm;
typedef enum ok_epilogue {
    OK_EPILOGUE_NONE = 0,
    OK_EPILOGUE_ACTIVATE = 1, /* ok_activate */
    OK_EPILOGUE_GATED = 2     /* ok_activate_gated: the first half of the product is the gate */
} ok_epilogue;

/* How a program is replayed: a loop over its launches in C, or a captured device graph. */
typedef enum ok_replay { OK_REPLAY_LOOP = 0, OK_REPLAY_GRAPH = 1 } ok_replay;

/* Fixed sizes that the driver needs to know. */
typedef enum ok_constant {
    OK_ABI_VERSION = 1,
    OK_KV_BLOCK_SIZE = 32,    /* tokens in one block of the paged KV cache */
    OK_SAMPLE_FLOATS = 8,     /* floats in one row of ok_sample's float parameters */
    OK_SAMPLE_INTS = 16,      /* int32s in one row of ok_sample's integer parameters */
    OK_SAMPLE_MAX_BANNED = 8  /* banned token ids at the end of that row */
} ok_constant;

typedef struct ok_arena ok_arena;     /* one reservation from the backend, carved by a bump pointer */
typedef struct ok_queue ok_queue;     /* an order of execution; immediate or recording */
typedef struct ok_program ok_program; /* a recorded list of launches, arguments packed once */
typedef struct ok_event ok_event;     /* a point in a queue, for timing */

/* ---- library ----------------------------------------------------------------------------------------------------- */

/* OK_ABI_VERSION of the build. */
OK_API int32_t ok_abi_version(void);
/* "cpu", "hip" or "cuda". */
OK_API const char *ok_backend(void);
/* Version, compiler and flags of the build, one line. */
OK_API const char *ok_build_info(void);
/* Instruction sets or GPU targets inside this build, separated by spaces: "portable avx2 avx512", "gfx1030 gfx90a". */
OK_API const char *ok_targets(void);
/* Name of a status, e.g. "OK_ERR_OUT_OF_MEMORY"; "unknown" for other values. */
OK_API const char *ok_status_name(int32_t status);
/* Message of the last failure on the calling thread; "" if none. Valid until the next failure on that thread. */
OK_API const char *ok_last_error(void);

/* ---- devices ----------------------------------------------------------------------------------------------------- */

/* Devices that can be seen; the CPU build says 1. OK_ERR_UNAVAILABLE with the reason where there is no runtime. */
OK_API ok_status ok_device_count(int32_t *host_count);
/* Marketing name and architecture ("gfx1030", "sm_90", "x86-64") into buffers of `size` bytes, cut if longer. */
OK_API ok_status ok_device_name(int32_t device, char *host_name, char *host_arch, int64_t size);
/* Free and total bytes. CPU: what this process may still use (MemAvailable, cgroup limit). */
OK_API ok_status ok_device_memory(int32_t device, uint64_t *host_free, uint64_t *host_total);
/* OK_SUCCESS if kernels of this build run on that device, else OK_ERR_UNAVAILABLE: "built for X, found Y". */
OK_API ok_status ok_device_usable(int32_t device);
/* Version of the GPU runtime in use (0 on the CPU) and the path it was loaded from (cut at `size`). */
OK_API ok_status ok_runtime_info(int32_t *host_version, char *host_path, int64_t size);

/* CPU build: threads used by every queue; default: cores this process may use (affinity, cgroup quota). 1 <= n <= 256.
 * GPU builds: OK_ERR_UNSUPPORTED, and ok_threads() is 1. */
OK_API ok_status ok_set_threads(int32_t n);
OK_API int32_t ok_threads(void);
/* CPU build: the instruction-set path in use, and a way to pin one of ok_targets() (tests, doctor). "" unpins. */
OK_API const char *ok_path(void);
OK_API ok_status ok_set_path(const char *host_name);

/* ---- memory ------------------------------------------------------------------------------------------------------ */

/* Reserves `bytes` once. OK_ERR_OUT_OF_MEMORY says needed, free and total. The memory is not cleared. */
OK_API ok_status ok_arena_create(ok_arena **host_out, int32_t device, ok_memory memory, uint64_t bytes);
/* Gives everything back. Null is allowed. In a child of fork only the child's own handle is forgotten. */
OK_API void ok_arena_destroy(ok_arena *arena);
/* Carves `bytes` (rounded up to 256, aligned to 256). OK_ERR_OUT_OF_MEMORY when the arena is full. */
OK_API ok_status ok_arena_alloc(ok_arena *arena, uint64_t bytes, void **host_out);
/* A mark is the number of bytes in use; releasing to it frees all that was carved since. */
OK_API ok_status ok_arena_mark(const ok_arena *arena, uint64_t *host_mark);
OK_API ok_status ok_arena_release(ok_arena *arena, uint64_t mark);
/* Allocations this library has asked the system for since it was loaded (all kinds). Unchanged by replays. */
OK_API int64_t ok_allocation_count(void);
/* Test hook: the n-th allocation from now (1 = the next) fails once; 0 switches it off. */
OK_API void ok_fail_allocation(int64_t n);

/* ---- queues, programs, events ------------------------------------------------------------------------------------ */

/* native_stream: a HIP or CUDA stream to use instead of one of our own; null on the CPU. */
OK_API ok_status ok_queue_create(ok_queue **host_out, int32_t device, void *native_stream);
OK_API void ok_queue_destroy(ok_queue *queue);
/* Working memory for operations that need some: at least the largest of the *_scratch_bytes of what is queued. */
OK_API ok_status ok_queue_set_scratch(ok_queue *queue, void *scratch, uint64_t bytes);
/* Waits until all work of the queue is done; reports failures of that work. */
OK_API ok_status ok_queue_sync(ok_queue *queue);
/* From here to ok_record_end operations are checked and appended, not run. */
OK_API ok_status ok_record_begin(ok_queue *queue);
OK_API ok_status ok_record_end(ok_queue *queue, ok_program **host_out);
/* Drops an unfinished recording; the queue is immediate again. */
OK_API ok_status ok_record_abort(ok_queue *queue);
OK_API void ok_program_destroy(ok_program *program);
/* Runs the program on its queue and returns when its results are there. */
OK_API ok_status ok_program_replay(ok_program *program);
OK_API ok_status ok_program_launches(const ok_program *program, int64_t *host_launches);
/* Chooses loop or graph; OK_ERR_UNSUPPORTED where there are no graphs. Every program starts as a loop. */
OK_API ok_status ok_program_set_replay(ok_program *program, ok_replay replay);
OK_API ok_status ok_event_create(ok_event **host_out, int32_t device);
OK_API void ok_event_destroy(ok_event *event);
OK_API ok_status ok_event_record(ok_event *event, ok_queue *queue);
/* Milliseconds from `begin` to `end`; waits for `end`. */
OK_API ok_status ok_event_elapsed(const ok_event *begin, const ok_event *end, float *host_milliseconds);

/* Copies `bytes` in queue order; either side may be device or host-arena memory. Pageable host memory is allowed only on
 * an immediate queue, and the call then returns when it may be reused. */
OK_API ok_status ok_copy(ok_queue *queue, void *dst, const void *src, uint64_t bytes);
OK_API ok_status ok_fill(ok_queue *queue, void *dst, uint8_t value, uint64_t bytes);
/* Reads `bytes` (a multiple of 64) and writes one word that depends on all of them: the bandwidth probe. */
OK_API ok_status ok_read(ok_queue *queue, uint32_t *sum, const void *src, uint64_t bytes);

/* ---- weight matrices --------------------------------------------------------------------------------------------- */

/* Bytes of a packed (out, in) matrix. dtype: f32, f16, bf16, q8_0. */
OK_API ok_status ok_matrix_bytes(ok_dtype dtype, int64_t out, int64_t in, uint64_t *host_bytes);
/* Writes rows [first_row, first_row + rows) of a packed (out, in) matrix from `src`, plain row-major (rows, in) of
 * src_dtype (f32, f16, bf16, or q8_0: ceil(in / 32) ggml blocks of 34 bytes a row). Converts by round-to-nearest-even; to
 * q8_0 as ok_quantize_q8_0. q8_0 sources go to q8_0 (the same numbers) or, dequantized, to the others. `overflow`
 * (device, may be null) is increased by the number of finite values that became infinite. A matrix may be filled in any
 * order; padding is written with the last row. */
OK_API ok_status ok_matrix_pack(ok_queue *queue, void *packed, ok_dtype dtype, int64_t out, int64_t in, int64_t first_row,
                                const void *src, ok_dtype src_dtype, int64_t rows, int32_t *overflow);
/* The inverse, into plain rows of dst_dtype: OK_F32 always (exact widening), OK_Q8_0 from q8_0 (ggml's blocks, bit for
 * bit what was packed). */
OK_API ok_status ok_matrix_unpack(ok_queue *queue, void *dst, ok_dtype dst_dtype, const void *packed, ok_dtype dtype,
                                  int64_t out, int64_t in, int64_t first_row, int64_t rows);
/* ggml's q8_0: per 32 values d = max|x| / 127, kept as f16, and q = round(x * (1 / d)), half away from zero; a zero block
 * has d = 0 and q = 0. blocks: (rows, ceil(cols / 32)) of 34 bytes; a short last block is padded with zeros. A scale past
 * f16 is held at 65504 and its quants at +-127; a block with a non-finite value gets d = NaN, q = 0, so that it cannot
 * pass as numbers. Both are counted in `overflow` (device, may be null). */
OK_API ok_status ok_quantize_q8_0(ok_queue *queue, void *blocks, const void *src, ok_dtype src_dtype, int64_t rows,
                                  int64_t cols, int32_t *overflow);

/* y[r, o] = sum_i x[r, i] * weight[o, i] (+ bias[o]) (+ residual[r, o]).
 * y, residual: f32 (rows, out); residual may alias y or be null. x: f32 (rows, in). weight: packed (out, in). bias: f32
 * (out) or null. active (may be null): rows at and past *active are neither read nor written.
 * The sum runs over i in one fixed order in f32, whatever the number of rows. x must not overlap y.
 * Queue scratch: ok_matmul_scratch_bytes. */
OK_API ok_status ok_matmul(ok_queue *queue, float *y, const float *x, const void *weight, ok_dtype dtype,
                           const float *bias, const float *residual, const int32_t *active, int64_t rows, int64_t out,
                           int64_t in);
OK_API ok_status ok_matmul_scratch_bytes(ok_dtype dtype, int64_t rows, int64_t out, int64_t in, uint64_t *host_bytes);
/* How q8_0 meets activations. CPU build: 1, the default: rounded to 16 bits, q = round(x / d) with d = max|x| / 32639
 * per row and 32 values, and multiplied as integers, exactly (a block whose d would be
 * subnormal, all below 4e-34, counts as zeros); 0: kept in f32, which is slower. GPU builds keep 22
 * bits or more: OK_ERR_UNSUPPORTED for 1. A property of the queue, read when an operation is queued. */
OK_API ok_status ok_queue_set_quantized_activations(ok_queue *queue, int32_t on);
/* Whether matmuls and attention use one variant of their kernels whatever the number of rows and the context, so that a
 * row is the same, bit for bit, in any company (1), or the fastest for each shape (0, the default). A property of the
 * queue, read when an operation is queued. The CPU always holds that promise: there it changes nothing. */
OK_API ok_status ok_queue_set_deterministic(ok_queue *queue, int32_t on);

/* The norm before a matmul and the activation after it: y = epilogue(norm(x) W^T + bias), in one launch for few rows on
 * a GPU, else as the single operations would.
 * x: f32 (rows, in). norm_weight, norm_bias: f32 (in), as ok_rms_norm and ok_layer_norm have them; null without a norm.
 * y: f32 (rows, out); gated: (rows, out / 2). normed: f32 (rows, in), product: f32 (rows, out): room for what lies
 * between, written or not; null where there is no norm, or the epilogue is not gated. None of these may overlap. */
OK_API ok_status ok_matmul_fused(ok_queue *queue, float *y, const float *x, ok_norm norm, const float *norm_weight,
                                 const float *norm_bias, float eps, float *normed, const void *weight, ok_dtype dtype,
                                 const float *bias, ok_epilogue epilogue, ok_activation activation, float *product,
                                 int64_t rows, int64_t out, int64_t in);

/* y[r, :] = table[ids[r], :] (+ residual[r, :]). table: packed (vocab, cols). An id outside [0, vocab) gives a row of
 * zeros (+ residual). residual: f32 (rows, cols), may alias y or be null. */
OK_API ok_status ok_embedding(ok_queue *queue, float *y, const void *table, ok_dtype dtype, const int32_t *ids,
                              const float *residual, int64_t rows, int64_t vocab, int64_t cols);

/* ---- norms, rotary, activations ---------------------------------------------------------------------------------- */

/* Each row holds `groups` neighbouring vectors of `cols` values, normalised apart; weight and bias are (groups, cols).
 * RMS: y = x / sqrt(mean(x^2) + eps) * weight.  Zhang & Sennrich 2019, eq. 4.
 * Layer: y = (x - mean) / sqrt(var + eps) * weight + bias, biased variance, two passes.  Ba et al. 2016, eq. 4.
 * (+ residual[r, g * cols + c]). x_stride, y_stride, residual_stride: elements between rows, >= groups * cols. bias and
 * residual may be null; y may alias x or residual with the same stride. */
OK_API ok_status ok_rms_norm(ok_queue *queue, float *y, int64_t y_stride, const float *x, int64_t x_stride,
                             const float *weight, const float *residual, int64_t residual_stride, int64_t rows,
                             int64_t groups, int64_t cols, float eps);
OK_API ok_status ok_layer_norm(ok_queue *queue, float *y, int64_t y_stride, const float *x, int64_t x_stride,
                               const float *weight, const float *bias, const float *residual, int64_t residual_stride,
                               int64_t rows, int64_t groups, int64_t cols, float eps);

/* Rotates in place the first rotary_dim values of each head, pairing j with j + rotary_dim / 2 ("half", NeoX):
 * x'[j] = x[j] cos - x[j + h] sin, x'[j + h] = x[j + h] cos + x[j] sin.  Su et al. 2021, eq. 34.
 * x: f32, rows of `stride`, head h at h * head_dim. table: f32 (table_rows, rotary_dim): cos in the first half of a row,
 * sin in the second. table_row[r] picks the row (position, plus an offset for a second set of frequencies); outside
 * [0, table_rows) the row is left alone. rotary_dim even, 2 <= rotary_dim <= head_dim. */
OK_API ok_status ok_rope(ok_queue *queue, float *x, int64_t stride, const float *table, int64_t table_rows,
                         const int32_t *table_row, int64_t rows, int64_t heads, int64_t head_dim, int64_t rotary_dim);

/* y = activation(x), elementwise over n values; y may alias x. */
OK_API ok_status ok_activate(ok_queue *queue, float *y, const float *x, ok_activation activation, int64_t n);
/* y[r, c] = activation(x[r, c]) * x[r, cols + c]. x: f32 (rows, 2 cols), gate then up. y: f32 (rows, cols). */
OK_API ok_status ok_activate_gated(ok_queue *queue, float *y, const float *x, ok_activation activation, int64_t rows,
                                   int64_t cols);
/* y[r, :] = x[index[r], :] for r < *active (null: all rows). index outside [0, x_rows): zeros. */
OK_API ok_status ok_gather_rows(ok_queue *queue, float *y, const float *x, const int32_t *index, const int32_t *active,
                                int64_t rows, int64_t x_rows, int64_t cols);
/* count += number of NaN or infinite values in the first *active (null: all) rows of x (rows, cols). */
OK_API ok_status ok_count_nonfinite(ok_queue *queue, int32_t *count, const float *x, const int32_t *active, int64_t rows,
                                    int64_t cols);

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* Bytes of one layer's paged cache, keys and values together. dtype: f32, f16, bf16. */
OK_API ok_status ok_kv_cache_bytes(ok_dtype dtype, int64_t blocks, int64_t kv_heads, int64_t head_dim,
                                   uint64_t *host_bytes);
/* Stores row r's key and value at slot[r] = block * OK_KV_BLOCK_SIZE + offset; outside the cache: dropped.
 * k, v: f32, rows of `stride`, kv head h at h * head_dim. */
OK_API ok_status ok_kv_append(ok_queue *queue, void *cache, ok_dtype dtype, int64_t blocks, const float *k,
                              const float *v, int64_t stride, const int32_t *slot, int64_t rows, int64_t kv_heads,
                              int64_t head_dim);
/* ok_rope on the queries and keys of each row, then ok_kv_append of its keys and values, in one launch.
 * qkv: f32, rows of `stride`: `heads` query heads, then kv_heads key heads, then kv_heads value heads. */
OK_API ok_status ok_rope_append(ok_queue *queue, float *qkv, int64_t stride, const float *table, int64_t table_rows,
                                const int32_t *table_row, void *cache, ok_dtype dtype, int64_t blocks,
                                const int32_t *slot, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                int64_t rotary_dim);
/* Causal attention of ragged rows over a paged cache: any mix of prefill and decode rows in one call.
 * Row r belongs to sequence[r], whose blocks are block_table[sequence[r], :] (block_table: int32 (sequences,
 * blocks_per_sequence)), and stands at position[r]: it sees keys max(0, position - window + 1) .. position, window = 0
 * meaning no window, so that exactly `window` keys including its own are seen. position[r] < 0: the row of y is zeros.
 * score = scale * q.k (+ slope[h] * (key - position)), softmax and sums in f32; query head h reads kv head
 * h / (heads / kv_heads). slope: f32 (heads), ALiBi (Press et al. 2022), or null.
 * q: f32, rows of q_stride, head h at h * head_dim. y: f32 (rows, heads * head_dim).
 * head_dim is 1 to 1024. A block number outside the cache holds no keys; a sequence outside the table gives zeros.
 * Keys are walked in fixed tiles counted from position 0. Queue scratch: ok_attention_scratch_bytes (on the CPU it only
 * buys parallelism: without it the result is the same). */
OK_API ok_status ok_attention_paged(ok_queue *queue, float *y, const float *q, int64_t q_stride, const void *cache,
                                    ok_dtype dtype, int64_t blocks, const int32_t *block_table, int64_t sequences,
                                    int64_t blocks_per_sequence, const int32_t *sequence, const int32_t *position,
                                    const float *slope, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                                    int64_t window, float scale);
OK_API ok_status ok_attention_scratch_bytes(int64_t rows, int64_t heads, int64_t head_dim, int64_t max_context,
                                            uint64_t *host_bytes);

/* ---- sampling ---------------------------------------------------------------------------------------------------- */

/* Picks one token a row. logits: f32 (rows, vocab), not changed. For r < *active (null: all):
 * floats (rows, OK_SAMPLE_FLOATS): temperature, top_p, min_p, repetition_penalty, presence_penalty,
 *   frequency_penalty, 0, 0.
 * ints (rows, OK_SAMPLE_INTS): top_k (<= 0: all), seed low, seed high, position, slot, 0, 0, 0, then
 *   OK_SAMPLE_MAX_BANNED token ids that must not be picked (-1: none).
 * In this order: logit + bias[slot]; repetition penalty (once for each id seen in prompt or output: l > 0 ? l / p :
 * l * p); - presence - frequency * count for ids in the output; banned ids drop out. temperature 0: the largest, the
 * lowest id on a tie. Else divide by temperature; keep the top_k largest (>= vocab: all; ties with the k-th stay); keep
 * the smallest set of most probable tokens whose sum is >= top_p (1: all; ties stay); keep p >= min_p * max p; then walk
 * the ids upward until the cumulative probability passes u * total. u: 24 bits of Philox4x32-10 (Salmon et al. 2011),
 * key = seed, counter = position. slot outside [0, slots): no bias, no counts; two rows must not share a slot.
 * counts: uint32 (slots, vocab), bit 31 = in the prompt, the rest = times in the output; the picked id's count is
 * increased. bias: f32 (slots, vocab). Both may be null when no row has a slot. ids: int32 (rows): the pick, or -1 where
 * logits hold NaN or +infinity or nothing is left to pick. logprobs: f32 (rows), may be null: log softmax of the
 * unchanged logits at the pick, -infinity where ids is -1. */
OK_API ok_status ok_sample(ok_queue *queue, int32_t *ids, float *logprobs, const float *logits, const float *floats,
                           const int32_t *ints, uint32_t *counts, const float *bias, const int32_t *active,
                           int64_t slots, int64_t rows, int64_t vocab);
/* Clears a slot's counts and bias and marks the prompt. prompt: int32 (prompt_length). bias_ids, bias_values:
 * (bias_length). counts or bias may be null. Ids outside [0, vocab) are ignored. */
OK_API ok_status ok_sample_reset(ok_queue *queue, uint32_t *counts, float *bias, int64_t slot, int64_t slots,
                                 int64_t vocab, const int32_t *prompt, int64_t prompt_length, const int32_t *bias_ids,
                                 const float *bias_values, int64_t bias_length);

#ifdef __cplusplus
}
#endif
#endif /* OKERNEL_H */
