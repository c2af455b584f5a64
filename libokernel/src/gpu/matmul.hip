// matmul.hip: y = x W^T (+ bias) (+ residual).
//
// Up to 16 rows: a wave walks along rows of W, 16 bytes a lane and load, and adds its lanes' sums at the end
// (`vector`). This is bound by reading W once; x comes from the cache. More rows: a block computes a tile of y through
// the matrix unit (fragment.h), both operands staged in LDS, the next step's loads under way while this one multiplies
// (`tiled`: 64 x 64, `wide`: 128 x 128, in q8_0 64 x 128). f16 and bf16 round x to the type of W first; `wide`, and on
// NVIDIA `tiled` too, once, into the queue's scratch. f32 multiplies in f32. Sums are f32 and run along k in an order of the variant's own; how many rows or
// outputs a wave takes side by side is no part of that order.
//
// q8_0 keeps 22 bits of x: per row and 32 values, which share a power of two, as three signed bytes, whose products with
// the quants have exact integer sums (few rows), or as two f16 terms, once, in the queue's scratch (many rows). The sum
// of a block or a part of one is then multiplied by both scales, and added in f32.
#include <type_traits>

#include "checks.h"
#include "fragment.h"
#include "matmul_vector.h"

namespace ok {

// Tiles of 128 x 128 that keep a large card busy, and whether 16-bit tiles of 64 x 64 too want x rounded once. On NVIDIA
// that feeds the pipeline, which wins in every shape measured; for AMD both are guesses.
#if defined(__CUDACC__)
constexpr int64_t kEnoughTiles = 128;
constexpr bool kRoundsForAll = true;
#else
constexpr int64_t kEnoughTiles = 64;
constexpr bool kRoundsForAll = false;
#endif

constexpr int64_t kNarrowRows = 64;  // most rows for tiles of 64 x 64
constexpr int kWideRowsQ8 = 64;      // of a wide tile of q8_0, which holds x twice

// ---- many rows ----------------------------------------------------------------------------------------------------

// Rows of x as an operand of a tile, rounded to T on their way into LDS.
template <class T>
struct InputRows {
    template <int N>
    struct Part {
        float value[N];
        __device__ float get(int i) const { return widen(narrow<T>(value[i])); }
    };
    const float *x;
    int64_t in;
    bool aligned;

    __device__ InputRows(const void *rows, int64_t, int64_t cols)
        : x(static_cast<const float *>(rows)),
          in(cols),
          aligned(cols % 4 == 0 && reinterpret_cast<uintptr_t>(rows) % 16 == 0) {}
    template <int N>
    __device__ Part<N> load(int64_t row, int64_t k) const {
        Part<N> part;
        const float *from = x + row * in + k;
        if (aligned && k + N <= in) {
#pragma unroll
            for (int i = 0; i < N; i += 4) {
                const Chunk<float> chunk = load_chunk(from + i);
#pragma unroll
                for (int j = 0; j < 4; ++j) part.value[i + j] = chunk.value[j];
            }
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) part.value[i] = k + i < in ? from[i] : 0.0f;
        }
        return part;
    }
};

// Rows [first, first + kRows) of an operand on their way to LDS, shared by the block's threads in chunks of 16 bytes.
template <class Operand, class T, int kRows>
struct Stage {
    static constexpr int kStep = 64 / sizeof(T), kChunk = 16 / sizeof(T), kStride = kStep + kChunk;
    static constexpr int kParts = kRows * 4 / kBlock;
    static_assert(kRows * 4 % kBlock == 0);
    using Part = typename Operand::template Part<kChunk>;
    Part part[kParts];

    static __device__ int row(int i) { return (threadIdx.x + i * kBlock) / 4; }
    static __device__ int column() { return threadIdx.x % 4 * kChunk; }

    __device__ void load(const Operand &operand, int64_t first, int64_t rows, int64_t k) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const int64_t wanted = first + row(i);
            part[i] = operand.template load<kChunk>(wanted < rows ? wanted : rows - 1, k + column());
        }
    }
    __device__ void store(T *tile) const {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            T *to = tile + row(i) * kStride + column();
            if constexpr (std::is_same<Part, typename FloatMatrix<T>::template Part<kChunk>>::value) {
                store_aligned(to, part[i]);
            } else {
                Chunk<T> chunk;
#pragma unroll
                for (int j = 0; j < kChunk; ++j) chunk.value[j] = narrow<T>(part[i].get(j));
                store_aligned(to, chunk);
            }
        }
    }
};

