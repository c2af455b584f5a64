// sampling_neon.cpp: sampling compiled for NEON.
#define OK_NEON
#include "sampling_row.h"

namespace ok {

const SampleRow sample_row_neon = sample_row;

}  // namespace ok
