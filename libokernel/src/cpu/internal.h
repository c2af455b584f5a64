// internal.h: what the CPU build's source files share: errors, queueing, threads, the instruction-set path.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "okernel.h"

struct ok_queue {
    void *scratch = nullptr;
    uint64_t scratch_bytes = 0;
    bool quantized_activations = true;  // q8_0 matmul: activations as int8 per row and 32 values, or f32
    ok_program *recording = nullptr;    // null: immediate
};

namespace ok {

// Keeps the message for ok_last_error() and returns `status`. By convention "function: argument=value must be ...".
[[gnu::format(printf, 2, 3)]] ok_status fail(ok_status status, const char *format, ...);

// Appends a launch to the recording: `run` and a copy of its `bytes` of arguments.
ok_status append_launch(ok_queue *queue, void (*run)(const void *), const void *args, size_t bytes);

// Runs a launch now, or records it. Arguments were checked before; Args is a plain struct of pointers and scalars.
template <class Args>
static inline ok_status submit(ok_queue *queue, void (*run)(const Args &), const Args &args) {
    static_assert(std::is_trivially_copyable_v<Args>);
    if (queue->recording)
        return append_launch(queue, reinterpret_cast<void (*)(const void *)>(run), &args, sizeof args);
    run(args);
    return OK_SUCCESS;
}

// Runs task(context, i) for i in [0, tasks) on the pool, in any order and on any thread; returns when all are done.
// Results must not depend on who runs what. Few or tiny tasks run on the caller alone.
void run_parallel(int64_t tasks, void (*task)(void *context, int64_t index), void *context);

template <class F>
static inline void parallel_for(int64_t tasks, F &&body) {
    using Body = std::remove_reference_t<F>;
    run_parallel(tasks, [](void *context, int64_t index) { (*static_cast<Body *>(context))(index); }, &body);
}

// The instruction-set path in force. Files named <op>_<path>.cpp are compiled for that path and hold nothing else.
enum class Path { portable, avx2, avx512, avx512vnni, neon, neondot };
Path path();

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace ok
