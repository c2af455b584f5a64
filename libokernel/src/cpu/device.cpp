// device.cpp: the CPU as a device: its name and memory, the instruction sets it has, and the path chosen among them.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <atomic>

#include "arena.h"
#include "host.h"
#include "internal.h"
#include "memory.h"

namespace {

struct PathInfo {
    ok::Path path;
    const char *name;
    bool (*available)();
};

bool always() { return true; }

#if defined(__x86_64__)
constexpr const char *kArch = "x86-64";
constexpr const char *kTargets = "portable avx2 avx512 avx512vnni";

bool has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }

constexpr PathInfo kPaths[] = {
    {ok::Path::portable, "portable", always},
    {ok::Path::avx2, "avx2", has_avx2},
    {ok::Path::avx512, "avx512", has_avx512},
    {ok::Path::avx512vnni, "avx512vnni", has_avx512vnni},
};
#elif defined(__aarch64__)
constexpr const char *kArch = "aarch64";
constexpr const char *kTargets = "portable neon neondot";

bool has_neondot() {
    constexpr unsigned long fphp = 1ul << 9, asimdhp = 1ul << 10, asimddp = 1ul << 20;  // asm/hwcap.h
    constexpr unsigned long all = fphp | asimdhp | asimddp;
    return (getauxval(AT_HWCAP) & all) == all;
}

constexpr PathInfo kPaths[] = {
    {ok::Path::portable, "portable", always},
    {ok::Path::neon, "neon", always},
    {ok::Path::neondot, "neondot", has_neondot},
};
#else
constexpr const char *kArch = "unknown";
constexpr const char *kTargets = "portable";
constexpr PathInfo kPaths[] = {{ok::Path::portable, "portable", always}};
#endif

constexpr int kUndecided = -1;
std::atomic<int> chosen{kUndecided};  // index into kPaths

const PathInfo *find_path(const char *name) {
    for (const PathInfo &info : kPaths)
        if (!strcmp(info.name, name)) return &info;
    return nullptr;
}

int best_path() {
    int best = 0;
    for (int i = 0; i < static_cast<int>(sizeof kPaths / sizeof *kPaths); i++)
        if (kPaths[i].available()) best = i;
    return best;
}

// The path in OKERNEL_PATH if that can be used, else the best one. check_path_variable says what is wrong with it.
const PathInfo &current_path() {
    int index = chosen.load(std::memory_order_relaxed);
    if (index == kUndecided) {
        const char *pinned = getenv("OKERNEL_PATH");
        const PathInfo *info = pinned ? find_path(pinned) : nullptr;
        index = info && info->available() ? static_cast<int>(info - kPaths) : best_path();
        chosen.store(index, std::memory_order_relaxed);
    }
    return kPaths[index];
}

ok_status check_path(const char *function, const char *what, const char *name) {
    const PathInfo *info = find_path(name);
    if (!info) return ok::fail_argument(function, "%s=%s must be one of: %s", what, name, kTargets);
    if (!info->available())
        return ok::fail(OK_ERR_UNAVAILABLE, "%s: %s=%s: this CPU has no such instructions", function, what, name);
    return OK_SUCCESS;
}

ok_status check_device(const char *function, int32_t device) {
    if (device == 0) return OK_SUCCESS;
    return ok::fail_argument(function, "device=%d must be 0: the CPU is one device", device);
}

// "model name	: AMD EPYC ..." in /proc/cpuinfo; aarch64 kernels give none.
void read_model_name(char *name, int64_t size) {
    char text[4096];
    snprintf(name, size, "CPU (%s)", kArch);
    if (ok::read_text("/proc/cpuinfo", text, sizeof text) < 0) return;
    const char *line = strstr(text, "model name");
    const char *colon = line ? strchr(line, ':') : nullptr;
    if (!colon) return;
    colon += 1 + (colon[1] == ' ');
    snprintf(name, size, "%.*s", static_cast<int>(strcspn(colon, "\n")), colon);
}

}  // namespace

ok::Path ok::path() { return current_path().path; }

const char *ok_path() { return current_path().name; }

ok_status ok_set_path(const char *host_name) {
    OK_REQUIRE_POINTER(host_name);
    if (!*host_name) {
        chosen.store(kUndecided);
        return OK_SUCCESS;
    }
    ok_status status = check_path(__func__, "host_name", host_name);
    if (status == OK_SUCCESS) chosen.store(static_cast<int>(find_path(host_name) - kPaths));
    return status;
}

const char *ok_backend() { return "cpu"; }
const char *ok_targets() { return kTargets; }

#if defined(__clang__)
#define OK_COMPILER __VERSION__
#else
#define OK_COMPILER "GCC " __VERSION__
#endif

const char *ok_build_info() { return "okernel " OKERNEL_VERSION ", " OK_COMPILER ", " OKERNEL_BUILD_FLAGS; }

ok_status ok_device_count(int32_t *host_count) {
    OK_REQUIRE_POINTER(host_count);
    *host_count = 1;
    return OK_SUCCESS;
}

ok_status ok_device_name(int32_t device, char *host_name, char *host_arch, int64_t size) {
    OK_REQUIRE_POINTER(host_name);
    OK_REQUIRE_POINTER(host_arch);
    OK_REQUIRE(size > 0, "size=%lld must be positive", static_cast<long long>(size));
    if (ok_status status = check_device(__func__, device)) return status;
    read_model_name(host_name, size);
    snprintf(host_arch, size, "%s", kArch);
    return OK_SUCCESS;
}

ok_status ok_device_memory(int32_t device, uint64_t *host_free, uint64_t *host_total) {
    OK_REQUIRE_POINTER(host_free);
    OK_REQUIRE_POINTER(host_total);
    if (ok_status status = check_device(__func__, device)) return status;
    ok::HostMemory memory = ok::host_memory();
    *host_free = memory.free;
    *host_total = memory.total;
    return OK_SUCCESS;
}

ok_status ok_device_usable(int32_t device) {
    if (ok_status status = check_device(__func__, device)) return status;
    const char *pinned = getenv("OKERNEL_PATH");
    return pinned ? check_path(__func__, "OKERNEL_PATH", pinned) : OK_SUCCESS;
}

ok_status ok_runtime_info(int32_t *host_version, char *host_path, int64_t size) {
    OK_REQUIRE_POINTER(host_version);
    OK_REQUIRE_POINTER(host_path);
    OK_REQUIRE(size > 0, "size=%lld must be positive", static_cast<long long>(size));
    *host_version = 0;
    *host_path = 0;
    return OK_SUCCESS;
}

// Device memory is host memory here. What cannot fit is refused here, not by the system's killer later.
ok_status ok::arena_reserve(ok_arena *arena, uint64_t bytes) {
    if (ok_status status = check_device("ok_arena_create", arena->device)) return status;
    HostMemory memory = host_memory();
    arena->base = bytes <= memory.free ? static_cast<char *>(map(bytes)) : nullptr;
    if (arena->base) return OK_SUCCESS;
    return fail_memory("ok_arena_create", bytes, memory.free, memory.total, "");
}

void ok::arena_unreserve(ok_arena *arena) { unmap(arena->base, arena->size); }
