// norm.cpp: RMSNorm and LayerNorm of the vectors in a row, each by one thread, with an optional residual added.
//
// Sums over a vector run in sixteen interleaved partial sums in f32, added pairwise at the end: one fixed order, which
// is not the order of the elements. Reads x two times (three for LayerNorm) from cache, writes y once.
#include <cmath>

#include "checks.h"
#include "internal.h"

namespace {

struct NormArgs {
    float *y;
    int64_t y_stride;
    const float *x;
    int64_t x_stride;
    const float *weight, *bias;  // (groups, cols); bias may be null
    const float *residual;       // may be null
    int64_t residual_stride;
    int64_t rows, groups, cols;
    float eps;
    bool centred;  // LayerNorm
};

// The sum of term(x[c]) over a vector.
template <class Term>
float sum_of(const float *x, int64_t cols, Term term) {
    constexpr int kSums = 16;
    float sums[kSums] = {};
    int64_t c = 0;
    for (; c + kSums <= cols; c += kSums)
        for (int i = 0; i < kSums; i++) sums[i] += term(x[c + i]);
    for (int i = 0; c + i < cols; i++) sums[i] += term(x[c + i]);
    for (int width = kSums / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) sums[i] += sums[i + width];
    return sums[0];
}

void normalise(float *y, const float *x, const float *weight, const float *bias, const float *residual, int64_t cols,
               float eps, bool centred) {
    const float count = static_cast<float>(cols);
    const float mean = centred ? sum_of(x, cols, [](float v) { return v; }) / count : 0.0f;
    const float square = sum_of(x, cols, [mean](float v) { return (v - mean) * (v - mean); }) / count;
    const float scale = 1.0f / std::sqrt(square + eps);
    // y may be x or residual: every element is read before it is written.
    OK_INDEPENDENT_ITERATIONS
    for (int64_t c = 0; c < cols; c++) {
        float value = (x[c] - mean) * scale * weight[c];
        if (bias) value += bias[c];
        if (residual) value += residual[c];
        y[c] = value;
    }
}

void run_norm(const NormArgs &args) {
    const int64_t grain = 1 + 8192 / args.cols;
    ok::parallel_ranges(args.rows * args.groups, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
            const int64_t row = i / args.groups, first = i % args.groups * args.cols;
            normalise(args.y + row * args.y_stride + first, args.x + row * args.x_stride + first, args.weight + first,
                      args.bias ? args.bias + first : nullptr,
                      args.residual ? args.residual + row * args.residual_stride + first : nullptr, args.cols, args.eps,
                      args.centred);
        }
    });
}

ok_status queue_norm(const char *function, ok_queue *queue, const NormArgs &args) {
    if (ok_status status =
            ok::check_norm(function, queue, args.y, args.y_stride, args.x, args.x_stride, args.weight, args.residual,
                           args.residual_stride, args.rows, args.groups, args.cols, args.eps))
        return status;
    return args.rows ? ok::submit(queue, run_norm, args) : OK_SUCCESS;
}

}  // namespace

ok_status ok_rms_norm(ok_queue *queue, float *y, int64_t y_stride, const float *x, int64_t x_stride,
                      const float *weight, const float *residual, int64_t residual_stride, int64_t rows, int64_t groups,
                      int64_t cols, float eps) {
    return queue_norm(
        __func__, queue,
        {y, y_stride, x, x_stride, weight, nullptr, residual, residual_stride, rows, groups, cols, eps, false});
}

ok_status ok_layer_norm(ok_queue *queue, float *y, int64_t y_stride, const float *x, int64_t x_stride,
                        const float *weight, const float *bias, const float *residual, int64_t residual_stride,
                        int64_t rows, int64_t groups, int64_t cols, float eps) {
    return queue_norm(
        __func__, queue,
        {y, y_stride, x, x_stride, weight, bias, residual, residual_stride, rows, groups, cols, eps, true});
}
