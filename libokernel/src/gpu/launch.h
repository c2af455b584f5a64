// launch.h: how a launcher hands a kernel to its queue: LAUNCH, the one macro with a body for each maker.
#pragma once
#include "program.h"
#include "status.h"

namespace ok {

// Blocks in each direction; a launcher may say int64_t and is refused, not cut, where the hardware's limits end.
struct Grid {
    int64_t x, y = 1, z = 1;
};

constexpr int kMaxArguments = 24;

// Runs `kernel` now or records it. `kernel` is what KERNEL_HANDLE made; each argument lies in a word of its own.
ok_status launch(ok_queue *queue, const void *kernel, Grid grid, int32_t threads, const uint64_t *arguments,
                 int32_t count);

// Whether a launch costs more than what operations do twice when they share one: OKERNEL_FUSED says (0 or 1), else where
// launches wait for each other. Where the next kernel comes early (NVIDIA), sharing was measured to be 6 % slower.
bool prefers_fused();

// Converts the launcher's arguments to the kernel's own parameter types and packs them.
template <class Signature>
struct Launcher;
template <class... P>
struct Launcher<void(P...)> {
    static_assert(sizeof...(P) <= kMaxArguments);
    static ok_status launch(ok_queue *queue, const void *kernel, Grid grid, int32_t threads, P... values) {
        uint64_t words[sizeof...(P)] = {};
        int32_t count = 0;
        ((memcpy(&words[count++], &values, sizeof values)), ...);
        return ok::launch(queue, kernel, grid, threads, words, count);
    }
};

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

#if defined(OK_HOST_HALF)
// A kernel of a code object, found by name on each device where it is first launched.
struct KernelSlot {
    const char *name;
    void *function[16];
};
#define KERNEL_HANDLE(kernel)                       \
    ([]() -> const void * {                         \
        static ok::KernelSlot slot = {#kernel, {}}; \
        return &slot;                               \
    }())
#elif defined(__CUDACC__)
#define KERNEL_HANDLE(kernel) reinterpret_cast<const void *>(&ok::kernel)
#elif defined(__HIP__)
#define KERNEL_HANDLE(kernel) nullptr  // launchers are only parsed here; OK_HOST_HALF makes code of them
#else
#define KERNEL_HANDLE(kernel) reinterpret_cast<const void *>(&standin::invoke<ok::kernel>)
#endif

}  // namespace ok

// LAUNCH(queue, kernel, Grid, threads, arguments...): an expression of type ok_status.
#define LAUNCH(queue, kernel, grid, threads, ...) \
    (ok::Launcher<decltype(ok::kernel)>::launch(queue, KERNEL_HANDLE(kernel), grid, threads, __VA_ARGS__))

// The same for <op>_f32_kernel, _f16_, _bf16_ and, of weight matrices, _q8_0_.
#define LAUNCH_FLOAT(op, dtype, queue, grid, threads, ...)                            \
    ((dtype) == OK_F32   ? LAUNCH(queue, op##_f32_kernel, grid, threads, __VA_ARGS__) \
     : (dtype) == OK_F16 ? LAUNCH(queue, op##_f16_kernel, grid, threads, __VA_ARGS__) \
                         : LAUNCH(queue, op##_bf16_kernel, grid, threads, __VA_ARGS__))
#define LAUNCH_MATRIX(op, dtype, queue, grid, threads, ...)                           \
    ((dtype) == OK_Q8_0 ? LAUNCH(queue, op##_q8_0_kernel, grid, threads, __VA_ARGS__) \
                        : LAUNCH_FLOAT(op, dtype, queue, grid, threads, __VA_ARGS__))
