// quantize.hip: ggml's q8_0 from floats, one thread a block.
//
// Traffic: each value in once, 34 bytes out for 32 of them.
#include "quantize.h"

#include "checks.h"

namespace ok {

KERNEL quantize_q8_0_kernel(uint8_t *blocks, const uint8_t *src, int32_t src_dtype, int64_t cols, int32_t *overflow) {
    begin_kernel();
    const int64_t row = blockIdx.x, block = column(), row_blocks = padded_cols(cols) / kMatrixBlock;
    if (block >= row_blocks) return;
    Q8Block *to = reinterpret_cast<Q8Block *>(blocks) + row * row_blocks + block;
    alignas(4) int8_t quants[kMatrixBlock];
    f16 scale;
    const bool held = quantize_block(src + row * plain_row_bytes(src_dtype, cols), src_dtype, block * kMatrixBlock,
                                     cols, &scale, quants);
    memcpy(&to->scale, &scale, sizeof scale);
#pragma unroll
    for (int i = 0; i < kMatrixBlock; ++i) to->quant[i] = quants[i];
    if (!held && overflow) atomicAdd(overflow, 1);
}

}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

ok_status ok_quantize_q8_0(ok_queue *queue, void *blocks, const void *src, ok_dtype src_dtype, int64_t rows,
                           int64_t cols, int32_t *overflow) {
    if (ok_status status = ok::check_quantize(__func__, queue, blocks, src, src_dtype, rows, cols)) return status;
    if (rows == 0) return OK_SUCCESS;
    const int64_t row_blocks = ok::padded_cols(cols) / ok::kMatrixBlock;
    return LAUNCH(queue, quantize_q8_0_kernel, {rows, ok::ceil_div(row_blocks, 64)}, 64, static_cast<uint8_t *>(blocks),
                  static_cast<const uint8_t *>(src), src_dtype, cols, overflow);
}
