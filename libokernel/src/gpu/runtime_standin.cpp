// runtime_standin.cpp: the runtime table over the CPU stand-in for HIP, so that tests run the whole library without a
// GPU.
#include <hip/hip_runtime.h>

#include "runtime.h"

namespace {

hipStream_t stream_of(void *stream) { return static_cast<hipStream_t>(stream); }
hipEvent_t event_of(void *event) { return static_cast<hipEvent_t>(event); }

int get_arch(char *arch, int size, int) {
    snprintf(arch, static_cast<size_t>(size), "%s", OKERNEL_TARGETS);
    return 0;
}

int allocate(void **out, size_t bytes) {
    size_t free = 0, total = 0;
    hipMemGetInfo(&free, &total);
    return bytes > free ? hipErrorOutOfMemory : hipMalloc(out, bytes);
}

ok::Runtime table = {
    "hip",
    "",
    0,
    [](int *count) -> int { return hipGetDeviceCount(count); },
    [](int device) -> int { return hipSetDevice(device); },
    [](char *name, int size, int device) -> int { return hipDeviceGetName(name, size, device); },
    get_arch,
    [](size_t *free, size_t *total) -> int { return hipMemGetInfo(free, total); },
    [](int error) { return hipGetErrorString(static_cast<hipError_t>(error)); },

    allocate,
    [](void *memory) -> int { return hipFree(memory); },
    [](void **out, size_t bytes) -> int { return hipHostMalloc(out, bytes); },
    [](void *memory) -> int { return hipHostFree(memory); },
    [](void *dst, const void *src, size_t bytes, void *stream) -> int {
        return hipMemcpyAsync(dst, src, bytes, hipMemcpyDefault, stream_of(stream));
    },
    [](void *dst, int value, size_t bytes, void *stream) -> int {
        return hipMemsetAsync(dst, value, bytes, stream_of(stream));
    },

    [](void **out) -> int { return hipStreamCreateWithFlags(reinterpret_cast<hipStream_t *>(out), 1); },
    [](void *stream) -> int { return hipStreamDestroy(stream_of(stream)); },
    [](void *stream) -> int { return hipStreamSynchronize(stream_of(stream)); },
    [](void **out) -> int { return hipEventCreate(reinterpret_cast<hipEvent_t *>(out)); },
    [](void *event) -> int { return hipEventDestroy(event_of(event)); },
    [](void *event, void *stream) -> int { return hipEventRecord(event_of(event), stream_of(stream)); },
    [](void *event) -> int { return hipEventSynchronize(event_of(event)); },
    [](float *milliseconds, void *begin, void *end) -> int {
        return hipEventElapsedTime(milliseconds, event_of(begin), event_of(end));
    },

    [](const char *, int, const char *) { return OK_SUCCESS; },
    [](const char *, int) { return OK_SUCCESS; },
    [](const void *, int) { return 0; },
    [](const void *kernel, int, const uint32_t grid[3], uint32_t threads, void *stream, void **arguments) -> int {
        hipFunction_t function = reinterpret_cast<hipFunction_t>(const_cast<void *>(kernel));
        return hipModuleLaunchKernel(function, grid[0], grid[1], grid[2], threads, 1, 1, 0, stream_of(stream),
                                     arguments, nullptr);
    },
    false,

    false,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

const char *ok_targets() { return OKERNEL_TARGETS; }

const ok::Runtime *ok::runtime(const char *) { return &table; }

ok_status ok::no_device(const char *function, int) {
    return fail(OK_ERR_UNAVAILABLE, "%s: the stand-in has no device", function);
}
