// types.h: the language part of HIP for the stand-in: keywords, dim3, vector types, bit casts, device maths.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#undef __noinline__
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define amdgpu_flat_work_group_size(...) /* the names of attributes that only AMD's targets know */
#define amdgpu_waves_per_eu(...)
#define __AMDGCN_WAVEFRONT_SIZE STANDIN_WAVE_SIZE
#define __AMDGCN_WAVEFRONT_SIZE__ STANDIN_WAVE_SIZE
constexpr int warpSize = STANDIN_WAVE_SIZE;

// All LDS of a library lies in one section, so that a launch can poison it.
#define __shared__ static __attribute__((section("standin_lds")))
#define HIP_DYNAMIC_SHARED(type, name) type *name = reinterpret_cast<type *>(::standin::dynamic_lds);

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
#define STANDIN_VECTOR(T, N, bytes, ...) \
    struct alignas(bytes) T##N {         \
        T __VA_ARGS__;                   \
    };
STANDIN_VECTOR(float, 2, 8, x, y)
STANDIN_VECTOR(float, 3, 4, x, y, z)
STANDIN_VECTOR(float, 4, 16, x, y, z, w)
STANDIN_VECTOR(int, 2, 8, x, y)
STANDIN_VECTOR(int, 4, 16, x, y, z, w)
STANDIN_VECTOR(uint, 2, 8, x, y)
STANDIN_VECTOR(uint, 4, 16, x, y, z, w)
STANDIN_VECTOR(ushort, 2, 4, x, y)
STANDIN_VECTOR(ushort, 4, 8, x, y, z, w)
STANDIN_VECTOR(char, 4, 4, x, y, z, w)
#undef STANDIN_VECTOR
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(uint x, uint y) { return {x, y}; }
inline uint4 make_uint4(uint x, uint y, uint z, uint w) { return {x, y, z, w}; }

namespace standin {
template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float bf16_to_f32(uint16_t h) { return bits<float>(uint32_t(h) << 16); }
}  // namespace standin

inline float __uint_as_float(uint x) { return standin::bits<float>(x); }
inline uint __float_as_uint(float x) { return standin::bits<uint>(x); }
inline float __int_as_float(int x) { return standin::bits<float>(x); }
inline int __float_as_int(float x) { return standin::bits<int>(x); }

typedef _Float16 __half;
inline float __half2float(__half h) { return float(h); }
inline __half __float2half(float f) { return __half(f); }

// Host maths are more exact than the card's: a comparison of values needs the tolerance of the card's functions anyway.
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __builtin_amdgcn_rcpf(float x) { return 1.0f / x; }
inline float __builtin_amdgcn_rsqf(float x) { return 1.0f / sqrtf(x); }
inline float __builtin_amdgcn_sqrtf(float x) { return sqrtf(x); }
inline float __builtin_amdgcn_exp2f(float x) { return exp2f(x); }
inline float __builtin_amdgcn_logf(float x) { return log2f(x); }
inline float __builtin_amdgcn_fmed3f(float a, float b, float c) { return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c)); }

inline int __popc(uint x) { return __builtin_popcount(x); }
inline int __popcll(uint64_t x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(uint(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(uint64_t(x)) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline uint __brev(uint x) { return __builtin_bitreverse32(x); }
inline uint __umulhi(uint a, uint b) { return uint(uint64_t(a) * b >> 32); }
inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
template <class T>
inline T __ldg(const T *p) {
    return *p;
}
#define STANDIN_MIN_MAX(T)                           \
    inline T min(T a, T b) { return b < a ? b : a; } \
    inline T max(T a, T b) { return a < b ? b : a; }
STANDIN_MIN_MAX(int)
STANDIN_MIN_MAX(unsigned)
STANDIN_MIN_MAX(long)
STANDIN_MIN_MAX(unsigned long)
STANDIN_MIN_MAX(long long)
STANDIN_MIN_MAX(unsigned long long)
#undef STANDIN_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
