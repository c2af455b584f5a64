// rope.cpp: rotary position embedding in place, "half" pairing: j with j + rotary_dim / 2 within each head.
#include "rope.h"

#include "checks.h"

namespace {

void rotate(float *__restrict low, float *__restrict high, const float *__restrict cos, const float *__restrict sin,
            int64_t half) {
    for (int64_t j = 0; j < half; j++) {
        const float a = low[j], b = high[j];
        low[j] = a * cos[j] - b * sin[j];
        high[j] = b * cos[j] + a * sin[j];
    }
}

}  // namespace

void ok::run_rope(const RopeArgs &args) {
    const int64_t half = args.rotary_dim / 2, grain = 1 + 8192 / (args.heads * args.rotary_dim);
    parallel_ranges(args.rows, grain, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const int64_t at = args.table_row[row];
            if (at < 0 || at >= args.table_rows) continue;
            const float *cos = args.table + at * args.rotary_dim;
            for (int64_t head = 0; head < args.heads; head++) {
                float *x = args.x + row * args.stride + head * args.head_dim;
                rotate(x, x + half, cos, cos + half, half);
            }
        }
    });
}

ok_status ok_rope(ok_queue *queue, float *x, int64_t stride, const float *table, int64_t table_rows,
                  const int32_t *table_row, int64_t rows, int64_t heads, int64_t head_dim, int64_t rotary_dim) {
    if (ok_status status =
            ok::check_rope(__func__, queue, x, stride, table, table_rows, table_row, rows, heads, head_dim, rotary_dim))
        return status;
    if (rows == 0) return OK_SUCCESS;
    return ok::submit(queue, ok::run_rope,
                      {x, stride, table, table_rows, table_row, rows, heads, head_dim, rotary_dim});
}
