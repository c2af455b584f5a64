// matmul.hip: y = x W^T (+ bias) (+ residual).
//
// Up to 16 rows: a wave walks along rows of W, 16 bytes a lane and load, and adds its lanes' sums at the end
// (`vector`). This is bound by reading W once; x comes from the cache. More rows: a block computes a tile of y through
// the matrix unit (fragment.h), both operands staged in LDS, the next step's loads under way while this one multiplies
// (`tiled`: 64 x 64, `wide`: 128 x 128). f16 and bf16 round x to the type of W first; `wide` does it once, into the
// queue's scratch. f32 and q8_0 multiply in f32. Sums are f32 and run along k in an order of the variant's own.
#include <type_traits>

#include "checks.h"
#include "fragment.h"
#include "matrix.h"
#include "separate.h"

namespace ok {

constexpr int64_t kVectorRows = 16;   // most rows for which W is walked as vectors
constexpr int kVectorOutputs = 16;    // of a block of kBlock threads
constexpr int kWaveOutputs = 2;       // that a wave computes side by side
constexpr int64_t kNarrowRows = 64;   // most rows for tiles of 64 x 64
constexpr int64_t kEnoughTiles = 64;  // of 128 x 128, to keep a large card busy

// ---- few rows -----------------------------------------------------------------------------------------------------

// x[k .. k + N) as a matmul with weights of type T sees it. `whole`: aligned to 16 bytes and within the row.
template <class T, int N, bool whole>
DEVICE void load_input(float *to, const float *x, int64_t k, int64_t in) {
    if (whole) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const Chunk<float> chunk = load_chunk(x + k + i);
#pragma unroll
            for (int j = 0; j < 4; ++j) to[i + j] = widen(narrow<T>(chunk.value[j]));
        }
    } else {
        const int last = in - k < N ? static_cast<int>(in - k) - 1 : N - 1;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float value = widen(narrow<T>(x[k + (i < last ? i : last)]));
            // Zeros past the row: a q8_0 block may hold anything there. (A mask, for conditions crowd scalar
            // registers.)
            to[i] = __uint_as_float(__float_as_uint(value) & ~static_cast<uint32_t>((last - i) >> 31));
        }
    }
}

// This lane's share of the sums of R rows and kWaveOutputs outputs from `first`.
template <class Weights, int R, bool whole>
DEVICE void walk_rows(float (&sum)[kWaveOutputs][R], const float *const (&x)[R], const Weights &weights, int64_t first,
                      int64_t out, int64_t in) {
    constexpr int N = Weights::kLoad;
    int64_t row[kWaveOutputs];
#pragma unroll
    for (int o = 0; o < kWaveOutputs; ++o) row[o] = first + o < out ? first + o : out - 1;
    [[maybe_unused]] constexpr int kAhead = !whole ? 1 : R == 1 ? 4 : 2;  // loads in flight
#pragma unroll kAhead
    for (int64_t k = lane_index() * N; k < in; k += kWave * N) {
        typename Weights::template Part<N> part[kWaveOutputs];
#pragma unroll
        for (int o = 0; o < kWaveOutputs; ++o) part[o] = weights.template load<N>(row[o], k);
        float value[R][N];
#pragma unroll
        for (int r = 0; r < R; ++r) load_input<typename Weights::Value, N, whole>(value[r], x[r], k, in);
#pragma unroll
        for (int o = 0; o < kWaveOutputs; ++o)
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const float w = part[o].get(i);
#pragma unroll
                for (int r = 0; r < R; ++r) sum[o][r] = fmaf(w, value[r][i], sum[o][r]);
            }
    }
}

template <class Weights, int R>
DEVICE void matmul_vector(float *y, const float *x, const void *packed, const float *bias, const float *residual,
                          const int32_t *active, int64_t rows, int64_t out, int64_t in) {
    const int64_t first_row = static_cast<int64_t>(blockIdx.y) * R;
    rows = active_rows(active, rows);
    if (first_row >= rows) return;
    const Weights weights(packed, out, in);
    const float *from[R];
#pragma unroll
    for (int r = 0; r < R; ++r) from[r] = x + (first_row + r < rows ? first_row + r : rows - 1) * in;
    const bool whole = in % Weights::kLoad == 0 && in % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;

    const int64_t block_first = static_cast<int64_t>(blockIdx.x) * kVectorOutputs;
    for (int at = wave_index() * kWaveOutputs; at < kVectorOutputs; at += wave_count() * kWaveOutputs) {
        const int64_t first = block_first + at;
        if (first >= out) return;
        float sum[kWaveOutputs][R] = {};
        if (whole)
            walk_rows<Weights, R, true>(sum, from, weights, first, out, in);
        else
            walk_rows<Weights, R, false>(sum, from, weights, first, out, in);
        float value = 0.0f;  // lane o * R + r takes output o of row r
#pragma unroll
        for (int o = 0; o < kWaveOutputs; ++o)
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const float total = reduce_wave<Add>(sum[o][r]);
                if (lane_index() == o * R + r) value = total;
            }
        const int64_t row = first_row + lane_index() % R, output = first + lane_index() / R;
        if (lane_index() >= kWaveOutputs * R || row >= rows || output >= out) continue;
        if (bias) value += bias[output];
        if (residual) value += residual[row * out + output];
        y[row * out + output] = value;
    }
}

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
    rows = active_rows(active, rows);
    if (first_row >= rows) return;
    const Input input(x, rows, in);
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

