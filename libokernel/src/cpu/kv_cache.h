// kv_cache.h: how one layer's paged cache of keys and values lies in memory.
//
// A block holds OK_KV_BLOCK_SIZE tokens of every kv head, as one tile a head. In a tile the keys come first, transposed
// (head_dim, tokens), so that vector lanes run over keys; then the values (tokens, padded head_dim), so that lanes run
// over head_dim. The padding holds zeros.
#pragma once
#include <cstdint>

#include "checks.h"
#include "internal.h"

namespace ok {

constexpr int64_t kTileTokens = OK_KV_BLOCK_SIZE;

struct KVLayout {
    int64_t blocks, kv_heads, head_dim;

    int64_t value_stride() const { return ceil_div(head_dim, 16) * 16; }  // whole vectors on every path
    int64_t tile_elements() const { return kTileTokens * (head_dim + value_stride()); }
    int64_t elements() const { return blocks * kv_heads * tile_elements(); }
    // Where the tile begins; `block` in [0, blocks).
    int64_t tile(int64_t block, int64_t kv_head) const { return (block * kv_heads + kv_head) * tile_elements(); }
    // From the tile's beginning: key value d of a token, and the token's first value.
    int64_t key(int64_t d, int64_t token) const { return d * kTileTokens + token; }
    int64_t value(int64_t token) const { return kTileTokens * head_dim + token * value_stride(); }
};

}  // namespace ok
