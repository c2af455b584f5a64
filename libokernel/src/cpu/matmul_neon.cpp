// matmul_neon.cpp: matmul for aarch64's baseline.
#define OK_NEON
#include "matmul_tile.h"

const ok::MatmulPath ok::matmul_path_neon = kMatmulPath;
