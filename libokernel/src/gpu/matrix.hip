// matrix.hip: packs plain rows into the layouts of matrix.h and reads them back.
//
// Traffic: each value once in, once out.
#include "matrix.h"

#include "checks.h"
#include "quantize.h"

namespace ok {

// packed, src: the first row of the slice.
template <class T>
DEVICE void pack(T *packed, const uint8_t *src, int32_t src_dtype, int64_t in, int32_t *overflow) {
    begin_kernel();
    const int64_t row = blockIdx.x, c = column(), cols = padded_cols(in);
    int32_t lost = 0;
    if (c < cols) {
        const float value = c < in ? plain_value(src + row * plain_row_bytes(src_dtype, in), src_dtype, c) : 0.0f;
        const T stored = narrow<T>(value);
        lost = is_finite(value) && !is_finite(widen(stored));
        packed[row * cols + c] = stored;
    }
    lost = reduce_block<Add>(lost);
    if (threadIdx.x == 0 && lost && overflow) atomicAdd(overflow, lost);
}

#define PACK_KERNEL(name, T)                                                                        \
    KERNEL name(void *packed, int64_t first_row, const uint8_t *src, int32_t src_dtype, int64_t in, \
                int32_t *overflow) {                                                                \
        pack(static_cast<T *>(packed) + first_row * padded_cols(in), src, src_dtype, in, overflow); \
    }
PACK_KERNEL(matrix_pack_f32_kernel, float)
PACK_KERNEL(matrix_pack_f16_kernel, f16)
PACK_KERNEL(matrix_pack_bf16_kernel, bf16)

KERNEL matrix_pack_q8_0_kernel(int8_t *packed_quants, f16 *packed_scales, const uint8_t *src, int32_t src_dtype,
                               int64_t in, int32_t *overflow) {
    begin_kernel();
    const int64_t row = blockIdx.x, block = column(), row_blocks = padded_cols(in) / kMatrixBlock;
    if (block >= row_blocks) return;
    src += row * plain_row_bytes(src_dtype, in);
    alignas(16) int8_t quants[kMatrixBlock];
    f16 scale;
    bool held = true;
    if (src_dtype == OK_Q8_0) {
        const uint8_t *from = src + block * static_cast<int64_t>(sizeof(Q8Block));
        scale = *reinterpret_cast<const f16 *>(from);
#pragma unroll
        for (int i = 0; i < kMatrixBlock; ++i) quants[i] = static_cast<int8_t>(from[2 + i]);
    } else {
        held = quantize_block(src, src_dtype, block * kMatrixBlock, in, &scale, quants);
    }
    const int64_t at = row * row_blocks + block;
    packed_scales[at] = scale;
    Chunk<int8_t> half[2];
    memcpy(half, quants, sizeof half);
    store_aligned(packed_quants + at * kMatrixBlock, half[0]);
    store_aligned(packed_quants + at * kMatrixBlock + 16, half[1]);
    if (!held && overflow) atomicAdd(overflow, 1);
}

template <class Weights>
DEVICE void unpack(float *dst, const void *packed, int64_t out, int64_t in, int64_t first_row) {
    begin_kernel();
    const int64_t row = blockIdx.x, c = column();
    if (c < in) dst[row * in + c] = Weights(packed, out, in).value(first_row + row, c);
}

#define UNPACK_KERNEL(name, Weights)                                                          \
    KERNEL name(float *dst, const void *packed, int64_t out, int64_t in, int64_t first_row) { \
        unpack<Weights>(dst, packed, out, in, first_row);                                     \
    }
UNPACK_KERNEL(matrix_unpack_f32_kernel, FloatMatrix<float>)
UNPACK_KERNEL(matrix_unpack_f16_kernel, FloatMatrix<f16>)
UNPACK_KERNEL(matrix_unpack_bf16_kernel, FloatMatrix<bf16>)
UNPACK_KERNEL(matrix_unpack_q8_0_kernel, Q8Matrix)

KERNEL matrix_unpack_blocks_kernel(uint8_t *dst, const void *packed, int64_t out, int64_t in, int64_t first_row) {
    begin_kernel();
    const int64_t row = blockIdx.x, block = column(), row_blocks = padded_cols(in) / kMatrixBlock;
    if (block >= row_blocks) return;
    const Q8Matrix matrix(packed, out, in);
    const int64_t at = (first_row + row) * row_blocks + block;
    Q8Block *to = reinterpret_cast<Q8Block *>(dst) + row * row_blocks + block;
    memcpy(&to->scale, &matrix.scales[at], sizeof to->scale);
#pragma unroll
    for (int i = 0; i < kMatrixBlock; ++i) to->quant[i] = matrix.quants[at * kMatrixBlock + i];
}

}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

