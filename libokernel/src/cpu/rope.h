// rope.h: the rotation of rows, for the operations that hold it.
#pragma once
#include "internal.h"

namespace ok {

struct RopeArgs {
    float *x;
    int64_t stride;
    const float *table;  // (table_rows, rotary_dim): cos, then sin
    int64_t table_rows;
    const int32_t *table_row;  // (rows)
    int64_t rows, heads, head_dim, rotary_dim;
};

void run_rope(const RopeArgs &args);

}  // namespace ok
