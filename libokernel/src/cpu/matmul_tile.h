// matmul_tile.h: the matmul of one path, written over vector.h and included by matmul_<path>.cpp.
//
// A tile multiplies R rows by P panels of 16 outputs and keeps the R * P * 16 sums in registers. Lanes run over
// outputs; each sum is one f32 accumulator that meets the products of its row and its output in the order of `in`,
// however many rows and panels travel together. That is why a row's result depends on nothing else.
//
// Each weight is widened to f32 and meets the activations as f32: in registers (q8_0: 32 values of a panel at a time on
// the stack), or, where several tiles share the panels, once for all of them into a buffer on the stack. Or q8_0 is
// multiplied by exact integer dots with activations rounded to 16 bits, per row and 32 values:
//   y += (sum_i q_w q_x) d_w d_x   per block, with a multiply, a multiply and an add, the same on every path.
#pragma once
#include <utility>

#include "matmul.h"
#include "matrix.h"
#include "vector.h"

namespace {

using namespace ok;

constexpr int kVecs = panel_size / kLanes;  // vectors of a panel

#if defined(__AVX512F__)
constexpr int kMaxRows = 12, kWidePanels = 2, kSums = 24;  // sums: vectors that a tile keeps in registers
constexpr int kMaxRowsInt16 = 12;
#elif defined(__AVX2__)
constexpr int kMaxRows = 6, kWidePanels = 1, kSums = 12;
constexpr int kMaxRowsInt16 = 4;
#elif defined(OK_NEON)
constexpr int kMaxRows = 6, kWidePanels = 1, kSums = 24;
constexpr int kMaxRowsInt16 = 3;
#else
constexpr int kMaxRows = 3, kWidePanels = 1, kSums = 12;
constexpr int kMaxRowsInt16 = 2;
#endif

#if defined(__AVX2__) || defined(OK_NEON)
constexpr bool kHalfLoads = true;  // an instruction or two widen f16 and bf16, hidden behind the products of a tile
#else
constexpr bool kHalfLoads = false;
#endif

// Values along `in` of the panels that tiles share: kWidePanels of them, as f32, fit a first-level cache.
constexpr int kChunk = 256;
static_assert(kChunk % q8_block == 0);

// Panels that a tile of `rows` rows takes at once: as many as fit for few rows, where the read of the weights is what
// counts, and kWidePanels for every height that can occur beside another tile.
constexpr int panels_at_once(int rows) {
    if (rows >= (kMaxRows + 1) / 2) return kWidePanels;
    int panels = 4;
    while (panels > 1 && rows * panels * kVecs > kSums) panels /= 2;
    return panels;
}

// Where P neighbouring panels begin: weights or quants, and f16 scales of q8_0. Strides lead to the next panel.
struct Panels {
    const void *data;
    const f16 *scale;
    int64_t data_stride, scale_stride;
};

template <int R, int P>
struct Sums {
    Vec at[R][P * kVecs];

    void load(const float *from) { std::memcpy(at, from, sizeof at); }
    void store(float *to) const { std::memcpy(to, at, sizeof at); }
};

// sums += x^T w over `n` values: x [n][R], w P panels of [n][16].
template <int R, int P, class T>
inline void multiply_add(Sums<R, P> &sums, const float *x, const T *w, int64_t stride, int64_t n) {
    constexpr int columns = P * kVecs;
    auto weight = [&](int column) { return ::load(w + column / kVecs * stride + column % kVecs * kLanes); };
    for (int64_t k = 0; k < n; k++, x += R, w += panel_size) {
        if constexpr (R < columns) {
            Vec row[R];
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) row[r] = broadcast(x[r]);
#pragma GCC unroll 16
            for (int c = 0; c < columns; c++) {
                const Vec value = weight(c);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) sums.at[r][c] = fma(value, row[r], sums.at[r][c]);
            }
        } else {
            Vec value[columns];
#pragma GCC unroll 16
            for (int c = 0; c < columns; c++) value[c] = weight(c);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                const Vec row = broadcast(x[r]);
#pragma GCC unroll 16
                for (int c = 0; c < columns; c++) sums.at[r][c] = fma(value[c], row, sums.at[r][c]);
            }
        }
    }
}

