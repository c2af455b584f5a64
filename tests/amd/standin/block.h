// block.h: runs one launch of the stand-in, block after block on the calling thread, each work-item in a fiber.
//
// A fiber is a stack and a saved stack pointer. A lane that reaches a barrier gives the processor back to the scheduler;
// a lane that ends goes straight on with the next lane that has not started, on the same stack: a kernel without barriers
// or shuffles is a plain loop. Faults inside a kernel land in `faulted`, on the lane's own stack, and end the launch.
#pragma once
#include <ctype.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <type_traits>
#include <utility>

#include "types.h"

#if !defined(__x86_64__) || !defined(__clang__)
#error "the stand-in switches fibers with x86-64 code and is written for clang"
#endif

typedef enum hipError_t {
    hipSuccess = 0,
    hipErrorInvalidValue = 1,
    hipErrorOutOfMemory = 2,
    hipErrorInvalidConfiguration = 9,
    hipErrorInvalidDevice = 101,
    hipErrorNotReady = 600,
    hipErrorIllegalAddress = 700,
    hipErrorLaunchFailure = 719,
    hipErrorNotSupported = 801,
} hipError_t;
typedef struct standin_stream *hipStream_t;
typedef void (*hipFunction_t)(void **params);

// Each library has its own LDS section; a library without LDS has none.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_standin_lds[], __stop_standin_lds[];

namespace standin {

constexpr unsigned wave_size = STANDIN_WAVE_SIZE;
constexpr unsigned max_lanes = 1024;
constexpr size_t stack_bytes = 128 << 10;
constexpr size_t page_bytes = 4096;
constexpr size_t max_lds_bytes = 64 << 10;
static_assert(wave_size == 32 || wave_size == 64);

// Lanes wait until all that still run have arrived; `site` is the source line that the first to arrive stands at.
struct Barrier {
    unsigned live = 0, arrived = 0, generation = 0;
    int site = 0;
    void release_when_full() {
        if (live && arrived == live) arrived = 0, site = 0, ++generation;
    }
};

// What the lanes of a warp bring to one exchange.
struct Exchange {
    alignas(64) unsigned char slot[wave_size][128];
    uint64_t present = 0;  // lanes that have brought something
};

// Two exchanges, used in turn: nobody can be two ahead of a lane that has yet to read.
struct Warp : Barrier {
    Exchange exchange[2];
    uint64_t running = 0;
    unsigned first_lane = 0, lanes = 0;
};

struct Lane {
    dim3 thread;
    unsigned index;  // within the warp
    Warp *warp;
    void *stack_pointer;  // null: not started
    char *stack;
    const Barrier *waiting;  // null: may run
    unsigned generation;     // of `waiting` on arrival
    bool done;
};

inline dim3 block_index, block_size, grid_size;
inline Lane lanes[max_lanes];
inline Warp warps[max_lanes / 32];
inline Barrier block_barrier;
inline Lane *self;
inline char *dynamic_lds;

inline void (*kernel)(void **);
inline void **kernel_params;

inline char *free_stacks[max_lanes];
inline unsigned free_stack_count, stack_count;
inline char *all_stacks[max_lanes];
inline void *scheduler_stack_pointer;
inline unsigned order[max_lanes];    // permutation of the lanes of one warp
inline unsigned cursor, cursor_end;  // position in `order` of the pass under way
inline Warp *current_warp;

inline hipError_t error;
inline char message[320] = "";
inline pthread_mutex_t launch_lock = PTHREAD_MUTEX_INITIALIZER;

[[gnu::format(printf, 2, 3)]] inline void fail(hipError_t code, const char *format, ...) {
    if (error != hipSuccess) return;  // the first finding is the one to report
    error = code;
    int n = snprintf(message, sizeof message, "block (%u,%u,%u): ", block_index.x, block_index.y, block_index.z);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message + n, sizeof message - size_t(n), format, arguments);
    va_end(arguments);
}

// Saves this context in *save and continues in `load`.
[[gnu::naked, gnu::noinline]] inline void switch_stack([[maybe_unused]] void **save, [[maybe_unused]] void *load) {
    asm volatile(
        "push %%rbp\n push %%rbx\n push %%r12\n push %%r13\n push %%r14\n push %%r15\n"
        "mov %%rsp, (%%rdi)\n mov %%rsi, %%rsp\n"
        "pop %%r15\n pop %%r14\n pop %%r13\n pop %%r12\n pop %%rbx\n pop %%rbp\n ret" ::
            : "memory");
}

