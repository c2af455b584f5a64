// matmul.hip: y = x W^T (+ bias) (+ residual).
//
// Up to 16 rows: a wave walks along rows of W, 16 bytes a lane and load, and adds its lanes' sums at the end
// (`vector`). This is bound by reading W once; x comes from the cache. More rows: a block computes a tile of y through
// the matrix unit (fragment.h), both operands staged in LDS, the next step's loads under way while this one multiplies
// (`tiled`: 64 x 64, `wide`: 128 x 128, in q8_0 64 x 128). f16 and bf16 round x to the type of W first; `wide` does it once, into the
// queue's scratch. f32 multiplies in f32. Sums are f32 and run along k in an order of the variant's own; how many rows or
// outputs a wave takes side by side is no part of that order.
//
// q8_0 keeps 22 bits of x: per row and 32 values, which share a power of two, as three signed bytes, whose products with
// the quants have exact integer sums (few rows), or as two f16 terms, once, in the queue's scratch (many rows). The sum
// of a block or a part of one is then multiplied by both scales, and added in f32.
#include <type_traits>

#include "checks.h"
#include "fragment.h"
#include "matrix.h"
#include "separate.h"

namespace ok {

constexpr int64_t kVectorRows = 16;   // most rows for which W is walked as vectors
constexpr int kVectorOutputs = 16;    // of a block of kBlock threads
constexpr int kWaveOutputs = 2;       // that a wave computes side by side
constexpr int kDigitValues = 8192;    // of x that a block holds in LDS as digits
constexpr int64_t kNarrowRows = 64;   // most rows for tiles of 64 x 64
constexpr int64_t kEnoughTiles = 64;  // of 128 x 128, to keep a large card busy
constexpr int kWideRowsQ8 = 64;       // of a wide tile of q8_0, which holds x twice

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
            // Zeros past the row. (A mask, for conditions crowd scalar registers.)
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

// Adds up the lanes' shares; lane o * R + r gets the sum of output o and row r.
template <int O, int R>
DEVICE float sum_of_lane(const float (&sum)[O][R]) {
    float value = 0.0f;
#pragma unroll
    for (int o = 0; o < O; ++o)
#pragma unroll
        for (int r = 0; r < R; ++r) {
            const float total = reduce_wave<Add>(sum[o][r]);
            if (lane_index() == o * R + r) value = total;
        }
    return value;
}

template <class Weights, int R>
DEVICE void matmul_vector(float *y, const float *x, const void *packed, const float *bias, const float *residual,
                          const int32_t *active, int64_t rows, int64_t out, int64_t in) {
    const int64_t first_row = static_cast<int64_t>(blockIdx.y) * R;
    begin_kernel();
    start_next();
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
        float value = sum_of_lane(sum);
        const int64_t row = first_row + lane_index() % R, output = first + lane_index() / R;
        if (lane_index() >= kWaveOutputs * R || row >= rows || output >= out) continue;
        if (bias) value += bias[output];
        if (residual) value += residual[row * out + output];
        y[row * out + output] = value;
    }
}

// ---- few rows, q8_0 -----------------------------------------------------------------------------------------------

namespace {

// Columns of R rows of x in LDS as three signed digits to the base 256 and, per block of 32, the power of two that they
// count: 22 bits and more of the block's largest. Zeros past the row, for a q8_0 block may hold anything there.
template <int R>
struct DigitTile {
    static constexpr int kCols = kDigitValues / R;
    alignas(16) uint32_t digits[R][3][kCols / 4];  // the highest first
    float scale[R][kCols / kMatrixBlock];

