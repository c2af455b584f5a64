// attention.hip: causal attention of ragged rows over the paged cache.
//
// Few rows (`span`): the blocks of one row and query head take its keys in turn, one step of neighbouring keys each;
// lanes lie along head_dim, so that a key or value is one coalesced read, and groups of lanes take keys side by side. A
// wave keeps one softmax. Several blocks of a row and head leave (weighted values, max, sum) in scratch for `merge`.
//
// Many rows (`tile`): a block takes 32 rows and one query head; keys and values pass through LDS, 32 at a time, for all
// rows of one sequence; rows of other sequences follow in further passes. Softmax and sums are f32 throughout.
//
// Traffic: `span` reads the visible keys and values once a query head, `tile` once for 32 rows.
#include "checks.h"
#include "kv_cache.h"

namespace ok {

constexpr uint32_t kMaxSpans = 16;  // blocks of one row and head
constexpr int64_t kTileFrom = 65;   // fewest rows for tiles
constexpr int kTileRows = 32, kTileKeys = OK_KV_BLOCK_SIZE, kTileDim = 64;
constexpr float kLowest = -__builtin_inff();

// Keys [first, end) that a row sees; its line of the block table.
struct Visible {
    int64_t first, end;
    const int32_t *table;

    __device__ Visible(int64_t sequence, int64_t position, const int32_t *block_table, int64_t sequences,
                       int64_t blocks_per_sequence, int64_t window) {
        const int64_t limit = blocks_per_sequence * OK_KV_BLOCK_SIZE;
        const bool known = sequence >= 0 && sequence < sequences;
        table = block_table + (known ? sequence * blocks_per_sequence : 0);
        end = !known ? 0 : position + 1 < limit ? position + 1 : limit;
        first = window > 0 && position >= window ? position - window + 1 : 0;
    }
};

// What exp(from - to) is for a running maximum that moved from `from` to `to`; 1 where both are still -infinity.
DEVICE float moved(float from, float to) { return from == to ? 1.0f : expf(from - to); }

// ---- few rows -----------------------------------------------------------------------------------------------------

// Keys that a group of lanes reads at a time; C: steps of 8 values that a lane holds of head_dim.
__host__ __device__ constexpr int keys_at_once(int C) { return C == 1 ? 4 : 1; }

// Steps of `keys` keys that hold a visible one. Step i is of span i % spans. (Positions are below 2^31.)
struct Steps {
    uint32_t first, end;

    __device__ Steps(const Visible &visible, uint32_t keys)
        : first(static_cast<uint32_t>(visible.first) / keys),
          end(visible.first < visible.end ? (static_cast<uint32_t>(visible.end) + keys - 1) / keys : first) {}
    __device__ uint32_t first_of(uint32_t span, uint32_t spans) const {
        const uint32_t before = first / spans * spans + span;
        return before < first ? before + spans : before;
    }
    __device__ bool any_of(uint32_t span, uint32_t spans) const { return first_of(span, spans) < end; }
};

// The cache blocks of keys at, at + groups, ... ; -1: not seen.
template <int N>
DEVICE void find_blocks(int32_t (&found)[N], const Visible &visible, int64_t at, int groups, int64_t blocks) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
        const int64_t key = at + n * groups;
        found[n] = key >= visible.first && key < visible.end ? visible.table[key / OK_KV_BLOCK_SIZE] : -1;
        if (found[n] >= blocks) found[n] = -1;
    }
}