inline void yield() { switch_stack(&self->stack_pointer, scheduler_stack_pointer); }

[[noreturn]] inline void stop_here() {
    for (;;) yield();
}

inline void wait(Barrier &barrier, int site, const char *what) {
    if (barrier.arrived == 0) barrier.site = site;
    if (barrier.site != site) {
        fail(hipErrorLaunchFailure, "divergent %s: lanes stand at lines %d and %d", what, barrier.site, site);
        stop_here();
    }
    self->waiting = &barrier;
    self->generation = barrier.generation;
    ++barrier.arrived;
    barrier.release_when_full();
    while (barrier.generation == self->generation) yield();
    self->waiting = nullptr;
}

inline bool can_run(const Lane &lane) {
    return !lane.done && (!lane.waiting || lane.waiting->generation != lane.generation);
}

// A fiber's whole life: the lane it was made for, then every following lane of the pass that has not started.
[[noreturn]] inline void fiber_main() {
    for (;;) {
        kernel(kernel_params);
        Lane &lane = *self;
        lane.done = true;
        lane.warp->running &= ~(1ull << lane.index);
        Barrier *barriers[] = {lane.warp, &block_barrier};
        for (Barrier *barrier : barriers) {
            --barrier->live;
            barrier->release_when_full();
        }
        if (cursor == cursor_end || error != hipSuccess) break;
        Lane &next = lanes[current_warp->first_lane + order[cursor]];
        if (next.stack_pointer || next.done) break;
        ++cursor;
        next.stack = lane.stack;
        next.stack_pointer = lane.stack;  // not null: started
        lane.stack = nullptr;
        self = &next;
    }
    free_stacks[free_stack_count++] = self->stack;
    stop_here();
}

// Where a faulting lane continues: on its own stack, never to return to the kernel.
[[noreturn]] inline void faulted() { stop_here(); }

inline void **fresh_context(char *stack, void (*entry)()) {
    void **top = reinterpret_cast<void **>(stack + stack_bytes) - 8;
    memset(top, 0, 8 * sizeof *top);
    top[6] = reinterpret_cast<void *>(entry);  // above the six saved registers, where `ret` finds it
    return top;
}

inline void on_fault(int signal, siginfo_t *info, void *context) {
    const dim3 t = self->thread;
    if (signal == SIGFPE)
        fail(hipErrorLaunchFailure, "integer division by zero in thread (%u,%u,%u)", t.x, t.y, t.z);
    else
        fail(hipErrorIllegalAddress, "out-of-bounds access at %p in thread (%u,%u,%u)", info->si_addr, t.x, t.y, t.z);
    greg_t *registers = static_cast<ucontext_t *>(context)->uc_mcontext.gregs;
    registers[REG_RIP] = reinterpret_cast<greg_t>(&faulted);
    registers[REG_RSP] = reinterpret_cast<greg_t>(self->stack + stack_bytes - 8);
}

inline void *pages(size_t bytes) {
    void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}

inline bool have_stacks(unsigned count) {
    for (; stack_count < count; ++stack_count) {
        char *stack = static_cast<char *>(pages(page_bytes + stack_bytes));
        if (!stack) return false;
        mprotect(stack, page_bytes, PROT_NONE);
        all_stacks[stack_count] = stack + page_bytes;
    }
    return true;
}

inline uint64_t random_state = 1;
inline unsigned random_below(unsigned n) {
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return unsigned((random_state >> 33) % n);
}

enum class Order { forward, reverse, random };

// One pass over a warp: runs each lane that can until it waits or ends. Says whether any ran.
inline bool run_warp(Warp &warp, Order how) {
    current_warp = &warp;
    bool ran = false;
    for (unsigned i = 0; i < warp.lanes; ++i) order[i] = how == Order::reverse ? warp.lanes - 1 - i : i;
    for (unsigned i = warp.lanes - 1; how == Order::random && i > 0; --i) {
        unsigned j = random_below(i + 1), kept = order[i];
        order[i] = order[j], order[j] = kept;
    }
    for (cursor = 0, cursor_end = warp.lanes; cursor < cursor_end && error == hipSuccess;) {
        Lane &lane = lanes[warp.first_lane + order[cursor++]];
        if (!can_run(lane)) continue;
        if (!lane.stack_pointer) {
            lane.stack = free_stacks[--free_stack_count];
            lane.stack_pointer = fresh_context(lane.stack, fiber_main);
        }
        self = &lane;
        switch_stack(&scheduler_stack_pointer, lane.stack_pointer);
        ran = true;
    }
    return ran;
}

