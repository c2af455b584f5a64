// status.h: how an operation reports a failure.
#pragma once
#include <cstdint>

#include "okernel.h"

namespace ok {

// Keeps the message for ok_last_error() and returns `status`. By convention "function: argument=value must be ...".
[[gnu::format(printf, 2, 3)]] ok_status fail(ok_status status, const char *format, ...);

// OK_ERR_OUT_OF_MEMORY with the three numbers a user needs; `hint` says what to change ("" for nothing).
ok_status fail_memory(const char *function, uint64_t needed, uint64_t free, uint64_t total, const char *hint);

// For a launcher's first lines: OK_ERR_INVALID_ARGUMENT with "<function>: <message>".
[[gnu::format(printf, 2, 3)]] ok_status fail_argument(const char *function, const char *format, ...);

}  // namespace ok

#define OK_REQUIRE(condition, ...)                                         \
    do {                                                                   \
        if (!(condition)) return ok::fail_argument(__func__, __VA_ARGS__); \
    } while (0)
#define OK_REQUIRE_POINTER(pointer) OK_REQUIRE((pointer) != nullptr, #pointer " is null")