// lanes: of a group, a power of two; step c of lane l along head_dim is l + c * lanes.
template <class T, int C>
DEVICE void attend_span(float *y, float *partial, const float *q, int64_t q_stride, const T *cache, int64_t blocks,
                        const int32_t *block_table, int64_t sequences, int64_t blocks_per_sequence,
                        const int32_t *sequence, const int32_t *position, const float *slope, int64_t heads,
                        int64_t kv_heads, int64_t head_dim, int64_t window, float scale, int32_t lanes) {
    constexpr int kKeys = keys_at_once(C), kWaves = kBlock / kWave;
    __shared__ float wave_max[kWaves], wave_sum[kWaves];
    __shared__ float wave_out[kWaves][C * 8 * 32];
    const KVLayout layout(kv_heads, head_dim);
    const uint32_t row = blockIdx.x / static_cast<uint32_t>(heads), head = blockIdx.x % static_cast<uint32_t>(heads);
    const uint32_t kv_head = head / (static_cast<uint32_t>(heads) / static_cast<uint32_t>(kv_heads));
    const uint32_t span = blockIdx.y, spans = gridDim.y;
    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = kBlock / lanes;
    begin_kernel();
    start_next();

    const int64_t at = position[row];
    const Visible visible(sequence[row], at, block_table, sequences, blocks_per_sequence, window);
    float query[C][8], out[C][8] = {}, max = kLowest, sum = 0.0f;
#pragma unroll
    for (int c = 0; c < C; ++c)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int64_t d = (lane + c * lanes) * 8 + i;
            query[c][i] = d < head_dim ? q[row * q_stride + head * head_dim + d] : 0.0f;
        }
    const float bias = slope ? slope[head] : 0.0f;

    const int step_keys = kKeys * groups;
    const Steps steps(visible, step_keys);
    if (spans > 1 && !steps.any_of(span, spans)) return;  // `merge` sees that it is empty too

    // Which group takes which key depends on the key's place alone. Table, keys and values are asked for ahead of their use.
    int64_t step = steps.first_of(span, spans);
    int32_t block[kKeys];
    find_blocks(block, visible, step * step_keys + group, groups, blocks);
    while (step < steps.end) {
        const int64_t first_key = step * step_keys + group;
        Eight<T> keys[kKeys][C] = {}, values[kKeys][C] = {};
        bool seen[kKeys];
#pragma unroll
        for (int n = 0; n < kKeys; ++n) {
            const int64_t token = (first_key + n * groups) % OK_KV_BLOCK_SIZE;
            seen[n] = block[n] >= 0;
#pragma unroll
            for (int c = 0; c < C; ++c) {
                const int64_t d = (lane + c * lanes) * 8;
                if (!seen[n] || d >= layout.padded_dim) continue;
                keys[n][c] = load_eight(cache + layout.key(block[n], kv_head, token) + d);
                values[n][c] = load_eight(cache + layout.value(block[n], kv_head, token) + d);
            }
        }
        step += spans;
        find_blocks(block, visible, step * step_keys + group, groups, blocks);

        float score[kKeys], now = max;
#pragma unroll
        for (int n = 0; n < kKeys; ++n) {
            float dot = 0.0f;
#pragma unroll
            for (int c = 0; c < C; ++c)
#pragma unroll
                for (int i = 0; i < 8; ++i) dot = fmaf(query[c][i], keys[n][c].get(i), dot);
            dot = reduce_lanes<Add>(dot, lanes);
            score[n] = seen[n] ? fmaf(scale, dot, bias * static_cast<float>(first_key + n * groups - at)) : kLowest;
            now = fmaxf(now, score[n]);
        }
        for (int mask = lanes; mask < kWave; mask *= 2) now = fmaxf(now, shuffle_xor(now, mask));
        const float kept = moved(max, now);
        max = now;
        sum *= kept;
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int i = 0; i < 8; ++i) out[c][i] *= kept;
#pragma unroll
        for (int n = 0; n < kKeys; ++n) {
            const float weight = score[n] == kLowest ? 0.0f : expf(score[n] - max);
            sum += weight;
#pragma unroll
            for (int c = 0; c < C; ++c)
#pragma unroll
                for (int i = 0; i < 8; ++i) out[c][i] = fmaf(weight, values[n][c].get(i), out[c][i]);
        }
    }

    // Fold the groups of a wave, then the waves.
    for (int mask = lanes; mask < kWave; mask *= 2) {
        sum += shuffle_xor(sum, mask);
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int i = 0; i < 8; ++i) out[c][i] += shuffle_xor(out[c][i], mask);
    }
    if (lane_index() == 0) {
        wave_max[wave_index()] = max;
        wave_sum[wave_index()] = sum;
    }
    if (lane_index() < lanes)
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int i = 0; i < 8; ++i) wave_out[wave_index()][(lane + c * lanes) * 8 + i] = out[c][i];
    __syncthreads();
    float share[kWaves];
    max = kLowest;
    sum = 0.0f;
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) max = fmaxf(max, wave_max[wave]);
#pragma unroll
    for (int wave = 0; wave < kWaves; ++wave) {
        share[wave] = moved(wave_max[wave], max);
        sum += wave_sum[wave] * share[wave];
    }
    const int64_t result = static_cast<int64_t>(row) * heads + head;
    float *to = spans > 1 ? partial + (result * spans + span) * (head_dim + 2) : y + result * head_dim;
    for (int64_t d = threadIdx.x; d < head_dim; d += kBlock) {
        float total = 0.0f;
#pragma unroll
        for (int wave = 0; wave < kWaves; ++wave) total += wave_out[wave][d] * share[wave];
        to[d] = spans > 1 ? total : sum == 0.0f ? 0.0f : total / sum;
    }
    if (spans > 1 && threadIdx.x == 0) {
        to[head_dim] = max;
        to[head_dim + 1] = sum;
    }
}

