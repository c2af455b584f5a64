// half.h: conversions between f32 and the 16-bit floats, one at a time, in arithmetic that compilers turn into vectors.
#pragma once
#include <cstdint>
#include <cstring>

namespace ok {

static inline uint32_t float_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Sign bit cleared, finite numbers lie below, NaN above.
constexpr uint32_t f32_infinity = 0x7f800000;
constexpr uint16_t f16_infinity = 0x7c00, bf16_infinity = 0x7f80;

static inline float f32_from_bf16(uint16_t half) { return bits_float(static_cast<uint32_t>(half) << 16); }

// Nearest, ties to even; past the largest finite value to infinity; NaN stays NaN.
static inline uint16_t bf16_from_f32(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet_nan = (bits >> 16) | 0x40;
    return static_cast<uint16_t>((bits & 0x7fffffff) > f32_infinity ? quiet_nan : rounded);
}

static inline float f32_from_f16(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t shifted = static_cast<uint32_t>(half & 0x7fff) << 13;  // the exponent still has f16's bias
    const uint32_t normal = shifted + (112u << 23);
    // A subnormal m * 2^-24 is 2^-14 * (1 + m / 2^10) less 2^-14.
    const uint32_t subnormal = float_bits(bits_float(shifted + (113u << 23)) - 0x1p-14f);
    const uint32_t finite = shifted < (1u << 23) ? subnormal : normal;
    return bits_float(sign | (shifted >= (31u << 23) ? shifted | f32_infinity : finite));
}

// Nearest, ties to even; past 65504 by half a step or more to infinity; NaN stays NaN.
static inline uint16_t f16_from_f32(float value) {
    const uint32_t bits = float_bits(value);
    const uint32_t sign = (bits >> 16) & 0x8000;
    const uint32_t magnitude = bits & 0x7fffffff;
    // Rounding may carry into the exponent, and from the largest exponent into infinity: both are right.
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // The last place of 1/2 is f16's smallest step, so adding it rounds there.
    const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
    const uint32_t quiet_nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    const uint32_t large = magnitude > f32_infinity ? quiet_nan : f16_infinity;
    return static_cast<uint16_t>(sign | (magnitude >= (143u << 23) ? large : finite));
}

}  // namespace ok
