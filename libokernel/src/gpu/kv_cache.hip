// kv_cache.hip: stores keys and values of token rows in the paged cache, rotated on the way if wanted.
//
// Traffic: k and v in once as f32, out once in the cache's type; rotated queries and keys also back to their place.
#include "kv_cache.h"

#include "checks.h"

namespace ok {

template <class T>
DEVICE void append(T *cache, int64_t blocks, const float *k, const float *v, int64_t stride, const int32_t *slots,
                   int64_t kv_heads, int64_t head_dim) {
    begin_rows();
    const KVLayout layout(kv_heads, head_dim);
    const int64_t row = blockIdx.x, at = column(), slot = slots[row];
    const int64_t head = at / layout.padded_dim, d = at % layout.padded_dim;
    if (head >= kv_heads || slot < 0 || slot >= blocks * OK_KV_BLOCK_SIZE) return;
    const int64_t block = slot / OK_KV_BLOCK_SIZE, token = slot % OK_KV_BLOCK_SIZE;
    const int64_t from = row * stride + head * head_dim + d;
    cache[layout.key(block, head, token) + d] = narrow<T>(d < head_dim ? k[from] : 0.0f);
    cache[layout.value(block, head, token) + d] = narrow<T>(d < head_dim ? v[from] : 0.0f);
}

#define APPEND_KERNEL(name, T)                                                                                     \
    KERNEL name(void *cache, int64_t blocks, const float *k, const float *v, int64_t stride, const int32_t *slots, \
                int64_t kv_heads, int64_t head_dim) {                                                              \
        append(static_cast<T *>(cache), blocks, k, v, stride, slots, kv_heads, head_dim);                          \
    }
APPEND_KERNEL(kv_append_f32_kernel, float)
APPEND_KERNEL(kv_append_f16_kernel, f16)
APPEND_KERNEL(kv_append_bf16_kernel, bf16)

// One thread rotates a pair of a query or key head as rope_kernel does, or stores a value that has no pair: the rest of
// a key, a value, padding.
template <class T>
DEVICE void rope_append(float *qkv, int64_t stride, const float *table, int64_t table_rows, const int32_t *table_row,
                        T *cache, int64_t blocks, const int32_t *slots, int64_t heads, int64_t kv_heads,
                        int64_t head_dim, int64_t half) {
    begin_rows();
    const KVLayout layout(kv_heads, head_dim);
    const int64_t row = blockIdx.x, slot = slots[row], at = table_row[row];
    const int64_t block = slot / OK_KV_BLOCK_SIZE, token = slot % OK_KV_BLOCK_SIZE;
    const bool stored = slot >= 0 && slot < blocks * OK_KV_BLOCK_SIZE;
    const int64_t rest = layout.padded_dim - 2 * half, pairs = (heads + kv_heads) * half;
    float *x = qkv + row * stride;
    int64_t task = column();
    if (task < pairs) {
        const int64_t head = task / half, j = task % half;
        float *low = x + head * head_dim + j, *high = low + half;
        float a = *low, b = *high;
        if (at >= 0 && at < table_rows) {
            const float c = table[at * 2 * half + j], s = table[at * 2 * half + half + j];
            const float rotated = a * c - b * s;
            b = b * c + a * s;
            a = rotated;
            *low = a;
            *high = b;
        }
        if (head < heads || !stored) return;
        T *key = cache + layout.key(block, head - heads, token) + j;
        key[0] = narrow<T>(a);
        key[half] = narrow<T>(b);
        return;
    }
    task -= pairs;
    if (!stored) return;
    const float *k = x + heads * head_dim, *v = k + kv_heads * head_dim;
    if (task < kv_heads * rest) {
        const int64_t head = task / rest, d = 2 * half + task % rest;
        cache[layout.key(block, head, token) + d] = narrow<T>(d < head_dim ? k[head * head_dim + d] : 0.0f);
        return;
    }
    task -= kv_heads * rest;
    const int64_t head = task / layout.padded_dim, d = task % layout.padded_dim;
    if (head < kv_heads)
        cache[layout.value(block, head, token) + d] = narrow<T>(d < head_dim ? v[head * head_dim + d] : 0.0f);
}

#define ROPE_APPEND_KERNEL(name, T)                                                                                   \
    KERNEL name(float *qkv, int64_t stride, const float *table, int64_t table_rows, const int32_t *table_row,         \
                void *cache, int64_t blocks, const int32_t *slots, int64_t heads, int64_t kv_heads, int64_t head_dim, \
                int64_t half) {                                                                                       \
        rope_append(qkv, stride, table, table_rows, table_row, static_cast<T *>(cache), blocks, slots, heads,         \
                    kv_heads, head_dim, half);                                                                        \
    }
ROPE_APPEND_KERNEL(rope_append_f32_kernel, float)
ROPE_APPEND_KERNEL(rope_append_f16_kernel, f16)
ROPE_APPEND_KERNEL(rope_append_bf16_kernel, bf16)

}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

ok_status ok_kv_cache_bytes(ok_dtype dtype, int64_t blocks, int64_t kv_heads, int64_t head_dim, uint64_t *host_bytes) {
    OK_REQUIRE_POINTER(host_bytes);
    const int64_t tile = ok::KVLayout(1, head_dim < 1 ? 1 : head_dim).tile_elements();
    if (ok_status status = ok::check_kv_cache(__func__, dtype, blocks, kv_heads, head_dim, tile)) return status;
    *host_bytes = static_cast<uint64_t>(blocks * kv_heads * tile) * (dtype == OK_F32 ? 4 : 2);
    return OK_SUCCESS;
}

ok_status ok_kv_append(ok_queue *queue, void *cache, ok_dtype dtype, int64_t blocks, const float *k, const float *v,
                       int64_t stride, const int32_t *slot, int64_t rows, int64_t kv_heads, int64_t head_dim) {
    const ok::KVLayout layout(kv_heads, head_dim < 1 ? 1 : head_dim);
    if (ok_status status = ok::check_kv_append(__func__, queue, cache, dtype, blocks, k, v, stride, slot, rows,
                                               kv_heads, head_dim, layout.tile_elements()))
        return status;
    if (rows == 0) return OK_SUCCESS;
    const ok::Grid grid = {rows, ok::ceil_div(kv_heads * layout.padded_dim, ok::kBlock)};
    return LAUNCH_FLOAT(kv_append, dtype, queue, grid, ok::kBlock, cache, blocks, k, v, stride, slot, kv_heads,
                        head_dim);
}

ok_status ok_rope_append(ok_queue *queue, float *qkv, int64_t stride, const float *table, int64_t table_rows,
                         const int32_t *table_row, void *cache, ok_dtype dtype, int64_t blocks, const int32_t *slot,
                         int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t rotary_dim) {
    const ok::KVLayout layout(kv_heads, head_dim < 1 ? 1 : head_dim);
    if (ok_status status =
            ok::check_rope_append(__func__, queue, qkv, stride, table, table_rows, table_row, cache, dtype, blocks,
                                  slot, rows, heads, kv_heads, head_dim, rotary_dim, layout.tile_elements()))
        return status;
    if (rows == 0) return OK_SUCCESS;
    const int64_t half = rotary_dim / 2;
    const int64_t tasks = (heads + kv_heads) * half + kv_heads * (2 * layout.padded_dim - rotary_dim);
    return LAUNCH_FLOAT(rope_append, dtype, queue, (ok::Grid{rows, ok::ceil_div(tasks, ok::kBlock)}), ok::kBlock, qkv,
                        stride, table, table_rows, table_row, cache, blocks, slot, heads, kv_heads, head_dim, half);
}
