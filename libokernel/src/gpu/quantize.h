// quantize.h: plain rows as a kernel reads them, and ggml's q8_0 of 32 values.
#pragma once
#include "matrix.h"

namespace ok {
namespace {

// Bytes of a plain row of `cols` values.
DEVICE int64_t plain_row_bytes(int32_t dtype, int64_t cols) {
    if (dtype == OK_Q8_0) return (cols + kMatrixBlock - 1) / kMatrixBlock * static_cast<int64_t>(sizeof(Q8Block));
    return cols * (dtype == OK_F32 ? 4 : 2);
}

// Value c of a plain row. Rows of q8_0 blocks need not be aligned to more than two bytes.
DEVICE float plain_value(const uint8_t *row, int32_t dtype, int64_t c) {
    if (dtype == OK_F32) return reinterpret_cast<const float *>(row)[c];
    if (dtype == OK_F16) return widen(reinterpret_cast<const f16 *>(row)[c]);
    if (dtype == OK_BF16) return widen(reinterpret_cast<const bf16 *>(row)[c]);
    const uint8_t *block = row + c / kMatrixBlock * static_cast<int64_t>(sizeof(Q8Block));
    const float d = widen(*reinterpret_cast<const f16 *>(block));
    return d * static_cast<float>(reinterpret_cast<const int8_t *>(block)[2 + c % kMatrixBlock]);
}

// Quantizes the 32 values from c of a plain row (zeros past `cols`). Returns whether the block holds its values: a
// scale past f16's range is held at its largest value, and a block with an infinity or NaN becomes NaN.
DEVICE bool quantize_block(const uint8_t *row, int32_t dtype, int64_t c, int64_t cols, f16 *scale, int8_t *quants) {
    float values[kMatrixBlock];
    uint32_t largest = 0;  // bits of |x| order as numbers do, infinity and NaN last
#pragma unroll
    for (int i = 0; i < kMatrixBlock; ++i) {
        values[i] = c + i < cols ? plain_value(row, dtype, c + i) : 0.0f;
        const uint32_t magnitude = __float_as_uint(values[i]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    const bool finite = largest < 0x7f800000u;
    float d = __uint_as_float(largest) / 127.0f;
    const bool fits = is_finite(widen(narrow<f16>(d)));
    if (!fits) d = 65504.0f;
    float inverse = d > 0.0f ? 1.0f / d : 0.0f;
    if (!is_finite(inverse)) inverse = 0.0f;  // a scale so small that f16 has 0 for it
    *scale = finite ? narrow<f16>(d) : narrow<f16>(__uint_as_float(0x7fc00000u));
#pragma unroll
    for (int i = 0; i < kMatrixBlock; ++i) {
        float x = finite ? values[i] * inverse : 0.0f;
        x = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x;
        const int32_t whole = static_cast<int32_t>(x);
        const float rest = x - static_cast<float>(whole);  // exact; half away from zero
        quants[i] = static_cast<int8_t>(whole + (rest >= 0.5f) - (rest <= -0.5f));
    }
    return finite && fits;
}

}  // namespace
}  // namespace ok