    // All threads of the block, each four neighbouring values.
    __device__ void load(int r, const float *x, int cols, bool aligned) {
        for (int base = 0; base < cols; base += kBlock * 4) {
            const int at = base + static_cast<int>(threadIdx.x) * 4;
            Chunk<float> four = {};
            if (aligned) {
                if (at < cols) four = load_chunk(x + at);
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (at + i < cols) four.value[i] = x[at + i];
            }
            uint32_t largest = 0;  // bits of |x| order as numbers do, infinity and NaN last
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint32_t magnitude = __float_as_uint(four.value[i]) & 0x7fffffffu;
                largest = magnitude > largest ? magnitude : largest;
            }
            largest = reduce_lanes<Max>(largest, static_cast<int>(kMatrixBlock) / 4);
            const bool finite = largest < 0x7f800000u;
            // The largest comes to lie in [2^22, 2^23), yet below what the digits' 127 * (1 + 256 + 65536) can hold.
            uint32_t exponent = (largest + 0x20000u) >> 23;
            if (exponent < 23) exponent = 23;  // else the scale is no normal number
            const float up = __uint_as_float((127 + 127 + 22 - exponent) << 23);
            uint32_t word[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int32_t whole = finite ? static_cast<int32_t>(rintf(four.value[i] * up)) : 0;
                word[i] = (static_cast<uint32_t>(whole) + 0x808080u) ^ 0x808080u;  // its low bytes are the digits
            }
            if (at >= padded_cols(cols)) continue;
#pragma unroll
            for (int d = 0; d < 3; ++d) {
                const int shift = 16 - 8 * d;
                digits[r][d][at / 4] = (word[0] >> shift & 0xff) | (word[1] >> shift & 0xff) << 8 |
                                       (word[2] >> shift & 0xff) << 16 | (word[3] >> shift & 0xff) << 24;
            }
            if (at % kMatrixBlock == 0)
                scale[r][at / kMatrixBlock] = __uint_as_float(finite ? (exponent - 22) << 23 : 0x7fc00000u);
        }
    }
};

// kSteps steps of a lane along kOutputs rows of W: asked for all at once, used when they are there.
template <int kSteps, int kOutputs>
struct Q8Steps {
    static constexpr int N = Q8Matrix::kLoad, kStep = kWave * N;
    Q8Matrix::Part<N> part[kSteps][kOutputs];

    __device__ void load(const Q8Matrix::Row (&row)[kOutputs], int k) {
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
#pragma unroll
            for (int o = 0; o < kOutputs; ++o) part[s][o] = row[o].template load<N>(k + s * kStep);
    }
    // Integer sums of N products, exact; one rounding as they become a float, then both scales.
    template <int R>
    __device__ void add(float (&sum)[kOutputs][R], const DigitTile<R> &tile, int at) const {
        struct alignas(16) Digits {
            uint32_t word[N / 4];
        };
#pragma unroll
        for (int s = 0; s < kSteps; ++s)
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const int k = at + s * kStep;
                Digits digits[3];
#pragma unroll
                for (int d = 0; d < 3; ++d) digits[d] = load_aligned<Digits>(&tile.digits[r][d][k / 4]);
                const float scale = tile.scale[r][k / kMatrixBlock];
#pragma unroll
                for (int o = 0; o < kOutputs; ++o) {
                    int32_t dot[3] = {};
#pragma unroll
                    for (int d = 0; d < 3; ++d)
#pragma unroll
                        for (int i = 0; i < N / 4; ++i)
                            dot[d] = dot4(part[s][o].quants.word[i], digits[d].word[i], dot[d]);
                    const float total =
                        fmaf(static_cast<float>(dot[0] * 256 + dot[1]), 256.0f, static_cast<float>(dot[2]));
                    sum[o][r] = fmaf(total, widen(part[s][o].scale) * scale, sum[o][r]);
                }
            }
    }
};

}  // namespace

