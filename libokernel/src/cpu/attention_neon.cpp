// attention_neon.cpp: attention compiled for NEON.
#define OK_NEON
#include "attention_kernel.h"

namespace ok {

const AttentionPath attention_neon = {attend, attend_span, fold_spans};

}  // namespace ok
