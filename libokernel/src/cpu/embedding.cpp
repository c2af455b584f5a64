// embedding.cpp: rows of a packed weight matrix, looked up by token id and widened to f32.
#include <cstring>

#include "checks.h"
#include "internal.h"
#include "matrix.h"

namespace {

struct EmbeddingArgs {
    float *y;
    const void *table;
    ok_dtype dtype;
    const int32_t *ids;
    const float *residual;  // may be null, may be y
    int64_t rows, vocab, cols;
};

void look_up(const EmbeddingArgs &args, int64_t row) {
    const int64_t id = args.ids[row];
    const bool known = id >= 0 && id < args.vocab;
    // In pieces through the stack: y may be the residual. Whole q8_0 blocks, so a piece is a multiple of 32.
    constexpr int64_t kPiece = 1024;
    float piece[kPiece] = {};
    for (int64_t first = 0; first < args.cols; first += kPiece) {
        const int64_t n = args.cols - first < kPiece ? args.cols - first : kPiece, at = row * args.cols + first;
        if (known) ok::read_matrix_row(piece, args.table, args.dtype, args.vocab, args.cols, id, first, n);
        if (args.residual)
            for (int64_t i = 0; i < n; i++) args.y[at + i] = piece[i] + args.residual[at + i];
        else
            memcpy(args.y + at, piece, n * sizeof *piece);
    }
}

void run_embedding(const EmbeddingArgs &args) {
    ok::parallel_ranges(args.rows, 1 + 4096 / args.cols, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) look_up(args, row);
    });
}

}  // namespace

ok_status ok_embedding(ok_queue *queue, float *y, const void *table, ok_dtype dtype, const int32_t *ids,
                       const float *residual, int64_t rows, int64_t vocab, int64_t cols) {
    if (ok_status status = ok::check_embedding(__func__, queue, y, table, dtype, ids, rows, vocab, cols)) return status;
    if (rows == 0) return OK_SUCCESS;
    return ok::submit(queue, run_embedding, {y, table, dtype, ids, residual, rows, vocab, cols});
}