// Folds the spans of a row and head in order; what several of them left is asked for at once.
KERNEL attention_merge_kernel(float *y, const float *partial, const int32_t *block_table, int64_t sequences,
                              int64_t blocks_per_sequence, const int32_t *sequence, const int32_t *position,
                              int64_t heads, int64_t head_dim, int64_t window, uint32_t spans, uint32_t step_keys) {
    begin_kernel();
    start_next();
    constexpr uint32_t kAtOnce = 8;
    const int64_t row = blockIdx.x / static_cast<uint32_t>(heads), record = head_dim + 2;
    const Visible visible(sequence[row], position[row], block_table, sequences, blocks_per_sequence, window);
    const Steps steps(visible, step_keys);
    partial += static_cast<int64_t>(blockIdx.x) * spans * record;
    for (int64_t d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float max = kLowest, sum = 0.0f, total = 0.0f;
        for (uint32_t base = 0; base < spans; base += kAtOnce) {
            float value[kAtOnce], value_max[kAtOnce], value_sum[kAtOnce], now = max;
#pragma unroll
            for (uint32_t n = 0; n < kAtOnce; ++n) {
                const bool used = base + n < spans && steps.any_of(base + n, spans);
                const float *from = partial + (base + n) * record;
                value[n] = used ? from[d] : 0.0f;
                value_max[n] = used ? from[head_dim] : kLowest;
                value_sum[n] = used ? from[head_dim + 1] : 0.0f;
            }
#pragma unroll
            for (uint32_t n = 0; n < kAtOnce; ++n) now = fmaxf(now, value_max[n]);
            const float kept = moved(max, now);
            max = now;
            sum *= kept;
            total *= kept;
#pragma unroll
            for (uint32_t n = 0; n < kAtOnce; ++n) {
                const float share = moved(value_max[n], max);
                sum += value_sum[n] * share;
                total += value[n] * share;
            }
        }
        y[blockIdx.x * head_dim + d] = sum == 0.0f ? 0.0f : total / sum;
    }
}

// ---- many rows ----------------------------------------------------------------------------------------------------

// 32 keys or values of one cache block, kTileDim of their values from `d`, into LDS as f32; zeros for keys outside
// [first, end), which may never have been written.
template <class T>
DEVICE void load_tile(float (*tile)[kTileDim + 4], const T *rows, int64_t padded_dim, int64_t d, int64_t tile_first,
                      int64_t first, int64_t end) {
    const int token = threadIdx.x / 8, part = threadIdx.x % 8 * 8;
    const int64_t key = tile_first + token;
    Eight<T> eight = {};
    if (rows && key >= first && key < end && d + part < padded_dim)
        eight = load_eight(rows + token * padded_dim + d + part);
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const Chunk<float> four = {{eight.get(i), eight.get(i + 1), eight.get(i + 2), eight.get(i + 3)}};
        store_aligned(&tile[token][part + i], four);
    }
}