// A wave's sums, with bias and residual, to y.
template <class Unit, int kDown, int kAcross>
DEVICE void write_tile(float *y, const typename Unit::Sum (&sum)[kDown][kAcross], const float *bias,
                       const float *residual, int64_t first_row, int64_t first_out, int64_t rows, int64_t out) {
#pragma unroll
    for (int m = 0; m < kDown; ++m)
#pragma unroll
        for (int n = 0; n < kAcross; ++n)
#pragma unroll
            for (int i = 0; i < Unit::Sum::kSize; ++i) {
                const int64_t row = first_row + m * 16 + Unit::row(i);
                const int64_t output = first_out + n * 16 + Unit::column(i);
                if (row >= rows || output >= out) continue;
                float value = sum[m][n].value[i];
                if (bias) value += bias[output];
                if (residual) value += residual[row * out + output];
                y[row * out + output] = value;
            }
}

template <class Weights, class Input, int kRows, int kOutputs>
DEVICE void matmul_tile(float *y, const void *x, const void *packed, const float *bias, const float *residual,
                        const int32_t *active, int64_t rows, int64_t out, int64_t in) {
    using T = typename MatrixType<typename Weights::Value>::Type;
    using Unit = Fragment<T>;
    using LeftStage = Stage<Input, T, kRows>;
    using RightStage = Stage<Weights, T, kOutputs>;
    constexpr int kStep = LeftStage::kStep, kStride = LeftStage::kStride;
    constexpr int kWavesDown = 2, kWavesAcross = kBlock / kWave / kWavesDown;
    constexpr int kDown = kRows / 16 / kWavesDown, kAcross = kOutputs / 16 / kWavesAcross;  // fragments of a wave
    alignas(16) __shared__ T left_tile[2][kRows * kStride];
    alignas(16) __shared__ T right_tile[2][kOutputs * kStride];

    const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
    const int64_t first_out = static_cast<int64_t>(blockIdx.y) * kOutputs;
    const int64_t depth = padded_cols(in);
    begin_kernel();
    const Input input(x, rows, in);
    rows = active_rows(active, rows);
    if (first_row >= rows) return;
    const Weights weights(packed, out, in);
    const int wave_row = wave_index() % kWavesDown * kDown * 16, wave_out = wave_index() / kWavesDown * kAcross * 16;

    typename Unit::Sum sum[kDown][kAcross] = {};
    LeftStage left;
    RightStage right;
    left.load(input, first_row, rows, 0);
    right.load(weights, first_out, out, 0);
    left.store(left_tile[0]);
    right.store(right_tile[0]);
    __syncthreads();
    int now = 0;
    for (int64_t k = kStep;; k += kStep) {
        const bool more = k < depth;
        if (more) {
            left.load(input, first_row, rows, k);
            right.load(weights, first_out, out, k);
        }
        const T *left_now = left_tile[now] + wave_row * kStride, *right_now = right_tile[now] + wave_out * kStride;
#pragma unroll Unit::kUnroll
        for (int step = 0; step < kStep; step += Unit::K) {
            typename Unit::Right columns[kAcross];
#pragma unroll
            for (int n = 0; n < kAcross; ++n)
                columns[n] = Unit::load_right(right_now + n * 16 * kStride + step, kStride);
#pragma unroll
            for (int m = 0; m < kDown; ++m) {
                const typename Unit::Left lines = Unit::load_left(left_now + m * 16 * kStride + step, kStride);
#pragma unroll
                for (int n = 0; n < kAcross; ++n) Unit::multiply(sum[m][n], lines, columns[n]);
            }
        }
        if (!more) break;
        now ^= 1;
        left.store(left_tile[now]);
        right.store(right_tile[now]);
        __syncthreads();
    }

    write_tile<Unit>(y, sum, bias, residual, first_row + wave_row, first_out + wave_out, rows, out);
}

