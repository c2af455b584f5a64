// attention.h: what the paths of attention share: the arguments, and the three steps that each compiles for itself.
#pragma once
#include <cstdint>

#include "kv_cache.h"

namespace ok {

// Keys are walked in spans of 256 from position 0: a row's softmax is taken over each span apart, and the spans are
// folded in order. A row is thus the same whether one thread walks its spans or each span has a thread of its own.
constexpr int64_t kSpanTokens = 256;

struct AttentionArgs {
    float *y;        // (rows, heads * head_dim)
    const float *q;  // (rows, heads * head_dim), rows of `q_stride`
    int64_t q_stride;
    const void *cache;
    ok_dtype dtype;
    KVLayout layout;
    const int32_t *block_table;  // (sequences, blocks_per_sequence)
    int64_t sequences, blocks_per_sequence;
    const int32_t *sequence, *position;  // (rows)
    const float *slope;                  // (heads) or null
    int64_t rows, heads, window;
    float scale;
    float *partials;  // scratch for `partials_bytes` of rows' spans, or null
    uint64_t partials_bytes;

    int64_t spans() const { return ceil_div(blocks_per_sequence * kTileTokens, kSpanTokens); }
};

// What one span leaves of one row and head: largest score, sum of exponentials, then the weighted sum of values.
constexpr int64_t kPartialHeader = 16;
static inline int64_t partial_floats(int64_t value_stride) { return kPartialHeader + value_stride; }

struct AttentionPath {
    // Rows [row, row + rows) and all query heads of one kv head, start to end.
    void (*attend)(const AttentionArgs &args, int64_t row, int64_t rows, int64_t kv_head);
    // The same work for one row in two steps: each span into `partials`, then their fold.
    void (*attend_span)(const AttentionArgs &args, int64_t row, int64_t kv_head, int64_t span);
    void (*fold_spans)(const AttentionArgs &args, int64_t row, int64_t kv_head);
};

extern const AttentionPath attention_portable, attention_avx2, attention_avx512, attention_neon;

}  // namespace ok
