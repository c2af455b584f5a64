// sampling.h: what the paths of sampling share: the arguments, and the row that each compiles for itself.
#pragma once
#include <cstdint>

#include "internal.h"

namespace ok {

constexpr uint32_t kPromptBit = 0x80000000;  // of a count: the token is in the prompt

struct SampleArgs {
    int32_t *ids;
    float *logprobs;
    const float *logits;
    const float *floats;
    const int32_t *ints;
    uint32_t *counts;
    const float *bias;
    const int32_t *active;
    int64_t slots, rows, vocab;
};

using SampleRow = void (*)(const SampleArgs &args, int64_t row);
extern const SampleRow sample_row_portable, sample_row_avx2, sample_row_avx512, sample_row_neon;

}  // namespace ok
