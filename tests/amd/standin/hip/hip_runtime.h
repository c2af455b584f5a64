// Stand-in for <hip/hip_runtime.h>: HIP kernels run on the CPU, one fiber a work-item, so that every kernel's source is
// executed where there is no AMD card.
//
// Compile kernels and launchers as C++17 with clang for x86-64: clang++-19 -x c++ -I tests/amd/standin -D__gfx1100__ ...
//   -DSTANDIN_WAVE_SIZE=64       wave size (32 by default)
//   STANDIN_ORDER=reverse|random (environment, read at each launch) the order in which warps and lanes run between
//                                barriers: a kernel whose result changes with it has a race
//   STANDIN_TRACE=file           (environment) every launch is written there, to be run again by another executor
// What it finds: accesses past a buffer's end (guard pages), reads of memory never written (it starts as NaN), divergent
// barriers and shuffles, deadlocks, lanes that do not exist. Each is an error return of the launch with a sentence in
// hipGetErrorString(). What it cannot find: bugs of the code generator, races inside one warp's step, anything of time.
//
// Two things are written differently for it. Dynamic LDS is declared with HIP_DYNAMIC_SHARED(type, name), as in HIP's own
// header. Kernels are launched through standin::launch() or hipModuleLaunchKernel() with standin::invoke<kernel>.
#pragma once
#ifndef STANDIN_WAVE_SIZE
#define STANDIN_WAVE_SIZE 32
#endif
#define OK_STANDIN 1

#include "../types.h"  // keywords, dim3, vectors, bit casts, maths

#include "../block.h"  // fibers, barriers, the launch

#include "../wave.h"  // shuffles, ballots, atomics

#include "../matrix.h"  // dot products and matrix instructions

#include "../host.h"  // the runtime's functions
