// sampling_avx512.cpp: sampling compiled for AVX-512.
#include "sampling_row.h"

namespace ok {

const SampleRow sample_row_avx512 = sample_row;

}  // namespace ok