// A thread computes the scores of 2 rows and 2 keys, then 4 output values of the same 2 rows in each of C parts of
// head_dim. The 16 threads that share 2 rows are neighbours in a wave.
template <class T, int C>
DEVICE void attend_tile(float *y, const float *q, int64_t q_stride, const T *cache, int64_t blocks,
                        const int32_t *block_table, int64_t sequences, int64_t blocks_per_sequence,
                        const int32_t *sequence, const int32_t *position, const float *slope, int64_t rows,
                        int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window, float scale) {
    alignas(16) __shared__ float query[kTileRows][C * kTileDim + 4];
    alignas(16) __shared__ float tile[kTileKeys][kTileDim + 4];
    alignas(16) __shared__ float weight[kTileRows][kTileKeys + 4];
    __shared__ int32_t row_sequence[kTileRows], row_position[kTileRows];
    const KVLayout layout(kv_heads, head_dim);
    const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTileRows, head = blockIdx.y;
    const int64_t kv_head = head / (heads / kv_heads);
    const int pair = threadIdx.x / 16 * 2, column = threadIdx.x % 16;
    begin_kernel();

    for (int i = threadIdx.x; i < kTileRows * C * kTileDim; i += blockDim.x) {
        const int r = i / (C * kTileDim), d = i % (C * kTileDim);
        const bool real = first_row + r < rows && d < head_dim;
        query[r][d] = real ? q[(first_row + r) * q_stride + head * head_dim + d] : 0.0f;
    }
    if (threadIdx.x < kTileRows) {
        const bool real = first_row + threadIdx.x < rows;
        row_sequence[threadIdx.x] = real ? sequence[first_row + threadIdx.x] : -1;
        row_position[threadIdx.x] = real ? position[first_row + threadIdx.x] : -1;
    }
    __syncthreads();

    const float bias = slope ? slope[head] : 0.0f;
    float out[C][2][4] = {}, max[2] = {kLowest, kLowest}, sum[2] = {};
    for (uint32_t waiting = ~0u; waiting;) {  // rows whose sequence has not had its pass
        int leader = 0;
        while (leader < kTileRows && (!(waiting >> leader & 1) || row_position[leader] < 0 ||
                                      row_sequence[leader] < 0 || row_sequence[leader] >= sequences))
            ++leader;
        if (leader == kTileRows) break;
        const int32_t own = row_sequence[leader];
        int64_t first = INT64_MAX, end = 0;  // keys that some row of this sequence sees
        for (int r = leader; r < kTileRows; ++r) {
            if (row_sequence[r] != own) continue;
            waiting &= ~(1u << r);
            if (row_position[r] < 0) continue;
            const Visible visible(own, row_position[r], block_table, sequences, blocks_per_sequence, window);
            if (visible.first < first) first = visible.first;
            if (visible.end > end) end = visible.end;
        }
        const int32_t *table = block_table + own * blocks_per_sequence;
        int64_t row_first[2], row_end[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool takes_part = row_sequence[pair + i] == own && row_position[pair + i] >= 0;
            const Visible visible(own, row_position[pair + i], block_table, sequences, blocks_per_sequence, window);
            row_first[i] = visible.first;
            row_end[i] = takes_part ? visible.end : 0;
        }
        for (int64_t base = first / kTileKeys * kTileKeys; base < end; base += kTileKeys) {
            const int64_t block = table[base / kTileKeys];
            const bool real = block >= 0 && block < blocks;
            const T *keys = real ? cache + layout.key(block, kv_head, 0) : nullptr;
            const T *values = real ? cache + layout.value(block, kv_head, 0) : nullptr;
            float score[2][2] = {};
#pragma unroll
            for (int c = 0; c < C; ++c) {
                load_tile(tile, keys, layout.padded_dim, c * kTileDim, base, first, end);
                __syncthreads();
#pragma unroll 4
                for (int d = 0; d < kTileDim; d += 4) {
                    Chunk<float> a[2], b[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        a[i] = load_chunk(&query[pair + i][c * kTileDim + d]);
                        b[i] = load_chunk(&tile[column + 16 * i][d]);
                    }
#pragma unroll
                    for (int n = 0; n < 4; ++n)
#pragma unroll
                        for (int i = 0; i < 2; ++i)
#pragma unroll
                            for (int j = 0; j < 2; ++j) score[i][j] = fmaf(a[i].value[n], b[j].value[n], score[i][j]);
                }
                __syncthreads();
            }
            float kept[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const int64_t key = base + column + 16 * j;
                    const bool seen = real && key >= row_first[i] && key < row_end[i];
                    score[i][j] =
                        seen ? fmaf(scale, score[i][j], bias * static_cast<float>(key - row_position[pair + i]))
                             : kLowest;
                }
                float now = fmaxf(max[i], fmaxf(score[i][0], score[i][1]));
#pragma unroll
                for (int mask = 8; mask > 0; mask /= 2) now = fmaxf(now, shuffle_xor(now, mask));
                kept[i] = moved(max[i], now);
                max[i] = now;
                float added = 0.0f;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float w = score[i][j] == kLowest ? 0.0f : expf(score[i][j] - now);
                    weight[pair + i][column + 16 * j] = w;
                    added += w;
                }
#pragma unroll
                for (int mask = 8; mask > 0; mask /= 2) added += shuffle_xor(added, mask);
                sum[i] = sum[i] * kept[i] + added;
            }
#pragma unroll
            for (int c = 0; c < C; ++c) {
                load_tile(tile, values, layout.padded_dim, c * kTileDim, base, first, end);
                __syncthreads();
#pragma unroll
                for (int i = 0; i < 2; ++i)
#pragma unroll
                    for (int n = 0; n < 4; ++n) out[c][i][n] *= kept[i];
#pragma unroll 2
                for (int key = 0; key < kTileKeys; key += 4) {
                    Chunk<float> w[2];
#pragma unroll
                    for (int i = 0; i < 2; ++i) w[i] = load_chunk(&weight[pair + i][key]);
#pragma unroll
                    for (int k = 0; k < 4; ++k) {
                        const Chunk<float> v = load_chunk(&tile[key + k][column * 4]);
#pragma unroll
                        for (int i = 0; i < 2; ++i)
#pragma unroll
                            for (int n = 0; n < 4; ++n) out[c][i][n] = fmaf(w[i].value[k], v.value[n], out[c][i][n]);
                    }
                }
                __syncthreads();
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int64_t row = first_row + pair + i, d = c * kTileDim + column * 4 + n;
                if (row < rows && d < head_dim)
                    y[(row * heads + head) * head_dim + d] = sum[i] == 0.0f ? 0.0f : out[c][i][n] / sum[i];
            }
}

