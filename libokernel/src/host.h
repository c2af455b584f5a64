// host.h: how much of this machine the process may use: cores and memory, under affinity and control groups.
#pragma once
#include <cstdint>

namespace ok {

struct HostMemory {
    uint64_t free, total;  // bytes
};

// MemAvailable and MemTotal, or less where a control group (v1 or v2) sets a limit.
HostMemory host_memory();

// Cores in this thread's affinity mask, or the whole cores of a control group's quota if those are fewer; at least 1.
int32_t host_cores();

// Reads a small file into `text` as a C string and returns its length, or -1. No allocation.
int64_t read_text(const char *path, char *text, int64_t size);

}  // namespace ok
