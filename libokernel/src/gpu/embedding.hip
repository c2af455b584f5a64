// embedding.hip: y[r, :] = table[ids[r], :] (+ residual[r, :]), out of a packed matrix.
//
// Traffic: one row of the table in and one of f32 out for each token. Ids outside the table give zeros.
#include "checks.h"
#include "gpu.h"
#include "matrix.h"

namespace ok {

template <class Weights>
DEVICE void embed(float *y, const void *table, const int32_t *ids, const float *residual, int64_t vocab, int64_t cols) {
    begin_rows();
    const int64_t row = blockIdx.x, c = column();
    if (c >= cols) return;
    const int64_t id = ids[row];
    float value = id < 0 || id >= vocab ? 0.0f : Weights(table, vocab, cols).value(id, c);
    if (residual) value += residual[row * cols + c];
    y[row * cols + c] = value;
}

#define EMBEDDING_KERNEL(name, Weights)                                                                                \
    KERNEL name(float *y, const void *table, const int32_t *ids, const float *residual, int64_t vocab, int64_t cols) { \
        embed<Weights>(y, table, ids, residual, vocab, cols);                                                          \
    }
EMBEDDING_KERNEL(embedding_f32_kernel, FloatMatrix<float>)
EMBEDDING_KERNEL(embedding_f16_kernel, FloatMatrix<f16>)
EMBEDDING_KERNEL(embedding_bf16_kernel, FloatMatrix<bf16>)
EMBEDDING_KERNEL(embedding_q8_0_kernel, Q8Matrix)

}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

ok_status ok_embedding(ok_queue *queue, float *y, const void *table, ok_dtype dtype, const int32_t *ids,
                       const float *residual, int64_t rows, int64_t vocab, int64_t cols) {
    if (ok_status status = ok::check_embedding(__func__, queue, y, table, dtype, ids, rows, vocab, cols)) return status;
    if (rows == 0) return OK_SUCCESS;
    const ok::Grid grid = {rows, ok::ceil_div(cols, ok::kBlock)};
    return LAUNCH_MATRIX(embedding, dtype, queue, grid, ok::kBlock, y, table, ids, residual, vocab, cols);
}
