// arena.h: one reservation from a backend, carved by a bump pointer.
#pragma once
#include <cstdint>

#include "okernel.h"

struct ok_arena {
    char *base = nullptr;
    uint64_t size = 0, used = 0;
    int32_t device = 0;
    ok_memory memory = OK_MEMORY_DEVICE;
    int32_t owner = 0;  // process that made it; a GPU's memory must not be freed by a child of fork
};

namespace ok {

// A backend's part: takes `bytes` for `arena`, whose device and memory are set, and fills in base. On failure
// it says "ok_arena_create: ...", with needed, free and total bytes where there is too little.
ok_status arena_reserve(ok_arena *arena, uint64_t bytes);
void arena_unreserve(ok_arena *arena);

}  // namespace ok