inline void run_block(unsigned warp_count, unsigned lane_count, Order how) {
    block_barrier = {};
    block_barrier.live = lane_count;
    for (unsigned w = 0; w < warp_count; ++w) {
        Warp &warp = warps[w];
        static_cast<Barrier &>(warp) = {};
        warp.first_lane = w * wave_size;
        warp.lanes = warp.live = lane_count - warp.first_lane < wave_size ? lane_count - warp.first_lane : wave_size;
        warp.running = warp.lanes == 64 ? ~0ull : (1ull << warp.lanes) - 1;
    }
    for (unsigned i = 0; i < lane_count; ++i) {
        Lane &lane = lanes[i];
        lane.thread = dim3(i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y));
        lane.index = i % wave_size;
        lane.warp = &warps[i / wave_size];
        lane.stack_pointer = nullptr;
        lane.stack = nullptr;
        lane.waiting = nullptr;
        lane.done = false;
    }
    memcpy(free_stacks, all_stacks, lane_count * sizeof *free_stacks);
    free_stack_count = lane_count;

    for (bool progress = true; progress && block_barrier.live && error == hipSuccess;) {
        progress = false;
        const unsigned turn = how == Order::random ? random_below(warp_count) : 0;
        for (unsigned w = 0; w < warp_count; ++w) {
            const unsigned pick = how == Order::reverse ? warp_count - 1 - w : (w + turn) % warp_count;
            while (error == hipSuccess && run_warp(warps[pick], how)) progress = true;
        }
    }
    if (error == hipSuccess && block_barrier.live)
        fail(hipErrorLaunchFailure,
             "deadlock: %u lanes wait for a barrier or shuffle that others never reach (line %d)", block_barrier.live,
             block_barrier.site ? block_barrier.site : warps[0].site);
}

inline Order order_asked() {
    const char *name = getenv("STANDIN_ORDER");
    if (!name || !*name) return Order::forward;
    return strcmp(name, "reverse") == 0 ? Order::reverse : strcmp(name, "random") == 0 ? Order::random : Order::forward;
}

// What a kernel is called and takes; `name` is the compiler's text for K and ends in "kernel_name]".
struct Description {
    const char *name;
    const size_t *sizes;
    const bool *pointers;
    unsigned count;
};
inline Description description;

// Appends one line of JSON for a launch to the file that STANDIN_TRACE names, so that the same launch can be run again
// elsewhere: {"kernel", "grid", "block", "lds", "arguments": [[is_pointer, "hexadecimal bytes"], ...]}.
inline void trace(const char *path, hipFunction_t function, dim3 grid, dim3 block, size_t lds_bytes, void **params) {
    FILE *file = fopen(path, "a");
    if (!file) return;
    function(nullptr);
    const char *end = strrchr(description.name, ']'), *begin = end;
    while (begin[-1] == '_' || isalnum(begin[-1])) --begin;
    fprintf(file,
            "{\"kernel\": \"%.*s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"lds\": %zu, \"arguments\": [",
            int(end - begin), begin, grid.x, grid.y, grid.z, block.x, block.y, block.z, lds_bytes);
    for (unsigned i = 0; i < description.count; ++i) {
        fprintf(file, "%s[%s, \"", i ? ", " : "", description.pointers[i] ? "true" : "false");
        for (size_t j = 0; j < description.sizes[i]; ++j) fprintf(file, "%02x", static_cast<uint8_t *>(params[i])[j]);
        fprintf(file, "\"]");
    }
    fprintf(file, "]}\n");
    fclose(file);
}