// x as q8_0's integer products see it: per row and 32 values, scale = max|x| / 127 and x rounded to a multiple of it,
// half to even. The products are then the same up to f32 rounding. One thread a block; NaN where it holds an infinity
// or NaN.
KERNEL matmul_quantize_kernel(float *to, const float *x, const int32_t *active, int64_t rows, int64_t in) {
    const int64_t row = blockIdx.x, k = column() * kMatrixBlock;
    if (row >= active_rows(active, rows) || k >= in) return;
    const int64_t n = k + kMatrixBlock < in ? kMatrixBlock : in - k;
    x += row * in + k;
    to += row * in + k;
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t magnitude = __float_as_uint(x[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const bool finite = largest < 0x7f800000u;
    float scale = __uint_as_float(largest) / 127.0f;
    if (scale < 0x1p-126f) scale = 0.0f;  // else 1 / scale is no number
    const float inverse = finite && scale > 0.0f ? 1.0f / scale : 0.0f;
    if (!finite) scale = __uint_as_float(0x7fc00000u);
    for (int64_t i = 0; i < n; ++i) to[i] = rintf(x[i] * inverse) * scale;
}

#define MATMUL_KERNEL(name, blocks, T, ...)                                                                            \
    KERNEL_OF(256, blocks)                                                                                             \
    name(float *y, const void *x, const void *packed, const float *bias, const float *residual, const int32_t *active, \
         int64_t rows, int64_t out, int64_t in) {                                                                      \
        __VA_ARGS__(y, static_cast<const T *>(x), packed, bias, residual, active, rows, out, in);                      \
    }
// wide_blocks, wide_type: of `wide`, how many fit on a multiprocessor, and of the rows that it is given.
#define MATMUL_KERNELS(dtype, Weights, wide_blocks, wide_type, ...)                                                 \
    MATMUL_KERNEL(matmul_vector_one_##dtype##_kernel, 2, float, matmul_vector<Weights, 1>)                          \
    MATMUL_KERNEL(matmul_vector_two_##dtype##_kernel, 2, float, matmul_vector<Weights, 2>)                          \
    MATMUL_KERNEL(matmul_tiled_##dtype##_kernel, 2, float, matmul_tile<Weights, InputRows<Weights::Value>, 64, 64>) \
    MATMUL_KERNEL(matmul_wide_##dtype##_kernel, wide_blocks, wide_type, __VA_ARGS__)
#if defined(__CUDACC__)
#define WIDE_TILE(T) matmul_pipeline<T, 128, 128>
#else
#define WIDE_TILE(T) matmul_tile<FloatMatrix<T>, FloatMatrix<T>, 128, 128>
#endif
MATMUL_KERNELS(f32, FloatMatrix<float>, 1, float, matmul_tile<FloatMatrix<float>, InputRows<float>, 128, 128>)
MATMUL_KERNELS(f16, FloatMatrix<f16>, 2, f16, WIDE_TILE(f16))
MATMUL_KERNELS(bf16, FloatMatrix<bf16>, 2, bf16, WIDE_TILE(bf16))
MATMUL_KERNELS(q8_0, Q8Matrix, 1, float, matmul_tile<Q8Matrix, InputRows<float>, 128, 128>)
MATMUL_KERNEL(matmul_vector_four_f32_kernel, 1, float, matmul_vector<FloatMatrix<float>, 4>)
MATMUL_KERNEL(matmul_vector_four_f16_kernel, 1, float, matmul_vector<FloatMatrix<f16>, 4>)
MATMUL_KERNEL(matmul_vector_four_bf16_kernel, 1, float, matmul_vector<FloatMatrix<bf16>, 4>)

}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

namespace {

bool is_wide(int64_t rows, int64_t out) {
    return rows > ok::kNarrowRows && ok::ceil_div(rows, 128) * ok::ceil_div(out, 128) >= ok::kEnoughTiles;
}

// quantized: q8_0 with quantized activations.
uint64_t scratch_needed(ok_dtype dtype, bool quantized, int64_t rows, int64_t out, int64_t in) {
    if (dtype == OK_Q8_0 && quantized) return static_cast<uint64_t>(rows * in) * sizeof(float);
    const bool rounds = (dtype == OK_F16 || dtype == OK_BF16) && is_wide(rows, out);
    return rounds ? static_cast<uint64_t>(rows * ok::padded_cols(in) * 2) : 0;
}

}  // namespace

ok_status ok_matmul(ok_queue *queue, float *y, const float *x, const void *weight, ok_dtype dtype, const float *bias,
                    const float *residual, const int32_t *active, int64_t rows, int64_t out, int64_t in) {
    if (ok_status status = ok::check_matmul(__func__, queue, y, x, weight, dtype, rows, out, in)) return status;
    const bool quantized = false;
    const uint64_t needed = scratch_needed(dtype, quantized, rows, out, in);
    if (ok_status status = ok::check_scratch(__func__, queue, needed, "ok_matmul_scratch_bytes")) return status;
    if (rows == 0) return OK_SUCCESS;
    if (quantized) {
        const ok::Grid grid = {rows, ok::ceil_div(ok::ceil_div(in, ok::kMatrixBlock), 64)};
        float *rounded = static_cast<float *>(queue->scratch);
        if (ok_status status = LAUNCH(queue, matmul_quantize_kernel, grid, 64, rounded, x, active, rows, in))
            return status;
        x = rounded;
    }
    if (rows <= ok::kVectorRows) {
        const int64_t side_by_side = rows <= 2 ? rows : dtype == OK_Q8_0 ? 2 : 4;  // as registers allow
        const ok::Grid grid = {ok::ceil_div(out, ok::kVectorOutputs), ok::ceil_div(rows, side_by_side)};
        if (side_by_side == 1)
            return LAUNCH_MATRIX(matmul_vector_one, dtype, queue, grid, ok::kBlock, y, x, weight, bias, residual,
                                 active, rows, out, in);
        if (side_by_side == 2)
            return LAUNCH_MATRIX(matmul_vector_two, dtype, queue, grid, ok::kBlock, y, x, weight, bias, residual,
                                 active, rows, out, in);
        return LAUNCH_FLOAT(matmul_vector_four, dtype, queue, grid, ok::kBlock, y, x, weight, bias, residual, active,
                            rows, out, in);
    }
    if (!is_wide(rows, out))
        return LAUNCH_MATRIX(matmul_tiled, dtype, queue, (ok::Grid{ok::ceil_div(rows, 64), ok::ceil_div(out, 64)}),
                             ok::kBlock, y, x, weight, bias, residual, active, rows, out, in);

    const void *input = x;
    if (dtype == OK_F16 || dtype == OK_BF16) {
        const ok::Grid grid = {rows, ok::ceil_div(ok::padded_cols(in) / 8, ok::kBlock)};
        const ok_status status =
            dtype == OK_F16
                ? LAUNCH(queue, matmul_round_f16_kernel, grid, ok::kBlock, queue->scratch, x, active, rows, in)
                : LAUNCH(queue, matmul_round_bf16_kernel, grid, ok::kBlock, queue->scratch, x, active, rows, in);
        if (status != OK_SUCCESS) return status;
        input = queue->scratch;
    }
    return LAUNCH_MATRIX(matmul_wide, dtype, queue, (ok::Grid{ok::ceil_div(rows, 128), ok::ceil_div(out, 128)}),
                         ok::kBlock, y, input, weight, bias, residual, active, rows, out, in);
}

ok_status ok_matmul_scratch_bytes(ok_dtype dtype, int64_t rows, int64_t out, int64_t in, uint64_t *host_bytes) {
    OK_REQUIRE_POINTER(host_bytes);
    if (ok_status status = ok::check_matmul_shape(__func__, dtype, rows, out, in)) return status;
    *host_bytes = scratch_needed(dtype, true, rows, out, in);
    return OK_SUCCESS;
}

ok_status ok_matmul_fused(ok_queue *queue, float *y, const float *x, ok_norm norm, const float *norm_weight,
                          const float *norm_bias, float eps, float *normed, const void *weight, ok_dtype dtype,
                          const float *bias, ok_epilogue epilogue, ok_activation activation, float *product,
                          int64_t rows, int64_t out, int64_t in) {
    if (ok_status status = ok::check_matmul_fused(__func__, queue, y, x, norm, norm_weight, eps, normed, weight, dtype,
                                                  epilogue, activation, product, rows, out, in))
        return status;
    if (rows == 0) return OK_SUCCESS;
    return ok::matmul_separately(queue, y, x, norm, norm_weight, norm_bias, eps, normed, weight, dtype, bias, epilogue,
                                 activation, product, rows, out, in);
}
