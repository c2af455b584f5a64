// runtime_cuda.cpp: the runtime table over CUDA's runtime, which is linked statically.
#include <cuda_runtime_api.h>
#include <pthread.h>

#include <cstdio>

#include "runtime.h"

namespace {

cudaStream_t stream_of(void *stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(void *event) { return static_cast<cudaEvent_t>(event); }

int get_arch(char *arch, int size, int device) {
    int major = 0, minor = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (!error) error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    snprintf(arch, size, "sm_%d%d", major, minor);
    return error;
}

int get_name(char *name, int size, int device) {
    static cudaDeviceProp properties;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    cudaError_t error = cudaGetDeviceProperties(&properties, device);
    snprintf(name, size, "%s", error ? "" : properties.name);
    pthread_mutex_unlock(&lock);
    return error;
}

// The oldest architecture with code here; the PTX of the newest serves what came after it.
ok_status usable(const char *function, int device, const char *arch) {
    int major = 0;
    sscanf(arch, "sm_%d", &major);
    if (major / 10 >= OKERNEL_CUDA_OLDEST / 10) return OK_SUCCESS;
    return ok::fail(OK_ERR_UNAVAILABLE, "%s: device %d: this library was built for %s; found %s", function, device,
                    ok_targets(), arch);
}

ok_status load(const char *function, int device) {
    char arch[32];
    if (ok_status status = ok::check_runtime(get_arch(arch, sizeof arch, device), function, "cudaDeviceGetAttribute"))
        return status;
    return usable(function, device, arch);
}

int prepare(const void *kernel, int) {
    cudaFuncAttributes attributes;
    return cudaFuncGetAttributes(&attributes, kernel);
}

int launch(const void *kernel, int, const uint32_t grid[3], uint32_t threads, void *stream, void **arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(grid[0], grid[1], grid[2]);
    config.blockDim = dim3(threads);
    config.stream = stream_of(stream);
    // The kernel may start before the one ahead of it has ended: begin_kernel waits for that.
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = OKERNEL_CUDA_OLDEST >= 90;
    return cudaLaunchKernelExC(&config, kernel, arguments);
}

int end_capture(void *stream, void **out) {
    cudaGraph_t graph = nullptr;
    cudaError_t error = cudaStreamEndCapture(stream_of(stream), &graph);
    if (error) return error;
    cudaGraphExec_t executable = nullptr;
    error = cudaGraphInstantiate(&executable, graph, 0);
    cudaGraphDestroy(graph);
    *out = executable;
    return error;
}

ok::Runtime table = {
    "cuda",
    "",
    0,
    [](int *count) -> int { return cudaGetDeviceCount(count); },
    [](int device) -> int { return cudaSetDevice(device); },
    get_name,
    get_arch,
    [](size_t *free, size_t *total) -> int { return cudaMemGetInfo(free, total); },
    [](int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); },

    [](void **out, size_t bytes) -> int { return cudaMalloc(out, bytes); },
    [](void *memory) -> int { return cudaFree(memory); },
    [](void **out, size_t bytes) -> int { return cudaMallocHost(out, bytes); },
    [](void *memory) -> int { return cudaFreeHost(memory); },
    [](void *dst, const void *src, size_t bytes, void *stream) -> int {
        return cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, stream_of(stream));
    },
    [](void *dst, int value, size_t bytes, void *stream) -> int {
        return cudaMemsetAsync(dst, value, bytes, stream_of(stream));
    },

    [](void **out) -> int {
        return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t *>(out), cudaStreamNonBlocking);
    },
    [](void *stream) -> int { return cudaStreamDestroy(stream_of(stream)); },
    [](void *stream) -> int { return cudaStreamSynchronize(stream_of(stream)); },
    [](void **out) -> int { return cudaEventCreate(reinterpret_cast<cudaEvent_t *>(out)); },
    [](void *event) -> int { return cudaEventDestroy(event_of(event)); },
    [](void *event, void *stream) -> int { return cudaEventRecord(event_of(event), stream_of(stream)); },
    [](void *event) -> int { return cudaEventSynchronize(event_of(event)); },
    [](float *milliseconds, void *begin, void *end) -> int {
        return cudaEventElapsedTime(milliseconds, event_of(begin), event_of(end));
    },

    usable,
    load,
    prepare,
    launch,
    true,

    true,
    [](void *stream) -> int { return cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeRelaxed); },
    end_capture,
    [](void *graph, void *stream) -> int {
        return cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream));
    },
    [](void *graph) -> int { return cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); },
};

}  // namespace

const char *ok_targets() { return OKERNEL_TARGETS; }

const ok::Runtime *ok::runtime(const char *) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, [] { cudaRuntimeGetVersion(&table.version); });
    return &table;
}

ok_status ok::no_device(const char *function, int error) {
    return fail(OK_ERR_UNAVAILABLE, "%s: the CUDA runtime sees no device%s%s", function, error ? ": " : "",
                error ? cudaGetErrorString(static_cast<cudaError_t>(error)) : "");
}