ok_status ok_matrix_bytes(ok_dtype dtype, int64_t out, int64_t in, uint64_t *host_bytes) {
    OK_REQUIRE_POINTER(host_bytes);
    if (ok_status status = ok::check_matrix(__func__, dtype, out, in)) return status;
    const int64_t blocks = out * (ok::padded_cols(in) / ok::kMatrixBlock);
    const int64_t block_bytes =
        dtype == OK_Q8_0 ? static_cast<int64_t>(sizeof(ok::Q8Block)) : ok::kMatrixBlock * (dtype == OK_F32 ? 4 : 2);
    *host_bytes = static_cast<uint64_t>(blocks * block_bytes);
    return OK_SUCCESS;
}

ok_status ok_matrix_pack(ok_queue *queue, void *packed, ok_dtype dtype, int64_t out, int64_t in, int64_t first_row,
                         const void *src, ok_dtype src_dtype, int64_t rows, int32_t *overflow) {
    if (ok_status status =
            ok::check_matrix_pack(__func__, queue, packed, dtype, out, in, first_row, src, src_dtype, rows))
        return status;
    if (rows == 0) return OK_SUCCESS;
    const uint8_t *from = static_cast<const uint8_t *>(src);
    const int64_t cols = ok::padded_cols(in), first = first_row * cols;
    const ok::Grid grid = {rows, ok::ceil_div(cols, ok::kBlock)};
    if (dtype != OK_Q8_0)
        return LAUNCH_FLOAT(matrix_pack, dtype, queue, grid, ok::kBlock, packed, first_row, from, src_dtype, in,
                            overflow);
    int8_t *quants = static_cast<int8_t *>(packed);
    ok::f16 *scales = reinterpret_cast<ok::f16 *>(quants + out * cols);
    return LAUNCH(queue, matrix_pack_q8_0_kernel, {rows, ok::ceil_div(cols / ok::kMatrixBlock, 64)}, 64, quants + first,
                  scales + first / ok::kMatrixBlock, from, src_dtype, in, overflow);
}

ok_status ok_matrix_unpack(ok_queue *queue, void *dst, ok_dtype dst_dtype, const void *packed, ok_dtype dtype,
                           int64_t out, int64_t in, int64_t first_row, int64_t rows) {
    if (ok_status status =
            ok::check_matrix_unpack(__func__, queue, dst, dst_dtype, packed, dtype, out, in, first_row, rows))
        return status;
    if (rows == 0) return OK_SUCCESS;
    if (dst_dtype == OK_Q8_0)
        return LAUNCH(queue, matrix_unpack_blocks_kernel,
                      {rows, ok::ceil_div(ok::padded_cols(in) / ok::kMatrixBlock, 64)}, 64, static_cast<uint8_t *>(dst),
                      packed, out, in, first_row);
    const ok::Grid grid = {rows, ok::ceil_div(in, ok::kBlock)};
    return LAUNCH_MATRIX(matrix_unpack, dtype, queue, grid, ok::kBlock, static_cast<float *>(dst), packed, out, in,
                         first_row);
}
