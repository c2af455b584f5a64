// device.cpp: GPUs as devices: how many, their names and memory, whether this build has code for them; and their
// arenas.
#include <pthread.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "arena.h"
#include "memory.h"
#include "runtime.h"

namespace {

// ---- arenas, so that a copy can tell pinned and device memory from pageable memory --------------------------------

constexpr int kMaxArenas = 256;
struct Range {
    const char *begin, *end;
};
Range arenas[kMaxArenas];
pthread_mutex_t arenas_lock = PTHREAD_MUTEX_INITIALIZER;

bool remember(const char *begin, uint64_t bytes) {
    pthread_mutex_lock(&arenas_lock);
    bool done = false;
    for (int i = 0; i < kMaxArenas && !done; i++)
        if (!arenas[i].begin) {
            arenas[i] = {begin, begin + bytes};
            done = true;
        }
    pthread_mutex_unlock(&arenas_lock);
    return done;
}

void forget(const char *begin) {
    pthread_mutex_lock(&arenas_lock);
    for (Range &range : arenas)
        if (range.begin == begin) range = {};
    pthread_mutex_unlock(&arenas_lock);
}

// ---- devices ------------------------------------------------------------------------------------------------------

// The process in which the runtime was first used: a GPU's runtime does not survive fork.
pid_t first_process;

ok_status count_devices(const char *function, int *count) {
    const ok::Runtime *gpu = ok::runtime(function);
    if (!gpu) return OK_ERR_UNAVAILABLE;
    pid_t expected = 0, self = getpid();
    if (!__atomic_compare_exchange_n(&first_process, &expected, self, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED) &&
        expected != self)
        return ok::fail(OK_ERR_UNAVAILABLE, "%s: the GPU was first used before fork, in process %d; use spawn",
                        function, static_cast<int>(expected));
    int error = gpu->get_device_count(count);
    if (error || *count < 1) return ok::no_device(function, error);
    return OK_SUCCESS;
}

ok_status check_device(const char *function, int32_t device) {
    int count = 0;
    if (ok_status status = count_devices(function, &count)) return status;
    if (device >= 0 && device < count && device < ok::kMaxDevices) return OK_SUCCESS;
    return ok::fail(OK_ERR_INVALID_ARGUMENT, "%s: device=%d must be in [0, %d)", function, device, count);
}

}  // namespace

ok_status ok::check_runtime(int error, const char *function, const char *call) {
    if (!error) return OK_SUCCESS;
    return fail(OK_ERR_DEVICE, "%s: %s: error %d: %s", function, call, error, runtime(function)->error_text(error));
}

ok_status ok::enter_device(const char *function, int32_t device) {
    static int state[kMaxDevices];  // 1: its kernels are loaded
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    if (ok_status status = check_device(function, device)) return status;
    const Runtime *gpu = runtime(function);
    if (ok_status status = check_runtime(gpu->set_device(device), function, "set_device")) return status;
    pthread_mutex_lock(&lock);
    ok_status status = state[device] ? OK_SUCCESS : gpu->load(function, device);
    if (status == OK_SUCCESS) state[device] = 1;
    pthread_mutex_unlock(&lock);
    return status;
}

bool ok::in_arena(const void *p, uint64_t bytes) {
    const char *begin = static_cast<const char *>(p);
    bool inside = false;
    pthread_mutex_lock(&arenas_lock);
    for (const Range &range : arenas)
        inside = inside || (range.begin && begin >= range.begin && begin + bytes <= range.end);
    pthread_mutex_unlock(&arenas_lock);
    return inside;
}

ok_status ok::arena_reserve(ok_arena *arena, uint64_t bytes) {
    const char *function = "ok_arena_create";
    if (ok_status status = enter_device(function, arena->device)) return status;
    const Runtime *gpu = runtime(function);
    void *memory = nullptr;
    const bool on_device = arena->memory == OK_MEMORY_DEVICE;
    int error = -1;
    if (count_allocation()) error = on_device ? gpu->allocate(&memory, bytes) : gpu->allocate_host(&memory, bytes);
    if (error || !memory) {
        size_t free = 0, total = 0;
        if (!on_device) return fail_host_memory(function, bytes, "pinned host memory");
        if (gpu->get_memory(&free, &total)) free = total = 0;
        return fail_memory(function, bytes, free, total,
                           "lower max_context, max_batch or kv_tokens, or use a smaller dtype");
    }
    if (!remember(static_cast<char *>(memory), bytes)) {
        on_device ? gpu->release(memory) : gpu->release_host(memory);
        return fail(OK_ERR_UNSUPPORTED, "%s: more than %d arenas", function, kMaxArenas);
    }
    arena->base = static_cast<char *>(memory);
    return OK_SUCCESS;
}