// ---- kinds of weights -----------------------------------------------------------------------------------------------
// Each says in how many `units` it walks along `in`, how many units one pass takes when several row tiles share the
// panels, how large a unit of x is, where panels begin, how panels widen to f32 (if that pays), and how to multiply one
// tile.

template <class T>
struct FloatWeights {
    static constexpr int max_rows = kMaxRows, chunk = kChunk, x_bytes = sizeof(float);
    static constexpr bool widens = sizeof(T) < sizeof(float) && !kHalfLoads;
    static constexpr int group(int rows) { return panels_at_once(rows); }
    static int64_t units(int64_t in) { return in; }

    static Panels panels(const MatmulJob &job, int64_t panel, int64_t unit) {
        return {static_cast<const T *>(job.weight) + (panel * job.in + unit) * panel_size, nullptr, job.in * panel_size,
                0};
    }

    static void widen(float *to, const Panels &w, int64_t panel, int64_t n) {
        const T *from = static_cast<const T *>(w.data) + panel * w.data_stride;
        for (int64_t i = 0; i < n * panel_size; i += kLanes) ::store(to + i, ::load(from + i));
    }

    template <int R, int P>
    static void tile(float *sums, const void *x, const Panels &w, int64_t n, bool first) {
        Sums<R, P> s = {};
        if (!first) s.load(sums);
        multiply_add(s, static_cast<const float *>(x), static_cast<const T *>(w.data), w.data_stride, n);
        s.store(sums);
    }
};

inline VecInt load_four(const int8_t *quants) {
    VecInt four;
    std::memcpy(&four, quants, sizeof four);
    return four;
}

static inline Panels q8_panels(const MatmulJob &job, int64_t panel, int64_t block) {
    const Q8Matrix matrix(job.weight, job.out, job.in);
    return {matrix.quants + (panel * matrix.blocks + block) * q8_panel_block_bytes,
            reinterpret_cast<const f16 *>(matrix.scales) + (panel * matrix.blocks + block) * panel_size,
            matrix.blocks * q8_panel_block_bytes, matrix.blocks * panel_size};
}

// q8_0 weights, activations in f32: each weight becomes q * d, then is multiplied as f32.
struct Q8Weights {
    static constexpr int max_rows = kMaxRows, chunk = kChunk, x_bytes = sizeof(float);
    static constexpr bool widens = true;
    static constexpr int group(int rows) { return panels_at_once(rows); }
    static int64_t units(int64_t in) { return in; }
    static Panels panels(const MatmulJob &job, int64_t panel, int64_t unit) {
        return q8_panels(job, panel, unit / q8_block);
    }

    static void widen(float *to, const Panels &w, int64_t panel, int64_t n) {
        for (int64_t block = 0; block < ceil_div(n, q8_block); block++, to += q8_block * panel_size)
            widen_block(to, w, panel, block);
    }

    static void widen_block(float *to, const Panels &w, int64_t panel, int64_t block) {
        const int8_t *quants =
            static_cast<const int8_t *>(w.data) + panel * w.data_stride + block * q8_panel_block_bytes;
        const f16 *scale = w.scale + panel * w.scale_stride + block * panel_size;
        Vec d[kVecs];
        for (int v = 0; v < kVecs; v++) d[v] = ::load(scale + v * kLanes);
        for (int i = 0; i < q8_block / 4; i++)
            for (int v = 0; v < kVecs; v++) {
                const VecInt four = load_four(quants + (i * panel_size + v * kLanes) * 4);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++)
                    ::store(to + (4 * i + j) * panel_size + v * kLanes,
                            __builtin_convertvector(four << (24 - 8 * j) >> 24, Vec) * d[v]);
            }
    }

    template <int R, int P>
    static void tile(float *sums, const void *x, const Panels &w, int64_t n, bool first) {
        constexpr int64_t stride = q8_block * panel_size;
        alignas(64) float block[P * stride];
        Sums<R, P> s = {};
        if (!first) s.load(sums);
        for (int64_t k = 0; k < n; k += q8_block) {
            for (int p = 0; p < P; p++) widen_block(block + p * stride, w, p, k / q8_block);
            multiply_add(s, static_cast<const float *>(x) + k * R, block, stride, n - k < q8_block ? n - k : q8_block);
        }
        s.store(sums);
    }
};

