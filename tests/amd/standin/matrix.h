// matrix.h: models of the dot-product and matrix instructions: which lane holds which element, and the value.
//
// A matrix instruction is one exchange: every lane of the warp lays its parts of A and B into its slot as f32 or i32, all
// meet, each computes the elements of D it holds. Products are summed in f64 and rounded once; the card's own order and
// rounding inside an instruction are not published. Layouts (l = lane, i = element of the lane's vector):
//   RDNA3 WMMA, wave32   A row l%16, B column l%16, all 16 of k in the lane, lanes 16-31 repeat 0-15; D[2i + l/16][l%16]
//   RDNA4 WMMA, wave32   k = 8 (l/16) + i, 8 of k in a lane;                                         D[8 (l/16) + i][l%16]
//   CDNA MFMA, wave64    k = n (l/16) + i, n of k in a lane (n = 4 for 16 bit, 1 for f32);           D[4 (l/16) + i][l%16]
#pragma once
#include "wave.h"

namespace standin {

typedef _Float16 half2_t __attribute__((ext_vector_type(2)));
typedef _Float16 half4_t __attribute__((ext_vector_type(4)));
typedef _Float16 half8_t __attribute__((ext_vector_type(8)));
typedef _Float16 half16_t __attribute__((ext_vector_type(16)));
typedef short short2_t __attribute__((ext_vector_type(2)));
typedef short short4_t __attribute__((ext_vector_type(4)));
typedef short short8_t __attribute__((ext_vector_type(8)));
typedef short short16_t __attribute__((ext_vector_type(16)));
typedef float float4_t __attribute__((ext_vector_type(4)));
typedef float float8_t __attribute__((ext_vector_type(8)));
typedef int int2_t __attribute__((ext_vector_type(2)));
typedef int int4_t __attribute__((ext_vector_type(4)));
typedef int int8_t_ __attribute__((ext_vector_type(8)));

inline float widen(_Float16 h) { return float(h); }
inline float widen(short h) { return bf16_to_f32(uint16_t(h)); }
inline float widen(float f) { return f; }
inline int byte_of(int word, int index, bool is_signed) {
    const int byte = word >> 8 * index & 255;
    return is_signed ? int(int8_t(byte)) : byte;
}

enum class Layout { rdna3, rdna4, cdna };

// D = A B + C for one 16 x 16 tile. a, b: the lane's K elements of each operand; d: its N elements of D, C on entry.
// depth: k of the whole instruction.
template <Layout layout, int N, class E, class D>
inline void multiply_tile(const E *a, const E *b, int count, int depth, D *d, int site) {
    static_assert(sizeof(E) == 4);
    constexpr bool repeated = layout == Layout::rdna3;
    if (wave_size != (layout == Layout::cdna ? 64 : 32)) {
        fail(hipErrorLaunchFailure, "matrix instruction at line %d is not one of wave%u", site, wave_size);
        stop_here();
    }
    Warp &warp = *self->warp;
    Exchange &exchange = join_exchange(warp);
    auto &slot = exchange.slot;
    const unsigned lane = self->index;
    E *mine = reinterpret_cast<E *>(slot[lane]);
    memcpy(mine, a, sizeof(E) * unsigned(count));
    memcpy(mine + 16, b, sizeof(E) * unsigned(count));
    wait(warp, site, "matrix instruction");
    if (exchange.present != (wave_size == 64 ? ~0ull : 0xffffffffull)) {
        fail(hipErrorLaunchFailure, "matrix instruction at line %d in a warp that is not full", site);
        stop_here();
    }
    const unsigned twin = lane ^ 16;
    if (repeated && memcmp(slot[lane], slot[twin], 2 * 16 * sizeof(E)) != 0) {
        fail(hipErrorLaunchFailure, "WMMA at line %d: lane %u does not repeat lane %u's A and B", site, lane, twin);
        stop_here();
    }
    const unsigned column = lane % 16, part = lane / 16;
    for (unsigned i = 0; i < N; ++i) {
        const unsigned row = repeated ? 2 * i + part : N * part + i;
        double sum = 0;
        for (int k = 0; k < depth; ++k) {
            const unsigned holder = 16 * unsigned(k / count), element = unsigned(k % count);
            sum += double(reinterpret_cast<E *>(slot[holder + row])[element]) *
                   double(reinterpret_cast<E *>(slot[holder + column])[16 + element]);
        }
        d[i] = D(sum + double(d[i]));
    }
}

template <Layout layout, int N, int depth, class V, class W>
inline W multiply_floats(V a, V b, W c, int site) {
    constexpr int count = sizeof(V) / sizeof(a[0]);
    float wide_a[16], wide_b[16], d[N];
    for (int i = 0; i < count; ++i) wide_a[i] = widen(a[i]), wide_b[i] = widen(b[i]);
    for (int i = 0; i < N; ++i) d[i] = c[i];
    multiply_tile<layout, N>(wide_a, wide_b, count, depth, d, site);
    for (int i = 0; i < N; ++i) c[i] = d[i];
    return c;
}

template <Layout layout, int N, int depth, class W>
inline W multiply_bytes(const int *a, bool sign_a, const int *b, bool sign_b, int words, W c, int site) {
    int wide_a[16], wide_b[16], d[N];
    for (int i = 0; i < 4 * words; ++i) {
        wide_a[i] = byte_of(a[i / 4], i % 4, sign_a);
        wide_b[i] = byte_of(b[i / 4], i % 4, sign_b);
    }
    for (int i = 0; i < N; ++i) d[i] = c[i];
    multiply_tile<layout, N>(wide_a, wide_b, 4 * words, depth, d, site);
    for (int i = 0; i < N; ++i) c[i] = d[i];
    return c;
}

inline int dot4(int a, bool sign_a, int b, bool sign_b, int c) {
    for (int i = 0; i < 4; ++i) c += byte_of(a, i, sign_a) * byte_of(b, i, sign_b);
    return c;
}
template <class V>
inline float dot2(V a, V b, float c) {
    return float(double(widen(a[0])) * widen(b[0]) + double(widen(a[1])) * widen(b[1]) + c);
}

}  // namespace standin

