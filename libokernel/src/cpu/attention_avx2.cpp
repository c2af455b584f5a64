// attention_avx2.cpp: attention compiled for AVX2, FMA and F16C.
#include "attention_kernel.h"

namespace ok {

const AttentionPath attention_avx2 = {attend, attend_span, fold_spans};

}  // namespace ok
