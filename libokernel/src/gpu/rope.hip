// rope.hip: rotary position embedding in place, halves paired (NeoX):
//   x'[j] = x[j] cos - x[j + h] sin,  x'[j + h] = x[j + h] cos + x[j] sin,  h = rotary_dim / 2   Su et al. 2021, eq. 34
//
// One thread a pair. Traffic: the rotated part of x in and out; a table row is shared by the heads.
#include "checks.h"
#include "gpu.h"

namespace ok {

KERNEL rope_kernel(float *x, int64_t stride, const float *table, int64_t table_rows, const int32_t *table_row,
                   int64_t pairs, int64_t head_dim, int64_t half) {
    begin_rows();
    const int64_t row = blockIdx.x, pair = column(), at = table_row[row];
    if (pair >= pairs || at < 0 || at >= table_rows) return;
    const int64_t head = pair / half, j = pair % half;
    float *low = x + row * stride + head * head_dim + j, *high = low + half;
    const float c = table[at * 2 * half + j], s = table[at * 2 * half + half + j];
    const float a = *low, b = *high;
    *low = a * c - b * s;
    *high = b * c + a * s;
}

}  // namespace ok

// ---- launchers ----------------------------------------------------------------------------------------------------

ok_status ok_rope(ok_queue *queue, float *x, int64_t stride, const float *table, int64_t table_rows,
                  const int32_t *table_row, int64_t rows, int64_t heads, int64_t head_dim, int64_t rotary_dim) {
    if (ok_status status =
            ok::check_rope(__func__, queue, x, stride, table, table_rows, table_row, rows, heads, head_dim, rotary_dim))
        return status;
    if (rows == 0) return OK_SUCCESS;
    const int64_t half = rotary_dim / 2, pairs = heads * half;
    return LAUNCH(queue, rope_kernel, {rows, ok::ceil_div(pairs, ok::kBlock)}, ok::kBlock, x, stride, table, table_rows,
                  table_row, pairs, head_dim, half);
}
