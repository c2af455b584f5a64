// matmul_neondot.cpp: matmul for aarch64 with integer dots.
#define OK_NEON
#include "matmul_tile.h"

const ok::MatmulPath ok::matmul_path_neondot = kMatmulPath;
