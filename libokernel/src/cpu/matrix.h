// matrix.h: how weight matrices lie in memory, and how one row of them is read.
//
// A panel is 16 neighbouring outputs, so that vector lanes run over outputs and each output is summed along `in` by one
// lane, in order. The last panel is padded with zeros.
//   f32, f16, bf16: [panel][in][16]
//   q8_0:           quants [panel][block][8][16][4], then scales f16 [panel][block][16]; a block is 32 values along
//                   `in`, and the innermost 4 are neighbours, as integer dot instructions want them.
#pragma once
#include <cstdint>

#include "internal.h"

namespace ok {

constexpr int64_t panel_size = 16;                               // outputs of a panel
constexpr int64_t q8_block = 32;                                 // values that share a scale
constexpr int64_t q8_panel_block_bytes = panel_size * q8_block;  // quants of a panel's block

// ggml's block_q8_0: 34 bytes.
struct Q8Block {
    uint16_t scale;  // f16
    int8_t quant[q8_block];
};
static_assert(sizeof(Q8Block) == 34);

// Index of element (output, i) of a panelled float matrix.
static inline int64_t panel_index(int64_t output, int64_t i, int64_t in) {
    return (output / panel_size * in + i) * panel_size + output % panel_size;
}

// Files of several instruction sets include this, so that its code has internal linkage.
namespace {

// The two parts of a packed q8_0 matrix.
struct Q8Matrix {
    int64_t blocks;  // of a row
    int8_t *quants;
    uint16_t *scales;

    Q8Matrix(const void *packed, int64_t out, int64_t in)
        : blocks(ceil_div(in, q8_block)),
          quants(static_cast<int8_t *>(const_cast<void *>(packed))),
          scales(reinterpret_cast<uint16_t *>(quants + ceil_div(out, panel_size) * blocks * q8_panel_block_bytes)) {}

    // The four neighbouring quants of `output` from value 4 * group of its block.
    int8_t *quants_at(int64_t output, int64_t block, int64_t group) const {
        const int64_t panel = output / panel_size, lane = output % panel_size;
        return quants + (panel * blocks + block) * q8_panel_block_bytes + (group * panel_size + lane) * 4;
    }
    uint16_t &scale_at(int64_t output, int64_t block) const {
        return scales[(output / panel_size * blocks + block) * panel_size + output % panel_size];
    }
};

}  // namespace

// Writes values [first, first + n) of row `row` of a packed (out, in) matrix as f32. `first` is a multiple of 32.
void read_matrix_row(float *dst, const void *packed, ok_dtype dtype, int64_t out, int64_t in, int64_t row,
                     int64_t first, int64_t n);

// Bytes of a plain row: `cols` values, or ceil(cols / 32) blocks.
int64_t plain_row_bytes(ok_dtype dtype, int64_t cols);

// Widens values [first, first + n) of a plain row. q8_0: first is a multiple of 32.
void widen_plain_row(float *dst, const void *row, ok_dtype dtype, int64_t first, int64_t n);

// ggml's q8_0 of `cols` values into ceil(cols / 32) blocks; returns how many blocks do not hold their values (see
// ok_quantize_q8_0).
int32_t quantize_row(Q8Block *blocks, const float *src, int64_t cols);

}  // namespace ok
