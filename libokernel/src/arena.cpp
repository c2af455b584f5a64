// arena.cpp: bump allocation within one reservation. Nothing is taken from the system after ok_arena_create.
#include "arena.h"

#include <unistd.h>

#include "memory.h"
#include "status.h"

static constexpr uint64_t kAlignment = 256;

// Under AddressSanitizer what is not carved may not be touched, gaps between allocations included.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define OK_ADDRESS_SANITIZER
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define OK_ADDRESS_SANITIZER
#endif
#if defined(OK_ADDRESS_SANITIZER)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(start, bytes) (void)(start)
#define ASAN_UNPOISON_MEMORY_REGION(start, bytes) (void)(start)
#endif

ok_status ok_arena_create(ok_arena **host_out, int32_t device, ok_memory memory, uint64_t bytes) {
    OK_REQUIRE_POINTER(host_out);
    *host_out = nullptr;
    OK_REQUIRE(memory == OK_MEMORY_DEVICE || memory == OK_MEMORY_HOST, "memory=%d must be 0 (device) or 1 (host)",
               static_cast<int>(memory));
    OK_REQUIRE(bytes > 0, "bytes=0 must be positive");
    ok_arena *arena = ok::create<ok_arena>();
    if (!arena) return ok::fail_host_memory(__func__, sizeof *arena);
    arena->device = device;
    arena->memory = memory;
    arena->owner = getpid();
    ok_status status = ok::arena_reserve(arena, bytes);
    if (status != OK_SUCCESS) {
        ok::release(arena);
        return status;
    }
    arena->size = bytes;
    ASAN_POISON_MEMORY_REGION(arena->base, bytes);
    *host_out = arena;
    return OK_SUCCESS;
}

void ok_arena_destroy(ok_arena *arena) {
    if (!arena) return;
    ASAN_UNPOISON_MEMORY_REGION(arena->base, arena->size);
    ok::arena_unreserve(arena);
    ok::release(arena);
}

ok_status ok_arena_alloc(ok_arena *arena, uint64_t bytes, void **host_out) {
    OK_REQUIRE_POINTER(host_out);
    *host_out = nullptr;
    OK_REQUIRE_POINTER(arena);
    OK_REQUIRE(bytes > 0, "bytes=0 must be positive");
    uint64_t left = arena->size - arena->used;
    if (bytes > left) return ok::fail_memory(__func__, bytes, left, arena->size, "the arena is full");
    *host_out = arena->base + arena->used;
    ASAN_UNPOISON_MEMORY_REGION(*host_out, bytes);
    uint64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    arena->used = rounded < left ? arena->used + rounded : arena->size;
    return OK_SUCCESS;
}

ok_status ok_arena_mark(const ok_arena *arena, uint64_t *host_mark) {
    OK_REQUIRE_POINTER(arena);
    OK_REQUIRE_POINTER(host_mark);
    *host_mark = arena->used;
    return OK_SUCCESS;
}

ok_status ok_arena_release(ok_arena *arena, uint64_t mark) {
    OK_REQUIRE_POINTER(arena);
    OK_REQUIRE(mark <= arena->used, "mark=%llu must be <= the %llu bytes in use", static_cast<unsigned long long>(mark),
               static_cast<unsigned long long>(arena->used));
    arena->used = mark;
    ASAN_POISON_MEMORY_REGION(arena->base + mark, arena->size - mark);
    return OK_SUCCESS;
}
