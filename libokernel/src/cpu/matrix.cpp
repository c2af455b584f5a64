// matrix.cpp: packs plain rows into the layouts of matrix.h and reads them back. Traffic: each value once in, once out.
#include "matrix.h"

#include <cstring>

#include "checks.h"
#include "half.h"
#include "internal.h"

namespace {

using namespace ok;

constexpr int64_t kStretch = 256;  // values of a row that are converted at a time
static_assert(kStretch % q8_block == 0);

// Element types of packed and plain rows.
struct F32 {
    using Bits = uint32_t;
    static constexpr Bits infinity = f32_infinity;
    static float widen(Bits bits) { return bits_float(bits); }
    static Bits narrow(float value) { return float_bits(value); }
};
struct F16 {
    using Bits = uint16_t;
    static constexpr Bits infinity = f16_infinity;
    static float widen(Bits bits) { return f32_from_f16(bits); }
    static Bits narrow(float value) { return f16_from_f32(value); }
};
struct BF16 {
    using Bits = uint16_t;
    static constexpr Bits infinity = bf16_infinity;
    static float widen(Bits bits) { return f32_from_bf16(bits); }
    static Bits narrow(float value) { return bf16_from_f32(value); }
};

// body(E{}) with the element type of a float dtype.
template <class F>
void with_element(ok_dtype dtype, F &&body) {
    if (dtype == OK_F16) return body(F16{});
    if (dtype == OK_BF16) return body(BF16{});
    body(F32{});
}

int64_t element_bytes(ok_dtype dtype) { return dtype == OK_F32 ? 4 : 2; }

template <class E>
void widen(float *to, const typename E::Bits *from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = E::widen(from[i]);
}

// Returns how many finite values became infinite.
template <class E>
int32_t narrow(typename E::Bits *to, const float *from, int64_t n) {
    constexpr typename E::Bits no_sign = static_cast<typename E::Bits>(-1) >> 1;
    int32_t overflow = 0;
    for (int64_t i = 0; i < n; i++) {
        to[i] = E::narrow(from[i]);
        overflow += ((float_bits(from[i]) & 0x7fffffff) < f32_infinity) & ((to[i] & no_sign) == E::infinity);
    }
    return overflow;
}

void widen_blocks(float *to, const Q8Block *blocks, int64_t n) {
    for (; n > 0; n -= q8_block, to += q8_block, blocks++) {
        const float d = f32_from_f16(blocks->scale);
        for (int64_t i = 0; i < (n < q8_block ? n : q8_block); i++) to[i] = static_cast<float>(blocks->quant[i]) * d;
    }
}

// ---- packing --------------------------------------------------------------------------------------------------------

struct PackArgs {
    void *packed;
    ok_dtype dtype;
    int64_t out, in, first_row;
    const char *src;
    ok_dtype src_dtype;
    int64_t rows;
    int32_t *overflow;
};

// The lanes of one panel that a pack writes, and where their plain rows begin.
struct Lanes {
    int64_t begin, end;  // source rows
    bool last;           // the matrix ends here: lanes from `end` on become zeros
    const char *row[panel_size];

