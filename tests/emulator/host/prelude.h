// What NVRTC knows without being told; included before a kernel that is compiled for the CPU.
#pragma once
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // C's math.h: C++'s takes a fifth of a unit's compilation
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#include "emu.h"

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__

// What Python calls in a compiled unit.
extern "C" char __ehdr_start __attribute__((visibility("hidden")));
extern "C" char _end __attribute__((visibility("hidden")));
#define EMULATED_UNIT(kernel)                                                \
  extern "C" const char* emulate(void* launch) {                             \
    const auto call = [](const void* params) { emu::call(kernel, params); }; \
    return emu::run(launch, call, &__ehdr_start, &_end);                     \
  }
#ifdef EMULATE_COVERAGE
extern "C" void __gcov_dump();
extern "C" void write_coverage() { __gcov_dump(); }
#endif
