// kv_cache.hip: stores keys and values of token rows in the paged cache.
//
// Traffic: k and v in once as f32, out once in the cache's type.
#include "kv_cache.h"

#include "checks.h"

namespace ok {

template <class T>
DEVICE void append(T *cache, int64_t blocks, const float *k, const float *v, int64_t stride, const int32_t *slots,
                   int64_t kv_heads, int64_t head_dim) {
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
