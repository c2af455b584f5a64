// Stand-in for <hip/hip_fp16.h>: the types are in hip_runtime.h.
#pragma once
#include "hip_runtime.h"
