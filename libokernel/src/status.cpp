// status.cpp: status names, the last error of each thread, the version of the interface.
#include "status.h"

#include <cstdarg>
#include <cstdio>

namespace ok {

static thread_local char last_error[1024];

ok_status fail(ok_status status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof last_error, format, args);
    va_end(args);
    return status;
}

ok_status fail_argument(const char *function, const char *format, ...) {
    int length = snprintf(last_error, sizeof last_error, "%s: ", function);
    va_list args;
    va_start(args, format);
    vsnprintf(last_error + length, sizeof last_error - length, format, args);
    va_end(args);
    return OK_ERR_INVALID_ARGUMENT;
}

ok_status fail_memory(const char *function, uint64_t needed, uint64_t free, uint64_t total, const char *hint) {
    return fail(OK_ERR_OUT_OF_MEMORY, "%s: out of memory: needed=%llu free=%llu total=%llu bytes%s%s", function,
                static_cast<unsigned long long>(needed), static_cast<unsigned long long>(free),
                static_cast<unsigned long long>(total), *hint ? "; " : "", hint);
}

}  // namespace ok

int32_t ok_abi_version() { return OK_ABI_VERSION; }

const char *ok_last_error() { return ok::last_error; }

const char *ok_status_name(int32_t status) {
    switch (status) {
        case OK_SUCCESS:
            return "OK_SUCCESS";
        case OK_ERR_INVALID_ARGUMENT:
            return "OK_ERR_INVALID_ARGUMENT";
        case OK_ERR_OUT_OF_MEMORY:
            return "OK_ERR_OUT_OF_MEMORY";
        case OK_ERR_DEVICE:
            return "OK_ERR_DEVICE";
        case OK_ERR_UNAVAILABLE:
            return "OK_ERR_UNAVAILABLE";
        case OK_ERR_UNSUPPORTED:
            return "OK_ERR_UNSUPPORTED";
        default:
            return "unknown";
    }
}
