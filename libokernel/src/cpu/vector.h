// vector.h: one vector of floats as wide as the including file's instruction set, with f16 and bf16 in memory, and exp.
//
// Files of a path (<op>_<path>.cpp) and portable files read the same code; flags decide the width. Portable vectors
// have four lanes and a multiply and an add for fma; on aarch64 the NEON files say OK_NEON first. Everything here has
// internal linkage, because the same names mean other instructions in other files.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // GCC 12 warns of undefined operands in its own header (bug 105593)
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(OK_NEON)
#include <arm_neon.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t VecInt __attribute__((vector_size(4 * kLanes)));  // also what a comparison of two Vec gives: 0 or -1
typedef uint16_t VecHalf __attribute__((vector_size(2 * kLanes)));

struct f16 {  // IEEE binary16
    uint16_t bits;
};
struct bf16 {  // the upper half of an f32
    uint16_t bits;
};

template <class To, class From>
inline To bit_cast(const From &from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline Vec broadcast(float x) { return x - Vec{}; }  // x + 0 would turn -0 into 0
inline VecInt broadcast(int32_t x) { return x - VecInt{}; }

inline Vec lane_index() {
    float index[kLanes];
    for (int i = 0; i < kLanes; i++) index[i] = static_cast<float>(i);
    return bit_cast<Vec>(index);
}

// a if a > b, else b: a NaN in b stays, a NaN in a does not.
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }

inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(OK_NEON)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

// ---- loads and stores ---------------------------------------------------------------------------------------------

inline Vec load(const float *p) {
    Vec x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

inline void store(float *p, Vec x) { std::memcpy(p, &x, sizeof x); }

inline Vec load(const f16 *p) {
    VecHalf half;
    std::memcpy(&half, p, sizeof half);
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(bit_cast<__m256i>(half));
#elif defined(__AVX2__)
    return _mm256_cvtph_ps(bit_cast<__m128i>(half));
#elif defined(OK_NEON)
    return vcvt_f32_f16(bit_cast<float16x4_t>(half));
#else
    // The exponent moves by 112, which for numbers below 2^-14 is a multiplication; infinity and NaN keep theirs.
    const VecInt bits = __builtin_convertvector(half, VecInt);
    const VecInt magnitude = (bits & 0x7fff) << 13;
    const VecInt finite = bit_cast<VecInt>(bit_cast<Vec>(magnitude) * 0x1p112f);
    const VecInt special = magnitude | 0x7f800000;
    return bit_cast<Vec>((magnitude >= 0x0f800000 ? special : finite) | (bits & 0x8000) << 16);
#endif
}

// Rounds to nearest even; past the largest f16 lies infinity.
inline void store(f16 *p, Vec x) {
#if defined(__AVX512F__)
    const auto half = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    const auto half = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(OK_NEON)
    const auto half = vcvt_f16_f32(x);
#else
    const VecInt bits = bit_cast<VecInt>(x);
    const VecInt magnitude = bits & 0x7fffffff;
    const VecInt normal = (magnitude + (0xfff - (112 << 23)) + (magnitude >> 13 & 1)) >> 13;
    const VecInt small = bit_cast<VecInt>(bit_cast<Vec>(magnitude) + 0.5f) - 0x3f000000;  // 0.5 has f16's last place
    const VecInt special = magnitude > 0x7f800000 ? (magnitude >> 13 & 0x3ff) | 0x7e00 : broadcast(0x7c00);
    const VecInt finite = magnitude < 0x38800000 ? small : normal;
    const VecHalf half =
        __builtin_convertvector((magnitude >= 0x47800000 ? special : finite) | (bits >> 16 & 0x8000), VecHalf);
#endif
    std::memcpy(p, &half, sizeof half);
}

inline Vec load(const bf16 *p) {
    VecHalf half;
    std::memcpy(&half, p, sizeof half);
#if defined(__AVX512F__)
    return bit_cast<Vec>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bit_cast<__m256i>(half)), 16));
#elif defined(__AVX2__)
    return bit_cast<Vec>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bit_cast<__m128i>(half)), 16));
#else
    return bit_cast<Vec>(__builtin_convertvector(half, VecInt) << 16);
#endif
}

inline void store(bf16 *p, Vec x) {
    const VecInt bits = bit_cast<VecInt>(x);
    const VecInt rounded = bits + 0x7fff + (bits >> 16 & 1);
    const VecInt quiet_nan = bits | 0x400000;
    const VecHalf half =
        __builtin_convertvector(((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : rounded) >> 16, VecHalf);
    std::memcpy(p, &half, sizeof half);
}

// ---- across lanes, in one fixed order -----------------------------------------------------------------------------

inline float sum(Vec x) {
    float lane[kLanes];
    store(lane, x);
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

inline float largest(Vec x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps(x);
#elif defined(__AVX2__)
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 pair = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
#elif defined(OK_NEON)
    return vmaxvq_f32(x);
#else
    const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
#endif
}

// ---- exp ----------------------------------------------------------------------------------------------------------

// x * 2^n for whole n in [-252, 254], rounded once.
inline Vec scale_by_power(Vec x, Vec n) {
#if defined(__AVX512F__)
    return _mm512_scalef_ps(x, n);
#else
    const VecInt whole = __builtin_convertvector(n, VecInt);
    const VecInt half = whole >> 1;
    return x * bit_cast<Vec>((half + 127) << 23) * bit_cast<Vec>((whole - half + 127) << 23);
#endif
}

// e^x within one unit in the last place; exact at 0; infinity past 88.72, 0 below -103.97, NaN for NaN.
// x = n ln 2 + r, |r| <= ln(2) / 2; e^r = 1 + r + r^2 q(r), q minimax of degree 5 (relative error 7e-10).
inline Vec exp(Vec x) {
    const Vec rounder = broadcast(0x1.8p23f);
    x = max(broadcast(-104.0f), min(broadcast(89.0f), x));
    const Vec n = fma(x, broadcast(0x1.715476p0f), rounder) - rounder;
    // ln 2 comes in two parts; the first has 15 bits, so that n times it is exact.
    Vec r = fma(n, broadcast(-0x1.62e4p-1f), x);
    r = fma(n, broadcast(-0x1.7f7d1cp-20f), r);
    Vec q = broadcast(0x1.a209bep-13f);
    q = fma(q, r, broadcast(0x1.6ce36cp-10f));
    q = fma(q, r, broadcast(0x1.110fb6p-7f));
    q = fma(q, r, broadcast(0x1.555542p-5f));
    q = fma(q, r, broadcast(0x1.555556p-3f));
    q = fma(q, r, broadcast(0.5f));
    return scale_by_power(fma(r * r, q, r) + 1.0f, n);
}

}  // namespace
