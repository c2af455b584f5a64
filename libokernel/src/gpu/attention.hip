// attention.hip: causal attention of ragged rows over the paged cache.
//
// Few rows (`span`): a block takes one row and query head and walks keys in spans of 256 from position 0; lanes lie along
// head_dim, so that a key or value is one coalesced read, and groups of lanes take keys in turn, each with a softmax of its
// own that is folded at the end. Spans beyond the first leave (max, sum, weighted values) in scratch for `merge`.
// Many rows (`tile`): a block takes 32 rows and one query head; keys and values pass through LDS, 32 at a time, for all rows
// of one sequence; rows of other sequences follow in further passes. Softmax and sums are f32 throughout.
// Traffic: `span` reads the visible keys and values once a query head, `tile` once for 32 rows.
#include "checks.h"
#include "kv_cache.h"

namespace ok {

constexpr int64_t kSpan = 256;      // keys
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

// ---- few rows ----------------------------------------------------------------------------------------------------------

// C: steps of 8 values that a lane holds of head_dim. lanes: of a group, a power of two; step c of lane l is l + c * lanes.
template <class T, int C>
DEVICE void attend_span(float *y, float *partial, const float *q, int64_t q_stride, const T *cache, int64_t blocks,
                        const int32_t *block_table, int64_t sequences, int64_t blocks_per_sequence, const int32_t *sequence,
                        const int32_t *position, const float *slope, int64_t heads, int64_t kv_heads, int64_t head_dim,
                        int64_t window, float scale, int64_t span_keys, int32_t lanes) {
    constexpr int kKeys = 4;  // that a group reads at a time
    __shared__ float wave_max[kMaxWaves], wave_sum[kMaxWaves];
    __shared__ float wave_out[kBlock / kWave][C * 8 * 32];
    const KVLayout layout(kv_heads, head_dim);
    const int64_t row = blockIdx.x / heads, head = blockIdx.x % heads, kv_head = head / (heads / kv_heads);
    const int64_t at = position[row], span = blockIdx.y, spans = gridDim.y;
    const Visible visible(sequence[row], at, block_table, sequences, blocks_per_sequence, window);
    const int64_t span_first = span * span_keys;
    const int64_t first = visible.first > span_first ? visible.first : span_first;
    const int64_t end = visible.end < span_first + span_keys ? visible.end : span_first + span_keys;
    const bool empty = first >= end;
    if (empty && (spans > 1 || visible.first < visible.end)) return;  // `merge` sees that it is empty too

    const int lane = threadIdx.x % lanes, group = threadIdx.x / lanes, groups = blockDim.x / lanes;
    float query[C][8], out[C][8] = {}, max = kLowest, sum = 0.0f;
#pragma unroll
    for (int c = 0; c < C; ++c)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int64_t d = (lane + c * lanes) * 8 + i;
            query[c][i] = d < head_dim ? q[row * q_stride + head * head_dim + d] : 0.0f;
        }
    const float bias = slope ? slope[head] : 0.0f;