#define SPAN_KERNEL(name, T, C, blocks_resident)                                                                    \
    KERNEL_OF(256, blocks_resident)                                                                                 \
    name(float *y, float *partial, const float *q, int64_t q_stride, const void *cache, int64_t blocks,             \
         const int32_t *block_table, int64_t sequences, int64_t blocks_per_sequence, const int32_t *sequence,       \
         const int32_t *position, const float *slope, int64_t heads, int64_t kv_heads, int64_t head_dim,            \
         int64_t window, float scale, int32_t lanes) {                                                              \
        attend_span<T, C>(y, partial, q, q_stride, static_cast<const T *>(cache), blocks, block_table, sequences,   \
                          blocks_per_sequence, sequence, position, slope, heads, kv_heads, head_dim, window, scale, \
                          lanes);                                                                                   \
    }
#define TILE_KERNEL(name, T, C, blocks_resident)                                                                    \
    KERNEL_OF(256, blocks_resident)                                                                                 \
    name(float *y, const float *q, int64_t q_stride, const void *cache, int64_t blocks, const int32_t *block_table, \
         int64_t sequences, int64_t blocks_per_sequence, const int32_t *sequence, const int32_t *position,          \
         const float *slope, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t window,       \
         float scale) {                                                                                             \
        attend_tile<T, C>(y, q, q_stride, static_cast<const T *>(cache), blocks, block_table, sequences,            \
                          blocks_per_sequence, sequence, position, slope, rows, heads, kv_heads, head_dim, window,  \
                          scale);                                                                                   \
    }