// Four weights a lane, and the exact dots of a block: 32 products of int8 and int16 stay below 2^31 (quantize_tile).
// Where bytes have a dot of their own, an activation is 256 high + low; elsewhere even and odd weights become int16.
#if defined(__ARM_FEATURE_DOTPROD)
struct FourWeights {
    int8x16_t bytes;

    explicit FourWeights(const int8_t *quants) : bytes(vld1q_s8(quants)) {}
};

struct Dots {
    int32x4_t high = {}, low = {};

    void add(const FourWeights &w, int32_t high_x, int32_t low_x) {
        high = vdotq_s32(high, w.bytes, vreinterpretq_s8_s32(vdupq_n_s32(high_x)));
        low = vdotq_s32(low, w.bytes, vreinterpretq_s8_s32(vdupq_n_s32(low_x)));
    }
    VecInt sum() const { return (bit_cast<VecInt>(high) << 8) + bit_cast<VecInt>(low); }
};
#else
typedef int16_t VecShort __attribute__((vector_size(4 * kLanes)));

struct FourWeights {
    VecShort even, odd;

    explicit FourWeights(const int8_t *quants) {
        VecShort pairs;
        std::memcpy(&pairs, quants, sizeof pairs);
        even = pairs << 8 >> 8;
        odd = pairs >> 8;
    }
};

struct Dots {
    VecInt total = {};

    void add(const FourWeights &w, int32_t even_x, int32_t odd_x) {
        add_pairs(w.even, even_x);
        add_pairs(w.odd, odd_x);
    }
    void add_pairs(VecShort w, int32_t x) {
#if defined(__AVX512VNNI__)
        total =
            bit_cast<VecInt>(_mm512_dpwssd_epi32(bit_cast<__m512i>(total), bit_cast<__m512i>(w), _mm512_set1_epi32(x)));
#elif defined(__AVX512F__)
        total += bit_cast<VecInt>(_mm512_madd_epi16(bit_cast<__m512i>(w), _mm512_set1_epi32(x)));
#elif defined(__AVX2__)
        total += bit_cast<VecInt>(_mm256_madd_epi16(bit_cast<__m256i>(w), _mm256_set1_epi32(x)));
#else
        const VecInt pair = bit_cast<VecInt>(w);
        total += (pair << 16 >> 16) * static_cast<int16_t>(x) + (pair >> 16) * (x >> 16);
#endif
    }
    VecInt sum() const { return total; }
};
#endif

// R rows of one block of 32 activations, four neighbours in two words: as FourWeights wants them.
template <int R>
struct Int16Rows {
    int32_t four[q8_block / 4][2][R];
    float scale[R];
};
static_assert(sizeof(Int16Rows<3>) == 3 * q8_activation_bytes);

// q8_0 weights, activations as Int16Rows.
struct Q8Int16Weights {
    static constexpr int max_rows = kMaxRowsInt16, chunk = 64, x_bytes = q8_activation_bytes;
    static constexpr bool widens = false;
    static constexpr int group(int) { return 1; }
    static int64_t units(int64_t in) { return ceil_div(in, q8_block); }
    static Panels panels(const MatmulJob &job, int64_t panel, int64_t unit) { return q8_panels(job, panel, unit); }

