// host.h: the part of HIP's runtime that the library uses, for the stand-in: synchronous, with guarded, poisoned memory.
#pragma once
#include <time.h>

#include "block.h"

typedef struct standin_event {
    double milliseconds;
} *hipEvent_t;
enum hipMemcpyKind {
    hipMemcpyHostToHost = 0,
    hipMemcpyHostToDevice = 1,
    hipMemcpyDeviceToHost = 2,
    hipMemcpyDeviceToDevice = 3,
    hipMemcpyDefault = 4
};

inline const char *hipGetErrorString(hipError_t error) {
    switch (error) {
        case hipSuccess:
            return "no error";
        case hipErrorInvalidValue:
            return "invalid argument";
        case hipErrorOutOfMemory:
            return "out of memory";
        case hipErrorInvalidDevice:
            return "invalid device ordinal";
        case hipErrorNotSupported:
            return "not supported by the stand-in";
        case hipErrorNotReady:
            return "not ready";
        default:
            return standin::message;  // a launch failed: what happened, and where
    }
}

namespace standin {
// Memory that ends at a page that cannot be touched and starts as 0xff bytes: NaN in every float type, -1 as an integer.
// alignment: a power of two; with one that divides `bytes` there is no slack before the guard.
inline void *guarded_alloc(size_t bytes, size_t alignment) {
    const size_t used = (bytes + alignment - 1) / alignment * alignment;
    const size_t whole = (used + page_bytes - 1) / page_bytes * page_bytes;
    char *base = static_cast<char *>(pages(page_bytes + whole + page_bytes));  // header, memory, guard
    if (!base) return nullptr;
    *reinterpret_cast<size_t *>(base) = page_bytes + whole + page_bytes;
    char *guard = base + page_bytes + whole;
    mprotect(guard, page_bytes, PROT_NONE);
    constexpr size_t poisoned_at_most = size_t(256) << 20;
    memset(guard - used, 0xff, used < poisoned_at_most ? used : poisoned_at_most);
    return guard - used;
}
inline void guarded_free(void *p) {
    if (!p) return;
    const uintptr_t first_page = reinterpret_cast<uintptr_t>(p) / page_bytes * page_bytes;
    char *base = reinterpret_cast<char *>(first_page - page_bytes);
    munmap(base, *reinterpret_cast<size_t *>(base));
}
}  // namespace standin

inline hipError_t hipMalloc(void **out, size_t bytes) {
    *out = standin::guarded_alloc(bytes, 256);
    return *out ? hipSuccess : hipErrorOutOfMemory;
}
template <class T>
inline hipError_t hipMalloc(T **out, size_t bytes) {
    return hipMalloc(reinterpret_cast<void **>(out), bytes);
}
inline hipError_t hipFree(void *p) {
    standin::guarded_free(p);
    return hipSuccess;
}
inline hipError_t hipHostMalloc(void **out, size_t bytes, unsigned = 0) { return hipMalloc(out, bytes); }
inline hipError_t hipHostFree(void *p) { return hipFree(p); }
inline hipError_t hipMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = *total_bytes = size_t(8) << 30;
    return hipSuccess;
}

inline hipError_t hipMemcpy(void *to, const void *from, size_t bytes, hipMemcpyKind) {
    memmove(to, from, bytes);
    return hipSuccess;
}
inline hipError_t hipMemcpyAsync(void *to, const void *from, size_t bytes, hipMemcpyKind kind, hipStream_t) {
    return hipMemcpy(to, from, bytes, kind);
}
inline hipError_t hipMemset(void *to, int value, size_t bytes) {
    memset(to, value, bytes);
    return hipSuccess;
}
inline hipError_t hipMemsetAsync(void *to, int value, size_t bytes, hipStream_t) { return hipMemset(to, value, bytes); }

inline hipError_t hipGetDeviceCount(int *count) {
    *count = 1;
    return hipSuccess;
}
inline hipError_t hipSetDevice(int device) { return device == 0 ? hipSuccess : hipErrorInvalidDevice; }
inline hipError_t hipGetDevice(int *device) {
    *device = 0;
    return hipSuccess;
}
inline hipError_t hipDeviceGetName(char *name, int size, int) {
    snprintf(name, size_t(size), "stand-in, wave%u", standin::wave_size);
    return hipSuccess;
}
inline hipError_t hipRuntimeGetVersion(int *version) {
    *version = 0;
    return hipSuccess;
}
inline hipError_t hipDriverGetVersion(int *version) { return hipRuntimeGetVersion(version); }
inline hipError_t hipDeviceSynchronize() { return hipSuccess; }
inline hipError_t hipGetLastError() { return hipSuccess; }

inline hipError_t hipStreamCreate(hipStream_t *stream) {
    *stream = nullptr;
    return hipSuccess;
}
inline hipError_t hipStreamCreateWithFlags(hipStream_t *stream, unsigned) { return hipStreamCreate(stream); }
inline hipError_t hipStreamDestroy(hipStream_t) { return hipSuccess; }
inline hipError_t hipStreamSynchronize(hipStream_t) { return hipSuccess; }

inline hipError_t hipEventCreate(hipEvent_t *event) {
    *event = static_cast<hipEvent_t>(calloc(1, sizeof **event));
    return *event ? hipSuccess : hipErrorOutOfMemory;
}
inline hipError_t hipEventDestroy(hipEvent_t event) {
    free(event);
    return hipSuccess;
}
inline hipError_t hipEventRecord(hipEvent_t event, hipStream_t = nullptr) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->milliseconds = double(now.tv_sec) * 1e3 + double(now.tv_nsec) * 1e-6;
    return hipSuccess;
}
inline hipError_t hipEventSynchronize(hipEvent_t) { return hipSuccess; }
inline hipError_t hipEventElapsedTime(float *milliseconds, hipEvent_t begin, hipEvent_t end) {
    *milliseconds = float(end->milliseconds - begin->milliseconds);
    return hipSuccess;
}

// A function handle is standin::invoke<kernel>; `extra` (packed arguments) has no stand-in.
inline hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned lds_bytes,
                                        hipStream_t, void **params, void **extra) {
    if (!function || extra) return hipErrorInvalidValue;
    return standin::launch(function, dim3(grid_x, grid_y, grid_z), dim3(block_x, block_y, block_z), lds_bytes, params);
}
template <auto kernel, class... A>
inline hipError_t standin_launch(dim3 grid, dim3 block, size_t lds_bytes, A... arguments) {
    return standin::Invoke<kernel>::with(grid, block, lds_bytes, arguments...);
}
#define hipLaunchKernelGGL(kernel, grid, block, lds_bytes, stream, ...) \
    ((void)(stream), standin_launch<kernel>(dim3(grid), dim3(block), lds_bytes, ##__VA_ARGS__))