#define ATTENTION_KERNELS(dtype, T)                            \
    SPAN_KERNEL(attention_span_##dtype##_kernel, T, 1, 2)      \
    SPAN_KERNEL(attention_long_span_##dtype##_kernel, T, 4, 1) \
    TILE_KERNEL(attention_tile64_##dtype##_kernel, T, 1, 2)    \
    TILE_KERNEL(attention_tile128_##dtype##_kernel, T, 2, 2)   \
    TILE_KERNEL(attention_tile256_##dtype##_kernel, T, 4, 1)
ATTENTION_KERNELS(f32, float)
ATTENTION_KERNELS(f16, f16)
ATTENTION_KERNELS(bf16, bf16)

}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

namespace {

bool takes_tiles(int64_t rows, int64_t head_dim) { return rows >= ok::kTileFrom && head_dim <= 4 * ok::kTileDim; }

// How the `span` kernels share out a head of `keys` keys.
struct SpanShape {
    bool is_long;  // a head that takes the kernel with C = 4
    int32_t lanes = 1, step_keys;
    int64_t spans;

    SpanShape(int64_t head_dim, int64_t keys) {
        const int64_t steps = ok::ceil_div(head_dim, ok::kHeadStep);
        is_long = steps > 32;
        while (lanes < 32 && lanes < steps) lanes *= 2;
        step_keys = ok::kBlock / lanes * ok::keys_at_once(is_long ? 4 : 1);
        spans = ok::ceil_div(keys, step_keys);
        if (spans > ok::kMaxSpans) spans = ok::kMaxSpans;
    }
};

uint64_t scratch_needed(int64_t rows, int64_t heads, int64_t head_dim, int64_t spans) {
    if (spans <= 1 || takes_tiles(rows, head_dim)) return 0;
    return static_cast<uint64_t>(rows * heads * spans * (head_dim + 2)) * sizeof(float);
}

}  // namespace

ok_status ok_attention_paged(ok_queue *queue, float *y, const float *q, int64_t q_stride, const void *cache,
                             ok_dtype dtype, int64_t blocks, const int32_t *block_table, int64_t sequences,
                             int64_t blocks_per_sequence, const int32_t *sequence, const int32_t *position,
                             const float *slope, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                             int64_t window, float scale) {
    const int64_t tile = ok::KVLayout(kv_heads, head_dim < 1 ? 1 : head_dim).tile_elements();
    if (ok_status status = ok::check_attention(__func__, queue, y, q, q_stride, cache, dtype, blocks, block_table,
                                               sequences, blocks_per_sequence, sequence, position, rows, heads,
                                               kv_heads, head_dim, window, scale, tile))
        return status;
    if (rows == 0) return OK_SUCCESS;
    if (!queue->deterministic && takes_tiles(rows, head_dim)) {
        const ok::Grid grid = {ok::ceil_div(rows, ok::kTileRows), heads};
        if (head_dim <= ok::kTileDim)
            return LAUNCH_FLOAT(attention_tile64, dtype, queue, grid, ok::kBlock, y, q, q_stride, cache, blocks,
                                block_table, sequences, blocks_per_sequence, sequence, position, slope, rows, heads,
                                kv_heads, head_dim, window, scale);
        if (head_dim <= 2 * ok::kTileDim)
            return LAUNCH_FLOAT(attention_tile128, dtype, queue, grid, ok::kBlock, y, q, q_stride, cache, blocks,
                                block_table, sequences, blocks_per_sequence, sequence, position, slope, rows, heads,
                                kv_heads, head_dim, window, scale);
        return LAUNCH_FLOAT(attention_tile256, dtype, queue, grid, ok::kBlock, y, q, q_stride, cache, blocks,
                            block_table, sequences, blocks_per_sequence, sequence, position, slope, rows, heads,
                            kv_heads, head_dim, window, scale);
    }

    // Without scratch for the spans, one block takes all steps; so too where the sums' order must not depend on how long
    // a context may be.
    const SpanShape shape(head_dim, blocks_per_sequence * OK_KV_BLOCK_SIZE);
    const bool is_short = queue->scratch_bytes < scratch_needed(rows, heads, head_dim, shape.spans);
    const int64_t spans = queue->deterministic || is_short ? 1 : shape.spans;
    float *partial = static_cast<float *>(queue->scratch);
    const ok::Grid grid = {rows * heads, spans};
    const ok_status status =
        shape.is_long ? LAUNCH_FLOAT(attention_long_span, dtype, queue, grid, ok::kBlock, y, partial, q, q_stride,
                                     cache, blocks, block_table, sequences, blocks_per_sequence, sequence, position,
                                     slope, heads, kv_heads, head_dim, window, scale, shape.lanes)
                      : LAUNCH_FLOAT(attention_span, dtype, queue, grid, ok::kBlock, y, partial, q, q_stride, cache,
                                     blocks, block_table, sequences, blocks_per_sequence, sequence, position, slope,
                                     heads, kv_heads, head_dim, window, scale, shape.lanes);
    if (status != OK_SUCCESS || spans == 1) return status;
    return LAUNCH(queue, attention_merge_kernel, {rows * heads}, head_dim <= 64 ? 64 : 128, y, partial, block_table,
                  sequences, blocks_per_sequence, sequence, position, heads, head_dim, window,
                  static_cast<uint32_t>(spans), shape.step_keys);
}

ok_status ok_attention_scratch_bytes(int64_t rows, int64_t heads, int64_t head_dim, int64_t max_context,
                                     uint64_t *host_bytes) {
    if (ok_status status = ok::check_attention_scratch(__func__, rows, heads, head_dim, max_context, host_bytes))
        return status;
    // A call with fewer rows may need more: tiles need none.
    const int64_t most_rows = takes_tiles(rows, head_dim) ? ok::kTileFrom - 1 : rows;
    const int64_t keys = ok::ceil_div(max_context, OK_KV_BLOCK_SIZE) * OK_KV_BLOCK_SIZE;
    *host_bytes = scratch_needed(most_rows, heads, head_dim, SpanShape(head_dim, keys).spans);
    return OK_SUCCESS;
}
