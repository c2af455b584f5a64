// sampling_avx2.cpp: sampling compiled for AVX2, FMA and F16C.
#include "sampling_row.h"

namespace ok {

const SampleRow sample_row_avx2 = sample_row;

}  // namespace ok
