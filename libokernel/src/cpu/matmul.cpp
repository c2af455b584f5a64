// matmul.cpp: y = x W^T (+ bias) (+ residual): lays rows out as tiles, shares the panels of W among threads; and the
// portable path, which every other is held to.
//
// Traffic: W once for up to 128 rows, x and y once; W alone matters for few rows. Queue scratch holds the tiles.
#include "matmul.h"

#include "checks.h"
#include "matmul_tile.h"
#include "separate.h"

const ok::MatmulPath ok::matmul_path_portable = kMatmulPath;

namespace {

const MatmulPath &path_in_use() {
    switch (path()) {
#if defined(__x86_64__)
        case Path::avx2:
            return matmul_path_avx2;
        case Path::avx512:
            return matmul_path_avx512;
        case Path::avx512vnni:
            return matmul_path_avx512vnni;
#elif defined(__aarch64__)
        case Path::neon:
            return matmul_path_neon;
        case Path::neondot:
            return matmul_path_neondot;
#endif
        default:
            return matmul_path_portable;
    }
}

MatmulKind kind_of(ok_dtype dtype, bool quantized_activations) {
    switch (dtype) {
        case OK_F16:
            return matmul_f16;
        case OK_BF16:
            return matmul_bf16;
        case OK_Q8_0:
            return quantized_activations ? matmul_q8_0_int16 : matmul_q8_0;
        default:
            return matmul_f32;
    }
}

struct MatmulArgs {
    float *y;
    const float *x;
    const void *weight;
    const float *bias, *residual;
    const int32_t *active;
    int64_t rows, out, in;
    void *scratch;
    MatmulKind kind;
};

// n values of each row become [n][rows of the tile].
void transpose_tile(float *tile, const float *x, int64_t rows, int64_t stride, int64_t n) {
    for (int64_t k = 0; k < n; k++)
        for (int64_t r = 0; r < rows; r++) *tile++ = x[r * stride + k];
}

void lay_out_tiles(const MatmulArgs &args, const MatmulJob &job, const MatmulPath &path) {
    constexpr int64_t worthwhile_values = 16384;
    const int64_t part = ceil_div(worthwhile_values, ceil_div(job.rows, job.tiles) * q8_block) * q8_block;
    const int64_t parts = ceil_div(args.in, part), blocks = ceil_div(args.in, q8_block);
    parallel_for(job.tiles * parts, [&](int64_t task) {
        const int64_t tile = task / parts, first = task % parts * part;
        const int64_t row = tile_row(job, tile), rows = tile_row(job, tile + 1) - row;
        const int64_t n = args.in - first < part ? args.in - first : part;
        const float *x = args.x + row * args.in + first;
        if (args.kind == matmul_q8_0_int16) {
            char *to = static_cast<char *>(args.scratch) + row * blocks * q8_activation_bytes;
            path.quantize_tile(to + first / q8_block * rows * q8_activation_bytes, x, rows, args.in, n);
        } else {
            transpose_tile(static_cast<float *>(args.scratch) + row * args.in + first * rows, x, rows, args.in, n);
        }
    });
}

void run_matmul(const MatmulArgs &args) {
    const int64_t rows = active_rows(args.active, args.rows);
    if (rows == 0) return;
    const MatmulPath &path = path_in_use();
    const MatmulKernel &kernel = path.kernels[args.kind];
    MatmulJob job = {args.y,    args.x,        args.weight,
                     args.bias, args.residual, rows,
                     args.out,  args.in,       ceil_div(rows, kernel.max_rows)};
    if (rows > 1 || args.kind == matmul_q8_0_int16) {
        lay_out_tiles(args, job, path);
        job.x = args.scratch;
    }

    // A task is some panels for a block of rows: enough to be worth handing out, few enough to go round.
    constexpr int64_t worthwhile_products = 32768, neighbours = 4;
    const int64_t block_tiles = matmul_block_rows / kernel.max_rows;
    const int64_t row_blocks = ceil_div(job.tiles, block_tiles), panels = ceil_div(args.out, panel_size);
    const int64_t block_rows = ceil_div(rows, row_blocks);
    const int64_t least = ceil_div(worthwhile_products, args.in * panel_size * block_rows);
    const int64_t fair = ceil_div(panels * row_blocks, ok_threads());
    const int64_t wanted = fair < neighbours ? fair : neighbours;
    const int64_t share = wanted > least ? wanted : least;
    const int64_t shares = ceil_div(panels, share);
    parallel_for(row_blocks * shares, [&](int64_t task) {
        const int64_t block = task / shares, panel = task % shares * share;
        kernel.run(job, panel, panel + share < panels ? panel + share : panels, job.tiles * block / row_blocks,
                   job.tiles * (block + 1) / row_blocks);
    });
}

uint64_t scratch_bytes(MatmulKind kind, int64_t rows, int64_t in) {
    if (kind == matmul_q8_0_int16) return rows * ceil_div(in, q8_block) * q8_activation_bytes;
    return rows > 1 ? rows * in * sizeof(float) : 0;
}

}  // namespace

// ---- launchers ------------------------------------------------------------------------------------------------------

ok_status ok_matmul(ok_queue *queue, float *y, const float *x, const void *weight, ok_dtype dtype, const float *bias,
                    const float *residual, const int32_t *active, int64_t rows, int64_t out, int64_t in) {
    if (ok_status status = check_matmul(__func__, queue, y, x, weight, dtype, rows, out, in)) return status;
    if (rows == 0) return OK_SUCCESS;
    const MatmulKind kind = kind_of(dtype, queue->quantized_activations);
    if (ok_status status = check_scratch(__func__, queue, scratch_bytes(kind, rows, in), "ok_matmul_scratch_bytes"))
        return status;
    return submit(queue, run_matmul,
                  MatmulArgs{y, x, weight, bias, residual, active, rows, out, in, queue->scratch, kind});
}

ok_status ok_matmul_scratch_bytes(ok_dtype dtype, int64_t rows, int64_t out, int64_t in, uint64_t *host_bytes) {
    OK_REQUIRE_POINTER(host_bytes);
    if (ok_status status = check_matmul_shape(__func__, dtype, rows, out, in)) return status;
    const uint64_t in_f32 = scratch_bytes(kind_of(dtype, false), rows, in);
    const uint64_t as_int16 = scratch_bytes(kind_of(dtype, true), rows, in);
    *host_bytes = in_f32 > as_int16 ? in_f32 : as_int16;
    return OK_SUCCESS;
}

ok_status ok_matmul_fused(ok_queue *queue, float *y, const float *x, ok_norm norm, const float *norm_weight,
                          const float *norm_bias, float eps, float *normed, const void *weight, ok_dtype dtype,
                          const float *bias, ok_epilogue epilogue, ok_activation activation, float *product,
                          int64_t rows, int64_t out, int64_t in) {
    if (ok_status status = ok::check_matmul_fused(__func__, queue, y, x, norm, norm_weight, eps, normed, weight, dtype,
                                                  epilogue, activation, product, rows, out, in))
        return status;
    if (rows == 0) return OK_SUCCESS;
    const uint64_t needed = scratch_bytes(kind_of(dtype, queue->quantized_activations), rows, in);
    if (ok_status status = ok::check_scratch(__func__, queue, needed, "ok_matmul_scratch_bytes")) return status;
    return ok::matmul_separately(queue, y, x, norm, norm_weight, norm_bias, eps, normed, weight, dtype, bias, epilogue,
                                 activation, product, rows, out, in);
}
