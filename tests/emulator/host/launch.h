// What Python passes to a launch and gets back; mirrored in run.py.
#pragma once
#include <cstdint>

namespace emu {

enum class Access : int32_t { read, write_once, add, thread_own };

// A strided view: strides in bytes, positive, from the largest to the smallest, none of axes that
// have one element or stride 0.
struct Array {
  const char* name;
  const uint8_t* base;
  int64_t bytes;  // from the first element's first byte to the last one's last
  int64_t shape[5], strides[5];
  int32_t rank, item_bytes;
  Access access;
};

struct Launch {
  int32_t grid[3], threads, blocks_per_sm;
  uint32_t shared_bytes;
  int32_t order, seed;
  int32_t checked;  // whether the unit calls the hooks; without them memory goes unchecked
  const void* params;
  int64_t params_bytes;
  const Array* arrays;
  int32_t n_arrays;

  int32_t kind;  // of the report, from here on filled by the launch
  const void* pc;
  int64_t bank_conflicts;
};

extern Launch* launch;
// Where the kernel's own code and constants are.
extern const uint8_t *unit_begin, *unit_end;

// Switches back to the launch for good, in the middle of a block.
void abandon_block();
// Between the two a trap in the unit is reported as undefined behaviour.
void begin_traps();
void end_traps();

}  // namespace emu
