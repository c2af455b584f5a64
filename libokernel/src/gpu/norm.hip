// norm.hip: RMS and layer normalisation.
//
//   RMS:   y = x / sqrt(mean(x^2) + eps) * weight                           Zhang & Sennrich 2019, eq. 4
//   layer: y = (x - mean) / sqrt(var + eps) * weight + bias, in two passes  Ba et al. 2016, eq. 4
// One block a vector: its values pass through registers of the same threads in every pass, so that y may alias x. Traffic:
// x once from memory (later passes hit the cache), y once.
#include "checks.h"
#include "gpu.h"

namespace ok {

struct NormVector {
    int64_t row, group, at;  // at: of the vector within a row
};

DEVICE NormVector norm_vector(int64_t groups, int64_t cols) {
    const int64_t row = blockIdx.x / groups, group = blockIdx.x % groups;
    return {row, group, group * cols};
}

KERNEL rms_norm_kernel(float *y, int64_t y_stride, const float *x, int64_t x_stride, const float *weight,
                       const float *residual, int64_t residual_stride, int64_t groups, int64_t cols, float eps) {
    const NormVector v = norm_vector(groups, cols);
    x += v.row * x_stride + v.at;
    float squares = 0.0f;
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) squares = fmaf(x[c], x[c], squares);
    const float mean = reduce_block<Add>(squares) / static_cast<float>(cols);
    const float inverse = 1.0f / sqrtf(mean + eps);
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
        float value = x[c] * inverse * weight[v.at + c];
        if (residual) value += residual[v.row * residual_stride + v.at + c];
        y[v.row * y_stride + v.at + c] = value;
    }
}

KERNEL layer_norm_kernel(float *y, int64_t y_stride, const float *x, int64_t x_stride, const float *weight,
                         const float *bias, const float *residual, int64_t residual_stride, int64_t groups, int64_t cols,
                         float eps) {
    const NormVector v = norm_vector(groups, cols);
    x += v.row * x_stride + v.at;
    float sum = 0.0f;
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) sum += x[c];
    const float mean = reduce_block<Add>(sum) / static_cast<float>(cols);
    float squares = 0.0f;
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) squares = fmaf(x[c] - mean, x[c] - mean, squares);
    const float variance = reduce_block<Add>(squares) / static_cast<float>(cols);
    const float inverse = 1.0f / sqrtf(variance + eps);
    for (int64_t c = threadIdx.x; c < cols; c += blockDim.x) {
        float value = (x[c] - mean) * inverse * weight[v.at + c];
        if (bias) value += bias[v.at + c];
        if (residual) value += residual[v.row * residual_stride + v.at + c];
        y[v.row * y_stride + v.at + c] = value;
    }
}

}  // namespace ok

// ---- launchers ---------------------------------------------------------------------------------------------------------

static int32_t norm_threads(int64_t cols) { return cols <= 64 ? 64 : cols <= 256 ? 128 : ok::kBlock; }

ok_status ok_rms_norm(ok_queue *queue, float *y, int64_t y_stride, const float *x, int64_t x_stride, const float *weight,
                      const float *residual, int64_t residual_stride, int64_t rows, int64_t groups, int64_t cols,
                      float eps) {
    if (ok_status status = ok::check_norm(__func__, queue, y, y_stride, x, x_stride, weight, residual, residual_stride,
                                          rows, groups, cols, eps))
        return status;
    if (rows == 0) return OK_SUCCESS;
    return LAUNCH(queue, rms_norm_kernel, {rows * groups}, norm_threads(cols), y, y_stride, x, x_stride, weight, residual,
                  residual_stride, groups, cols, eps);
}

ok_status ok_layer_norm(ok_queue *queue, float *y, int64_t y_stride, const float *x, int64_t x_stride,
                        const float *weight, const float *bias, const float *residual, int64_t residual_stride,
                        int64_t rows, int64_t groups, int64_t cols, float eps) {
    if (ok_status status = ok::check_norm(__func__, queue, y, y_stride, x, x_stride, weight, residual, residual_stride,
                                          rows, groups, cols, eps))
        return status;
    if (rows == 0) return OK_SUCCESS;
    return LAUNCH(queue, layer_norm_kernel, {rows * groups}, norm_threads(cols), y, y_stride, x, x_stride, weight, bias,
                  residual, residual_stride, groups, cols, eps);
}
