// matmul_avx512.cpp: matmul for AVX-512 F, BW, DQ and VL.
#include "matmul_tile.h"

const ok::MatmulPath ok::matmul_path_avx512 = kMatmulPath;
