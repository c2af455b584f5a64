// attention_avx512.cpp: attention compiled for AVX-512.
#include "attention_kernel.h"

namespace ok {

const AttentionPath attention_avx512 = {attend, attend_span, fold_spans};

}  // namespace ok
