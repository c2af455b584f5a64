// attention.cpp: the attention op: the portable path, the choice of path, how work is shared out, and the launchers.
#include "attention.h"

#include "attention_kernel.h"

namespace ok {

const AttentionPath attention_portable = {attend, attend_span, fold_spans};

namespace {

constexpr int64_t kSplitRows = 8;  // most rows whose spans may be shared out

const AttentionPath &attention_path() {
    switch (path()) {
#if defined(__x86_64__)
        case Path::avx512vnni:
        case Path::avx512:
            return attention_avx512;
        case Path::avx2:
            return attention_avx2;
#elif defined(__aarch64__)
        case Path::neondot:
        case Path::neon:
            return attention_neon;
#endif
        default:
            return attention_portable;
    }
}

// Floats of scratch for the spans of `rows` rows.
int64_t split_floats(int64_t rows, int64_t heads, int64_t spans, int64_t value_stride) {
    return rows * heads * spans * partial_floats(value_stride);
}

// Spans that the longest row sees.
int64_t longest_spans(const AttentionArgs &args) {
    int64_t spans = 0;
    for (int64_t row = 0; row < args.rows; row++) {
        const int64_t own = ceil_div(args.position[row] + int64_t{1}, kSpanTokens);
        if (own > spans) spans = own;
    }
    return spans < args.spans() ? spans : args.spans();
}

void run_attention(const AttentionArgs &args) {
    const AttentionPath &path = attention_path();
    const int64_t kv_heads = args.layout.kv_heads, pairs = args.rows * kv_heads, spans = longest_spans(args);
    const int64_t floats = split_floats(args.rows, args.heads, args.spans(), args.layout.value_stride());

    // Few rows and heads leave threads idle, so that each span becomes a task, given scratch to keep its result.
    if (ok_threads() > 1 && pairs < 8 * ok_threads() && args.rows <= kSplitRows && spans > 1 &&
        sizeof(float) * floats <= args.partials_bytes) {
        parallel_for(pairs * spans,
                     [&](int64_t i) { path.attend_span(args, i / spans / kv_heads, i / spans % kv_heads, i % spans); });
        parallel_for(pairs, [&](int64_t i) { path.fold_spans(args, i / kv_heads, i % kv_heads); });
        return;
    }
    // Else neighbouring rows, of one sequence as a rule, share the tiles they load, as long as there are tasks for all.
    const int64_t ratio = args.heads / kv_heads;
    int64_t group = pairs / 64 < kQueries / ratio ? pairs / 64 : kQueries / ratio;
    if (group < 1) group = 1;
    parallel_for(ceil_div(args.rows, group) * kv_heads, [&](int64_t i) {
        const int64_t row = i / kv_heads * group, left = args.rows - row;
        path.attend(args, row, left < group ? left : group, i % kv_heads);
    });
}

}  // namespace
}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

ok_status ok_attention_paged(ok_queue *queue, float *y, const float *q, int64_t q_stride, const void *cache,
                             ok_dtype dtype, int64_t blocks, const int32_t *block_table, int64_t sequences,
                             int64_t blocks_per_sequence, const int32_t *sequence, const int32_t *position,
                             const float *slope, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                             int64_t window, float scale) {
    const ok::KVLayout layout = {blocks, kv_heads, head_dim};
    if (ok_status status = ok::check_attention(__func__, queue, y, q, q_stride, cache, dtype, blocks, block_table,
                                               sequences, blocks_per_sequence, sequence, position, rows, heads,
                                               kv_heads, head_dim, window, scale, layout.tile_elements()))
        return status;
    if (rows == 0) return OK_SUCCESS;
    const ok::AttentionArgs args = {y,
                                    q,
                                    q_stride,
                                    cache,
                                    dtype,
                                    layout,
                                    block_table,
                                    sequences,
                                    blocks_per_sequence,
                                    sequence,
                                    position,
                                    slope,
                                    rows,
                                    heads,
                                    window,
                                    scale,
                                    static_cast<float *>(queue->scratch),
                                    queue->scratch_bytes};
    return ok::submit(queue, ok::run_attention, args);
}

ok_status ok_attention_scratch_bytes(int64_t rows, int64_t heads, int64_t head_dim, int64_t max_context,
                                     uint64_t *host_bytes) {
    if (ok_status status = ok::check_attention_scratch(__func__, rows, heads, head_dim, max_context, host_bytes))
        return status;
    const int64_t spans = ok::ceil_div(max_context, ok::kSpanTokens);
    const ok::KVLayout layout = {1, 1, head_dim};
    *host_bytes = 0;
    if (spans > 1)
        *host_bytes = sizeof(float) * ok::split_floats(rows < ok::kSplitRows ? rows : ok::kSplitRows, heads, spans,
                                                       layout.value_stride());
    return OK_SUCCESS;
}
