// kv_cache.cpp: the size of a paged cache of keys and values, and the op that stores rows in it.
#include "kv_cache.h"

#include "rope.h"
#include "vector.h"

namespace ok {
namespace {

struct Args {
    void *cache;
    const float *k, *v;   // (rows, kv_heads * head_dim), rows of `stride`
    const int32_t *slot;  // (rows)
    int64_t stride, rows;
    KVLayout layout;
    ok_dtype dtype;
};

// dst[i * step] = src[i], rounded to T.
template <class T>
inline void scatter(T *dst, int64_t step, const float *src, int64_t n) {
    T narrow[kLanes];
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        store(narrow, load(src + i));
        for (int lane = 0; lane < kLanes; lane++) dst[(i + lane) * step] = narrow[lane];
    }
    float rest[kLanes] = {};
    for (int lane = 0; i + lane < n; lane++) rest[lane] = src[i + lane];
    store(narrow, load(rest));
    for (int lane = 0; i + lane < n; lane++) dst[(i + lane) * step] = narrow[lane];
}

// A cached token is head_dim keys a head, each in a row of its own, and as many values side by side. Rows of one head
// follow each other, so that a prompt's keys fill their cache lines while these are near.
template <class T>
void append(const Args &args) {
    const KVLayout &layout = args.layout;
    T *cache = static_cast<T *>(args.cache);
    parallel_ranges(layout.kv_heads * args.rows, ceil_div(4096, layout.head_dim), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t head = i / args.rows, row = i % args.rows, slot = args.slot[row];
            if (slot < 0 || slot >= layout.blocks * kTileTokens) continue;
            const int64_t token = slot % kTileTokens, offset = row * args.stride + head * layout.head_dim;
            T *tile = cache + layout.tile(slot / kTileTokens, head), *value = tile + layout.value(token);
            scatter(tile + layout.key(0, token), kTileTokens, args.k + offset, layout.head_dim);
            scatter(value, 1, args.v + offset, layout.head_dim);
            for (int64_t d = layout.head_dim; d < layout.value_stride(); d++) value[d] = T{};
        }
    });
}

void run_append(const Args &args) {
    if (args.dtype == OK_F16)
        append<f16>(args);
    else if (args.dtype == OK_BF16)
        append<bf16>(args);
    else
        append<float>(args);
}

struct RopeAppendArgs {
    RopeArgs rope;
    Args append;
};

void run_rope_append(const RopeAppendArgs &args) {
    run_rope(args.rope);
    run_append(args.append);
}

}  // namespace
}  // namespace ok

ok_status ok_kv_cache_bytes(ok_dtype dtype, int64_t blocks, int64_t kv_heads, int64_t head_dim, uint64_t *host_bytes) {
    OK_REQUIRE_POINTER(host_bytes);
    const ok::KVLayout layout = {blocks, kv_heads, head_dim};
    if (ok_status status = ok::check_kv_cache(__func__, dtype, blocks, kv_heads, head_dim, layout.tile_elements()))
        return status;
    *host_bytes = static_cast<uint64_t>(layout.elements()) * (dtype == OK_F32 ? 4 : 2);
    return OK_SUCCESS;
}

ok_status ok_kv_append(ok_queue *queue, void *cache, ok_dtype dtype, int64_t blocks, const float *k, const float *v,
                       int64_t stride, const int32_t *slot, int64_t rows, int64_t kv_heads, int64_t head_dim) {
    const ok::KVLayout layout = {blocks, kv_heads, head_dim};
    if (ok_status status = ok::check_kv_append(__func__, queue, cache, dtype, blocks, k, v, stride, slot, rows,
                                               kv_heads, head_dim, layout.tile_elements()))
        return status;
    if (rows == 0) return OK_SUCCESS;
    return ok::submit(queue, ok::run_append, ok::Args{cache, k, v, slot, stride, rows, layout, dtype});
}

ok_status ok_rope_append(ok_queue *queue, float *qkv, int64_t stride, const float *table, int64_t table_rows,
                         const int32_t *table_row, void *cache, ok_dtype dtype, int64_t blocks, const int32_t *slot,
                         int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t rotary_dim) {
    const ok::KVLayout layout = {blocks, kv_heads, head_dim};
    if (ok_status status =
            ok::check_rope_append(__func__, queue, qkv, stride, table, table_rows, table_row, cache, dtype, blocks,
                                  slot, rows, heads, kv_heads, head_dim, rotary_dim, layout.tile_elements()))
        return status;
    if (rows == 0) return OK_SUCCESS;
    const float *k = qkv + heads * head_dim, *v = k + kv_heads * head_dim;
    return ok::submit(
        queue, ok::run_rope_append,
        ok::RopeAppendArgs{{qkv, stride, table, table_rows, table_row, rows, heads + kv_heads, head_dim, rotary_dim},
                           {cache, k, v, slot, stride, rows, layout, dtype}});
}
