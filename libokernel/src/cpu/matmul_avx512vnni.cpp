// matmul_avx512vnni.cpp: matmul for AVX-512 with VNNI's integer dots.
#include "matmul_tile.h"

const ok::MatmulPath ok::matmul_path_avx512vnni = kMatmulPath;