namespace {

// Rows of x as q8_0 multiplies them: x = (high + low) * scale[block][row], a power of two per row and block of 32.
struct SplitRows {
    template <int N>
    struct Part {
        typename FloatMatrix<f16>::template Part<N> high, low;
        float scale;
        __device__ float get(int i) const { return (high.get(i) + low.get(i)) * scale; }
    };
    const f16 *high, *low;
    const float *scales;
    int64_t rows, cols;

    __device__ SplitRows(const void *split, int64_t of, int64_t in)
        : high(static_cast<const f16 *>(split)), low(nullptr), scales(nullptr), rows(of), cols(padded_cols(in)) {
        low = high + rows * cols;
        scales = reinterpret_cast<const float *>(low + rows * cols);
    }
    template <int N>
    __device__ Part<N> load(int64_t row, int64_t k) const {
        using Half = typename FloatMatrix<f16>::template Part<N>;
        return {load_aligned<Half>(high + row * cols + k), load_aligned<Half>(low + row * cols + k),
                scales[k / kMatrixBlock * rows + row]};
    }
};

}  // namespace

static constexpr uint64_t split_bytes(int64_t rows, int64_t cols) {
    return static_cast<uint64_t>(rows * cols * 4 + rows * (cols / kMatrixBlock) * 4);
}

// A tile of q8_0 through a unit that takes f16: the two terms of x times the quants of a block of 32, exact but for the
// sum's rounding, then that sum times both scales.
template <class Unit, int kRows, int kOutputs>
DEVICE void matmul_blocks(float *y, const void *x, const void *packed, const float *bias, const float *residual,
                          const int32_t *active, int64_t rows, int64_t out, int64_t in) {
    using LeftStage = Stage<FloatMatrix<f16>, f16, kRows>;
    using RightStage = Stage<Q8Quants, f16, kOutputs>;
    constexpr int kStep = LeftStage::kStep, kStride = LeftStage::kStride;
    static_assert(kStep == kMatrixBlock && kRows + kOutputs <= kBlock);
    constexpr int kWavesDown = 2, kWavesAcross = kBlock / kWave / kWavesDown;
    constexpr int kDown = kRows / 16 / kWavesDown, kAcross = kOutputs / 16 / kWavesAcross;  // fragments of a wave
    alignas(16) __shared__ f16 high_tile[2][kRows * kStride], low_tile[2][kRows * kStride];
    alignas(16) __shared__ f16 right_tile[2][kOutputs * kStride];
    __shared__ float scale_tile[2][kRows + kOutputs];  // of rows, then of outputs

    const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
    const int64_t first_out = static_cast<int64_t>(blockIdx.y) * kOutputs;
    const SplitRows split(x, rows, in);
    const int64_t depth = split.cols;
    begin_kernel();
    rows = active_rows(active, rows);
    if (first_row >= rows) return;
    const FloatMatrix<f16> high_rows(split.high, rows, in), low_rows(split.low, rows, in);
    const Q8Quants quants(packed, out, in);
    const int wave_row = wave_index() % kWavesDown * kDown * 16, wave_out = wave_index() / kWavesDown * kAcross * 16;

    LeftStage high, low;
    RightStage right;
    float scale = 0.0f;
    const auto load = [&](int64_t k) {
        high.load(high_rows, first_row, rows, k);
        low.load(low_rows, first_row, rows, k);
        right.load(quants, first_out, out, k);
        const int thread = static_cast<int>(threadIdx.x);
        if (thread < kRows) {
            const int64_t row = first_row + thread;
            scale = split.scales[k / kMatrixBlock * split.rows + (row < rows ? row : rows - 1)];
        } else if (thread < kRows + kOutputs) {
            const int64_t output = first_out + thread - kRows;
            scale = quants.scale(output < out ? output : out - 1, k);
        }
    };
    const auto store = [&](int slot) {
        high.store(high_tile[slot]);
        low.store(low_tile[slot]);
        right.store(right_tile[slot]);
        if (threadIdx.x < kRows + kOutputs) scale_tile[slot][threadIdx.x] = scale;
    };

    typename Unit::Sum sum[kDown][kAcross] = {};
    load(0);
    store(0);
    __syncthreads();
    int now = 0;
    for (int64_t k = kStep;; k += kStep) {
        const bool more = k < depth;
        if (more) load(k);
        const f16 *high_now = high_tile[now] + wave_row * kStride, *low_now = low_tile[now] + wave_row * kStride;
        const f16 *right_now = right_tile[now] + wave_out * kStride;
        typename Unit::Sum block[kDown][kAcross] = {};
#pragma unroll Unit::kUnroll
        for (int step = 0; step < kStep; step += Unit::K) {
            typename Unit::Right columns[kAcross];
#pragma unroll
            for (int n = 0; n < kAcross; ++n)
                columns[n] = Unit::load_right(right_now + n * 16 * kStride + step, kStride);
#pragma unroll
            for (int m = 0; m < kDown; ++m) {
                const typename Unit::Left lines = Unit::load_left(high_now + m * 16 * kStride + step, kStride);
                const typename Unit::Left rests = Unit::load_left(low_now + m * 16 * kStride + step, kStride);
#pragma unroll
                for (int n = 0; n < kAcross; ++n) {
                    Unit::multiply(block[m][n], lines, columns[n]);
                    Unit::multiply(block[m][n], rests, columns[n]);
                }
            }
        }
        const float *row_scale = scale_tile[now] + wave_row, *out_scale = scale_tile[now] + kRows + wave_out;
#pragma unroll
        for (int m = 0; m < kDown; ++m)
#pragma unroll
            for (int n = 0; n < kAcross; ++n)
#pragma unroll
                for (int i = 0; i < Unit::Sum::kSize; ++i)
                    sum[m][n].value[i] = fmaf(block[m][n].value[i],
                                              row_scale[m * 16 + Unit::row(i)] * out_scale[n * 16 + Unit::column(i)],
                                              sum[m][n].value[i]);
        if (!more) break;
        now ^= 1;
        store(now);
        __syncthreads();
    }

    write_tile<Unit>(y, sum, bias, residual, first_row + wave_row, first_out + wave_out, rows, out);
}

