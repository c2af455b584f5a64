// activation_stretch.h: the activations on vectors, compiled once for each instruction-set path.
#pragma once
#include "activation.h"
#include "vector.h"

namespace {

inline Vec magnitude(Vec x) { return bit_cast<Vec>(bit_cast<VecInt>(x) & 0x7fffffff); }

// 1 / (1 + e^-x), from e^-|x| so that nothing overflows and small results keep their digits.
inline Vec sigmoid(Vec x) {
    const Vec e = exp(-magnitude(x));
    return (x < 0.0f ? e : broadcast(1.0f)) / (1.0f + e);
}

// erfc(a) for a >= 0 as t exp(-a^2 + p(2 t - 1)), t = 2 / (2 + a), p a Chebyshev fit of degree 9 to the logarithm of
// the rest: relative error 1.3e-7 and that of a^2.
inline Vec erfc_of_positive(Vec a) {
    const Vec t = 2.0f / (2.0f + a), s = t + t - 1.0f;
    Vec p = broadcast(0x1.30b96ap-12f);
    p = fma(p, s, broadcast(-0x1.087ee4p-13f));
    p = fma(p, s, broadcast(-0x1.0c63b8p-9f));
    p = fma(p, s, broadcast(0x1.be6782p-10f));
    p = fma(p, s, broadcast(0x1.1df1b0p-7f));
    p = fma(p, s, broadcast(-0x1.42e592p-7f));
    p = fma(p, s, broadcast(-0x1.800f12p-5f));
    p = fma(p, s, broadcast(0x1.83d27ap-5f));
    p = fma(p, s, broadcast(0x1.5864a0p-1f));
    p = fma(p, s, broadcast(-0x1.57f564p-1f));
    return t * exp(fma(-a, a, p));
}

inline Vec silu(Vec x) { return x * sigmoid(x); }

// 0.5 (1 + tanh u) is sigmoid(2 u).
inline Vec gelu_tanh(Vec x) {
    constexpr float twice_sqrt_2_over_pi = 1.5957691216057308f;
    return x * sigmoid(twice_sqrt_2_over_pi * fma(0.044715f * x * x, x, x));
}

// 0.5 (1 + erf z) is 1 - erfc(z) / 2 for z >= 0 and erfc(-z) / 2 below, where 1 + erf would lose its digits.
inline Vec gelu_erf(Vec x) {
    constexpr float sqrt_half = 0.70710678118654752f;
    const Vec tail = 0.5f * erfc_of_positive(magnitude(x) * sqrt_half);
    return x * (x < 0.0f ? tail : 1.0f - tail);
}

inline Vec relu(Vec x) { return x < 0.0f ? Vec{} : x; }  // NaN stays

template <class F>
inline void for_each_value(float *y, const float *x, const float *up, int64_t n, F f) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(y + i, up ? f(load(x + i)) * load(up + i) : f(load(x + i)));
    if (i == n) return;
    float rest[kLanes] = {}, rest_up[kLanes] = {};  // the same arithmetic for the last few
    std::memcpy(rest, x + i, (n - i) * sizeof *x);
    if (up) std::memcpy(rest_up, up + i, (n - i) * sizeof *up);
    store(rest, up ? f(load(rest)) * load(rest_up) : f(load(rest)));
    std::memcpy(y + i, rest, (n - i) * sizeof *y);
}

inline void activate_stretch(float *y, const float *x, const float *up, int64_t n, ok_activation activation) {
    switch (activation) {
        case OK_SILU:
            return for_each_value(y, x, up, n, [](Vec v) { return silu(v); });
        case OK_GELU_TANH:
            return for_each_value(y, x, up, n, [](Vec v) { return gelu_tanh(v); });
        case OK_GELU_ERF:
            return for_each_value(y, x, up, n, [](Vec v) { return gelu_erf(v); });
        case OK_RELU:
            return for_each_value(y, x, up, n, [](Vec v) { return relu(v); });
    }
}

}  // namespace
