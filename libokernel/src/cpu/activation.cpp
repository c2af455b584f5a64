// activation.cpp: elementwise activations, alone or gating a second half; each value is read once and written once.
#include "activation.h"

#include "activation_stretch.h"
#include "checks.h"

void ok::activate_stretch_portable(float *y, const float *x, const float *up, int64_t n, ok_activation activation) {
    activate_stretch(y, x, up, n, activation);
}

namespace {

ok::ActivateStretch *chosen_stretch() {
    switch (ok::path()) {
#if defined(__x86_64__)
        case ok::Path::avx512vnni:
        case ok::Path::avx512:
            return ok::activate_stretch_avx512;
        case ok::Path::avx2:
            return ok::activate_stretch_avx2;
#elif defined(__aarch64__)
        case ok::Path::neondot:
        case ok::Path::neon:
            return ok::activate_stretch_neon;
#endif
        default:
            return ok::activate_stretch_portable;
    }
}

constexpr int64_t kGrain = 8192;  // values of a piece

struct ActivateArgs {
    float *y;
    const float *x;
    ok_activation activation;
    int64_t n;
    ok::ActivateStretch *stretch;
};

void run_activate(const ActivateArgs &args) {
    ok::parallel_ranges(args.n, kGrain, [&](int64_t begin, int64_t end) {
        args.stretch(args.y + begin, args.x + begin, nullptr, end - begin, args.activation);
    });
}

struct GatedArgs {
    float *y;        // (rows, cols)
    const float *x;  // (rows, 2 cols): gate, then up
    ok_activation activation;
    int64_t rows, cols;
    ok::ActivateStretch *stretch;
};

void run_gated(const GatedArgs &args) {
    ok::parallel_ranges(args.rows, 1 + kGrain / args.cols, [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; row++) {
            const float *gate = args.x + row * 2 * args.cols;
            args.stretch(args.y + row * args.cols, gate, gate + args.cols, args.cols, args.activation);
        }
    });
}

}  // namespace

ok_status ok_activate(ok_queue *queue, float *y, const float *x, ok_activation activation, int64_t n) {
    if (ok_status status = ok::check_activate(__func__, queue, y, x, activation, n)) return status;
    if (n == 0) return OK_SUCCESS;
    return ok::submit(queue, run_activate, {y, x, activation, n, chosen_stretch()});
}

ok_status ok_activate_gated(ok_queue *queue, float *y, const float *x, ok_activation activation, int64_t rows,
                            int64_t cols) {
    if (ok_status status = ok::check_activate_gated(__func__, queue, y, x, activation, rows, cols)) return status;
    if (rows == 0) return OK_SUCCESS;
    return ok::submit(queue, run_gated, {y, x, activation, rows, cols, chosen_stretch()});
}