// Runs grid.x * grid.y * grid.z blocks. params[i] points to the kernel's i-th argument.
inline hipError_t launch(hipFunction_t function, dim3 grid, dim3 block, size_t lds_bytes, void **params) {
    pthread_mutex_lock(&launch_lock);
    error = hipSuccess;
    block_index = dim3(0, 0, 0);
    const uint64_t lane_count = uint64_t(block.x) * block.y * block.z;
    if (lane_count < 1 || lane_count > max_lanes || !grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535)
        fail(hipErrorInvalidConfiguration, "grid (%u,%u,%u) of blocks (%u,%u,%u) cannot be launched", grid.x, grid.y,
             grid.z, block.x, block.y, block.z);
    else if (lds_bytes > max_lds_bytes)
        fail(hipErrorInvalidConfiguration, "%zu bytes of dynamic LDS, at most %zu", lds_bytes, max_lds_bytes);
    else if (!have_stacks(unsigned(lane_count)))
        fail(hipErrorOutOfMemory, "no memory for %u stacks", unsigned(lane_count));

    static char *lds_guard = nullptr;  // dynamic LDS ends here, at a page that cannot be touched
    if (!lds_guard) {
        char *lds = static_cast<char *>(pages(max_lds_bytes + page_bytes));
        lds_guard = lds + max_lds_bytes;
        mprotect(lds_guard, page_bytes, PROT_NONE);
    }
    struct sigaction action = {}, old_segv, old_bus, old_fpe;
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &old_segv);
    sigaction(SIGBUS, &action, &old_bus);
    sigaction(SIGFPE, &action, &old_fpe);
    if (error == hipSuccess) {
        const char *trace_path = getenv("STANDIN_TRACE");
        if (trace_path && *trace_path) trace(trace_path, function, grid, block, lds_bytes, params);
        const Order how = order_asked();
        const unsigned warp_count = (unsigned(lane_count) + wave_size - 1) / wave_size;
        grid_size = grid;
        block_size = block;
        kernel = function;
        kernel_params = params;
        dynamic_lds = lds_guard - (lds_bytes + 15) / 16 * 16;
        memset(dynamic_lds, 0xff, size_t(lds_guard - dynamic_lds));
        if (__start_standin_lds) memset(__start_standin_lds, 0xff, size_t(__stop_standin_lds - __start_standin_lds));
        const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
        for (uint64_t i = 0; i < blocks && error == hipSuccess; ++i) {
            const uint64_t n = how == Order::reverse ? blocks - 1 - i : i;
            block_index = dim3(unsigned(n % grid.x), unsigned(n / grid.x % grid.y), unsigned(n / grid.x / grid.y));
            run_block(warp_count, unsigned(lane_count), how);
        }
    }
    sigaction(SIGSEGV, &old_segv, nullptr);
    sigaction(SIGBUS, &old_bus, nullptr);
    sigaction(SIGFPE, &old_fpe, nullptr);
    const hipError_t result = error;
    pthread_mutex_unlock(&launch_lock);
    return result;
}

// Calls kernel K with arguments behind pointers, as the module API passes them.
template <auto K>
struct Invoke;
template <auto K>
void invoke(void **params);
template <class... P, void (*K)(P...)>
struct Invoke<K> {
    static constexpr unsigned count = sizeof...(P);
    static constexpr size_t sizes[] = {sizeof(P)..., 0};
    static constexpr bool pointers[] = {std::is_pointer_v<P>..., false};
    template <size_t... I>
    static void call([[maybe_unused]] void **params, std::index_sequence<I...>) {
        K(*static_cast<std::remove_const_t<P> *>(params[I])...);
    }
    // Converts each argument to the kernel's own type first, as a call would.
    static hipError_t with(dim3 grid, dim3 block, size_t lds_bytes, std::remove_const_t<P>... arguments) {
        void *params[] = {&arguments..., nullptr};
        return launch(&invoke<K>, grid, block, lds_bytes, params);
    }
};
// A kernel's handle. Without params it describes itself instead of running.
template <auto K>
inline void invoke(void **params) {
    using Kernel = Invoke<K>;
    if (params)
        Kernel::call(params, std::make_index_sequence<Kernel::count>{});
    else
        description = {__PRETTY_FUNCTION__, Kernel::sizes, Kernel::pointers, Kernel::count};
}

}  // namespace standin

#define threadIdx (::standin::self->thread)
#define blockIdx (::standin::block_index)
#define blockDim (::standin::block_size)
#define gridDim (::standin::grid_size)
