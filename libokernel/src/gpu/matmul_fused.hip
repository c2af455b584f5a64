// matmul_fused.hip: a norm, a matmul and an activation in one launch, for one row or two.
//
// Each block norms the rows anew on their way into LDS, once, while its first weights are under way. That pays where it
// costs less than two launches (prefers_fused). A gated product is two rows of W in the same wave. More rows are the
// single operations.
#include "activation.h"
#include "checks.h"
#include "matmul_vector.h"
#include "separate.h"

namespace ok {

constexpr int kStagedValues = 8192;  // of x that a block holds in LDS
constexpr int kFusedRows = 2;
constexpr int64_t kFusedBlocks = 512;  // a block takes several groups of outputs, and norms once

namespace {

// One row's norm; without a weight: none.
struct RowNorm {
    const float *weight = nullptr, *bias = nullptr;
    float mean = 0.0f, inverse = 1.0f;

    // All threads of the block, with as many of the row's `in` values as `each` hands out: each(f) calls f(x).
    template <class Each>
    __device__ void measure(int64_t in, int32_t kind, float eps, const Each &each) {
        if (kind == OK_NORM_LAYER) {
            float sum = 0.0f;
            each([&](float x) { sum += x; });
            mean = reduce_block<Add>(sum) / static_cast<float>(in);
        }
        float squares = 0.0f;
        each([&](float x) { squares = fmaf(x - mean, x - mean, squares); });
        inverse = 1.0f / sqrtf(reduce_block<Add>(squares) / static_cast<float>(in) + eps);
    }
    __device__ float of(float x, int k) const {
        if (!weight) return x;
        const float value = (x - mean) * inverse * weight[k];
        return bias ? value + bias[k] : value;
    }
};

// Rows that a thread can hold: up to kHeldChunks times 4 values of x, weight and bias, asked for all at once.
constexpr int kHeldChunks = 4;

// What a block does to each row: hand its normed values to store(k, four), k a multiple of 4 and below in.
struct Norm {
    int32_t kind;
    const float *weight, *bias;
    float eps;

    __device__ bool holds(const float *x, int64_t in) const {
        const uintptr_t addresses =
            reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(weight) | reinterpret_cast<uintptr_t>(bias);
        return addresses % 16 == 0 && in % 4 == 0 && in <= kBlock * kHeldChunks * 4;
    }
    template <class Store>
    __device__ void held(const float *x, int64_t in, const Store &store) const {
        Chunk<float> value[kHeldChunks] = {}, scale[kHeldChunks] = {}, offset[kHeldChunks] = {};
        const int first = threadIdx.x * 4, step = kBlock * 4;
#pragma unroll
        for (int n = 0; n < kHeldChunks; ++n) {
            const int k = first + n * step;
            if (k >= in) continue;
            value[n] = load_chunk(x + k);
            if (weight) scale[n] = load_chunk(weight + k);
            if (bias) offset[n] = load_chunk(bias + k);
        }
        RowNorm norm;
        if (weight)
            norm.measure(in, kind, eps, [&](const auto &f) {
#pragma unroll
                for (int n = 0; n < kHeldChunks; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if (first + n * step < in) f(value[n].value[i]);
            });
#pragma unroll
        for (int n = 0; n < kHeldChunks; ++n) {
            const int k = first + n * step;
            if (k >= in) continue;
#pragma unroll
            for (int i = 0; weight && i < 4; ++i) {
                float normed = (value[n].value[i] - norm.mean) * norm.inverse * scale[n].value[i];
                if (bias) normed += offset[n].value[i];
                value[n].value[i] = normed;
            }
            store(k, value[n]);
        }
    }
    __device__ RowNorm of_row(const float *x, int64_t in) const {
        RowNorm norm;
        if (!weight) return norm;
        norm.weight = weight;
        norm.bias = bias;
        norm.measure(in, kind, eps, [&](const auto &f) {
            for (int64_t k = threadIdx.x; k < in; k += kBlock) f(x[k]);
        });
        return norm;
    }
};

// Which rows of W the O sums of a wave are: neighbours, or as many of the gate and of what it gates.
template <int O>
struct WaveRows {
    int64_t first, width;  // width: of the gated product, or 0

