// quantize.cpp: ggml's q8_0 from floats.
#include "checks.h"
#include "half.h"
#include "internal.h"
#include "matrix.h"

namespace {

// Returns whether the block holds its values. A scale past f16's range is held at its largest value and the quants at
// +-127; a block with an infinity or NaN becomes NaN, so that nobody mistakes it for numbers.
bool quantize_block(ok::Q8Block *block, const float *values) {
    constexpr float largest_f16 = 65504.0f;
    uint32_t largest = 0;  // bits of |x| order as numbers do, infinity and NaN last
    for (int i = 0; i < ok::q8_block; i++) {
        const uint32_t magnitude = ok::float_bits(values[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= ok::f32_infinity) {
        *block = {0x7e00, {}};
        return false;
    }
    float scale = ok::bits_float(largest) / 127.0f;
    const bool fits = ok::f16_from_f32(scale) < ok::f16_infinity;
    if (!fits) scale = largest_f16;
    float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    if (ok::float_bits(inverse) >= ok::f32_infinity) inverse = 0.0f;  // a scale so small that f16 has 0 for it
    block->scale = ok::f16_from_f32(scale);
    for (int i = 0; i < ok::q8_block; i++) {
        float x = values[i] * inverse;
        x = x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x;
        const int32_t whole = static_cast<int32_t>(x);
        const float rest = x - static_cast<float>(whole);  // exact; half away from zero
        block->quant[i] = static_cast<int8_t>(whole + (rest >= 0.5f) - (rest <= -0.5f));
    }
    return fits;
}

struct QuantizeArgs {
    ok::Q8Block *blocks;
    const void *src;
    ok_dtype src_dtype;
    int64_t rows, cols;
    int32_t *overflow;
};

void run_quantize(const QuantizeArgs &args) {
    const int64_t row_blocks = ok::ceil_div(args.cols, ok::q8_block), stretch = 64 * ok::q8_block;
    const int64_t row_bytes = ok::plain_row_bytes(args.src_dtype, args.cols);
    ok::parallel_for(args.rows, [&](int64_t row) {
        const char *src = static_cast<const char *>(args.src) + row * row_bytes;
        float values[stretch];
        int32_t failed = 0;
        for (int64_t first = 0; first < args.cols; first += stretch) {
            const int64_t n = args.cols - first < stretch ? args.cols - first : stretch;
            ok::widen_plain_row(values, src, args.src_dtype, first, n);
            failed += ok::quantize_row(args.blocks + row * row_blocks + first / ok::q8_block, values, n);
        }
        if (failed && args.overflow) __atomic_fetch_add(args.overflow, failed, __ATOMIC_RELAXED);
    });
}

}  // namespace

int32_t ok::quantize_row(Q8Block *blocks, const float *src, int64_t cols) {
    int32_t failed = 0;
    for (; cols >= q8_block; cols -= q8_block, src += q8_block) failed += !quantize_block(blocks++, src);
    if (cols > 0) {
        float values[q8_block] = {};
        memcpy(values, src, cols * sizeof(float));
        failed += !quantize_block(blocks, values);
    }
    return failed;
}

// ---- launchers ------------------------------------------------------------------------------------------------------

ok_status ok_quantize_q8_0(ok_queue *queue, void *blocks, const void *src, ok_dtype src_dtype, int64_t rows,
                           int64_t cols, int32_t *overflow) {
    if (ok_status status = ok::check_quantize(__func__, queue, blocks, src, src_dtype, rows, cols)) return status;
    if (rows == 0) return OK_SUCCESS;
    return ok::submit(queue, run_quantize,
                      QuantizeArgs{static_cast<ok::Q8Block *>(blocks), src, src_dtype, rows, cols, overflow});
}
