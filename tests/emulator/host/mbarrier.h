// mbarriers, as the copies that they count use them.
#pragma once
#include <cstdint>

namespace emu {

// Reports unless it is an mbarrier that the running thread may know of.
void check_mbarrier(uint32_t bar);
// Bytes of a load that was issued at `pc` have landed: what it did is released through the
// mbarrier.
void land_bytes(uint32_t bar, int bytes, uint32_t moment, const void* pc);
// Where a load was issued that has landed and that nobody has waited for; null if there is none.
const void* load_without_wait();
// The agent of the copies that it counts.
int agent_of(uint32_t bar);

}  // namespace emu