    template <int R, int P>
    static void tile(float *sums, const void *x, const Panels &w, int64_t n, bool first) {
        static_assert(P == 1);
        Sums<R, 1> s = {};
        if (!first) s.load(sums);
        const int8_t *quants = static_cast<const int8_t *>(w.data);
        const f16 *scale = w.scale;
        const Int16Rows<R> *rows = static_cast<const Int16Rows<R> *>(x);
        for (int64_t block = 0; block < n; block++, rows++, scale += panel_size) {
            Dots dots[R][kVecs];
#pragma GCC unroll 8
            for (int i = 0; i < q8_block / 4; i++, quants += 4 * panel_size) {
#pragma GCC unroll 16
                for (int v = 0; v < kVecs; v++) {
                    const FourWeights weights(quants + v * kLanes * 4);
#pragma GCC unroll 16
                    for (int r = 0; r < R; r++) dots[r][v].add(weights, rows->four[i][0][r], rows->four[i][1][r]);
                }
            }
#pragma GCC unroll 16
            for (int v = 0; v < kVecs; v++) {
                const Vec d = ::load(scale + v * kLanes);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++)
                    s.at[r][v] += __builtin_convertvector(dots[r][v].sum(), Vec) * d * broadcast(rows->scale[r]);
            }
        }
        s.store(sums);
    }
};

// ---- a share of a job -----------------------------------------------------------------------------------------------

// y = sums (+ bias) (+ residual) for outputs [first_output, first_output + outputs) of `rows` rows.
static void finish(const MatmulJob &job, const float *sums, int64_t width, int64_t first_row, int64_t rows,
                   int64_t first_output) {
    const int64_t outputs = job.out - first_output < width ? job.out - first_output : width;
    const float *bias = job.bias ? job.bias + first_output : nullptr;
    for (int64_t r = 0; r < rows; r++, sums += width) {
        const int64_t offset = (first_row + r) * job.out + first_output;
        const float *residual = job.residual ? job.residual + offset : nullptr;
        float *y = job.y + offset;
        for (int64_t o = 0; o < outputs; o++) {
            float value = sums[o];
            if (bias) value += bias[o];
            if (residual) value += residual[o];
            y[o] = value;
        }
    }
}

using Tile = void (*)(float *sums, const void *x, const Panels &w, int64_t n, bool first);

// The tiles of one kind of weights by rows - 1: for W::group(rows) panels at once, and for one.
template <class W, class = std::make_integer_sequence<int, W::max_rows>>
struct Tiles;
template <class W, int... R>
struct Tiles<W, std::integer_sequence<int, R...>> {
    static constexpr Tile grouped[] = {&W::template tile<R + 1, W::group(R + 1)>...};
    static constexpr Tile single[] = {&W::template tile<R + 1, 1>...};
};

template <class W>
void run(const MatmulJob &job, int64_t panel_begin, int64_t panel_end, int64_t tile_begin, int64_t tile_end) {
    const bool shared = tile_end - tile_begin > 1;
    const int64_t units = W::units(job.in), chunk = shared ? W::chunk : units;
    const int64_t first_row = tile_row(job, tile_begin), rows = tile_row(job, tile_end) - first_row;
    const int64_t at_once = W::group(static_cast<int>(tile_row(job, tile_begin + 1) - first_row));
    alignas(64) float sums[matmul_block_rows * kWidePanels * panel_size];
    static_assert(sizeof sums >= W::max_rows * 4 * panel_size * sizeof(float));
    alignas(64) float wide[W::widens ? kWidePanels * kChunk * panel_size : 1];

    for (int64_t panel = panel_begin, group; panel < panel_end; panel += group) {
        group = panel_end - panel >= at_once ? at_once : 1;
        for (int64_t unit = 0; unit < units; unit += chunk) {
            const int64_t n = units - unit < chunk ? units - unit : chunk;
            Panels w = W::panels(job, panel, unit);
            const Tile *tiles = group > 1 ? Tiles<W>::grouped : Tiles<W>::single;
            if constexpr (W::widens) {
                if (shared) {
                    for (int64_t p = 0; p < group; p++) W::widen(wide + p * kChunk * panel_size, w, p, n);
                    w = {wide, nullptr, kChunk * panel_size, 0};
                    tiles = group > 1 ? Tiles<FloatWeights<float>>::grouped : Tiles<FloatWeights<float>>::single;
                }
            }
            for (int64_t t = tile_begin; t < tile_end; t++) {
                const int64_t row = tile_row(job, t), height = tile_row(job, t + 1) - row;
                const char *x = static_cast<const char *>(job.x) + (row * units + unit * height) * W::x_bytes;
                tiles[height - 1](sums + (row - first_row) * group * panel_size, x, w, n, unit == 0);
            }
        }
        finish(job, sums, group * panel_size, first_row, rows, panel * panel_size);
    }
}

