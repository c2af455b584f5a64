// transfer.cpp: copy, fill and the read that measures bandwidth; each moves its bytes once, in pieces shared by the
// threads.
#include <atomic>
#include <cstring>

#include "internal.h"

namespace {

constexpr int64_t kGrain = 1 << 20;  // bytes of a piece

struct CopyArgs {
    char *dst;
    const char *src;
    int64_t bytes;
};

void run_copy(const CopyArgs &args) {
    ok::parallel_ranges(args.bytes, kGrain,
                        [&](int64_t begin, int64_t end) { memcpy(args.dst + begin, args.src + begin, end - begin); });
}

struct FillArgs {
    char *dst;
    uint8_t value;
    int64_t bytes;
};

void run_fill(const FillArgs &args) {
    ok::parallel_ranges(args.bytes, kGrain,
                        [&](int64_t begin, int64_t end) { memset(args.dst + begin, args.value, end - begin); });
}

struct ReadArgs {
    uint32_t *sum;
    const char *src;
    int64_t bytes;
};

void run_read(const ReadArgs &args) {
    std::atomic<uint32_t> total{0};
    ok::parallel_ranges(args.bytes, kGrain, [&](int64_t begin, int64_t end) {
        uint32_t lanes[16] = {};  // a line of 64 bytes; addition modulo 2^32 may go in any order
        for (int64_t at = begin; at < end; at += sizeof lanes) {
            uint32_t line[16];
            memcpy(line, args.src + at, sizeof line);
            for (int i = 0; i < 16; i++) lanes[i] += line[i];
        }
        uint32_t sum = 0;
        for (uint32_t lane : lanes) sum += lane;
        total.fetch_add(sum, std::memory_order_relaxed);
    });
    *args.sum = total.load();
}

}  // namespace

ok_status ok_copy(ok_queue *queue, void *dst, const void *src, uint64_t bytes) {
    OK_REQUIRE_POINTER(queue);
    if (bytes == 0) return OK_SUCCESS;
    OK_REQUIRE_POINTER(dst);
    OK_REQUIRE_POINTER(src);
    OK_REQUIRE(bytes <= INT64_MAX, "bytes=%llu is too large", static_cast<unsigned long long>(bytes));
    return ok::submit(queue, run_copy,
                      {static_cast<char *>(dst), static_cast<const char *>(src), static_cast<int64_t>(bytes)});
}

ok_status ok_fill(ok_queue *queue, void *dst, uint8_t value, uint64_t bytes) {
    OK_REQUIRE_POINTER(queue);
    if (bytes == 0) return OK_SUCCESS;
    OK_REQUIRE_POINTER(dst);
    OK_REQUIRE(bytes <= INT64_MAX, "bytes=%llu is too large", static_cast<unsigned long long>(bytes));
    return ok::submit(queue, run_fill, {static_cast<char *>(dst), value, static_cast<int64_t>(bytes)});
}

ok_status ok_read(ok_queue *queue, uint32_t *sum, const void *src, uint64_t bytes) {
    OK_REQUIRE_POINTER(queue);
    OK_REQUIRE_POINTER(sum);
    OK_REQUIRE_POINTER(src);
    OK_REQUIRE(bytes > 0 && bytes <= INT64_MAX && bytes % 64 == 0, "bytes=%llu must be a positive multiple of 64",
               static_cast<unsigned long long>(bytes));
    return ok::submit(queue, run_read, {sum, static_cast<const char *>(src), static_cast<int64_t>(bytes)});
}
