// activation.h: the activation of one stretch of values, on each instruction-set path.
#pragma once
#include "internal.h"

namespace ok {

// y[i] = activation(x[i]) (* up[i] unless up is null) for n values; y may be x. The same value gives the same result
// wherever it stands.
using ActivateStretch = void(float *y, const float *x, const float *up, int64_t n, ok_activation activation);
ActivateStretch activate_stretch_portable, activate_stretch_avx2, activate_stretch_avx512, activate_stretch_neon;

}  // namespace ok
