// host.cpp: reads /proc, the affinity mask and the control groups (OKERNEL_CGROUP_ROOT replaces /sys/fs/cgroup in
// tests).
#include "host.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

int64_t ok::read_text(const char *path, char *text, int64_t size) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    int64_t length = 0;
    while (length < size - 1) {
        ssize_t n = read(file, text + length, size - 1 - length);
        if (n <= 0) break;
        length += n;
    }
    close(file);
    text[length] = 0;
    return length;
}

namespace {

// The decimal integer at the start of `text`, after blanks; *end (may be null) is what follows, or `text` if there is
// none. Not strtoll, which ties a build on a new glibc to that glibc.
int64_t read_integer(const char *text, const char **end) {
    const char *digit = text + strspn(text, " \t");
    bool negative = *digit == '-';
    if (negative) digit++;
    bool found = *digit >= '0' && *digit <= '9';
    int64_t value = 0;
    for (; *digit >= '0' && *digit <= '9'; digit++)
        value = value < INT64_MAX / 10 ? value * 10 + (*digit - '0') : INT64_MAX;
    if (end) *end = found ? digit : text;
    return negative ? -value : value;
}

// The number after `key` at the start of a line ("MemTotal:   123 kB"), or -1.
int64_t number_after(const char *text, const char *key) {
    size_t length = strlen(key);
    for (const char *line = text; line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : nullptr)
        if (!strncmp(line, key, length)) return read_integer(line + length, nullptr);
    return -1;
}

// One control group's folder. Limits of its ancestors hold as well: parent() walks up to the mount's root.
struct Cgroup {
    char path[1024];
    size_t root_length;  // of the prefix that belongs to the mount

    bool read(const char *name, char *text, int64_t size) const {
        char file[1100];
        snprintf(file, sizeof file, "%s/%s", path, name);
        return ok::read_text(file, text, size) >= 0;
    }

    // A file that holds one number; -1 where it is missing or says "max".
    int64_t number(const char *name) const {
        char text[64];
        if (!read(name, text, sizeof text) || (text[0] != '-' && (text[0] < '0' || text[0] > '9'))) return -1;
        return read_integer(text, nullptr);
    }

    bool parent() {
        char *slash = strrchr(path, '/');
        if (!slash || static_cast<size_t>(slash - path) < root_length) return false;
        *slash = 0;
        return true;
    }
};

// This process's group for a v1 controller ("cpu", "memory"), or with null the unified v2 one.
// /proc/self/cgroup has lines "id:controllers:/path", with v2 as "0::/path".
Cgroup find_cgroup(const char *controller) {
    const char *root = getenv("OKERNEL_CGROUP_ROOT");
    if (!root) root = "/sys/fs/cgroup";
    char text[8192], group[700] = "";
    if (ok::read_text("/proc/self/cgroup", text, sizeof text) >= 0) {
        for (char *line = text; line && *line;) {
            char *end = strchr(line, '\n');
            if (end) *end = 0;
            char *names = strchr(line, ':');
            char *path = names ? strchr(names + 1, ':') : nullptr;
            if (path) {
                *path++ = 0;
                bool ours = !controller && names[1] == 0;
                for (char *name = names + 1; controller && name;
                     name = strchr(name, ',') ? strchr(name, ',') + 1 : nullptr)
                    ours |= !strncmp(name, controller, strlen(controller)) &&
                            (name[strlen(controller)] == ',' || name[strlen(controller)] == 0);
                if (ours && strcmp(path, "/")) snprintf(group, sizeof group, "%s", path);
            }
            line = end ? end + 1 : nullptr;
        }
    }
    Cgroup found;
    found.root_length = snprintf(found.path, sizeof found.path, controller ? "%.250s/%s" : "%.250s", root, controller);
    snprintf(found.path + found.root_length, sizeof found.path - found.root_length, "%s", group);
    return found;
}

// Whole cores that CPU quotas allow; INT32_MAX without a quota.
int64_t quota_cores() {
    int64_t cores = INT32_MAX;
    auto limit = [&cores](int64_t quota, int64_t period) {
        if (quota > 0 && period > 0 && quota / period < cores) cores = quota / period;
    };
    Cgroup unified = find_cgroup(nullptr);
    do {
        char text[64];
        const char *end;
        if (!unified.read("cpu.max", text, sizeof text)) continue;  // "max 100000" or "150000 100000"
        int64_t quota = read_integer(text, &end);
        if (end != text) limit(quota, read_integer(end, nullptr));
    } while (unified.parent());
    Cgroup v1 = find_cgroup("cpu");
    do limit(v1.number("cpu.cfs_quota_us"), v1.number("cpu.cfs_period_us"));
    while (v1.parent());
    return cores;
}

// Lowers `memory` to what one control group leaves: its limit less its use, not counting cache that can be dropped.
void apply_memory_limit(ok::HostMemory *memory, const Cgroup &group, const char *limit_name, const char *use_name,
                        const char *cache_key) {
    int64_t limit = group.number(limit_name);
    if (limit < 0 || static_cast<uint64_t>(limit) >= memory->total) return;
    int64_t use = group.number(use_name), cache = -1;
    char stat[8192];
    if (group.read("memory.stat", stat, sizeof stat)) cache = number_after(stat, cache_key);
    use = (use < 0 ? 0 : use) - (cache < 0 ? 0 : cache);
    int64_t left = limit - (use < 0 ? 0 : use);
    memory->total = limit;
    if (memory->free > static_cast<uint64_t>(left < 0 ? 0 : left)) memory->free = left < 0 ? 0 : left;
}

}  // namespace

int32_t ok::host_cores() {
    unsigned long mask[16384 / (8 * sizeof(unsigned long))];
    long bytes = syscall(SYS_sched_getaffinity, 0, sizeof mask, mask);
    int64_t cores = 0;
    for (long i = 0; i < bytes / static_cast<long>(sizeof mask[0]); i++)
        for (unsigned long left = mask[i]; left; left &= left - 1) cores++;
    int64_t quota = quota_cores();
    if (quota < cores) cores = quota;
    return cores < 1 ? 1 : static_cast<int32_t>(cores);
}

ok::HostMemory ok::host_memory() {
    HostMemory memory = {0, 0};
    char text[8192];
    if (read_text("/proc/meminfo", text, sizeof text) > 0) {
        int64_t total = number_after(text, "MemTotal:"), available = number_after(text, "MemAvailable:");
        if (available < 0) available = number_after(text, "MemFree:");
        memory = {static_cast<uint64_t>(available < 0 ? 0 : available) << 10,
                  static_cast<uint64_t>(total < 0 ? 0 : total) << 10};
    }
    Cgroup unified = find_cgroup(nullptr);
    do apply_memory_limit(&memory, unified, "memory.max", "memory.current", "inactive_file ");
    while (unified.parent());
    Cgroup v1 = find_cgroup("memory");
    do apply_memory_limit(&memory, v1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ");
    while (v1.parent());
    return memory;
}
