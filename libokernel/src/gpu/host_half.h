// host_half.h: just enough for an ordinary C++ compiler to parse the kernels. It needs their parameter types to launch
// them through HIP's module interface; their bodies are inline functions that nothing calls, so no code comes of them.
#pragma once
#include <math.h>
#include <stdint.h>

#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static

struct Index {
    unsigned x, y, z;
};
extern const Index threadIdx, blockIdx, blockDim, gridDim;

struct HostHalf {
    uint16_t bits;
    HostHalf() = default;
    explicit HostHalf(float);
    explicit operator float() const;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

void __syncthreads();
template <class T>
T __shfl_xor(T value, int mask);
template <class T>
T __shfl(T value, int lane);
template <class T>
T __shfl_up(T value, int distance);
uint64_t __ballot(int predicate);
template <class T, class U>
T atomicAdd(T *p, U value);
template <class T, class U>
T atomicMax(T *p, U value);
float __uint_as_float(uint32_t bits);
uint32_t __float_as_uint(float value);
uint32_t __umulhi(uint32_t a, uint32_t b);
int __popcll(uint64_t bits);
int __ffsll(long long bits);
