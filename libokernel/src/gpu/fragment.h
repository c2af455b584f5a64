// fragment.h: the matrix unit, whichever the target has: 16 x 16 tiles of f32 sums that one wave holds in registers.
//
//   RDNA3, wave32   v_wmma_f32_16x16x16_{f16,bf16}         gfx11
//   RDNA4, wave32   the same with 8 values a lane          gfx12
//   CDNA,  wave64   v_mfma_f32_16x16x16_{f16,bf16_1k}      gfx90a, gfx942
//   NVIDIA          mma.sync.m16n8k16, twice               sm_80 and later
//   RDNA2           v_dot2_f32_f16 on a tile of lanes      gfx1030 (f16; it has no bf16 product)
//   all             fused multiply-add on a tile of lanes  f32; and what no unit takes, widened (MatrixType)
//
// And dot4, four products of signed bytes to an exact sum, of the vector unit.
//
// Fragment<T> gives: K, the depth of one step; kUnroll, steps to unroll; Left and Right, what a lane holds of 16 rows
// of each operand; Sum; load_left and load_right from a tile in LDS, tile[row * stride + k], rows aligned to 16 bytes;
// multiply; and where sum i of this lane stands: row(i) of the left operand, column(i) = row of the right one.
#pragma once
#include "gpu.h"

namespace ok {
namespace {

// A tile of lanes: 8 lanes down, kWave / 8 across; each holds 2 rows of the left operand and kColumns of the right one.
template <class T>
struct LaneFragment {
    static constexpr int K = 16 / sizeof(T);
    static constexpr int kUnroll = 1;  // more steps at once would not fit in registers
    static constexpr int kAcross = kWave / 8, kColumns = 16 / kAcross;
    struct Left {
        Chunk<T> row[2];
    };
    struct Right {
        Chunk<T> row[kColumns];
    };
    struct Sum {
        static constexpr int kSize = 2 * kColumns;
        float value[kSize];
    };
    static __device__ Left load_left(const T *tile, int stride) {
        Left left;
#pragma unroll
        for (int i = 0; i < 2; ++i) left.row[i] = load_chunk(tile + (lane_index() % 8 + 8 * i) * stride);
        return left;
    }
    static __device__ Right load_right(const T *tile, int stride) {
        Right right;
#pragma unroll
        for (int j = 0; j < kColumns; ++j) right.row[j] = load_chunk(tile + (lane_index() / 8 + kAcross * j) * stride);
        return right;
    }
    static __device__ void multiply(Sum &sum, const Left &left, const Right &right) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < kColumns; ++j)
                sum.value[i * kColumns + j] = dot(left.row[i], right.row[j], sum.value[i * kColumns + j]);
    }
    static __device__ int row(int i) { return lane_index() % 8 + 8 * (i / kColumns); }
    static __device__ int column(int i) { return lane_index() / 8 + kAcross * (i % kColumns); }

    static __device__ float dot(const Chunk<float> &a, const Chunk<float> &b, float sum) {
#pragma unroll
        for (int k = 0; k < K; ++k) sum = fmaf(a.value[k], b.value[k], sum);
        return sum;
    }
#if defined(__gfx1030__)
    static __device__ float dot(const Chunk<f16> &a, const Chunk<f16> &b, float sum) {
        typedef _Float16 Pair __attribute__((ext_vector_type(2)));
        Pair x[4], y[4];
        memcpy(x, &a, sizeof x);
        memcpy(y, &b, sizeof y);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum = __builtin_amdgcn_fdot2(x[k], y[k], sum, false);
        return sum;
    }
#endif
};

template <class T>
struct Fragment : LaneFragment<T> {};

#if defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__) || defined(__gfx1103__) || \
    defined(__gfx1150__) || defined(__gfx1151__) || defined(__gfx1152__)
#define OK_FRAGMENT_RDNA3 1
#elif defined(__gfx1200__) || defined(__gfx1201__)
#define OK_FRAGMENT_RDNA4 1
#elif defined(__gfx90a__) || defined(__gfx942__)
#define OK_FRAGMENT_CDNA 1
#endif

#if OK_FRAGMENT_RDNA3 || OK_FRAGMENT_RDNA4 || OK_FRAGMENT_CDNA

#if OK_FRAGMENT_RDNA3
constexpr int kUnitValues = 16;  // values of an operand's row that a lane holds; lanes 16 to 31 repeat lanes 0 to 15
#elif OK_FRAGMENT_RDNA4
constexpr int kUnitValues = 8;
#else
constexpr int kUnitValues = 4;
#endif
constexpr int kUnitSums = 256 / kWave;

typedef _Float16 HalfVector __attribute__((ext_vector_type(kUnitValues)));
typedef short ShortVector __attribute__((ext_vector_type(kUnitValues)));  // bf16, as the instructions name it
typedef float SumVector __attribute__((ext_vector_type(kUnitSums)));

#if OK_FRAGMENT_RDNA3
DEVICE SumVector matrix_multiply(HalfVector a, HalfVector b, SumVector c) {
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, c);
}
DEVICE SumVector matrix_multiply(ShortVector a, ShortVector b, SumVector c) {
    return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, c);
}
DEVICE int held_from() { return 0; }
DEVICE int sum_row(int i) { return 2 * i + lane_index() / 16; }
#elif OK_FRAGMENT_RDNA4
DEVICE SumVector matrix_multiply(HalfVector a, HalfVector b, SumVector c) {
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a, b, c);
}
DEVICE SumVector matrix_multiply(ShortVector a, ShortVector b, SumVector c) {
    return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(a, b, c);
}
DEVICE int held_from() { return 8 * (lane_index() / 16); }
DEVICE int sum_row(int i) { return 8 * (lane_index() / 16) + i; }
#else
DEVICE SumVector matrix_multiply(HalfVector a, HalfVector b, SumVector c) {
    return __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0);
}
DEVICE SumVector matrix_multiply(ShortVector a, ShortVector b, SumVector c) {
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0);
}
DEVICE int held_from() { return 4 * (lane_index() / 16); }
DEVICE int sum_row(int i) { return 4 * (lane_index() / 16) + i; }
#endif

