// norm.hip: RMS and layer normalisation.
//
//   RMS:   y = x / sqrt(mean(x^2) + eps) * weight                           Zhang & Sennrich 2019, eq. 4
//   layer: y = (x - mean) / sqrt(var + eps) * weight + bias, in two passes  Ba et al. 2016, eq. 4
// One block a vector: its values pass through registers of the same threads in every pass, so that y may alias x. Traffic:
// x once from memory, y once. A vector of up to kHeldCols aligned values stays in registers between the passes; a longer one
// is read again, from the cache.
#include "checks.h"
#include "gpu.h"

namespace ok {

constexpr int kNormThreads = 1024;  // at most; always a power of two
constexpr int kHeld = 2;            // chunks of 4 values that a thread holds
constexpr int64_t kHeldCols = kNormThreads * kHeld * 4;

// One vector and what belongs to it, at its first value.
struct NormVector {
    float *y;
    const float *x, *weight, *bias, *residual;  // the last two may be null
    int64_t cols;
    float eps;

    __device__ NormVector(float *out, int64_t y_stride, const float *in, int64_t x_stride, const float *weights,
                          const float *biases, const float *residuals, int64_t residual_stride, int64_t groups,
                          int64_t columns, float epsilon)
        : cols(columns), eps(epsilon) {
        const int64_t row = blockIdx.x / groups, at = blockIdx.x % groups * cols;
        y = out + row * y_stride + at;
        x = in + row * x_stride + at;
        weight = weights + at;
        bias = biases ? biases + at : nullptr;
        residual = residuals ? residuals + row * residual_stride + at : nullptr;
    }
};

// The sum over a block whose waves are a power of two in number, with one barrier; `partial` must not be in use.
DEVICE float sum_block(float value, float *partial) {
    value = reduce_wave<Add>(value);
    if (lane_index() == 0) partial[wave_index()] = value;
    __syncthreads();
    return reduce_lanes<Add>(partial[lane_index() % wave_count()], wave_count());
}

// centred: layer normalisation, which takes the mean away first.
template <bool centred>
DEVICE void normalise_held(const NormVector &v) {
    __shared__ float partial[2][kMaxWaves];
    Chunk<float> x[kHeld] = {}, weight[kHeld] = {}, bias[kHeld] = {}, residual[kHeld] = {};
#pragma unroll
    for (int n = 0; n < kHeld; ++n) {
        const int64_t c = (static_cast<int64_t>(n) * blockDim.x + threadIdx.x) * 4;
        if (c >= v.cols) continue;
        x[n] = load_chunk(v.x + c);
        weight[n] = load_chunk(v.weight + c);
        if (v.bias) bias[n] = load_chunk(v.bias + c);
        if (v.residual) residual[n] = load_chunk(v.residual + c);
    }
    if (centred) {
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < kHeld; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum += x[n].value[i];
        const float mean = sum_block(sum, partial[0]) / static_cast<float>(v.cols);
#pragma unroll
        for (int n = 0; n < kHeld; ++n) {
            if ((static_cast<int64_t>(n) * blockDim.x + threadIdx.x) * 4 >= v.cols) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) x[n].value[i] -= mean;
        }
    }
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < kHeld; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) squares = fmaf(x[n].value[i], x[n].value[i], squares);
    const float inverse = 1.0f / sqrtf(sum_block(squares, partial[1]) / static_cast<float>(v.cols) + v.eps);
#pragma unroll
    for (int n = 0; n < kHeld; ++n) {
        const int64_t c = (static_cast<int64_t>(n) * blockDim.x + threadIdx.x) * 4;
        if (c >= v.cols) continue;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            x[n].value[i] = x[n].value[i] * inverse * weight[n].value[i];
            if (v.bias) x[n].value[i] += bias[n].value[i];
            if (v.residual) x[n].value[i] += residual[n].value[i];
        }
        store_aligned(v.y + c, x[n]);
    }
}

