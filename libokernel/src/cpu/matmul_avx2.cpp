// matmul_avx2.cpp: matmul for AVX2, FMA and F16C.
#include "matmul_tile.h"

const ok::MatmulPath ok::matmul_path_avx2 = kMatmulPath;
