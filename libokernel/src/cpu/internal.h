// internal.h: what the CPU build's source files share: errors, queueing, threads, the instruction-set path.
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "program.h"
#include "status.h"

// For a loop whose pointers are equal or do not overlap: every element is read before it is written.
#if defined(__clang__)
#define OK_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define OK_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace ok {

// Runs a launch now, or records it. Arguments were checked before; Args is a plain struct of pointers and scalars.
template <class Args>
static inline ok_status submit(ok_queue *queue, void (*run)(const Args &), const Args &args) {
    struct Bound {
        void (*run)(const Args &);
        Args args;
    } bound = {run, args};
    static_assert(std::is_trivially_copyable_v<Bound>);
    auto call = [](const void *launch) {
        const Bound *bound = static_cast<const Bound *>(launch);
        bound->run(bound->args);
    };
    if (queue->recording) return append_launch(queue, call, &bound, sizeof bound);
    run(args);
    return OK_SUCCESS;
}

// Runs task(context, i) for i in [0, tasks) on the pool, in any order and on any thread; returns when all are done.
// Results must not depend on who runs what. A single task, or any while the pool is busy, runs on the caller alone.
void run_parallel(int64_t tasks, void (*task)(void *context, int64_t index), void *context);

template <class F>
static inline void parallel_for(int64_t tasks, F &&body) {
    using Body = std::remove_reference_t<F>;
    run_parallel(tasks, [](void *context, int64_t index) { (*static_cast<Body *>(context))(index); }, &body);
}

// Splits [0, n) into neighbouring ranges of `grain` (the last may be shorter) and runs body(begin, end) for each.
// Choose the grain so that a range is worth handing to another thread: some 10 microseconds.
template <class F>
static inline void parallel_ranges(int64_t n, int64_t grain, F &&body) {
    parallel_for((n + grain - 1) / grain, [&](int64_t i) {
        int64_t begin = i * grain, end = begin + grain;
        body(begin, end < n ? end : n);
    });
}

// The instruction-set path in force. Files named <op>_<path>.cpp are compiled for that path and hold nothing else.
enum class Path { portable, avx2, avx512, avx512vnni, neon, neondot };
Path path();

static constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many of `rows` an operation works on: all, or those before *active. Read when the operation runs.
static inline int64_t active_rows(const int32_t *active, int64_t rows) {
    if (!active || *active >= rows) return rows;
    return *active < 0 ? 0 : *active;
}

}  // namespace ok
