// memory.cpp: the only caller of malloc and mmap. It counts, and it fails where a test asks for that.
#include "memory.h"

#include <sys/mman.h>

#include <atomic>
#include <cstdlib>

#include "host.h"
#include "status.h"

namespace ok {

static std::atomic<int64_t> allocations{0};
static std::atomic<int64_t> fail_countdown{0};  // 1: the next allocation fails; 0: none does

bool count_allocation() {
    allocations.fetch_add(1, std::memory_order_relaxed);
    int64_t left = fail_countdown.load(std::memory_order_relaxed);
    while (left > 0)
        if (fail_countdown.compare_exchange_weak(left, left - 1)) return left != 1;
    return true;
}

void *allocate(size_t bytes) { return count_allocation() ? calloc(1, bytes) : nullptr; }

void release(void *memory) { free(memory); }

static constexpr uint64_t kHugePage = uint64_t{2} << 20;
static constexpr uint64_t kHugeFrom = 16 * kHugePage;  // below that, huge pages would cost more than they save

// What is really asked of the system for `bytes`: room to align large reservations to huge pages.
static uint64_t mapped_bytes(uint64_t bytes) { return bytes >= kHugeFrom ? bytes + kHugePage : bytes; }

void *map(uint64_t bytes) {
    if (bytes == 0 || bytes > UINT64_MAX / 2 || !count_allocation()) return nullptr;
    void *start =
        mmap(nullptr, mapped_bytes(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    if (bytes < kHugeFrom) return start;
    // Streaming weights through 4 KiB pages costs a page walk each; 2 MiB ones do not. Give back what alignment left.
    char *first = static_cast<char *>(start);
    char *aligned = first + (kHugePage - reinterpret_cast<uintptr_t>(first) % kHugePage) % kHugePage;
    if (aligned > first) munmap(first, aligned - first);
    char *end = first + mapped_bytes(bytes);
    char *used_end = aligned + (bytes + 4095) / 4096 * 4096;
    if (end > used_end) munmap(used_end, end - used_end);
    madvise(aligned, bytes, MADV_HUGEPAGE);
    return aligned;
}

void unmap(void *memory, uint64_t bytes) {
    if (memory) munmap(memory, bytes);
}

ok_status fail_host_memory(const char *function, uint64_t needed, const char *hint) {
    HostMemory host = host_memory();
    return fail_memory(function, needed, host.free, host.total, hint);
}

}  // namespace ok

int64_t ok_allocation_count() { return ok::allocations.load(std::memory_order_relaxed); }

void ok_fail_allocation(int64_t n) { ok::fail_countdown.store(n < 0 ? 0 : n); }