    // Which group takes which key depends on the key's place in its span alone.
    for (int64_t base = span_first + (first - span_first) / (kKeys * groups) * (kKeys * groups); base < end;
         base += kKeys * groups) {
        float score[kKeys];
        Eight<T> values[kKeys][C];
#pragma unroll
        for (int n = 0; n < kKeys; ++n) {
            const int64_t key = base + n * groups + group;
            int64_t block = -1;
            if (key >= first && key < end) block = visible.table[key / OK_KV_BLOCK_SIZE];
            const bool seen = block >= 0 && block < blocks;
            float dot = 0.0f;
#pragma unroll
            for (int c = 0; c < C; ++c) {
                const int64_t d = (lane + c * lanes) * 8;
                values[n][c] = {};
                if (!seen || d >= layout.padded_dim) continue;
                const Eight<T> keys = load_eight(cache + layout.key(block, kv_head, key % OK_KV_BLOCK_SIZE) + d);
                values[n][c] = load_eight(cache + layout.value(block, kv_head, key % OK_KV_BLOCK_SIZE) + d);
#pragma unroll
                for (int i = 0; i < 8; ++i) dot = fmaf(query[c][i], keys.get(i), dot);
            }
            dot = reduce_lanes<Add>(dot, lanes);
            score[n] = seen ? fmaf(scale, dot, bias * static_cast<float>(key - at)) : kLowest;
        }
        float now = max;
#pragma unroll
        for (int n = 0; n < kKeys; ++n) now = fmaxf(now, score[n]);
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
        const float other = shuffle_xor(max, mask), now = fmaxf(max, other), kept = moved(max, now);
        const float taken = moved(other, now);
        sum = sum * kept + shuffle_xor(sum, mask) * taken;
#pragma unroll
        for (int c = 0; c < C; ++c)
#pragma unroll
            for (int i = 0; i < 8; ++i) out[c][i] = out[c][i] * kept + shuffle_xor(out[c][i], mask) * taken;
        max = now;
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
    max = wave_max[0];
    for (int wave = 1; wave < wave_count(); ++wave) max = fmaxf(max, wave_max[wave]);
    sum = 0.0f;
    for (int wave = 0; wave < wave_count(); ++wave) sum += wave_sum[wave] * moved(wave_max[wave], max);
    float *to = spans > 1 ? partial + ((row * heads + head) * spans + span) * (head_dim + 2)
                          : y + (row * heads + head) * head_dim;
    for (int64_t d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float total = 0.0f;
        for (int wave = 0; wave < wave_count(); ++wave) total += wave_out[wave][d] * moved(wave_max[wave], max);
        to[d] = spans > 1 ? total : sum == 0.0f ? 0.0f : total / sum;
    }
    if (spans > 1 && threadIdx.x == 0) {
        to[head_dim] = max;
        to[head_dim + 1] = sum;
    }
}

// Folds the spans of a row and head in order.
KERNEL attention_merge_kernel(float *y, const float *partial, const int32_t *block_table, int64_t sequences,
                              int64_t blocks_per_sequence, const int32_t *sequence, const int32_t *position, int64_t heads,
                              int64_t head_dim, int64_t window, int64_t spans) {
    const int64_t row = blockIdx.x / heads, head = blockIdx.x % heads, record = head_dim + 2;
    const Visible visible(sequence[row], position[row], block_table, sequences, blocks_per_sequence, window);
    partial += (row * heads + head) * spans * record;
    const bool any = visible.first < visible.end;
    const int64_t begin = visible.first / kSpan, end = any ? (visible.end + kSpan - 1) / kSpan : begin;
    float max = kLowest, sum = 0.0f;
    for (int64_t span = begin; span < end; ++span) max = fmaxf(max, partial[span * record + head_dim]);
    for (int64_t span = begin; span < end; ++span)
        sum += partial[span * record + head_dim + 1] * moved(partial[span * record + head_dim], max);
    for (int64_t d = threadIdx.x; d < head_dim; d += blockDim.x) {
        float total = 0.0f;
        for (int64_t span = begin; span < end; ++span)
            total += partial[span * record + d] * moved(partial[span * record + head_dim], max);
        y[(row * heads + head) * head_dim + d] = sum == 0.0f ? 0.0f : total / sum;
    }
}

// ---- many rows ---------------------------------------------------------------------------------------------------------

// 32 keys or values of one cache block, kTileDim of their values from `d`, into LDS as f32; zeros for keys outside
// [first, end), which may never have been written.
template <class T>
DEVICE void load_tile(float (*tile)[kTileDim + 4], const T *rows, int64_t padded_dim, int64_t d, int64_t tile_first,
                      int64_t first, int64_t end) {
    const int token = threadIdx.x / 8, part = threadIdx.x % 8 * 8;
    const int64_t key = tile_first + token;
    Eight<T> eight = {};
    if (rows && key >= first && key < end && d + part < padded_dim) eight = load_eight(rows + token * padded_dim + d + part);
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
        const Chunk<float> four = {{eight.get(i), eight.get(i + 1), eight.get(i + 2), eight.get(i + 3)}};
        store_aligned(&tile[token][part + i], four);
    }
}

