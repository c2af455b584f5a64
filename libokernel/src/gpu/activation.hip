// activation.hip: y = act(x), and y = act(gate) * up for gated MLPs.
//
// Traffic: each value in once, each result out once.
#include "activation.h"

#include "checks.h"

namespace ok {

#define ACTIVATION_KERNELS(name, activation)                                        \
    KERNEL activate_##name##_kernel(float *y, const float *x, int64_t n) {          \
        begin_rows();                                                               \
        const int64_t i = global_thread();                                          \
        if (i < n) y[i] = activated<activation>(x[i]);                              \
    }                                                                               \
    KERNEL activate_gated_##name##_kernel(float *y, const float *x, int64_t cols) { \
        begin_rows();                                                               \
        const int64_t row = blockIdx.x, c = column();                               \
        const float *gate = x + row * 2 * cols, *up = gate + cols;                  \
        if (c < cols) y[row * cols + c] = activated<activation>(gate[c]) * up[c];   \
    }
ACTIVATION_KERNELS(silu, OK_SILU)
ACTIVATION_KERNELS(gelu_tanh, OK_GELU_TANH)
ACTIVATION_KERNELS(gelu_erf, OK_GELU_ERF)
ACTIVATION_KERNELS(relu, OK_RELU)

}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

ok_status ok_activate(ok_queue *queue, float *y, const float *x, ok_activation activation, int64_t n) {
    if (ok_status status = ok::check_activate(__func__, queue, y, x, activation, n)) return status;
    if (n == 0) return OK_SUCCESS;
    const ok::Grid grid = {ok::ceil_div(n, ok::kBlock)};
    switch (activation) {
        case OK_SILU:
            return LAUNCH(queue, activate_silu_kernel, grid, ok::kBlock, y, x, n);
        case OK_GELU_TANH:
            return LAUNCH(queue, activate_gelu_tanh_kernel, grid, ok::kBlock, y, x, n);
        case OK_GELU_ERF:
            return LAUNCH(queue, activate_gelu_erf_kernel, grid, ok::kBlock, y, x, n);
        default:
            return LAUNCH(queue, activate_relu_kernel, grid, ok::kBlock, y, x, n);
    }
}

ok_status ok_activate_gated(ok_queue *queue, float *y, const float *x, ok_activation activation, int64_t rows,
                            int64_t cols) {
    if (ok_status status = ok::check_activate_gated(__func__, queue, y, x, activation, rows, cols)) return status;
    if (rows == 0) return OK_SUCCESS;
    const ok::Grid grid = {rows, ok::ceil_div(cols, ok::kBlock)};
    switch (activation) {
        case OK_SILU:
            return LAUNCH(queue, activate_gated_silu_kernel, grid, ok::kBlock, y, x, cols);
        case OK_GELU_TANH:
            return LAUNCH(queue, activate_gated_gelu_tanh_kernel, grid, ok::kBlock, y, x, cols);
        case OK_GELU_ERF:
            return LAUNCH(queue, activate_gated_gelu_erf_kernel, grid, ok::kBlock, y, x, cols);
        default:
            return LAUNCH(queue, activate_gated_relu_kernel, grid, ok::kBlock, y, x, cols);
    }
}
