// elementwise.hip: picks rows by index, and counts values that are not finite.
//
// Traffic: gather moves each picked row in and out once; the count reads x once.
#include "checks.h"
#include "gpu.h"

namespace ok {

KERNEL gather_rows_kernel(float *y, const float *x, const int32_t *index, const int32_t *active, int64_t rows,
                          int64_t x_rows, int64_t cols) {
    begin_rows();
    const int64_t row = blockIdx.x, c = column();
    if (row >= active_rows(active, rows) || c >= cols) return;
    const int64_t from = index[row];
    y[row * cols + c] = from < 0 || from >= x_rows ? 0.0f : x[from * cols + c];
}

KERNEL count_nonfinite_kernel(int32_t *count, const float *x, const int32_t *active, int64_t rows, int64_t cols) {
    begin_rows();
    const int64_t n = active_rows(active, rows) * cols, step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    int32_t found = 0;
    for (int64_t i = global_thread(); i < n; i += step) found += !is_finite(x[i]);
    found = reduce_block<Add>(found);
    if (threadIdx.x == 0 && found) atomicAdd(count, found);
}

}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

ok_status ok_gather_rows(ok_queue *queue, float *y, const float *x, const int32_t *index, const int32_t *active,
                         int64_t rows, int64_t x_rows, int64_t cols) {
    if (ok_status status = ok::check_gather_rows(__func__, queue, y, x, index, rows, x_rows, cols)) return status;
    if (rows == 0) return OK_SUCCESS;
    return LAUNCH(queue, gather_rows_kernel, {rows, ok::ceil_div(cols, ok::kBlock)}, ok::kBlock, y, x, index, active,
                  rows, x_rows, cols);
}

ok_status ok_count_nonfinite(ok_queue *queue, int32_t *count, const float *x, const int32_t *active, int64_t rows,
                             int64_t cols) {
    if (ok_status status = ok::check_count_nonfinite(__func__, queue, count, x, rows, cols)) return status;
    if (rows == 0) return OK_SUCCESS;
    int64_t blocks = ok::ceil_div(rows * cols, 2 * ok::kBlock);
    if (blocks > 1024) blocks = 1024;
    return LAUNCH(queue, count_nonfinite_kernel, {blocks}, ok::kBlock, count, x, active, rows, cols);
}
