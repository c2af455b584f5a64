// activation_avx512.cpp: activations with AVX-512.
#include "activation_stretch.h"

void ok::activate_stretch_avx512(float *y, const float *x, const float *up, int64_t n, ok_activation activation) {
    activate_stretch(y, x, up, n, activation);
}
