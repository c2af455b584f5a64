// runtime.h: the few things that the library asks of a GPU runtime, as one table: HIP found at run time, CUDA, or the
// stand-in.
#pragma once
#include <cstddef>
#include <cstdint>

#include "launch.h"
#include "okernel.h"

namespace ok {

constexpr int kMaxDevices = 16;

// Handles are the runtime's own, passed around as void *. Functions return 0 or the runtime's error code.
struct Runtime {
    const char *backend;  // "hip", "cuda"
    const char *path;     // of the library; "" where it is linked statically
    int version;

    int (*get_device_count)(int *count);
    int (*set_device)(int device);
    int (*get_name)(char *name, int size, int device);
    int (*get_arch)(char *arch, int size, int device);
    int (*get_memory)(size_t *free, size_t *total);
    const char *(*error_text)(int error);

    int (*allocate)(void **out, size_t bytes);
    int (*release)(void *memory);
    int (*allocate_host)(void **out, size_t bytes);  // pinned
    int (*release_host)(void *memory);
    int (*copy)(void *dst, const void *src, size_t bytes, void *stream);
    int (*fill)(void *dst, int value, size_t bytes, void *stream);

    int (*create_stream)(void **out);
    int (*destroy_stream)(void *stream);
    int (*sync_stream)(void *stream);
    int (*create_event)(void **out);
    int (*destroy_event)(void *event);
    int (*record_event)(void *event, void *stream);
    int (*sync_event)(void *event);
    int (*elapsed)(float *milliseconds, void *begin, void *end);

    // Says OK_ERR_UNAVAILABLE where this build has no code for the device; `arch` as get_arch says.
    ok_status (*usable)(const char *function, int device, const char *arch);
    // Makes the kernels ready on the device; called once for each, before its first queue.
    ok_status (*load)(const char *function, int device);
    // Looks the kernel up, so that a launch under capture has nothing left to load.
    int (*prepare)(const void *kernel, int device);
    int (*launch)(const void *kernel, int device, const uint32_t grid[3], uint32_t threads, void *stream,
                  void **arguments);
    bool launches_overlap;  // the next kernel comes while one runs, and waits beside it

    // Graphs; null where there are none. Trusted ones need no self-test.
    bool graphs_trusted;
    int (*begin_capture)(void *stream);
    int (*end_capture)(void *stream, void **graph);  // the executable graph
    int (*launch_graph)(void *graph, void *stream);
    int (*destroy_graph)(void *graph);
};

// The runtime in use, found at the first call; null after a failure, which is then told as `function`'s.
const Runtime *runtime(const char *function);

// OK_ERR_UNAVAILABLE with the reason why the runtime sees no device; `error` is what it said, or 0.
ok_status no_device(const char *function, int error);

// OK_SUCCESS, or the message of a runtime's error.
ok_status check_runtime(int error, const char *function, const char *call);

// Makes `device` the calling thread's.
ok_status enter_device(const char *function, int32_t device);

// One queue operation that is not a kernel; runs now or is recorded.
ok_status launch_copy(ok_queue *queue, void *dst, const void *src, uint64_t bytes);
ok_status launch_fill(ok_queue *queue, void *dst, uint8_t value, uint64_t bytes);

// Whether captured graphs replay rightly on this device, and faster than the loop (probe.hip).
bool graph_self_test(int32_t device);
ok_status capture_program(const char *function, ok_program *program);
double seconds_now();

// Whether [p, p + bytes) lies in an arena of this library.
bool in_arena(const void *p, uint64_t bytes);

}  // namespace ok
