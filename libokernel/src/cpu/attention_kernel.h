// attention_kernel.h: attention over a paged cache, in the vectors of the including file; each path compiles it once.
//
// Online softmax (Milakov and Gimelshein 2018; Dao et al. 2022) over tiles of 32 keys. A row's arithmetic is the same
// in any company: a score is one chain of fma over d, an output value one chain over keys; all that queries share is the
// loading and widening of a tile. Memory traffic: a tile is read once for up to kQueries queries.
#pragma once
#include "attention.h"
#include "vector.h"

namespace ok {
namespace {

constexpr int kTile = static_cast<int>(kTileTokens);
constexpr int kQueries = 16;        // most queries that walk the tiles together
constexpr int kGroupFloats = 8192;  // and most values in their outputs
constexpr int kBlock = 4;           // queries that share a tile's registers
static_assert(kGroupFloats / kMaxHeadDim >= kBlock);
const float kInfinity = __builtin_inff();

// Up to kQueries queries (row, head) of one sequence that read one kv head, and their running softmax over a span.
struct Queries {
    int count = 0;
    const float *q[kQueries];                                    // (head_dim)
    int64_t position[kQueries], first[kQueries], end[kQueries];  // keys seen: [first, end)
    float slope[kQueries];
    float max[kQueries];
    Vec sum[kQueries];     // of exponentials, per lane
    float *out[kQueries];  // (value_stride) weighted sum of values
};

// What a query has seen of all spans so far.
struct Total {
    float max = -kInfinity, sum = 0.0f;
    float *out;  // (value_stride)
};

inline float exp_one(float x) { return exp(broadcast(x))[0]; }

// score[j][key] = q[j] . key for all keys of a tile.
template <class T, int N>
inline void score_tile(float (*score)[kTile], const T *tile, const float *const *q, int64_t head_dim) {
    constexpr int registers = kLanes == 16 ? 2 : N == 1 ? (kLanes == 8 ? 4 : 8) : 2;
    constexpr int width = registers * kLanes;
    for (int key = 0; key < kTile; key += width) {
        Vec sum[N][registers] = {};
        for (int64_t d = 0; d < head_dim; d++) {
            Vec k[registers];
#pragma GCC unroll 8
            for (int i = 0; i < registers; i++) k[i] = load(tile + d * kTile + key + i * kLanes);
#pragma GCC unroll 4
            for (int j = 0; j < N; j++) {
                const Vec x = broadcast(q[j][d]);
#pragma GCC unroll 8
                for (int i = 0; i < registers; i++) sum[j][i] = fma(x, k[i], sum[j][i]);
            }
        }
        for (int j = 0; j < N; j++)
            for (int i = 0; i < registers; i++) store(score[j] + key + i * kLanes, sum[j][i]);
    }
}

// Turns query j's scores into exponentials, 0 outside keys [low, high); returns what earlier sums shrink by.
inline float softmax_tile(float *score, Queries &queries, int j, int64_t tile_position, int low, int high,
                          float scale) {
    const Vec slope = broadcast(queries.slope[j]);
    const float distance = static_cast<float>(tile_position - queries.position[j]);
    Vec top = broadcast(-kInfinity);
    for (int key = 0; key < kTile; key += kLanes) {
        const Vec index = lane_index() + static_cast<float>(key);
        Vec x = fma(slope, index + distance, load(score + key) * scale);
        const VecInt seen = (index >= static_cast<float>(low)) & (index < static_cast<float>(high));
        x = seen ? x : broadcast(-kInfinity);
        store(score + key, x);
        top = max(top, x);
    }
    const float before = queries.max[j], tile_max = largest(top);
    const float now = tile_max > before ? tile_max : before;
    const float shrink = now > before ? exp_one(before - now) : 1.0f;
    Vec sum = queries.sum[j] * shrink;
    for (int key = 0; key < kTile; key += kLanes) {
        const Vec p = exp(load(score + key) - now);
        store(score + key, p);
        sum = sum + p;
    }
    queries.max[j] = now;
    queries.sum[j] = sum;
    return shrink;
}

// out[j][d] = out[j][d] * shrink[j] + sum over keys [low, high) of p[j][key] * value[key][d], `registers` vectors of d.
template <class T, int N, int registers>
inline void weigh_values(float *const *out, const float (*p)[kTile], const float *shrink, const T *values,
                         int64_t stride, int low, int high) {
    Vec sum[N][registers];
    for (int j = 0; j < N; j++)
        for (int i = 0; i < registers; i++) sum[j][i] = load(out[j] + i * kLanes) * shrink[j];
    for (int key = low; key < high; key++) {
        Vec v[registers];
#pragma GCC unroll 8
        for (int i = 0; i < registers; i++) v[i] = load(values + key * stride + i * kLanes);
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) {
            const Vec x = broadcast(p[j][key]);
#pragma GCC unroll 8
            for (int i = 0; i < registers; i++) sum[j][i] = fma(x, v[i], sum[j][i]);
        }
    }
    for (int j = 0; j < N; j++)
        for (int i = 0; i < registers; i++) store(out[j] + i * kLanes, sum[j][i]);
}

// One tile for N neighbouring queries from j on that see the same keys of it.
template <class T, int N>
void attend_tile(Queries &queries, int j, const KVLayout &layout, const T *tile, int64_t tile_position, int low,
                 int high, float scale) {
    float p[N][kTile], shrink[N];
    score_tile<T, N>(p, tile, queries.q + j, layout.head_dim);
    for (int i = 0; i < N; i++) shrink[i] = softmax_tile(p[i], queries, j + i, tile_position, low, high, scale);

    constexpr int registers = N == 1 ? 4 : 2;
    const int64_t stride = layout.value_stride();
    const T *values = tile + layout.value(0);
    float *out[N];
    for (int i = 0; i < N; i++) out[i] = queries.out[j + i];
    int64_t d = 0;
    for (; d + registers * kLanes <= stride; d += registers * kLanes) {
        weigh_values<T, N, registers>(out, p, shrink, values + d, stride, low, high);
        for (int i = 0; i < N; i++) out[i] += registers * kLanes;
    }
    for (; d < stride; d += kLanes) {
        weigh_values<T, N, 1>(out, p, shrink, values + d, stride, low, high);
        for (int i = 0; i < N; i++) out[i] += kLanes;
    }
}

// Asks for a tile while the one before it is worked on: blocks lie anywhere, so the processor cannot guess the next.
template <class T>
inline void prefetch_tile(const T *tile, const KVLayout &layout) {
    constexpr int64_t line = 64 / sizeof(T);
    for (int64_t i = 0; i < layout.tile_elements(); i += line) __builtin_prefetch(tile + i, 0, 2);
}

// All queries over the tiles of one span. Blocks outside the cache hold nothing.
template <class T>
void walk_span(const AttentionArgs &args, Queries &queries, const int32_t *table, int64_t kv_head, int64_t span) {
    const KVLayout &layout = args.layout;
    int64_t first = (span + 1) * kSpanTokens, end = 0;
    for (int j = 0; j < queries.count; j++) {
        queries.max[j] = -kInfinity;
        queries.sum[j] = Vec{};
        for (int64_t d = 0; d < layout.value_stride(); d++) queries.out[j][d] = 0.0f;
        if (queries.first[j] < first) first = queries.first[j];
        if (queries.end[j] > end) end = queries.end[j];
    }
    if (first < span * kSpanTokens) first = span * kSpanTokens;
    if (end > (span + 1) * kSpanTokens) end = (span + 1) * kSpanTokens;

    for (int64_t index = first / kTile; index * kTile < end; index++) {
        const int64_t block = table[index], position = index * kTile;
        if (block < 0 || block >= layout.blocks) continue;
        const T *tile = static_cast<const T *>(args.cache) + layout.tile(block, kv_head);
        if (position + kTile < end && table[index + 1] >= 0 && table[index + 1] < layout.blocks)
            prefetch_tile(static_cast<const T *>(args.cache) + layout.tile(table[index + 1], kv_head), layout);
        const auto low = [&](int j) {
            return queries.first[j] > position ? static_cast<int>(queries.first[j] - position) : 0;
        };
        const auto high = [&](int j) {
            return queries.end[j] < position + kTile ? static_cast<int>(queries.end[j] - position) : kTile;
        };
        for (int j = 0, n = 1; j < queries.count; j += n, n = 1) {
            if (low(j) >= high(j)) continue;
            while (n < kBlock && j + n < queries.count && low(j + n) == low(j) && high(j + n) == high(j)) n++;
            const auto step = n == 1   ? attend_tile<T, 1>
                              : n == 2 ? attend_tile<T, 2>
                              : n == 3 ? attend_tile<T, 3>
                                       : attend_tile<T, 4>;
            step(queries, j, layout, tile, position, low(j), high(j), args.scale);
        }
    }
}

void walk_span(const AttentionArgs &args, Queries &queries, const int32_t *table, int64_t kv_head, int64_t span) {
    if (args.dtype == OK_F16)
        walk_span<f16>(args, queries, table, kv_head, span);
    else if (args.dtype == OK_BF16)
        walk_span<bf16>(args, queries, table, kv_head, span);
    else
        walk_span<float>(args, queries, table, kv_head, span);
}

// The row's line of the block table; null if its sequence has none.
inline const int32_t *table_of(const AttentionArgs &args, int64_t row) {
    const int64_t sequence = args.sequence[row];
    if (sequence < 0 || sequence >= args.sequences) return nullptr;
    return args.block_table + sequence * args.blocks_per_sequence;
}

inline void add_query(const AttentionArgs &args, Queries &queries, int64_t row, int64_t head, float *out) {
    const int j = queries.count++;
    const int64_t position = args.position[row], limit = args.blocks_per_sequence * kTile;
    const int64_t end = table_of(args, row) ? position + 1 : 0;
    queries.q[j] = args.q + row * args.q_stride + head * args.layout.head_dim;
    queries.position[j] = position;
    queries.first[j] = args.window > 0 && position >= args.window ? position - args.window + 1 : 0;
    queries.end[j] = end < limit ? end : limit;
    queries.slope[j] = args.slope ? args.slope[head] : 0.0f;
    queries.out[j] = out;
}

// Folds one span into the total. A span without keys has sum = 0: the largest score of any adds 1 to it.
inline void fold(Total &total, float max, float sum, const float *out, int64_t value_stride) {
    if (sum == 0.0f) return;
    const float now = max > total.max ? max : total.max;
    const float old_share = exp_one(total.max - now), new_share = exp_one(max - now);
    for (int64_t d = 0; d < value_stride; d += kLanes)
        store(total.out + d, fma(load(out + d), broadcast(new_share), load(total.out + d) * old_share));
    total.sum = total.sum * old_share + sum * new_share;
    total.max = now;
}

// y = total / sum; zeros where no key was seen.
inline void finish(const AttentionArgs &args, const Total &total, int64_t row, int64_t head) {
    float *y = args.y + (row * args.heads + head) * args.layout.head_dim;
    for (int64_t d = 0; d < args.layout.head_dim; d++) y[d] = total.sum == 0.0f ? 0.0f : total.out[d] / total.sum;
}

// ---- the three steps ----------------------------------------------------------------------------------------------

// Queries [begin, end) of those of one sequence, counted row by row from `row` and within a row head by head.
void attend_queries(const AttentionArgs &args, int64_t row, int64_t kv_head, int64_t begin, int64_t end) {
    alignas(64) float outs[kGroupFloats], totals[kGroupFloats];
    const int64_t ratio = args.heads / args.layout.kv_heads, stride = args.layout.value_stride();
    Queries queries;
    Total total[kQueries];
    int64_t first = INT64_MAX, last = 0;
    for (int64_t i = begin; i < end; i++) {
        const int j = queries.count;
        add_query(args, queries, row + i / ratio, kv_head * ratio + i % ratio, outs + j * stride);
        total[j].out = totals + j * stride;
        for (int64_t d = 0; d < stride; d++) total[j].out[d] = 0.0f;
        if (queries.first[j] < first) first = queries.first[j];
        if (queries.end[j] > last) last = queries.end[j];
    }
    for (int64_t span = first / kSpanTokens; span * kSpanTokens < last; span++) {
        walk_span(args, queries, table_of(args, row), kv_head, span);
        for (int j = 0; j < queries.count; j++)
            fold(total[j], queries.max[j], sum(queries.sum[j]), queries.out[j], stride);
    }
    for (int64_t i = begin; i < end; i++) finish(args, total[i - begin], row + i / ratio, kv_head * ratio + i % ratio);
}

void attend(const AttentionArgs &args, int64_t row, int64_t rows, int64_t kv_head) {
    const int64_t ratio = args.heads / args.layout.kv_heads, fit = kGroupFloats / args.layout.value_stride();
    const int64_t group = fit < kQueries ? fit : kQueries;
    for (const int64_t stop = row + rows; row < stop;) {
        int64_t same = 1;  // rows of one sequence
        while (row + same < stop && args.sequence[row + same] == args.sequence[row]) same++;
        for (int64_t begin = 0; begin < same * ratio; begin += group)
            attend_queries(args, row, kv_head, begin, begin + group < same * ratio ? begin + group : same * ratio);
        row += same;
    }
}

inline float *partial(const AttentionArgs &args, int64_t row, int64_t head, int64_t span) {
    return args.partials +
           ((row * args.heads + head) * args.spans() + span) * partial_floats(args.layout.value_stride());
}

void attend_span(const AttentionArgs &args, int64_t row, int64_t kv_head, int64_t span) {
    const int64_t ratio = args.heads / args.layout.kv_heads;
    for (int64_t begin = 0; begin < ratio; begin += kQueries) {
        Queries queries;
        for (int64_t i = begin; i < ratio && i < begin + kQueries; i++) {
            const int64_t head = kv_head * ratio + i;
            add_query(args, queries, row, head, partial(args, row, head, span) + kPartialHeader);
        }
        if (span * kSpanTokens >= queries.end[0] || (span + 1) * kSpanTokens <= queries.first[0]) return;
        walk_span(args, queries, table_of(args, row), kv_head, span);
        for (int j = 0; j < queries.count; j++) {
            queries.out[j][0 - kPartialHeader] = queries.max[j];
            queries.out[j][1 - kPartialHeader] = sum(queries.sum[j]);
        }
    }
}

void fold_spans(const AttentionArgs &args, int64_t row, int64_t kv_head) {
    alignas(64) float out[kMaxHeadDim];
    const int64_t ratio = args.heads / args.layout.kv_heads, stride = args.layout.value_stride();
    for (int64_t head = kv_head * ratio; head < (kv_head + 1) * ratio; head++) {
        Queries query;
        add_query(args, query, row, head, nullptr);
        Total total;
        total.out = out;
        for (int64_t d = 0; d < stride; d++) out[d] = 0.0f;
        for (int64_t span = query.first[0] / kSpanTokens; span * kSpanTokens < query.end[0]; span++) {
            const float *part = partial(args, row, head, span);
            fold(total, part[0], part[1], part + kPartialHeader, stride);
        }
        finish(args, total, row, head);
    }
}

}  // namespace
}  // namespace ok