// Fewer than 2 kSteps steps, from column `first + at`.
template <int kSteps, int kOutputs, int R>
DEVICE void walk_rest(float (&sum)[kOutputs][R], const DigitTile<R> &tile, const Q8Matrix::Row (&row)[kOutputs],
                      int first, int at, int steps) {
    if (steps & kSteps) {
        Q8Steps<kSteps, kOutputs> some;
        some.load(row, first + at);
        some.add(sum, tile, at);
        at += kSteps * some.kStep;
    }
    if constexpr (kSteps > 1) walk_rest<kSteps / 2>(sum, tile, row, first, at, steps);
}

template <int R>
DEVICE void matmul_digits(float *y, const float *x, const void *packed, const float *bias, const float *residual,
                          const int32_t *active, int64_t rows, int64_t out, int64_t in) {
    using Tile = DigitTile<R>;
    constexpr int kOutputs = kVectorOutputs / (kBlock / kWave), N = Q8Matrix::kLoad, kStep = kWave * N;
    constexpr int kAhead = R <= 2 && kStep <= 512 ? 2 : 1;  // steps under way, as registers allow
    static_assert(Tile::kCols % kStep == 0);
    __shared__ Tile tile;
    const int64_t first_row = static_cast<int64_t>(blockIdx.y) * R;
    const int64_t first_out = static_cast<int64_t>(blockIdx.x) * kVectorOutputs + wave_index() * kOutputs;
    begin_kernel();
    start_next();
    rows = active_rows(active, rows);
    if (first_row >= rows) return;
    const Q8Matrix weights(packed, out, in);
    Q8Matrix::Row row[kOutputs];
#pragma unroll
    for (int o = 0; o < kOutputs; ++o) row[o] = weights.row(first_out + o < out ? first_out + o : out - 1);
    const bool aligned = in % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;

    float sum[kOutputs][R] = {};
    for (int64_t first = 0; first < in; first += Tile::kCols) {
        const int cols = static_cast<int>(in - first < Tile::kCols ? in - first : Tile::kCols);
        const int from = static_cast<int>(first);
        int at = lane_index() * N, steps = cols / kStep;
        Q8Steps<kAhead, kOutputs> coming;  // on their way while x is taken apart
        if (steps >= kAhead) coming.load(row, from + at);
        if (first > 0) __syncthreads();
#pragma unroll
        for (int r = 0; r < R; ++r)
            tile.load(r, x + (first_row + r < rows ? first_row + r : rows - 1) * in + first, cols, aligned);
        __syncthreads();
        while (steps >= kAhead) {
            coming.add(sum, tile, at);
            at += kAhead * kStep;
            steps -= kAhead;
            if (steps >= kAhead) coming.load(row, from + at);
        }
        if constexpr (kAhead > 1) walk_rest<kAhead / 2>(sum, tile, row, from, at, steps);
        at += steps * kStep;
        if (at < cols) walk_rest<1>(sum, tile, row, from, at, 1);
    }
    float value = sum_of_lane(sum);
    const int64_t to_row = first_row + lane_index() % R, output = first_out + lane_index() / R;
    if (lane_index() >= kOutputs * R || to_row >= rows || output >= out) return;
    if (bias) value += bias[output];
    if (residual) value += residual[to_row * out + output];
    y[to_row * out + output] = value;
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

#define TILED_KERNEL(dtype, T) \
    MATMUL_KERNEL(matmul_tiled_##dtype##_kernel, 2, float, matmul_tile<FloatMatrix<T>, InputRows<T>, 64, 64>)
TILED_KERNEL(f32, float)
TILED_KERNEL(f16, f16)
TILED_KERNEL(bf16, bf16)
MATMUL_KERNEL(matmul_tiled_q8_0_kernel, 2, void, matmul_q8_0<64, 64>)

#if defined(__CUDACC__)
#define WIDE_TILE(T) matmul_pipeline<T, 128, 128>
#else
#define WIDE_TILE(T) matmul_tile<FloatMatrix<T>, FloatMatrix<T>, 128, 128>
#endif
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
    return is_wide(rows, out) ? static_cast<uint64_t>(rows * ok::padded_cols(in) * 2) : 0;
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
