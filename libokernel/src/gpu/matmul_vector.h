// matmul_vector.h: matmul for few rows: a wave walks along rows of W and adds its lanes' sums at the end.
//
// Bound by reading W once: 16 bytes a lane and load. q8_0 takes x apart into signed bytes, whose products with the quants
// have exact integer sums.
#pragma once
#include "fragment.h"
#include "matrix.h"

namespace ok {

constexpr int64_t kVectorRows = 16;  // most rows for which W is walked as vectors
constexpr int kVectorOutputs = 16;   // of a block of kBlock threads
constexpr int kWaveOutputs = 2;      // that a wave computes side by side
constexpr int kDigitValues = 8192;   // of x that a block holds in LDS as digits

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

// Values as they are.
struct NoNorm {
    __device__ float of(float x, int) const { return x; }
};

// Columns of R rows of x in LDS as three signed digits to the base 256 and, per block of 32, the power of two that they
// count: 22 bits and more of the block's largest. Zeros past the row, for a q8_0 block may hold anything there.
template <int R>
struct DigitTile {
    static constexpr int kCols = kDigitValues / R;
    alignas(16) uint32_t digits[R][3][kCols / 4];  // the highest first
    float scale[R][kCols / kMatrixBlock];

    // All threads of the block, each four neighbouring values; `norm` sees each with its column.
    template <class Norm>
    __device__ void load(int r, const float *x, int first, int cols, bool aligned, const Norm &norm) {
        x += first;
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
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (at + i < cols) four.value[i] = norm.of(four.value[i], first + at + i);
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

// The sums of R rows of x, those of the matrix rows `row`, as lanes hold them.
template <int R, int kOutputs, class Norm>
DEVICE void walk_digits(float (&sum)[kOutputs][R], DigitTile<R> &tile, const float *const (&x)[R],
                        const Q8Matrix::Row (&row)[kOutputs], const Norm (&norm)[R], int64_t in) {
    using Tile = DigitTile<R>;
    constexpr int N = Q8Matrix::kLoad, kStep = kWave * N;
    constexpr int kAhead = R <= 2 && kStep <= 512 ? 2 : 1;  // steps under way, as registers allow
    static_assert(Tile::kCols % kStep == 0);
    const bool aligned = in % 4 == 0 && reinterpret_cast<uintptr_t>(x[0]) % 16 == 0;
    for (int64_t first = 0; first < in; first += Tile::kCols) {
        const int cols = static_cast<int>(in - first < Tile::kCols ? in - first : Tile::kCols);
        const int from = static_cast<int>(first);
        int at = lane_index() * N, steps = cols / kStep;
        Q8Steps<kAhead, kOutputs> coming;  // on their way while x is taken apart
        if (steps >= kAhead) coming.load(row, from + at);
        if (first > 0) __syncthreads();
#pragma unroll
        for (int r = 0; r < R; ++r) tile.load(r, x[r], from, cols, aligned, norm[r]);
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
}

template <int R>
DEVICE void matmul_digits(float *y, const float *x, const void *packed, const float *bias, const float *residual,
                          const int32_t *active, int64_t rows, int64_t out, int64_t in) {
    constexpr int kOutputs = kVectorOutputs / (kBlock / kWave);
    __shared__ DigitTile<R> tile;
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
    const float *from[R];
#pragma unroll
    for (int r = 0; r < R; ++r) from[r] = x + (first_row + r < rows ? first_row + r : rows - 1) * in;

    float sum[kOutputs][R] = {};
    const NoNorm none[R];
    walk_digits(sum, tile, from, row, none, in);
    float value = sum_of_lane(sum);
    const int64_t to_row = first_row + lane_index() % R, output = first_out + lane_index() / R;
    if (lane_index() >= kOutputs * R || to_row >= rows || output >= out) return;
    if (bias) value += bias[output];
    if (residual) value += residual[to_row * out + output];
    y[to_row * out + output] = value;
}

}  // namespace ok
