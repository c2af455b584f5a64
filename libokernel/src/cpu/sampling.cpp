// sampling.cpp: the sampling op: the portable path, the choice of path, the reset of a slot, and the launchers.
#include "sampling.h"

#include "checks.h"
#include "sampling_row.h"

namespace ok {

const SampleRow sample_row_portable = sample_row;

namespace {

SampleRow sample_row_path() {
    switch (path()) {
#if defined(__x86_64__)
        case Path::avx512vnni:
        case Path::avx512:
            return sample_row_avx512;
        case Path::avx2:
            return sample_row_avx2;
#elif defined(__aarch64__)
        case Path::neondot:
        case Path::neon:
            return sample_row_neon;
#endif
        default:
            return sample_row_portable;
    }
}

void run_sample(const SampleArgs &args) {
    const SampleRow sample = sample_row_path();
    parallel_for(active_rows(args.active, args.rows), [&](int64_t row) { sample(args, row); });
}

struct ResetArgs {
    uint32_t *counts;
    float *bias;
    int64_t slot, vocab;
    const int32_t *prompt;
    int64_t prompt_length;
    const int32_t *bias_ids;
    const float *bias_values;
    int64_t bias_length;
};

void run_reset(const ResetArgs &args) {
    if (args.counts) {
        uint32_t *counts = args.counts + args.slot * args.vocab;
        std::memset(counts, 0, args.vocab * sizeof *counts);
        for (int64_t i = 0; i < args.prompt_length; i++)
            if (args.prompt[i] >= 0 && args.prompt[i] < args.vocab) counts[args.prompt[i]] = kPromptBit;
    }
    if (args.bias) {
        float *bias = args.bias + args.slot * args.vocab;
        std::memset(bias, 0, args.vocab * sizeof *bias);
        for (int64_t i = 0; i < args.bias_length; i++)
            if (args.bias_ids[i] >= 0 && args.bias_ids[i] < args.vocab) bias[args.bias_ids[i]] = args.bias_values[i];
    }
}

}  // namespace
}  // namespace ok

// ---- launchers -----------------------------------------------------------------------------------------------------

ok_status ok_sample(ok_queue *queue, int32_t *ids, float *logprobs, const float *logits, const float *floats,
                    const int32_t *ints, uint32_t *counts, const float *bias, const int32_t *active, int64_t slots,
                    int64_t rows, int64_t vocab) {
    if (ok_status status = ok::check_sample(__func__, queue, ids, logits, floats, ints, slots, rows, vocab))
        return status;
    if (rows == 0) return OK_SUCCESS;
    return ok::submit(queue, ok::run_sample,
                      ok::SampleArgs{ids, logprobs, logits, floats, ints, counts, bias, active, slots, rows, vocab});
}

ok_status ok_sample_reset(ok_queue *queue, uint32_t *counts, float *bias, int64_t slot, int64_t slots, int64_t vocab,
                          const int32_t *prompt, int64_t prompt_length, const int32_t *bias_ids,
                          const float *bias_values, int64_t bias_length) {
    if (ok_status status = ok::check_sample_reset(__func__, queue, slot, slots, vocab, prompt, prompt_length, bias_ids,
                                                  bias_values, bias_length))
        return status;
    return ok::submit(
        queue, ok::run_reset,
        ok::ResetArgs{counts, bias, slot, vocab, prompt, prompt_length, bias_ids, bias_values, bias_length});
}
