// elementwise.cpp: gather_rows and count_nonfinite; each moves its bytes once.
#include <atomic>
#include <cstring>

#include "checks.h"
#include "internal.h"

namespace {

struct GatherArgs {
    float *y;
    const float *x;
    const int32_t *index, *active;
    int64_t rows, x_rows, cols;
};

void run_gather(const GatherArgs &args) {
    const int64_t rows = ok::active_rows(args.active, args.rows);
    const size_t row_bytes = args.cols * sizeof(float);
    ok::parallel_ranges(rows, 1 + 16384 / args.cols, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const int64_t from = args.index[row];
            if (from >= 0 && from < args.x_rows)
                memcpy(args.y + row * args.cols, args.x + from * args.cols, row_bytes);
            else
                memset(args.y + row * args.cols, 0, row_bytes);
        }
    });
}

struct CountArgs {
    int32_t *count;
    const float *x;
    const int32_t *active;
    int64_t rows, cols;
};

void run_count(const CountArgs &args) {
    std::atomic<int32_t> found{0};
    const int64_t n = ok::active_rows(args.active, args.rows) * args.cols;
    ok::parallel_ranges(n, 65536, [&](int64_t begin, int64_t end) {
        int32_t here = 0;
        for (int64_t i = begin; i < end; i++) {
            uint32_t bits;
            memcpy(&bits, args.x + i, sizeof bits);
            here += (bits & 0x7f800000) == 0x7f800000;
        }
        found.fetch_add(here, std::memory_order_relaxed);
    });
    *args.count += found.load();
}

}  // namespace

ok_status ok_gather_rows(ok_queue *queue, float *y, const float *x, const int32_t *index, const int32_t *active,
                         int64_t rows, int64_t x_rows, int64_t cols) {
    if (ok_status status = ok::check_gather_rows(__func__, queue, y, x, index, rows, x_rows, cols)) return status;
    if (rows == 0) return OK_SUCCESS;
    return ok::submit(queue, run_gather, {y, x, index, active, rows, x_rows, cols});
}

ok_status ok_count_nonfinite(ok_queue *queue, int32_t *count, const float *x, const int32_t *active, int64_t rows,
                             int64_t cols) {
    if (ok_status status = ok::check_count_nonfinite(__func__, queue, count, x, rows, cols)) return status;
    if (rows == 0) return OK_SUCCESS;
    return ok::submit(queue, run_count, {count, x, active, rows, cols});
}