// A thread computes the scores of 2 rows and 2 keys, then 4 output values of the same 2 rows in each of C parts of head_dim.
// The 16 threads that share 2 rows are neighbours in a wave.
template <class T, int C>
DEVICE void attend_tile(float *y, const float *q, int64_t q_stride, const T *cache, int64_t blocks,
                        const int32_t *block_table, int64_t sequences, int64_t blocks_per_sequence, const int32_t *sequence,
                        const int32_t *position, const float *slope, int64_t rows, int64_t heads, int64_t kv_heads,
                        int64_t head_dim, int64_t window, float scale) {
    alignas(16) __shared__ float query[kTileRows][C * kTileDim + 4];
    alignas(16) __shared__ float tile[kTileKeys][kTileDim + 4];
    alignas(16) __shared__ float weight[kTileRows][kTileKeys + 4];
    __shared__ int32_t row_sequence[kTileRows], row_position[kTileRows];
    const KVLayout layout(kv_heads, head_dim);
    const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kTileRows, head = blockIdx.y;
    const int64_t kv_head = head / (heads / kv_heads);
    const int pair = threadIdx.x / 16 * 2, column = threadIdx.x % 16;

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
        while (leader < kTileRows && (!(waiting >> leader & 1) || row_position[leader] < 0 || row_sequence[leader] < 0 ||
                                      row_sequence[leader] >= sequences))
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
                    score[i][j] = seen ? fmaf(scale, score[i][j], bias * static_cast<float>(key - row_position[pair + i]))
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

#define SPAN_KERNEL(name, T, C, blocks_resident)                                                                        \
    KERNEL_OF(256, blocks_resident)                                                                                     \
    name(float *y, float *partial, const float *q, int64_t q_stride, const void *cache, int64_t blocks,                 \
                const int32_t *block_table, int64_t sequences, int64_t blocks_per_sequence, const int32_t *sequence,    \
                const int32_t *position, const float *slope, int64_t heads, int64_t kv_heads, int64_t head_dim,         \
                int64_t window, float scale, int64_t span_keys, int32_t lanes) {                                        \
        attend_span<T, C>(y, partial, q, q_stride, static_cast<const T *>(cache), blocks, block_table, sequences,       \
                          blocks_per_sequence, sequence, position, slope, heads, kv_heads, head_dim, window, scale,     \
                          span_keys, lanes);                                                                            \
    }
#define TILE_KERNEL(name, T, C, blocks_resident)                                                                        \
    KERNEL_OF(256, blocks_resident)                                                                                     \
    name(float *y, const float *q, int64_t q_stride, const void *cache, int64_t blocks,                                 \
                const int32_t *block_table, int64_t sequences, int64_t blocks_per_sequence, const int32_t *sequence,    \
                const int32_t *position, const float *slope, int64_t rows, int64_t heads, int64_t kv_heads,             \
                int64_t head_dim, int64_t window, float scale) {                                                        \
        attend_tile<T, C>(y, q, q_stride, static_cast<const T *>(cache), blocks, block_table, sequences,                \
                          blocks_per_sequence, sequence, position, slope, rows, heads, kv_heads, head_dim, window,      \
                          scale);                                                                                       \
    }
#define ATTENTION_KERNELS(dtype, T)                          \
    SPAN_KERNEL(attention_span_##dtype##_kernel, T, 1, 2)       \
    SPAN_KERNEL(attention_long_span_##dtype##_kernel, T, 4, 1)  \
    TILE_KERNEL(attention_tile64_##dtype##_kernel, T, 1, 2)     \
    TILE_KERNEL(attention_tile128_##dtype##_kernel, T, 2, 2)    \
    TILE_KERNEL(attention_tile256_##dtype##_kernel, T, 4, 1)
ATTENTION_KERNELS(f32, float)
ATTENTION_KERNELS(f16, f16)
ATTENTION_KERNELS(bf16, bf16)

}  // namespace ok

// ---- launchers ---------------------------------------------------------------------------------------------------------

namespace {

bool takes_tiles(int64_t rows, int64_t head_dim) { return rows >= ok::kTileFrom && head_dim <= 4 * ok::kTileDim; }

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
    if (ok_status status = ok::check_attention(__func__, queue, y, q, q_stride, cache, dtype, blocks, block_table, sequences,
                                               blocks_per_sequence, sequence, position, rows, heads, kv_heads, head_dim,
                                               window, scale, tile))
        return status;
    if (rows == 0) return OK_SUCCESS;
    if (takes_tiles(rows, head_dim)) {
        const ok::Grid grid = {ok::ceil_div(rows, ok::kTileRows), heads};
        if (head_dim <= ok::kTileDim)
            return LAUNCH_FLOAT(attention_tile64, dtype, queue, grid, ok::kBlock, y, q, q_stride, cache, blocks, block_table,
                                sequences, blocks_per_sequence, sequence, position, slope, rows, heads, kv_heads, head_dim,
                                window, scale);
        if (head_dim <= 2 * ok::kTileDim)
            return LAUNCH_FLOAT(attention_tile128, dtype, queue, grid, ok::kBlock, y, q, q_stride, cache, blocks,
                                block_table, sequences, blocks_per_sequence, sequence, position, slope, rows, heads,
                                kv_heads, head_dim, window, scale);
        return LAUNCH_FLOAT(attention_tile256, dtype, queue, grid, ok::kBlock, y, q, q_stride, cache, blocks, block_table,
                            sequences, blocks_per_sequence, sequence, position, slope, rows, heads, kv_heads, head_dim,
                            window, scale);
    }

    // Without scratch for the spans, one block walks them all.
    const int64_t keys = blocks_per_sequence * OK_KV_BLOCK_SIZE;
    int64_t spans = ok::ceil_div(keys, ok::kSpan), span_keys = ok::kSpan;
    if (queue->scratch_bytes < scratch_needed(rows, heads, head_dim, spans)) spans = 1;
    if (spans == 1) span_keys = keys;
    float *partial = static_cast<float *>(queue->scratch);
    const ok::Grid grid = {rows * heads, spans};
    const int64_t steps = ok::ceil_div(head_dim, ok::kHeadStep);
    int32_t lanes = 1;
    while (lanes < 32 && lanes < steps) lanes *= 2;
    const ok_status status =
        steps <= 32 ? LAUNCH_FLOAT(attention_span, dtype, queue, grid, ok::kBlock, y, partial, q, q_stride, cache, blocks,
                                   block_table, sequences, blocks_per_sequence, sequence, position, slope, heads, kv_heads,
                                   head_dim, window, scale, span_keys, lanes)
                    : LAUNCH_FLOAT(attention_long_span, dtype, queue, grid, ok::kBlock, y, partial, q, q_stride, cache,
                                   blocks, block_table, sequences, blocks_per_sequence, sequence, position, slope, heads,
                                   kv_heads, head_dim, window, scale, span_keys, lanes);
    if (status != OK_SUCCESS || spans == 1) return status;
    return LAUNCH(queue, attention_merge_kernel, {rows * heads}, head_dim <= 64 ? 64 : 128, y, partial, block_table,
                  sequences, blocks_per_sequence, sequence, position, heads, head_dim, window, spans);
}

ok_status ok_attention_scratch_bytes(int64_t rows, int64_t heads, int64_t head_dim, int64_t max_context,
                                     uint64_t *host_bytes) {
    if (ok_status status = ok::check_attention_scratch(__func__, rows, heads, head_dim, max_context, host_bytes))
        return status;
    // A call with fewer rows may need more: tiles need none.
    const int64_t most_rows = takes_tiles(rows, head_dim) ? ok::kTileFrom - 1 : rows;
    *host_bytes = scratch_needed(most_rows, heads, head_dim, ok::ceil_div(max_context, ok::kSpan));
    return OK_SUCCESS;
}
