// memory.h: host memory; all of the library's goes through here, so that it can be counted and made to fail.
#pragma once
#include <cstddef>
#include <cstdint>

#include "okernel.h"

namespace ok {

// Small bookkeeping memory, cleared; null when there is none. release(null) is allowed.
void *allocate(size_t bytes);
void release(void *memory);

// A large reservation, aligned to a page at least; null when there is none. unmap takes what map was given.
void *map(uint64_t bytes);
void unmap(void *memory, uint64_t bytes);

// For memory of another kind (a GPU's): counts one more allocation and says whether it may go ahead. Only a test's
// ok_fail_allocation refuses.
bool count_allocation();

// OK_ERR_OUT_OF_MEMORY for host memory, with what this process may still use.
ok_status fail_host_memory(const char *function, uint64_t needed, const char *hint = "");

// Allocates and constructs a T, to be given back with release(). T is plain data with default values.
template <class T>
static inline T *create() {
    T *object = static_cast<T *>(allocate(sizeof(T)));
    if (object) *object = T();
    return object;
}

}  // namespace ok