    Lanes(const PackArgs &args, int64_t panel) {
        const int64_t first = panel * panel_size, row_bytes = plain_row_bytes(args.src_dtype, args.in);
        begin = args.first_row > first ? args.first_row - first : 0;
        end = args.first_row + args.rows - first;
        if (end > panel_size) end = panel_size;
        last = first + end == args.out;
        for (int64_t lane = begin; lane < end; lane++)
            row[lane] = args.src + (first + lane - args.first_row) * row_bytes;
    }
};

// Stretches of 16 rows, side by side, become a panel's [n][16].
template <class T>
void interleave(T *panel, const T *const *rows, const Lanes &lanes, int64_t n) {
    if (lanes.begin == 0 && lanes.end == panel_size) {
        for (int64_t i = 0; i < n; i++, panel += panel_size)
            for (int lane = 0; lane < panel_size; lane++) panel[lane] = rows[lane][i];
        return;
    }
    for (int64_t i = 0; i < n; i++, panel += panel_size) {
        for (int64_t lane = lanes.begin; lane < lanes.end; lane++) panel[lane] = rows[lane][i];
        for (int64_t lane = lanes.end; lanes.last && lane < panel_size; lane++) panel[lane] = T{};
    }
}

template <class E>
int32_t pack_float_panel(const PackArgs &args, int64_t panel) {
    using T = typename E::Bits;
    const Lanes lanes(args, panel);
    float wide[kStretch];
    alignas(64) T converted[panel_size][kStretch];
    int32_t overflow = 0;
    for (int64_t first = 0; first < args.in; first += kStretch) {
        const int64_t n = args.in - first < kStretch ? args.in - first : kStretch;
        const T *rows[panel_size] = {};
        for (int64_t lane = lanes.begin; lane < lanes.end; lane++) {
            if (args.src_dtype == args.dtype) {
                rows[lane] = reinterpret_cast<const T *>(lanes.row[lane]) + first;
            } else {
                widen_plain_row(wide, lanes.row[lane], args.src_dtype, first, n);
                overflow += narrow<E>(converted[lane], wide, n);
                rows[lane] = converted[lane];
            }
        }
        interleave(static_cast<T *>(args.packed) + panel_index(panel * panel_size, first, args.in), rows, lanes, n);
    }
    return overflow;
}

int32_t pack_q8_panel(const PackArgs &args, int64_t panel) {
    const Lanes lanes(args, panel);
    const Q8Matrix matrix(args.packed, args.out, args.in);
    float wide[kStretch];
    Q8Block converted[kStretch / q8_block];
    int32_t overflow = 0;
    for (int64_t lane = lanes.begin; lane < (lanes.last ? panel_size : lanes.end); lane++) {
        const int64_t output = panel * panel_size + lane;
        for (int64_t first = 0; first < args.in; first += kStretch) {
            const int64_t n = args.in - first < kStretch ? args.in - first : kStretch;
            const Q8Block *blocks = converted;
            if (lane >= lanes.end) {
                memset(converted, 0, sizeof converted);
            } else if (args.src_dtype == OK_Q8_0) {
                blocks = reinterpret_cast<const Q8Block *>(lanes.row[lane]) + first / q8_block;
            } else {
                widen_plain_row(wide, lanes.row[lane], args.src_dtype, first, n);
                overflow += quantize_row(converted, wide, n);
            }
            for (int64_t block = first / q8_block; block < ceil_div(first + n, q8_block); block++, blocks++) {
                matrix.scale_at(output, block) = blocks->scale;
                for (int64_t group = 0; group < q8_block / 4; group++)
                    memcpy(matrix.quants_at(output, block, group), blocks->quant + 4 * group, 4);
            }
        }
    }
    return overflow;
}

void run_pack(const PackArgs &args) {
    const int64_t first_panel = args.first_row / panel_size;
    const int64_t panels = ceil_div(args.first_row + args.rows, panel_size) - first_panel;
    parallel_for(panels, [&](int64_t index) {
        int32_t overflow = 0;
        if (args.dtype == OK_Q8_0)
            overflow = pack_q8_panel(args, first_panel + index);
        else
            with_element(args.dtype,
                         [&](auto type) { overflow = pack_float_panel<decltype(type)>(args, first_panel + index); });
        if (overflow && args.overflow) __atomic_fetch_add(args.overflow, overflow, __ATOMIC_RELAXED);
    });
}

// ---- unpacking ------------------------------------------------------------------------------------------------------

struct UnpackArgs {
    char *dst;
    ok_dtype dst_dtype;
    const void *packed;
    ok_dtype dtype;
    int64_t out, in, first_row, rows;
};

void run_unpack(const UnpackArgs &args) {
    const int64_t row_bytes = plain_row_bytes(args.dst_dtype, args.in);
    parallel_for(args.rows, [&](int64_t index) {
        const int64_t row = args.first_row + index;
        char *dst = args.dst + index * row_bytes;
        if (args.dst_dtype == OK_F32)
            return read_matrix_row(reinterpret_cast<float *>(dst), args.packed, args.dtype, args.out, args.in, row, 0,
                                   args.in);
        const Q8Matrix matrix(args.packed, args.out, args.in);
        Q8Block *blocks = reinterpret_cast<Q8Block *>(dst);
        for (int64_t block = 0; block < matrix.blocks; block++) {
            blocks[block].scale = matrix.scale_at(row, block);
            for (int64_t group = 0; group < q8_block / 4; group++)
                memcpy(blocks[block].quant + 4 * group, matrix.quants_at(row, block, group), 4);
        }
    });
}

}  // namespace

