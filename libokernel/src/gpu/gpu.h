// gpu.h: the language the kernels are written in, the same for AMD, NVIDIA, the CPU stand-in and a host compiler.
//
// A kernel file holds kernels and, below them, the launchers. It is read by four compilers:
//   clang for AMD (device code only), nvcc, clang with the stand-in for <hip/hip_runtime.h> (tests), and, for the host
//   half of the HIP build, an ordinary compiler that only looks at the kernels' parameter types (OK_HOST_HALF).
// Kernels take pointers and scalars, are extern "C", and never mention a wave size: kWave is the one constant.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(OK_HOST_HALF)
#include "host_half.h"
#elif defined(__CUDACC__)
#include <cuda_fp16.h>
#else
#include <hip/hip_runtime.h>
#endif

#define DEVICE static __device__ __forceinline__
// Blocks have 256 threads unless a launcher says fewer. `blocks`: that should fit on one multiprocessor, which bounds
// the registers on NVIDIA; clang finds that balance itself.
#if defined(__CUDACC__)
#define KERNEL_OF(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#else
#define KERNEL_OF(threads, blocks) extern "C" __global__ void __launch_bounds__(threads)
#endif
#define KERNEL KERNEL_OF(256, 2)

namespace ok {
namespace {

constexpr int kBlock = 256;

#if defined(OK_STANDIN)
constexpr int kWave = STANDIN_WAVE_SIZE;
#elif defined(__HIP_DEVICE_COMPILE__) && defined(__GFX9__)
constexpr int kWave = 64;
#else
constexpr int kWave = 32;
#endif
constexpr int kMaxWaves = 1024 / 32;

// The first thing that every kernel does. On NVIDIA a kernel may be launched while the one before still runs
// (runtime_cuda.cpp): here it waits for that one's end, before it touches memory.
DEVICE void begin_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next kernel's blocks come and wait beside this one's. That hides the launch, and pays in kernels of a decode;
// where blocks are large, they would be spread unevenly over what is free early.
DEVICE void start_next() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Both, for kernels whose grid has a row in x.
DEVICE void begin_rows() {
    begin_kernel();
    if (gridDim.x <= 16) start_next();
}

DEVICE int lane_index() { return threadIdx.x % kWave; }
DEVICE int wave_index() { return threadIdx.x / kWave; }
DEVICE int wave_count() { return (blockDim.x + kWave - 1) / kWave; }

// ---- what the lanes of a wave do together; all lanes of the wave must take part -----------------------------------

#if defined(__CUDACC__)
template <class T>
DEVICE T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class T>
DEVICE T shuffle(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}
template <class T>
DEVICE T shuffle_up(T value, int distance) {
    return __shfl_up_sync(0xffffffffu, value, distance);
}
#else
template <class T>
DEVICE T shuffle_xor(T value, int mask) {
    return __shfl_xor(value, mask);
}
template <class T>
DEVICE T shuffle(T value, int lane) {
    return __shfl(value, lane);
}
template <class T>
DEVICE T shuffle_up(T value, int distance) {
    return __shfl_up(value, distance);
}
#endif

struct Add {
    template <class T>
    DEVICE T of(T a, T b) {
        return a + b;
    }
};
struct Max {
    template <class T>
    DEVICE T of(T a, T b) {
        return a < b ? b : a;
    }
};

// Combines the values of `width` neighbouring lanes (a power of two); each of them gets the result.
template <class Op, class T>
DEVICE T reduce_lanes(T value, int width) {
    for (int mask = width / 2; mask > 0; mask /= 2) value = Op::of(value, shuffle_xor(value, mask));
    return value;
}
template <class Op, class T>
DEVICE T reduce_wave(T value) {
#pragma unroll
    for (int mask = kWave / 2; mask > 0; mask /= 2) value = Op::of(value, shuffle_xor(value, mask));
    return value;
}

// Combines the values of all threads of the block, in a fixed order; each gets the result. Holds two barriers.
template <class Op, class T>
DEVICE T reduce_block(T value) {
    __shared__ T partial[kMaxWaves];
    value = reduce_wave<Op>(value);
    if (lane_index() == 0) partial[wave_index()] = value;
    __syncthreads();
    value = partial[0];
    for (int wave = 1; wave < wave_count(); ++wave) value = Op::of(value, partial[wave]);
    __syncthreads();
    return value;
}

// ---- storage types ------------------------------------------------------------------------------------------------

#if defined(__CUDACC__)
typedef __half f16;
#elif defined(OK_HOST_HALF)
typedef HostHalf f16;
#else
typedef _Float16 f16;
#endif
struct bf16 {
    uint16_t bits;
};
DEVICE float widen(float x) { return x; }
DEVICE float widen(f16 x) { return static_cast<float>(x); }
DEVICE float widen(bf16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }

// Rounds to nearest even; a value out of range becomes infinite and a NaN stays one.
template <class T>
__device__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ f16 narrow<f16>(float x) {
    return static_cast<f16>(x);
}
template <>
__device__ __forceinline__ bf16 narrow<bf16>(float x) {
    uint32_t bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>(bits >> 16 | 0x40)};
    return bf16{static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

DEVICE bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// Loads and stores a trivial type of 4, 8 or 16 bytes, which is its alignment, in one instruction. (On clang a native
// vector: of a struct of four words it would make loads of the members that are used.)
#if defined(__clang__) && !defined(__CUDACC__)
typedef uint32_t Words2 __attribute__((ext_vector_type(2)));
typedef uint32_t Words4 __attribute__((ext_vector_type(4)));
#else
typedef uint2 Words2;
typedef uint4 Words4;
#endif
template <int bytes>
struct Words;
template <>
struct Words<4> {
    using Type = uint32_t;
};
template <>
struct Words<8> {
    using Type = Words2;
};
template <>
struct Words<16> {
    using Type = Words4;
};
template <class T>
DEVICE T load_aligned(const void *p) {
    const auto words = *static_cast<const typename Words<sizeof(T)>::Type *>(p);
    T value;
    memcpy(&value, &words, sizeof value);
    return value;
}
template <class T>
DEVICE void store_aligned(void *p, const T &value) {
    typename Words<sizeof(T)>::Type words;
    memcpy(&words, &value, sizeof words);
    *static_cast<typename Words<sizeof(T)>::Type *>(p) = words;
}

// Sixteen bytes as values of T.
template <class T>
struct Chunk {
    static constexpr int kSize = 16 / sizeof(T);
    alignas(16) T value[kSize];
};
template <class T>
DEVICE Chunk<T> load_chunk(const T *p) {
    return load_aligned<Chunk<T>>(p);
}

// How many of `rows` an operation works on: all, or those before *active.
DEVICE int64_t active_rows(const int32_t *active, int64_t rows) {
    if (!active || *active >= rows) return rows;
    return *active < 0 ? 0 : *active;
}

// Grids of (rows, columns): rows may be many, so they lie in x.
DEVICE int64_t column() { return static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x; }
DEVICE int64_t global_thread() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

}  // namespace
}  // namespace ok

#include "launch.h"