void ok::arena_unreserve(ok_arena *arena) {
    forget(arena->base);
    if (arena->owner != getpid()) return;  // the parent's memory
    const Runtime *gpu = runtime("ok_arena_destroy");
    gpu->set_device(arena->device);
    arena->memory == OK_MEMORY_DEVICE ? gpu->release(arena->base) : gpu->release_host(arena->base);
}

const char *ok_backend() { return OKERNEL_BACKEND; }
const char *ok_build_info() { return "okernel " OKERNEL_VERSION ", " OKERNEL_DEVICE_COMPILER ", " OKERNEL_BUILD_FLAGS; }

ok_status ok_device_count(int32_t *host_count) {
    OK_REQUIRE_POINTER(host_count);
    *host_count = 0;
    return count_devices(__func__, host_count);
}

ok_status ok_device_name(int32_t device, char *host_name, char *host_arch, int64_t size) {
    OK_REQUIRE_POINTER(host_name);
    OK_REQUIRE_POINTER(host_arch);
    OK_REQUIRE(size > 0, "size=%lld must be positive", static_cast<long long>(size));
    if (ok_status status = check_device(__func__, device)) return status;
    const ok::Runtime *gpu = ok::runtime(__func__);
    const int limit = size < 4096 ? static_cast<int>(size) : 4096;
    if (ok_status status = ok::check_runtime(gpu->get_name(host_name, limit, device), __func__, "get_name"))
        return status;
    return ok::check_runtime(gpu->get_arch(host_arch, limit, device), __func__, "get_arch");
}

ok_status ok_device_memory(int32_t device, uint64_t *host_free, uint64_t *host_total) {
    OK_REQUIRE_POINTER(host_free);
    OK_REQUIRE_POINTER(host_total);
    if (ok_status status = check_device(__func__, device)) return status;
    const ok::Runtime *gpu = ok::runtime(__func__);
    size_t free = 0, total = 0;
    if (ok_status status = ok::check_runtime(gpu->set_device(device), __func__, "set_device")) return status;
    if (ok_status status = ok::check_runtime(gpu->get_memory(&free, &total), __func__, "get_memory")) return status;
    *host_free = free;
    *host_total = total;
    return OK_SUCCESS;
}

ok_status ok_device_usable(int32_t device) {
    if (ok_status status = check_device(__func__, device)) return status;
    const ok::Runtime *gpu = ok::runtime(__func__);
    char arch[64];
    if (ok_status status = ok::check_runtime(gpu->get_arch(arch, sizeof arch, device), __func__, "get_arch"))
        return status;
    return gpu->usable(__func__, device, arch);
}

ok_status ok_runtime_info(int32_t *host_version, char *host_path, int64_t size) {
    OK_REQUIRE_POINTER(host_version);
    OK_REQUIRE_POINTER(host_path);
    OK_REQUIRE(size > 0, "size=%lld must be positive", static_cast<long long>(size));
    const ok::Runtime *gpu = ok::runtime(__func__);
    if (!gpu) return OK_ERR_UNAVAILABLE;
    *host_version = gpu->version;
    snprintf(host_path, static_cast<size_t>(size), "%s", gpu->path);
    return OK_SUCCESS;
}

ok_status ok_set_threads(int32_t) {
    return ok::fail(OK_ERR_UNSUPPORTED, "ok_set_threads: the %s build has no threads", OKERNEL_BACKEND);
}
int32_t ok_threads() { return 1; }
const char *ok_path() { return ""; }
ok_status ok_set_path(const char *host_name) {
    OK_REQUIRE_POINTER(host_name);
    if (!*host_name) return OK_SUCCESS;
    return ok::fail(OK_ERR_UNSUPPORTED, "%s: host_name=%s: the %s build has no instruction-set paths", __func__,
                    host_name, OKERNEL_BACKEND);
}
