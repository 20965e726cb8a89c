// Global memory: the arrays of the launch, each a strided view with its own rule.
#pragma once
#include <cstdint>

namespace emu {

void begin_arrays();
void end_arrays();  // every element of an output must have been written

void read_global(const void* p, int bytes);
void write_global(const void* p, int bytes);
void add_global(const void* p, int bytes);

}  // namespace emu