// ---- activations as int16 -------------------------------------------------------------------------------------------

// Four values as the two words of Int16Rows.
static inline void split_four(int32_t *two, const int32_t *x) {
#if defined(__ARM_FEATURE_DOTPROD)
    int8_t high[4], low[4];
    for (int i = 0; i < 4; i++) {
        low[i] = static_cast<int8_t>(x[i]);
        high[i] = static_cast<int8_t>((x[i] - low[i]) / 256);
    }
    std::memcpy(&two[0], high, 4);
    std::memcpy(&two[1], low, 4);
#else
    for (int i = 0; i < 2; i++) two[i] = (x[i] & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(x[i + 2]) << 16);
#endif
}

// q = x / d to the nearest whole number (ties to even), d = max|x| / (127 * 256 + 127), so that both of q's bytes are
// signed and 32 products with int8 fit an int32. A block with an infinity or NaN gets d = NaN.
static void quantize_tile(void *tile, const float *x, int64_t rows, int64_t stride, int64_t n) {
    constexpr float largest_quant = 127 * 256 + 127;
    int32_t *four = static_cast<int32_t *>(tile);
    for (; n > 0; n -= q8_block, x += q8_block, four += rows * (q8_activation_bytes / 4)) {
        float *scales = reinterpret_cast<float *>(four + rows * (q8_block / 2));
        for (int64_t r = 0; r < rows; r++) {
            alignas(64) float values[q8_block] = {};
            std::memcpy(values, x + r * stride, (n < q8_block ? n : q8_block) * sizeof(float));
            int32_t largest = 0;  // bits of |x| order as numbers do, infinity and NaN last
            for (int i = 0; i < q8_block; i++) {
                const int32_t magnitude = bit_cast<int32_t>(values[i]) & 0x7fffffff;
                largest = magnitude > largest ? magnitude : largest;
            }
            const float scale = bit_cast<float>(largest) / largest_quant;
            const bool normal = largest < 0x7f800000 && scale >= 0x1p-126f;  // else 1 / scale is no number
            const float inverse = normal ? 1.0f / scale : 0.0f;
            alignas(64) int32_t whole[q8_block];
            for (int i = 0; i < q8_block; i++)  // 1.5 * 2^23 has 1 as its last place
                whole[i] = bit_cast<int32_t>(values[i] * inverse + 0x1.8p23f) - 0x4b400000;
            for (int i = 0; i < q8_block / 4; i++) {
                int32_t two[2];
                split_four(two, whole + 4 * i);
                four[2 * i * rows + r] = two[0];
                four[(2 * i + 1) * rows + r] = two[1];
            }
            scales[r] = normal ? scale : largest < 0x7f800000 ? 0.0f : bit_cast<float>(INT32_C(0x7fc00000));
        }
    }
}

template <class W>
constexpr MatmulKernel kKernel = {W::max_rows, run<W>};

constexpr MatmulPath kMatmulPath = {{kKernel<FloatWeights<float>>, kKernel<FloatWeights<f16>>,
                                     kKernel<FloatWeights<bf16>>, kKernel<Q8Weights>, kKernel<Q8Int16Weights>},
                                    quantize_tile};

}  // namespace
