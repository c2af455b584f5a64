// activation_neon.cpp: activations with NEON.
#define OK_NEON
#include "activation_stretch.h"

void ok::activate_stretch_neon(float *y, const float *x, const float *up, int64_t n, ok_activation activation) {
    activate_stretch(y, x, up, n, activation);
}