    __device__ WaveRows(int64_t group, int64_t out, int32_t epilogue)
        : first(group * kVectorOutputs + wave_index() * O), width(epilogue == OK_EPILOGUE_GATED ? out / 2 : 0) {}
    __device__ int64_t row(int o) const { return width ? first / 2 + o % (O / 2) + o / (O / 2) * width : first + o; }
    // Past the matrix only sums that are not written come from another row.
    __device__ int64_t row_within(int o, int64_t out) const {
        const int64_t last = width && o < O / 2 ? width - 1 : out - 1, at = row(o);
        return at < last ? at : last;
    }
};

template <int O, int R>
DEVICE void write_fused(float *y, const float (&sum)[O][R], const WaveRows<O> &rows, const float *bias,
                        int32_t epilogue, int32_t activation, int64_t out) {
    float value = sum_of_lane(sum);
    const int r = lane_index() % R, o = lane_index() / R;
    const int64_t at = rows.row(o), limit = rows.width ? rows.width : out;
    if (bias && o < O) value += bias[rows.row_within(o, out)];
    const float up = shuffle(value, (lane_index() + O / 2 * R) % kWave);
    if (o >= (rows.width ? O / 2 : O) || at >= limit) return;
    if (epilogue != OK_EPILOGUE_NONE) value = activated(value, activation);
    y[r * limit + at] = rows.width ? value * up : value;
}

}  // namespace

template <class Weights, int R>
DEVICE void fused_floats(float *y, const float *x, const void *packed, const float *bias, const Norm &norm,
                         int32_t epilogue, int32_t activation, int64_t out, int64_t in) {
    using T = typename Weights::Value;
    constexpr int N = Weights::kLoad, kOutputs = kVectorOutputs / (kBlock / kWave), kStep = kWave * N;
    constexpr int kAhead = 8 / kOutputs;  // steps under way
    using Part = typename Weights::template Part<N>;
    alignas(16) __shared__ T tile[R][kStagedValues / R];
    const Weights weights(packed, out, in);
    const int cols = static_cast<int>(padded_cols(in));
    begin_kernel();
    start_next();

    bool staged = false;
    for (int64_t group = blockIdx.x; group * kVectorOutputs < out; group += gridDim.x) {
        const WaveRows<kOutputs> rows(group, out, epilogue);
        int64_t row[kOutputs];
#pragma unroll
        for (int o = 0; o < kOutputs; ++o) row[o] = rows.row_within(o, out);
        Part coming[kAhead][kOutputs] = {};
        const auto load = [&](int at) {
#pragma unroll
            for (int s = 0; s < kAhead; ++s)
#pragma unroll
                for (int o = 0; o < kOutputs; ++o)
                    if (at + s * kStep < cols) coming[s][o] = weights.template load<N>(row[o], at + s * kStep);
        };
        int at = lane_index() * N;
        load(at);
        if (!staged) {
            staged = true;
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const float *from = x + r * in;
                if (norm.holds(from, in)) {
                    norm.held(from, in, [&](int k, const Chunk<float> &four) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) tile[r][k + i] = narrow<T>(four.value[i]);
                    });
                    for (int k = static_cast<int>(in) + threadIdx.x; k < cols; k += kBlock)
                        tile[r][k] = narrow<T>(0.0f);
                } else {
                    const RowNorm normed = norm.of_row(from, in);
                    for (int k = threadIdx.x; k < cols; k += kBlock)
                        tile[r][k] = narrow<T>(k < in ? normed.of(from[k], k) : 0.0f);
                }
            }
            __syncthreads();
        }

        float sum[kOutputs][R] = {};
        while (at < cols) {
#pragma unroll
            for (int s = 0; s < kAhead; ++s) {
                if (at + s * kStep >= cols) continue;
#pragma unroll
                for (int r = 0; r < R; ++r) {
                    const Part value = load_aligned<Part>(&tile[r][at + s * kStep]);
#pragma unroll
                    for (int o = 0; o < kOutputs; ++o)
#pragma unroll
                        for (int i = 0; i < N; ++i) sum[o][r] = fmaf(coming[s][o].get(i), value.get(i), sum[o][r]);
                }
            }
            at += kAhead * kStep;
            load(at);
        }
        write_fused(y, sum, rows, bias, epilogue, activation, out);
    }
}

