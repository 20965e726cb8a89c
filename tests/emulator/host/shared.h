// Shared memory and what is known of every four bytes of it: who wrote last, who has read since,
// and which asynchronous operations work on it.
#pragma once
#include <cstddef>
#include <cstdint>

#include "block.h"

namespace emu {

// Bytes that share one record. Smaller accesses are refused: two threads that write the halves of
// one record would look like a race.
constexpr uint32_t kRecordBytes = 4;
constexpr size_t kMaxSharedBytes = 256 << 10;  // more than any card has

// Where the window starts: not at 0, as on a card, but at a multiple of every swizzle pattern.
constexpr uint32_t kWindow = 0x400;

// The offset in shared memory that an instruction's address stands for; reports what lies outside
// or is not aligned.
uint32_t shared_offset(uint32_t address, int bytes, int alignment);

// By the running thread, for itself or for another lane of its warp.
void read_shared(uint32_t offset, int bytes, const Thread& thread);
void write_shared(uint32_t offset, int bytes, const Thread& thread);

// Whether anything may be written there now, by what happens after `thread`'s present moment.
void check_free(uint32_t offset, int bytes, const Thread& thread);
void set_written(uint32_t offset, int bytes, int agent, Moment moment, const void* pc);
void set_in_flight(uint32_t offset, int bytes);
// The place of an mbarrier: only mbarrier instructions touch it.
void set_mbarrier(uint32_t offset);

// The async proxy reads, from `begin` to `end`; until then nobody may write. What it reads must be
// written, known to the threads that start the operation, and fenced by its writer.
void check_async_read(uint32_t offset, int bytes, const Thread& thread);
void begin_async_read(uint32_t offset, int bytes);
void end_async_read(uint32_t offset, int bytes, int agent, Moment moment);

}  // namespace emu
