// activation.h: the activations, of one value.
#pragma once
#include "gpu.h"

namespace ok {

// x * sigmoid(t), with all its digits where the sigmoid is tiny.
DEVICE float times_sigmoid(float x, float t) {
    const float e = expf(-fabsf(t));
    return t < 0.0f ? x * e / (1.0f + e) : x / (1.0f + e);
}

template <int activation>
DEVICE float activated(float x) {
    switch (activation) {
        case OK_SILU:
            return times_sigmoid(x, x);
        case OK_GELU_TANH:  // 0.5 (1 + tanh(u)) = sigmoid(2 u)
            return times_sigmoid(x, 1.5957691216057308f * fmaf(0.044715f * x * x, x, x));
        case OK_GELU_ERF:
            return 0.5f * x * erfcf(x * -0.7071067811865476f);
        default:
            return x > 0.0f || x != x ? x : 0.0f;
    }
}

// The same where the kernel does not know which.
DEVICE float activated(float x, int32_t activation) {
    switch (activation) {
        case OK_SILU:
            return activated<OK_SILU>(x);
        case OK_GELU_TANH:
            return activated<OK_GELU_TANH>(x);
        case OK_GELU_ERF:
            return activated<OK_GELU_ERF>(x);
        default:
            return activated<OK_RELU>(x);
    }
}

}  // namespace ok