inline float __builtin_amdgcn_fdot2(standin::half2_t a, standin::half2_t b, float c, bool) {
    return standin::dot2(a, b, c);
}
inline float __builtin_amdgcn_fdot2_f32_bf16(standin::short2_t a, standin::short2_t b, float c, bool) {
    return standin::dot2(a, b, c);
}
inline int __builtin_amdgcn_sdot4(int a, int b, int c, bool) { return standin::dot4(a, true, b, true, c); }
inline uint __builtin_amdgcn_udot4(uint a, uint b, uint c, bool) {
    return uint(standin::dot4(int(a), false, int(b), false, int(c)));
}
inline int __builtin_amdgcn_sudot4(bool sign_a, int a, bool sign_b, int b, int c, bool) {
    return standin::dot4(a, sign_a, b, sign_b, c);
}

#define STANDIN_FLOAT_TILE(name, layout, depth, V, W)                                      \
    inline W name(V a, V b, W c, int site = __builtin_LINE()) {                            \
        constexpr int n = sizeof(W) / sizeof(float);                                       \
        return standin::multiply_floats<standin::Layout::layout, n, depth>(a, b, c, site); \
    }
STANDIN_FLOAT_TILE(__builtin_amdgcn_wmma_f32_16x16x16_f16_w32, rdna3, 16, standin::half16_t, standin::float8_t)
STANDIN_FLOAT_TILE(__builtin_amdgcn_wmma_f32_16x16x16_bf16_w32, rdna3, 16, standin::short16_t, standin::float8_t)
STANDIN_FLOAT_TILE(__builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12, rdna4, 16, standin::half8_t, standin::float8_t)
STANDIN_FLOAT_TILE(__builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12, rdna4, 16, standin::short8_t, standin::float8_t)
#undef STANDIN_FLOAT_TILE

// MFMA's three control words (broadcasts) are always 0 with us.
#define STANDIN_MFMA(name, depth, V)                                                                           \
    inline standin::float4_t name(V a, V b, standin::float4_t c, int, int, int, int site = __builtin_LINE()) { \
        return standin::multiply_floats<standin::Layout::cdna, 4, depth>(a, b, c, site);                       \
    }
STANDIN_MFMA(__builtin_amdgcn_mfma_f32_16x16x16f16, 16, standin::half4_t)
STANDIN_MFMA(__builtin_amdgcn_mfma_f32_16x16x16bf16_1k, 16, standin::short4_t)
#undef STANDIN_MFMA
inline standin::float4_t __builtin_amdgcn_mfma_f32_16x16x4f32(float a, float b, standin::float4_t c, int, int, int,
                                                              int site = __builtin_LINE()) {
    float d[4] = {c[0], c[1], c[2], c[3]};
    standin::multiply_tile<standin::Layout::cdna, 4>(&a, &b, 1, 4, d, site);
    return {d[0], d[1], d[2], d[3]};
}

inline standin::int8_t_ __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(bool sign_a, standin::int4_t a, bool sign_b,
                                                                   standin::int4_t b, standin::int8_t_ c, bool,
                                                                   int site = __builtin_LINE()) {
    const int wa[] = {a[0], a[1], a[2], a[3]}, wb[] = {b[0], b[1], b[2], b[3]};
    return standin::multiply_bytes<standin::Layout::rdna3, 8, 16>(wa, sign_a, wb, sign_b, 4, c, site);
}
inline standin::int8_t_ __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32_gfx12(bool sign_a, standin::int2_t a, bool sign_b,
                                                                         standin::int2_t b, standin::int8_t_ c, bool,
                                                                         int site = __builtin_LINE()) {
    const int wa[] = {a[0], a[1]}, wb[] = {b[0], b[1]};
    return standin::multiply_bytes<standin::Layout::rdna4, 8, 16>(wa, sign_a, wb, sign_b, 2, c, site);
}
inline standin::int4_t __builtin_amdgcn_mfma_i32_16x16x16i8(int a, int b, standin::int4_t c, int, int, int,
                                                            int site = __builtin_LINE()) {
    return standin::multiply_bytes<standin::Layout::cdna, 4, 16>(&a, true, &b, true, 1, c, site);
}
inline standin::int4_t __builtin_amdgcn_mfma_i32_16x16x32_i8(long a, long b, standin::int4_t c, int, int, int,
                                                             int site = __builtin_LINE()) {
    const standin::int2_t wa = standin::bits<standin::int2_t>(a), wb = standin::bits<standin::int2_t>(b);
    const int words_a[] = {wa[0], wa[1]}, words_b[] = {wb[0], wb[1]};
    return standin::multiply_bytes<standin::Layout::cdna, 4, 32>(words_a, true, words_b, true, 2, c, site);
}
