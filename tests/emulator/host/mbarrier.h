// mbarriers, as the copies that they count use them.
#pragma once
#include <cstdint>

namespace emu {

// Reports unless it is an mbarrier that the running thread may know of.
void check_mbarrier(uint32_t bar);
// Bytes have landed: what the copy did is released through the mbarrier.
void land_bytes(uint32_t bar, int bytes, uint32_t moment);
// The agent of the copies that it counts.
int agent_of(uint32_t bar);

}  // namespace emu