template <int R>
DEVICE void fused_digits(float *y, const float *x, const void *packed, const float *bias, const Norm &norm,
                         int32_t epilogue, int32_t activation, int64_t out, int64_t in) {
    constexpr int kOutputs = kVectorOutputs / (kBlock / kWave);
    __shared__ DigitTile<R> tile;
    const Q8Matrix weights(packed, out, in);
    begin_kernel();
    start_next();
    const float *from[R];
    RowNorm normed[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
        from[r] = x + r * in;
        normed[r] = norm.of_row(from[r], in);
    }
    const WaveRows<kOutputs> rows(blockIdx.x, out, epilogue);
    Q8Matrix::Row row[kOutputs];
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) row[o] = weights.row(rows.row_within(o, out));
    float sum[kOutputs][R] = {};
    walk_digits(sum, tile, from, row, normed, in);
    write_fused(y, sum, rows, bias, epilogue, activation, out);
}

#define FUSED_KERNEL(name, blocks, ...)                                                                           \
    KERNEL_OF(256, blocks)                                                                                        \
    name(float *y, const float *x, const void *packed, const float *bias, int32_t norm, const float *norm_weight, \
         const float *norm_bias, float eps, int32_t epilogue, int32_t activation, int64_t out, int64_t in) {      \
        __VA_ARGS__(y, x, packed, bias, Norm{norm, norm_weight, norm_bias, eps}, epilogue, activation, out, in);  \
    }
#define FUSED_KERNELS(dtype, T)                                                         \
    FUSED_KERNEL(matmul_fused_one_##dtype##_kernel, 2, fused_floats<FloatMatrix<T>, 1>) \
    FUSED_KERNEL(matmul_fused_two_##dtype##_kernel, 2, fused_floats<FloatMatrix<T>, 2>)
FUSED_KERNELS(f32, float)
FUSED_KERNELS(f16, f16)
FUSED_KERNELS(bf16, bf16)
FUSED_KERNEL(matmul_fused_one_q8_0_kernel, 3, fused_digits<1>)
FUSED_KERNEL(matmul_fused_two_q8_0_kernel, 2, fused_digits<2>)

}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

ok_status ok_matmul_fused(ok_queue *queue, float *y, const float *x, ok_norm norm, const float *norm_weight,
                          const float *norm_bias, float eps, float *normed, const void *weight, ok_dtype dtype,
                          const float *bias, ok_epilogue epilogue, ok_activation activation, float *product,
                          int64_t rows, int64_t out, int64_t in) {
    if (ok_status status = ok::check_matmul_fused(__func__, queue, y, x, norm, norm_weight, eps, normed, weight, dtype,
                                                  epilogue, activation, product, rows, out, in))
        return status;
    if (rows == 0) return OK_SUCCESS;
    const bool fits = rows <= ok::kFusedRows && (dtype == OK_Q8_0 || rows * ok::padded_cols(in) <= ok::kStagedValues);
    const bool plain = norm == OK_NORM_NONE && epilogue == OK_EPILOGUE_NONE;
    uint64_t needed = 0;
    if (rows > ok::kVectorRows && !queue->deterministic) ok_matmul_scratch_bytes(dtype, rows, out, in, &needed);
    if (ok_status status = ok::check_scratch(__func__, queue, needed, "ok_matmul_scratch_bytes")) return status;
    if (!fits || plain || queue->deterministic || !ok::prefers_fused())
        return ok::matmul_separately(queue, y, x, norm, norm_weight, norm_bias, eps, normed, weight, dtype, bias,
                                     epilogue, activation, product, rows, out, in);
    int64_t blocks = ok::ceil_div(out, ok::kVectorOutputs);
    if (dtype != OK_Q8_0 && blocks > ok::kFusedBlocks) blocks = ok::kFusedBlocks;
    const ok::Grid grid = {blocks};
    return rows == 1 ? LAUNCH_MATRIX(matmul_fused_one, dtype, queue, grid, ok::kBlock, y, x, weight, bias, norm,
                                     norm_weight, norm_bias, eps, epilogue, activation, out, in)
                     : LAUNCH_MATRIX(matmul_fused_two, dtype, queue, grid, ok::kBlock, y, x, weight, bias, norm,
                                     norm_weight, norm_bias, eps, epilogue, activation, out, in);
}
