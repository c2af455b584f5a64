// kv_cache.h: how one layer's paged cache of keys and values lies in a GPU's memory.
//
// A block holds OK_KV_BLOCK_SIZE tokens; in it each kv head has its keys, (tokens, padded head_dim), then its values,
// the same. head_dim is padded with zeros to a multiple of 8, so that a lane's 8 values are aligned.
#pragma once
#include "gpu.h"

namespace ok {

constexpr int64_t kHeadStep = 8;  // values of a head that a lane takes at a time

struct KVLayout {
    int64_t kv_heads, padded_dim;

    __host__ __device__ KVLayout(int64_t heads, int64_t head_dim)
        : kv_heads(heads), padded_dim((head_dim + kHeadStep - 1) / kHeadStep * kHeadStep) {}
    __host__ __device__ int64_t tile_elements() const { return 2 * OK_KV_BLOCK_SIZE * padded_dim; }
    __host__ __device__ int64_t key(int64_t block, int64_t head, int64_t token) const {
        return (block * kv_heads + head) * tile_elements() + token * padded_dim;
    }
    __host__ __device__ int64_t value(int64_t block, int64_t head, int64_t token) const {
        return key(block, head, token) + OK_KV_BLOCK_SIZE * padded_dim;
    }
};

namespace {

// Eight neighbouring values of a cached row, p aligned to all of them or to 16 bytes.
template <class T>
struct Eight {
    Chunk<T> chunk[sizeof(T) / 2];
    __device__ float get(int i) const { return widen(chunk[i / Chunk<T>::kSize].value[i % Chunk<T>::kSize]); }
};
template <class T>
DEVICE Eight<T> load_eight(const T *p) {
    Eight<T> eight;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) eight.chunk[i] = load_chunk(p + i * Chunk<T>::kSize);
    return eight;
}

}  // namespace
}  // namespace ok