// q8_0 with the unit that the target has; where none takes f16, in f32.
template <int kRows, int kOutputs>
DEVICE void matmul_q8_0(float *y, const void *x, const void *packed, const float *bias, const float *residual,
                        const int32_t *active, int64_t rows, int64_t out, int64_t in) {
    using T = typename MatrixType<f16>::Type;
    if constexpr (std::is_same<T, f16>::value)
        matmul_blocks<Fragment<T>, kRows, kOutputs>(y, x, packed, bias, residual, active, rows, out, in);
    else
        matmul_tile<Q8Matrix, SplitRows, kRows, kOutputs>(y, x, packed, bias, residual, active, rows, out, in);
}

#if defined(__CUDACC__)
// The same tile where both operands lie in memory as the unit takes them: copied straight to LDS, two steps ahead, in a
// ring of three. Rows of a tile are 64 bytes; chunk c of row r stands at c ^ (r / 2 % 4), so that neither copies nor
// ldmatrix meet in a bank.
template <class T, int kRows, int kOutputs>
DEVICE void matmul_pipeline(float *y, const T *x, const void *packed, const float *bias, const float *residual,
                            const int32_t *active, int64_t rows, int64_t out, int64_t in) {
    using Unit = Fragment<T>;
    constexpr int kStep = 32, kChunk = 8, kRing = 3;
    constexpr int kWavesDown = 2, kWavesAcross = kBlock / kWave / kWavesDown;
    constexpr int kDown = kRows / 16 / kWavesDown, kAcross = kOutputs / 16 / kWavesAcross;
    constexpr int kLeftParts = kRows * 4 / kBlock, kRightParts = kOutputs * 4 / kBlock;
    alignas(128) __shared__ T left_tile[kRing][kRows * kStep];
    alignas(128) __shared__ T right_tile[kRing][kOutputs * kStep];

    const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
    const int64_t first_out = static_cast<int64_t>(blockIdx.y) * kOutputs;
    const int64_t depth = padded_cols(in);
    const int steps = static_cast<int>(depth / kStep);
    begin_kernel();
    rows = active_rows(active, rows);
    if (first_row >= rows) return;
    const auto place = [](int row, int chunk) { return row * kStep + (chunk ^ (row / 2 % 4)) * kChunk; };

    const int part_row = threadIdx.x / 4, part_chunk = threadIdx.x % 4;
    const T *left_from[kLeftParts], *right_from[kRightParts];
#pragma unroll
    for (int i = 0; i < kLeftParts; ++i) {
        const int64_t row = first_row + part_row + i * (kBlock / 4);
        left_from[i] = x + (row < rows ? row : rows - 1) * depth + part_chunk * kChunk;
    }
#pragma unroll
    for (int i = 0; i < kRightParts; ++i) {
        const int64_t row = first_out + part_row + i * (kBlock / 4);
        right_from[i] = static_cast<const T *>(packed) + (row < out ? row : out - 1) * depth + part_chunk * kChunk;
    }
    const auto start = [&](int step) {
        if (step < steps) {
            const int slot = step % kRing;
#pragma unroll
            for (int i = 0; i < kLeftParts; ++i)
                copy_async(left_tile[slot] + place(part_row + i * (kBlock / 4), part_chunk),
                           left_from[i] + step * kStep);
#pragma unroll
            for (int i = 0; i < kRightParts; ++i)
                copy_async(right_tile[slot] + place(part_row + i * (kBlock / 4), part_chunk),
                           right_from[i] + step * kStep);
        }
        close_copy_group();  // an empty one at the end, so that the count below holds
    };

    const int lane = lane_index();
    const int wave_row = wave_index() % kWavesDown * kDown * 16, wave_out = wave_index() / kWavesDown * kAcross * 16;
    typename Unit::Sum sum[kDown][kAcross] = {};
    start(0);
    start(1);
    for (int step = 0; step < steps; ++step) {
        wait_copy_groups<1>();
        __syncthreads();  // this step's tiles are there for all, and all are done with the slot that is filled next
        start(step + 2);
        const T *left_now = left_tile[step % kRing], *right_now = right_tile[step % kRing];
#pragma unroll
        for (int at = 0; at < kStep / kChunk; at += Unit::K / kChunk) {
            typename Unit::Right columns[kAcross];
#pragma unroll
            for (int n = 0; n < kAcross; ++n)
                load_tiles(columns[n].value,
                           right_now + place(wave_out + n * 16 + lane % 8 + lane / 16 * 8, at + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < kDown; ++m) {
                typename Unit::Left lines;
                load_tiles(lines.value, left_now + place(wave_row + m * 16 + lane % 16, at + lane / 16));
#pragma unroll
                for (int n = 0; n < kAcross; ++n) Unit::multiply(sum[m][n], lines, columns[n]);
            }
        }
    }
    write_tile<Unit>(y, sum, bias, residual, first_row + wave_row, first_out + wave_out, rows, out);
}
#endif

// x rounded to T in rows padded as a packed matrix's.
template <class T>
DEVICE void round_rows(T *to, const float *x, const int32_t *active, int64_t rows, int64_t in) {
    begin_kernel();
    const int64_t row = blockIdx.x, k = column() * Chunk<T>::kSize, cols = padded_cols(in);
    if (row >= active_rows(active, rows) || k >= cols) return;
    const auto part = InputRows<T>(x, rows, in).template load<Chunk<T>::kSize>(row, k);
    Chunk<T> chunk;
#pragma unroll
    for (int i = 0; i < Chunk<T>::kSize; ++i) chunk.value[i] = narrow<T>(part.value[i]);
    store_aligned(to + row * cols + k, chunk);
}
KERNEL matmul_round_f16_kernel(void *to, const float *x, const int32_t *active, int64_t rows, int64_t in) {
    round_rows(static_cast<f16 *>(to), x, active, rows, in);
}
KERNEL matmul_round_bf16_kernel(void *to, const float *x, const int32_t *active, int64_t rows, int64_t in) {
    round_rows(static_cast<bf16 *>(to), x, active, rows, in);
}

// x split for q8_0, in memory as SplitRows reads it. Four neighbouring threads take a block of 32.
KERNEL matmul_split_kernel(void *to, const float *x, const int32_t *active, int64_t rows, int64_t in) {
    begin_kernel();
    constexpr int N = Chunk<f16>::kSize;
    const int64_t row = blockIdx.x, k = column() * N;
    if (row >= active_rows(active, rows)) return;
    const SplitRows split(to, rows, in);
    const auto part = InputRows<float>(x, rows, in).template load<N>(row, k);
    uint32_t largest = 0;  // bits of |x| order as numbers do, infinity and NaN last
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const uint32_t magnitude = __float_as_uint(part.value[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    largest = reduce_lanes<Max>(largest, static_cast<int>(kMatrixBlock / N));
    if (k >= split.cols) return;
    // The largest comes to lie in [2^14, 2^15), near the top of f16, so that what is lost at its bottom is far below.
    uint32_t exponent = largest >> 23;
    if (exponent < 15) exponent = 15;  // else the scale is no normal number
    const float up = __uint_as_float((127 + 127 + 14 - exponent) << 23);
    const float scale = __uint_as_float(exponent < 255 ? (exponent - 14) << 23 : 0x7fc00000u);
    Chunk<f16> high, low;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float value = part.value[i] * up;
        high.value[i] = narrow<f16>(value);
        low.value[i] = narrow<f16>(value - widen(high.value[i]));
    }
    store_aligned(const_cast<f16 *>(split.high) + row * split.cols + k, high);
    store_aligned(const_cast<f16 *>(split.low) + row * split.cols + k, low);
    if (k % kMatrixBlock == 0) const_cast<float *>(split.scales)[k / kMatrixBlock * rows + row] = scale;
}

#define MATMUL_KERNEL(name, blocks, T, ...)                                                                            \
    KERNEL_OF(256, blocks)                                                                                             \
    name(float *y, const void *x, const void *packed, const float *bias, const float *residual, const int32_t *active, \
         int64_t rows, int64_t out, int64_t in) {                                                                      \
        __VA_ARGS__(y, static_cast<const T *>(x), packed, bias, residual, active, rows, out, in);                      \
    }
#define VECTOR_KERNELS(dtype, T)                                                                  \
    MATMUL_KERNEL(matmul_vector_one_##dtype##_kernel, 2, float, matmul_vector<FloatMatrix<T>, 1>) \
    MATMUL_KERNEL(matmul_vector_two_##dtype##_kernel, 2, float, matmul_vector<FloatMatrix<T>, 2>) \
    MATMUL_KERNEL(matmul_vector_four_##dtype##_kernel, 1, float, matmul_vector<FloatMatrix<T>, 4>)
VECTOR_KERNELS(f32, float)
VECTOR_KERNELS(f16, f16)
VECTOR_KERNELS(bf16, bf16)
MATMUL_KERNEL(matmul_vector_one_q8_0_kernel, 4, float, matmul_digits<1>)
MATMUL_KERNEL(matmul_vector_two_q8_0_kernel, 3, float, matmul_digits<2>)
MATMUL_KERNEL(matmul_vector_four_q8_0_kernel, 2, float, matmul_digits<4>)

#if defined(__CUDACC__)
#define TILED_KERNEL(dtype, T) MATMUL_KERNEL(matmul_tiled_##dtype##_kernel, 3, T, matmul_pipeline<T, 64, 64>)
#define WIDE_TILE(T) matmul_pipeline<T, 128, 128>
#else
#define TILED_KERNEL(dtype, T) \
    MATMUL_KERNEL(matmul_tiled_##dtype##_kernel, 2, float, matmul_tile<FloatMatrix<T>, InputRows<T>, 64, 64>)
#define WIDE_TILE(T) matmul_tile<FloatMatrix<T>, FloatMatrix<T>, 128, 128>
#endif
MATMUL_KERNEL(matmul_tiled_f32_kernel, 2, float, matmul_tile<FloatMatrix<float>, InputRows<float>, 64, 64>)
TILED_KERNEL(f16, f16)
TILED_KERNEL(bf16, bf16)
MATMUL_KERNEL(matmul_tiled_q8_0_kernel, 2, void, matmul_q8_0<64, 64>)
MATMUL_KERNEL(matmul_wide_f32_kernel, 1, float, matmul_tile<FloatMatrix<float>, InputRows<float>, 128, 128>)
MATMUL_KERNEL(matmul_wide_f16_kernel, 2, f16, WIDE_TILE(f16))
MATMUL_KERNEL(matmul_wide_bf16_kernel, 2, bf16, WIDE_TILE(bf16))
MATMUL_KERNEL(matmul_wide_q8_0_kernel, 2, void, matmul_q8_0<kWideRowsQ8, 128>)

}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

namespace {

bool is_wide(int64_t rows, int64_t out) {
    return rows > ok::kNarrowRows && ok::ceil_div(rows, 128) * ok::ceil_div(out, 128) >= ok::kEnoughTiles;
}

uint64_t scratch_needed(ok_dtype dtype, int64_t rows, int64_t out, int64_t in) {
    if (rows <= ok::kVectorRows || dtype == OK_F32) return 0;
    if (dtype == OK_Q8_0) return ok::split_bytes(rows, ok::padded_cols(in));
    return ok::kRoundsForAll || is_wide(rows, out) ? static_cast<uint64_t>(rows * ok::padded_cols(in) * 2) : 0;
}

}  // namespace

ok_status ok_matmul(ok_queue *queue, float *y, const float *x, const void *weight, ok_dtype dtype, const float *bias,
                    const float *residual, const int32_t *active, int64_t rows, int64_t out, int64_t in) {
    if (ok_status status = ok::check_matmul(__func__, queue, y, x, weight, dtype, rows, out, in)) return status;
    const bool walks = rows <= ok::kVectorRows || queue->deterministic;
    const uint64_t needed = walks ? 0 : scratch_needed(dtype, rows, out, in);
    if (ok_status status = ok::check_scratch(__func__, queue, needed, "ok_matmul_scratch_bytes")) return status;
    if (rows == 0) return OK_SUCCESS;
    if (walks) {
        const int64_t side_by_side = rows <= 2 ? rows : 4;
        const ok::Grid grid = {ok::ceil_div(out, ok::kVectorOutputs), ok::ceil_div(rows, side_by_side)};
        if (side_by_side == 1)
            return LAUNCH_MATRIX(matmul_vector_one, dtype, queue, grid, ok::kBlock, y, x, weight, bias, residual,
                                 active, rows, out, in);
        if (side_by_side == 2)
            return LAUNCH_MATRIX(matmul_vector_two, dtype, queue, grid, ok::kBlock, y, x, weight, bias, residual,
                                 active, rows, out, in);
        return LAUNCH_MATRIX(matmul_vector_four, dtype, queue, grid, ok::kBlock, y, x, weight, bias, residual, active,
                             rows, out, in);
    }

    const bool wide = is_wide(rows, out);
    const void *input = x;
    if (needed) {
        const ok::Grid grid = {rows, ok::ceil_div(ok::padded_cols(in) / 8, ok::kBlock)};
        const ok_status status =
            dtype == OK_Q8_0 ? LAUNCH(queue, matmul_split_kernel, grid, ok::kBlock, queue->scratch, x, active, rows, in)
            : dtype == OK_F16
                ? LAUNCH(queue, matmul_round_f16_kernel, grid, ok::kBlock, queue->scratch, x, active, rows, in)
                : LAUNCH(queue, matmul_round_bf16_kernel, grid, ok::kBlock, queue->scratch, x, active, rows, in);
        if (status != OK_SUCCESS) return status;
        input = queue->scratch;
    }
    if (!wide)
        return LAUNCH_MATRIX(matmul_tiled, dtype, queue, (ok::Grid{ok::ceil_div(rows, 64), ok::ceil_div(out, 64)}),
                             ok::kBlock, y, input, weight, bias, residual, active, rows, out, in);
    const int64_t tile_rows = dtype == OK_Q8_0 ? ok::kWideRowsQ8 : 128;
    return LAUNCH_MATRIX(matmul_wide, dtype, queue, (ok::Grid{ok::ceil_div(rows, tile_rows), ok::ceil_div(out, 128)}),
                         ok::kBlock, y, input, weight, bias, residual, active, rows, out, in);
}

ok_status ok_matmul_scratch_bytes(ok_dtype dtype, int64_t rows, int64_t out, int64_t in, uint64_t *host_bytes) {
    OK_REQUIRE_POINTER(host_bytes);
    if (ok_status status = ok::check_matmul_shape(__func__, dtype, rows, out, in)) return status;
    *host_bytes = scratch_needed(dtype, rows, out, in);
    return OK_SUCCESS;
}