template <bool centred>
DEVICE void normalise_any(const NormVector &v) {
    __shared__ float partial[2][kMaxWaves];
    float mean = 0.0f, squares = 0.0f;
    if (centred) {
        float sum = 0.0f;
        for (int64_t c = threadIdx.x; c < v.cols; c += blockDim.x) sum += v.x[c];
        mean = sum_block(sum, partial[0]) / static_cast<float>(v.cols);
    }
    for (int64_t c = threadIdx.x; c < v.cols; c += blockDim.x) squares = fmaf(v.x[c] - mean, v.x[c] - mean, squares);
    const float inverse = 1.0f / sqrtf(sum_block(squares, partial[1]) / static_cast<float>(v.cols) + v.eps);
    for (int64_t c = threadIdx.x; c < v.cols; c += blockDim.x) {
        float value = (v.x[c] - mean) * inverse * v.weight[c];
        if (v.bias) value += v.bias[c];
        if (v.residual) value += v.residual[c];
        v.y[c] = value;
    }
}

KERNEL_OF(kNormThreads, 1)
rms_norm_kernel(float *y, int64_t y_stride, const float *x, int64_t x_stride, const float *weight,
                const float *residual, int64_t residual_stride, int64_t groups, int64_t cols, float eps, int32_t held) {
    begin_rows();
    const NormVector v(y, y_stride, x, x_stride, weight, nullptr, residual, residual_stride, groups, cols, eps);
    held ? normalise_held<false>(v) : normalise_any<false>(v);
}

KERNEL_OF(kNormThreads, 1)
layer_norm_kernel(float *y, int64_t y_stride, const float *x, int64_t x_stride, const float *weight, const float *bias,
                  const float *residual, int64_t residual_stride, int64_t groups, int64_t cols, float eps,
                  int32_t held) {
    begin_rows();
    const NormVector v(y, y_stride, x, x_stride, weight, bias, residual, residual_stride, groups, cols, eps);
    held ? normalise_held<true>(v) : normalise_any<true>(v);
}

}  // namespace ok

// ---- launchers ---------------------------------------------------------------------------------------------------------

namespace {

int32_t norm_threads(int64_t cols) {
    int32_t threads = 64;
    while (threads < ok::kNormThreads && threads * ok::kHeld * 4 < cols) threads *= 2;
    return threads;
}

// Every chunk of 4 values lies in one vector and on 16 bytes, and registers can hold them all.
bool can_hold(const float *y, int64_t y_stride, const float *x, int64_t x_stride, const float *weight,
              const float *bias, const float *residual, int64_t residual_stride, int64_t cols) {
    const float *const pointers[] = {y, x, weight, bias, residual};
    uintptr_t addresses = 0;
    for (const float *pointer : pointers) addresses |= reinterpret_cast<uintptr_t>(pointer);
    const int64_t sizes = cols | y_stride | x_stride | (residual ? residual_stride : 0);
    return addresses % 16 == 0 && sizes % 4 == 0 && cols <= ok::kHeldCols;
}

}  // namespace

ok_status ok_rms_norm(ok_queue *queue, float *y, int64_t y_stride, const float *x, int64_t x_stride,
                      const float *weight, const float *residual, int64_t residual_stride, int64_t rows, int64_t groups,
                      int64_t cols, float eps) {
    if (ok_status status = ok::check_norm(__func__, queue, y, y_stride, x, x_stride, weight, residual, residual_stride,
                                          rows, groups, cols, eps))
        return status;
    if (rows == 0) return OK_SUCCESS;
    const bool held = can_hold(y, y_stride, x, x_stride, weight, nullptr, residual, residual_stride, cols);
    return LAUNCH(queue, rms_norm_kernel, {rows * groups}, norm_threads(cols), y, y_stride, x, x_stride, weight,
                  residual, residual_stride, groups, cols, eps, held);
}

ok_status ok_layer_norm(ok_queue *queue, float *y, int64_t y_stride, const float *x, int64_t x_stride,
                        const float *weight, const float *bias, const float *residual, int64_t residual_stride,
                        int64_t rows, int64_t groups, int64_t cols, float eps) {
    if (ok_status status = ok::check_norm(__func__, queue, y, y_stride, x, x_stride, weight, residual, residual_stride,
                                          rows, groups, cols, eps))
        return status;
    if (rows == 0) return OK_SUCCESS;
    const bool held = can_hold(y, y_stride, x, x_stride, weight, bias, residual, residual_stride, cols);
    return LAUNCH(queue, layer_norm_kernel, {rows * groups}, norm_threads(cols), y, y_stride, x, x_stride, weight, bias,
                  residual, residual_stride, groups, cols, eps, held);
}
