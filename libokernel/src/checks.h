// checks.h: what each operation requires of its arguments, in the words a caller reads; one text for every backend.
//
// check_<op> returns OK_SUCCESS, or OK_ERR_INVALID_ARGUMENT with "<function>: argument=value must be ...". Pointers
// that only rows need may be null where rows == 0.
#pragma once
#include <cstdint>

#include "program.h"
#include "status.h"

namespace ok {
namespace {

#define CHECK(condition, ...)                                              \
    do {                                                                   \
        if (!(condition)) return ok::fail_argument(function, __VA_ARGS__); \
    } while (0)
#define CHECK_POINTER(pointer) CHECK((pointer) != nullptr, #pointer " is null")
// Up to 2^31, so that products of two stay within 64 bits.
#define CHECK_SIZE(size, least)                                                                     \
    do {                                                                                            \
        CHECK((size) >= (least), #size "=%lld must be >= " #least, static_cast<long long>(size));   \
        CHECK((size) <= ok::kMaxSide, #size "=%lld must be <= 2^31", static_cast<long long>(size)); \
    } while (0)
#define CHECK_STRIDE(stride, least, text)                                                                  \
    CHECK((stride) >= (least), #stride "=%lld must be >= " text " = %lld", static_cast<long long>(stride), \
          static_cast<long long>(least))

constexpr int64_t kMaxSide = int64_t{1} << 31;  // rows and columns of a matrix
constexpr int64_t kMaxHeadDim = 1024;

inline bool is_float_dtype(ok_dtype dtype) { return dtype == OK_F32 || dtype == OK_F16 || dtype == OK_BF16; }
inline bool is_matrix_dtype(ok_dtype dtype) { return is_float_dtype(dtype) || dtype == OK_Q8_0; }

#define CHECK_MATRIX_DTYPE(dtype)                                                                  \
    CHECK(ok::is_matrix_dtype(dtype), #dtype "=%d must be 0 (f32), 1 (f16), 2 (bf16) or 3 (q8_0)", \
          static_cast<int>(dtype))
#define CHECK_SIDE(side) \
    CHECK((side) > 0 && (side) <= ok::kMaxSide, #side "=%lld must be in 1..2^31", static_cast<long long>(side))

[[maybe_unused]] ok_status check_matrix(const char *function, ok_dtype dtype, int64_t out, int64_t in) {
    CHECK_MATRIX_DTYPE(dtype);
    CHECK_SIDE(out);
    CHECK_SIDE(in);
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_matrix_rows(const char *function, int64_t first_row, int64_t rows, int64_t out) {
    CHECK(first_row >= 0 && rows >= 0 && first_row <= out && rows <= out - first_row,
          "first_row=%lld and rows=%lld must lie within out=%lld", static_cast<long long>(first_row),
          static_cast<long long>(rows), static_cast<long long>(out));
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_matrix_pack(const char *function, const ok_queue *queue, const void *packed,
                                             ok_dtype dtype, int64_t out, int64_t in, int64_t first_row,
                                             const void *src, ok_dtype src_dtype, int64_t rows) {
    CHECK_POINTER(queue);
    if (ok_status status = check_matrix(function, dtype, out, in)) return status;
    CHECK_MATRIX_DTYPE(src_dtype);
    if (ok_status status = check_matrix_rows(function, first_row, rows, out)) return status;
    if (rows == 0) return OK_SUCCESS;
    CHECK_POINTER(packed);
    CHECK_POINTER(src);
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_matrix_unpack(const char *function, const ok_queue *queue, const void *dst,
                                               ok_dtype dst_dtype, const void *packed, ok_dtype dtype, int64_t out,
                                               int64_t in, int64_t first_row, int64_t rows) {
    CHECK_POINTER(queue);
    if (ok_status status = check_matrix(function, dtype, out, in)) return status;
    CHECK(dst_dtype == OK_F32 || (dst_dtype == OK_Q8_0 && dtype == OK_Q8_0),
          "dst_dtype=%d must be 0 (f32), or 3 (q8_0) from q8_0", static_cast<int>(dst_dtype));
    if (ok_status status = check_matrix_rows(function, first_row, rows, out)) return status;
    if (rows == 0) return OK_SUCCESS;
    CHECK_POINTER(dst);
    CHECK_POINTER(packed);
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_quantize(const char *function, const ok_queue *queue, const void *blocks,
                                          const void *src, ok_dtype src_dtype, int64_t rows, int64_t cols) {
    CHECK_POINTER(queue);
    CHECK(is_float_dtype(src_dtype), "src_dtype=%d must be 0 (f32), 1 (f16) or 2 (bf16)", static_cast<int>(src_dtype));
    CHECK_SIZE(rows, 0);
    CHECK(cols > 0, "cols=%lld must be > 0", static_cast<long long>(cols));
    if (rows == 0) return OK_SUCCESS;
    CHECK_POINTER(blocks);
    CHECK_POINTER(src);
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_matmul_shape(const char *function, ok_dtype dtype, int64_t rows, int64_t out,
                                              int64_t in) {
    CHECK_MATRIX_DTYPE(dtype);
    CHECK(rows >= 0 && rows <= kMaxSide, "rows=%lld must be in 0..2^31", static_cast<long long>(rows));
    CHECK_SIDE(out);
    CHECK_SIDE(in);
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_matmul(const char *function, const ok_queue *queue, const float *y, const float *x,
                                        const void *weight, ok_dtype dtype, int64_t rows, int64_t out, int64_t in) {
    CHECK_POINTER(queue);
    if (ok_status status = check_matmul_shape(function, dtype, rows, out, in)) return status;
    if (rows == 0) return OK_SUCCESS;
    CHECK_POINTER(y);
    CHECK_POINTER(x);
    CHECK_POINTER(weight);
    const uintptr_t x_begin = reinterpret_cast<uintptr_t>(x), y_begin = reinterpret_cast<uintptr_t>(y);
    const bool apart = x_begin + 4 * rows * in <= y_begin || y_begin + 4 * rows * out <= x_begin;
    CHECK(apart, "x and y must not overlap");
    return OK_SUCCESS;
}

// `needed`: what `source` says for this call.
[[maybe_unused]] ok_status check_scratch(const char *function, const ok_queue *queue, uint64_t needed,
                                         const char *source) {
    CHECK(queue->scratch_bytes >= needed, "the queue's scratch of %llu bytes must be >= %llu (%s)",
          static_cast<unsigned long long>(queue->scratch_bytes), static_cast<unsigned long long>(needed), source);
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_embedding(const char *function, const ok_queue *queue, const float *y,
                                           const void *table, ok_dtype dtype, const int32_t *ids, int64_t rows,
                                           int64_t vocab, int64_t cols) {
    CHECK_POINTER(queue);
    CHECK_POINTER(y);
    CHECK_POINTER(table);
    CHECK_POINTER(ids);
    CHECK(is_matrix_dtype(dtype), "dtype=%d must be f32, f16, bf16 or q8_0", static_cast<int>(dtype));
    CHECK_SIZE(rows, 0);
    CHECK_SIZE(vocab, 1);
    CHECK_SIZE(cols, 1);
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_norm(const char *function, const ok_queue *queue, const float *y, int64_t y_stride,
                                      const float *x, int64_t x_stride, const float *weight, const float *residual,
                                      int64_t residual_stride, int64_t rows, int64_t groups, int64_t cols, float eps) {
    CHECK_POINTER(queue);
    CHECK_POINTER(y);
    CHECK_POINTER(x);
    CHECK_POINTER(weight);
    CHECK_SIZE(rows, 0);
    CHECK(groups > 0 && groups <= kMaxSide, "groups=%lld must be positive, at most 2^31",
          static_cast<long long>(groups));
    CHECK(cols > 0 && cols <= kMaxSide, "cols=%lld must be positive, at most 2^31", static_cast<long long>(cols));
    CHECK_STRIDE(x_stride, groups * cols, "groups * cols");
    CHECK_STRIDE(y_stride, groups * cols, "groups * cols");
    if (residual) CHECK_STRIDE(residual_stride, groups * cols, "groups * cols");
    CHECK(eps >= 0.0f && eps - eps == 0.0f, "eps=%g must be finite and >= 0", static_cast<double>(eps));
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_rope(const char *function, const ok_queue *queue, const float *x, int64_t stride,
                                      const float *table, int64_t table_rows, const int32_t *table_row, int64_t rows,
                                      int64_t heads, int64_t head_dim, int64_t rotary_dim) {
    CHECK_POINTER(queue);
    CHECK_POINTER(x);
    CHECK_POINTER(table);
    CHECK_POINTER(table_row);
    CHECK_SIZE(rows, 0);
    CHECK_SIZE(table_rows, 1);
    CHECK_SIZE(heads, 1);
    CHECK_SIZE(head_dim, 1);
    CHECK(rotary_dim >= 2 && rotary_dim % 2 == 0 && rotary_dim <= head_dim,
          "rotary_dim=%lld must be even, >= 2 and <= head_dim=%lld", static_cast<long long>(rotary_dim),
          static_cast<long long>(head_dim));
    CHECK_STRIDE(stride, heads * head_dim, "heads * head_dim");
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_activation(const char *function, const ok_queue *queue, const float *y, const float *x,
                                            ok_activation activation) {
    CHECK_POINTER(queue);
    CHECK_POINTER(y);
    CHECK_POINTER(x);
    CHECK(activation >= OK_SILU && activation <= OK_RELU, "activation=%d must be between 0 and 3",
          static_cast<int>(activation));
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_activate(const char *function, const ok_queue *queue, const float *y, const float *x,
                                          ok_activation activation, int64_t n) {
    if (ok_status status = check_activation(function, queue, y, x, activation)) return status;
    CHECK_SIZE(n, 0);
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_activate_gated(const char *function, const ok_queue *queue, const float *y,
                                                const float *x, ok_activation activation, int64_t rows, int64_t cols) {
    if (ok_status status = check_activation(function, queue, y, x, activation)) return status;
    CHECK_SIZE(rows, 0);
    CHECK_SIZE(cols, 1);
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_matmul_fused(const char *function, const ok_queue *queue, const float *y,
                                              const float *x, ok_norm norm, const float *norm_weight, float eps,
                                              const float *normed, const void *weight, ok_dtype dtype,
                                              ok_epilogue epilogue, ok_activation activation, const float *product,
                                              int64_t rows, int64_t out, int64_t in) {
    CHECK_POINTER(queue);
    CHECK(norm >= OK_NORM_NONE && norm <= OK_NORM_LAYER, "norm=%d must be between 0 and 2", static_cast<int>(norm));
    CHECK(epilogue >= OK_EPILOGUE_NONE && epilogue <= OK_EPILOGUE_GATED, "epilogue=%d must be between 0 and 2",
          static_cast<int>(epilogue));
    if (ok_status status = check_matmul_shape(function, dtype, rows, out, in)) return status;
    const bool gated = epilogue == OK_EPILOGUE_GATED;
    CHECK(!gated || out % 2 == 0, "out=%lld must be even: a gate and what it gates", static_cast<long long>(out));
    CHECK(epilogue == OK_EPILOGUE_NONE || (activation >= OK_SILU && activation <= OK_RELU),
          "activation=%d must be between 0 and 3", static_cast<int>(activation));
    CHECK(norm == OK_NORM_NONE || (eps >= 0.0f && eps - eps == 0.0f), "eps=%g must be finite and >= 0",
          static_cast<double>(eps));
    if (rows == 0) return OK_SUCCESS;
    CHECK_POINTER(y);
    CHECK_POINTER(x);
    CHECK_POINTER(weight);
    if (norm != OK_NORM_NONE) {
        CHECK_POINTER(norm_weight);
        CHECK_POINTER(normed);
    }
    if (gated) CHECK_POINTER(product);
    const struct {
        const char *name;
        const float *begin;
        int64_t count;
    } parts[] = {{"x", x, rows * in},
                 {"y", y, rows * (gated ? out / 2 : out)},
                 {"normed", norm != OK_NORM_NONE ? normed : nullptr, rows * in},
                 {"product", gated ? product : nullptr, rows * out}};
    for (const auto &a : parts)
        for (const auto &b : parts)
            CHECK(&a >= &b || !a.begin || !b.begin || a.begin + a.count <= b.begin || b.begin + b.count <= a.begin,
                  "%s and %s must not overlap", a.name, b.name);
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_gather_rows(const char *function, const ok_queue *queue, const float *y,
                                             const float *x, const int32_t *index, int64_t rows, int64_t x_rows,
                                             int64_t cols) {
    CHECK_POINTER(queue);
    CHECK_POINTER(y);
    CHECK_POINTER(x);
    CHECK_POINTER(index);
    CHECK_SIZE(rows, 0);
    CHECK_SIZE(x_rows, 0);
    CHECK_SIZE(cols, 1);
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_count_nonfinite(const char *function, const ok_queue *queue, const int32_t *count,
                                                 const float *x, int64_t rows, int64_t cols) {
    CHECK_POINTER(queue);
    CHECK_POINTER(count);
    CHECK_POINTER(x);
    CHECK_SIZE(rows, 0);
    CHECK_SIZE(cols, 1);
    return OK_SUCCESS;
}

// A cache's description; `tile_elements`: values that the backend's layout spends on one block of one kv head.
[[maybe_unused]] ok_status check_kv_cache(const char *function, ok_dtype dtype, int64_t blocks, int64_t kv_heads,
                                          int64_t head_dim, int64_t tile_elements) {
    constexpr int64_t limit = int64_t{1} << 40;
    CHECK(is_float_dtype(dtype), "dtype=%d must be f32, f16 or bf16", static_cast<int>(dtype));
    CHECK(blocks > 0 && blocks <= INT32_MAX, "blocks=%lld must be between 1 and 2^31 - 1",
          static_cast<long long>(blocks));
    CHECK(head_dim > 0 && head_dim <= kMaxHeadDim, "head_dim=%lld must be between 1 and %lld",
          static_cast<long long>(head_dim), static_cast<long long>(kMaxHeadDim));
    CHECK(kv_heads > 0 && kv_heads <= limit / blocks / tile_elements,
          "kv_heads=%lld must be > 0, and the cache below 2^40 values", static_cast<long long>(kv_heads));
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_kv_append(const char *function, const ok_queue *queue, const void *cache,
                                           ok_dtype dtype, int64_t blocks, const float *k, const float *v,
                                           int64_t stride, const int32_t *slot, int64_t rows, int64_t kv_heads,
                                           int64_t head_dim, int64_t tile_elements) {
    CHECK_POINTER(queue);
    CHECK_POINTER(cache);
    CHECK_POINTER(k);
    CHECK_POINTER(v);
    CHECK_POINTER(slot);
    if (ok_status status = check_kv_cache(function, dtype, blocks, kv_heads, head_dim, tile_elements)) return status;
    CHECK_SIZE(rows, 0);
    CHECK_STRIDE(stride, kv_heads * head_dim, "kv_heads * head_dim");
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_rope_append(const char *function, const ok_queue *queue, const float *qkv,
                                             int64_t stride, const float *table, int64_t table_rows,
                                             const int32_t *table_row, const void *cache, ok_dtype dtype,
                                             int64_t blocks, const int32_t *slot, int64_t rows, int64_t heads,
                                             int64_t kv_heads, int64_t head_dim, int64_t rotary_dim,
                                             int64_t tile_elements) {
    CHECK_POINTER(queue);
    CHECK_POINTER(qkv);
    CHECK_POINTER(cache);
    CHECK_POINTER(slot);
    if (ok_status status = check_kv_cache(function, dtype, blocks, kv_heads, head_dim, tile_elements)) return status;
    CHECK_SIZE(heads, 1);
    CHECK(heads % kv_heads == 0, "heads=%lld must be a positive multiple of kv_heads=%lld",
          static_cast<long long>(heads), static_cast<long long>(kv_heads));
    CHECK_STRIDE(stride, (heads + 2 * kv_heads) * head_dim, "(heads + 2 kv_heads) * head_dim");
    return check_rope(function, queue, qkv, stride, table, table_rows, table_row, rows, heads + kv_heads, head_dim,
                      rotary_dim);
}

[[maybe_unused]] ok_status check_attention(const char *function, const ok_queue *queue, const float *y, const float *q,
                                           int64_t q_stride, const void *cache, ok_dtype dtype, int64_t blocks,
                                           const int32_t *block_table, int64_t sequences, int64_t blocks_per_sequence,
                                           const int32_t *sequence, const int32_t *position, int64_t rows,
                                           int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window,
                                           float scale, int64_t tile_elements) {
    CHECK_POINTER(queue);
    CHECK_POINTER(y);
    CHECK_POINTER(q);
    CHECK_POINTER(cache);
    CHECK_POINTER(block_table);
    CHECK_POINTER(sequence);
    CHECK_POINTER(position);
    if (ok_status status = check_kv_cache(function, dtype, blocks, kv_heads, head_dim, tile_elements)) return status;
    CHECK_SIZE(rows, 0);
    CHECK_SIZE(heads, 1);
    CHECK(heads % kv_heads == 0, "heads=%lld must be a positive multiple of kv_heads=%lld",
          static_cast<long long>(heads), static_cast<long long>(kv_heads));
    CHECK_STRIDE(q_stride, heads * head_dim, "heads * head_dim");
    CHECK(sequences > 0, "sequences=%lld must be > 0", static_cast<long long>(sequences));
    CHECK(blocks_per_sequence > 0 && blocks_per_sequence <= INT32_MAX / OK_KV_BLOCK_SIZE,
          "blocks_per_sequence=%lld must be between 1 and 2^31 / %d", static_cast<long long>(blocks_per_sequence),
          OK_KV_BLOCK_SIZE);
    CHECK_SIZE(window, 0);
    CHECK(scale - scale == 0.0f, "scale=%g must be finite", static_cast<double>(scale));
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_attention_scratch(const char *function, int64_t rows, int64_t heads, int64_t head_dim,
                                                   int64_t max_context, const uint64_t *host_bytes) {
    CHECK_POINTER(host_bytes);
    CHECK_SIZE(rows, 0);
    CHECK(heads > 0 && heads <= INT32_MAX, "heads=%lld must be > 0", static_cast<long long>(heads));
    CHECK(head_dim > 0 && head_dim <= kMaxHeadDim, "head_dim=%lld must be between 1 and %lld",
          static_cast<long long>(head_dim), static_cast<long long>(kMaxHeadDim));
    CHECK(max_context > 0 && max_context <= INT32_MAX, "max_context=%lld must be > 0",
          static_cast<long long>(max_context));
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_sample(const char *function, const ok_queue *queue, const int32_t *ids,
                                        const float *logits, const float *floats, const int32_t *ints, int64_t slots,
                                        int64_t rows, int64_t vocab) {
    CHECK_POINTER(queue);
    CHECK_POINTER(ids);
    CHECK_POINTER(logits);
    CHECK_POINTER(floats);
    CHECK_POINTER(ints);
    CHECK_SIZE(rows, 0);
    CHECK(vocab > 0 && vocab <= INT32_MAX, "vocab=%lld must be between 1 and 2^31 - 1", static_cast<long long>(vocab));
    CHECK_SIZE(slots, 0);
    return OK_SUCCESS;
}

[[maybe_unused]] ok_status check_sample_reset(const char *function, const ok_queue *queue, int64_t slot, int64_t slots,
                                              int64_t vocab, const int32_t *prompt, int64_t prompt_length,
                                              const int32_t *bias_ids, const float *bias_values, int64_t bias_length) {
    CHECK_POINTER(queue);
    CHECK(vocab > 0 && vocab <= INT32_MAX, "vocab=%lld must be between 1 and 2^31 - 1", static_cast<long long>(vocab));
    CHECK(slot >= 0 && slot < slots, "slot=%lld must be between 0 and slots - 1 = %lld", static_cast<long long>(slot),
          static_cast<long long>(slots - 1));
    CHECK_SIZE(prompt_length, 0);
    CHECK_SIZE(bias_length, 0);
    if (prompt_length > 0) CHECK_POINTER(prompt);
    if (bias_length > 0) {
        CHECK_POINTER(bias_ids);
        CHECK_POINTER(bias_values);
    }
    return OK_SUCCESS;
}

}  // namespace
}  // namespace ok
