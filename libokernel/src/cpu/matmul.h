// matmul.h: what the matmul paths share: a job, and the table of functions that each path fills from matmul_tile.h.
#pragma once
#include <cstdint>

#include "internal.h"

namespace ok {

// One product. Rows travel in `tiles` tiles of nearly equal height, at most the kernel's max_rows.
struct MatmulJob {
    float *y;               // (rows, out)
    const void *x;          // row tiles, one after the other: [in][rows of the tile] f32, or int16 blocks
    const void *weight;     // packed (out, in)
    const float *bias;      // (out) or null
    const float *residual;  // (rows, out) or null; may be y
    int64_t rows, out, in, tiles;
};

// Where a tile's rows begin.
static inline int64_t tile_row(const MatmulJob &job, int64_t tile) { return job.rows * tile / job.tiles; }

// Which weights meet which activations.
enum MatmulKind { matmul_f32, matmul_f16, matmul_bf16, matmul_q8_0, matmul_q8_0_int16, matmul_kinds };

struct MatmulKernel {
    int32_t max_rows;  // of a tile
    // Outputs of panels [panel_begin, panel_end) for the rows of tiles [tile_begin, tile_end): at most
    // matmul_block_rows of them unless it is one tile.
    void (*run)(const MatmulJob &job, int64_t panel_begin, int64_t panel_end, int64_t tile_begin, int64_t tile_end);
};
constexpr int64_t matmul_block_rows = 128;

struct MatmulPath {
    MatmulKernel kernels[matmul_kinds];
    // Quantises n values of each of `rows` rows, `stride` apart, into a tile for matmul_q8_0_int16.
    void (*quantize_tile)(void *tile, const float *x, int64_t rows, int64_t stride, int64_t n);
};
// Bytes of a row, per block of 32, in a tile of int16 activations: the values and a scale.
constexpr int64_t q8_activation_bytes = 68;

extern const MatmulPath matmul_path_portable, matmul_path_avx2, matmul_path_avx512, matmul_path_avx512vnni,
    matmul_path_neon, matmul_path_neondot;

}  // namespace ok