int64_t ok::plain_row_bytes(ok_dtype dtype, int64_t cols) {
    return dtype == OK_Q8_0 ? ceil_div(cols, q8_block) * int64_t{sizeof(Q8Block)} : cols * element_bytes(dtype);
}

void ok::widen_plain_row(float *dst, const void *row, ok_dtype dtype, int64_t first, int64_t n) {
    if (dtype == OK_Q8_0) return widen_blocks(dst, static_cast<const Q8Block *>(row) + first / q8_block, n);
    with_element(dtype, [&](auto type) {
        using E = decltype(type);
        widen<E>(dst, static_cast<const typename E::Bits *>(row) + first, n);
    });
}

void ok::read_matrix_row(float *dst, const void *packed, ok_dtype dtype, int64_t out, int64_t in, int64_t row,
                         int64_t first, int64_t n) {
    const int64_t end = first + n;
    if (dtype == OK_Q8_0) {
        const Q8Matrix matrix(packed, out, in);
        for (int64_t at = first; at < end; at += q8_block) {
            const int64_t block = at / q8_block;
            Q8Block plain = {matrix.scale_at(row, block), {}};
            for (int64_t group = 0; group < q8_block / 4; group++)
                memcpy(plain.quant + 4 * group, matrix.quants_at(row, block, group), 4);
            widen_blocks(dst + at - first, &plain, end - at < q8_block ? end - at : q8_block);
        }
        return;
    }
    with_element(dtype, [&](auto type) {
        using E = decltype(type);
        using T = typename E::Bits;
        const T *from = static_cast<const T *>(packed) + panel_index(row, 0, in);
        T together[kStretch];
        for (int64_t at = first; at < end; at += kStretch) {
            const int64_t count = end - at < kStretch ? end - at : kStretch;
            for (int64_t i = 0; i < count; i++) together[i] = from[(at + i) * panel_size];
            widen<E>(dst + at - first, together, count);
        }
    });
}

// ---- launchers ------------------------------------------------------------------------------------------------------

ok_status ok_matrix_bytes(ok_dtype dtype, int64_t out, int64_t in, uint64_t *host_bytes) {
    OK_REQUIRE_POINTER(host_bytes);
    if (ok_status status = check_matrix(__func__, dtype, out, in)) return status;
    const int64_t panels = ceil_div(out, panel_size);
    *host_bytes = dtype == OK_Q8_0 ? panels * panel_size * ceil_div(in, q8_block) * sizeof(Q8Block)
                                   : panels * panel_size * in * element_bytes(dtype);
    return OK_SUCCESS;
}

ok_status ok_matrix_pack(ok_queue *queue, void *packed, ok_dtype dtype, int64_t out, int64_t in, int64_t first_row,
                         const void *src, ok_dtype src_dtype, int64_t rows, int32_t *overflow) {
    if (ok_status status = check_matrix_pack(__func__, queue, packed, dtype, out, in, first_row, src, src_dtype, rows))
        return status;
    if (rows == 0) return OK_SUCCESS;
    return submit(
        queue, run_pack,
        PackArgs{packed, dtype, out, in, first_row, static_cast<const char *>(src), src_dtype, rows, overflow});
}

ok_status ok_matrix_unpack(ok_queue *queue, void *dst, ok_dtype dst_dtype, const void *packed, ok_dtype dtype,
                           int64_t out, int64_t in, int64_t first_row, int64_t rows) {
    if (ok_status status =
            check_matrix_unpack(__func__, queue, dst, dst_dtype, packed, dtype, out, in, first_row, rows))
        return status;
    if (rows == 0) return OK_SUCCESS;
    return submit(queue, run_unpack,
                  UnpackArgs{static_cast<char *>(dst), dst_dtype, packed, dtype, out, in, first_row, rows});
}