template <class T, class Vector>
struct UnitFragment {
    static constexpr int K = 16, kUnroll = 2;
    struct Left {
        Vector value;
    };
    using Right = Left;
    struct Sum {
        static constexpr int kSize = kUnitSums;
        float value[kSize];
    };
    static __device__ Left load_left(const T *tile, int stride) {
        Left left;
        memcpy(
            &left.value,
            __builtin_assume_aligned(tile + (lane_index() % 16) * stride + held_from(), 2 * kUnitValues < 16 ? 8 : 16),
            sizeof left.value);
        return left;
    }
    static __device__ Right load_right(const T *tile, int stride) { return load_left(tile, stride); }
    static __device__ void multiply(Sum &sum, const Left &left, const Right &right) {
        SumVector value;
        memcpy(&value, sum.value, sizeof value);
        value = matrix_multiply(left.value, right.value, value);
        memcpy(sum.value, &value, sizeof value);
    }
    static __device__ int row(int i) { return sum_row(i); }
    static __device__ int column(int) { return lane_index() % 16; }
};
template <>
struct Fragment<f16> : UnitFragment<f16, HalfVector> {};
template <>
struct Fragment<bf16> : UnitFragment<bf16, ShortVector> {};

#elif defined(__CUDACC__)

DEVICE void matrix_multiply(float *c, const uint32_t *a, const uint32_t *b, f16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void matrix_multiply(float *c, const uint32_t *a, const uint32_t *b, bf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Four 8 x 8 tiles of 16-bit values; each lane names one of their 32 rows.
DEVICE void load_tiles(uint32_t *to, const void *row) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

// Sixteen bytes from global memory to LDS without passing a register; they count as one group with all since the last
// fence.
DEVICE void copy_async(void *to, const void *from) {
    const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
}
DEVICE void close_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kOpen>
DEVICE void wait_copy_groups() {  // until at most kOpen of this thread's groups are under way
    asm volatile("cp.async.wait_group %0;" ::"n"(kOpen) : "memory");
}

template <class T>
struct UnitFragment {
    static constexpr int K = 16, kUnroll = 2;
    struct Left {
        uint32_t value[4];
    };
    struct Right {
        uint32_t value[4];  // two instructions' worth: rows 0 to 7, then 8 to 15
    };
    struct Sum {
        static constexpr int kSize = 8;
        float value[kSize];
    };
    static __device__ Left load_left(const T *tile, int stride) {
        Left left;
        load_tiles(left.value, tile + lane_index() % 16 * stride + lane_index() / 16 * 8);
        return left;
    }
    static __device__ Right load_right(const T *tile, int stride) {
        Right right;
        load_tiles(right.value, tile + (lane_index() % 8 + lane_index() / 16 * 8) * stride + lane_index() / 8 % 2 * 8);
        return right;
    }
    static __device__ void multiply(Sum &sum, const Left &left, const Right &right) {
        matrix_multiply(sum.value, left.value, right.value, T{});
        matrix_multiply(sum.value + 4, left.value, right.value + 2, T{});
    }
    static __device__ int row(int i) { return lane_index() / 4 + 8 * (i / 2 % 2); }
    static __device__ int column(int i) { return i / 4 * 8 + lane_index() % 4 * 2 + i % 2; }
};
template <>
struct Fragment<f16> : UnitFragment<f16> {};
template <>
struct Fragment<bf16> : UnitFragment<bf16> {};

#endif

// sum + the products of four signed bytes.
DEVICE int32_t dot4(uint32_t a, uint32_t b, int32_t sum) {
#if defined(__CUDACC__)
    return __dp4a(static_cast<int32_t>(a), static_cast<int32_t>(b), sum);
#elif OK_FRAGMENT_RDNA3 || OK_FRAGMENT_RDNA4
    return __builtin_amdgcn_sudot4(true, static_cast<int32_t>(a), true, static_cast<int32_t>(b), sum, false);
#elif OK_FRAGMENT_CDNA || defined(__gfx1030__)
    return __builtin_amdgcn_sdot4(static_cast<int32_t>(a), static_cast<int32_t>(b), sum, false);
#else
    for (int i = 0; i < 32; i += 8) sum += static_cast<int8_t>(a >> i) * static_cast<int8_t>(b >> i);
    return sum;
#endif
}

// The type in which a matrix of T is multiplied: T where the target has a product for it, else f32.
template <class T>
struct MatrixType {
    using Type = float;
};
#if OK_FRAGMENT_RDNA3 || OK_FRAGMENT_RDNA4 || OK_FRAGMENT_CDNA || defined(__CUDACC__) || defined(__gfx1030__)
template <>
struct MatrixType<f16> {
    using Type = f16;
};
#endif
#if OK_FRAGMENT_RDNA3 || OK_FRAGMENT_RDNA4 || OK_FRAGMENT_CDNA || defined(__CUDACC__)
template <>
struct MatrixType<bf16> {
    using Type = bf16;
};
#endif

}  // namespace
}  // namespace ok
