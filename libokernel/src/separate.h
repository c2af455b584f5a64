// separate.h: ok_matmul_fused as the single operations it stands for.
#pragma once
#include "okernel.h"

namespace ok {

static inline ok_status matmul_separately(ok_queue *queue, float *y, const float *x, ok_norm norm,
                                          const float *norm_weight, const float *norm_bias, float eps, float *normed,
                                          const void *weight, ok_dtype dtype, const float *bias, ok_epilogue epilogue,
                                          ok_activation activation, float *product, int64_t rows, int64_t out,
                                          int64_t in) {
    ok_status status = OK_SUCCESS;
    if (norm == OK_NORM_RMS)
        status = ok_rms_norm(queue, normed, in, x, in, norm_weight, nullptr, 0, rows, 1, in, eps);
    else if (norm == OK_NORM_LAYER)
        status = ok_layer_norm(queue, normed, in, x, in, norm_weight, norm_bias, nullptr, 0, rows, 1, in, eps);
    if (status != OK_SUCCESS) return status;
    float *to = epilogue == OK_EPILOGUE_GATED ? product : y;
    status =
        ok_matmul(queue, to, norm == OK_NORM_NONE ? x : normed, weight, dtype, bias, nullptr, nullptr, rows, out, in);
    if (status != OK_SUCCESS || epilogue == OK_EPILOGUE_NONE) return status;
    return epilogue == OK_EPILOGUE_GATED ? ok_activate_gated(queue, y, product, activation, rows, out / 2)
                                         : ok_activate(queue, y, y, activation, rows * out);
}

}  // namespace ok
