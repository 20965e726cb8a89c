// Shared memory with its shadow.
#include "shared.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "launch.h"

namespace emu {
namespace {

struct Record {
  const void* pc;  // of the last write
  Moment moment;
  uint16_t writer;
  uint16_t async_readers;
  bool written, in_flight, mbarrier;
};
// Of one warp's reads since the last write, the latest; or of one agent's.
struct Reader {
  Moment moment;  // 0: none
  int agent;
};

std::vector<Record> records;
std::vector<Reader> readers;  // by record, then warp, then warpgroup
int n_readers = 0;

uint32_t first_record(uint32_t offset) { return offset / kRecordBytes; }
uint32_t end_record(uint32_t offset, int bytes) {
  return (offset + bytes + kRecordBytes - 1) / kRecordBytes;
}

std::string name_of(int agent) {
  if (agent < block.n_threads) return "thread " + std::to_string(agent);
  return agent < wgmma_agent(0) ? "a bulk load" : "a wgmma";
}

Reader& reader(uint32_t record, int agent) {
  const int place = agent < block.n_threads ? agent / 32 : block.n_warps + agent - wgmma_agent(0);
  return readers[record * n_readers + place];
}

// Reports unless `thread` may read the record.
void check_readable(uint32_t i, const Thread& thread) {
  const Record& r = records[i];
  const uint32_t offset = i * kRecordBytes;
  if (r.mbarrier)
    fail(Kind::protocol, "%s of thread %d reads shared memory +%u, which holds an mbarrier",
         self->op, thread.id, offset);
  if (r.in_flight)
    fail(Kind::in_flight, "%s of thread %d reads shared memory +%u, into which a copy is under way",
         self->op, thread.id, offset);
  if (!r.written)
    fail(Kind::unwritten, "%s of thread %d reads shared memory +%u, which nobody has written",
         self->op, thread.id, offset);
  if (!knows(thread.seen, r.writer, r.moment))
    fail(Kind::race,
         "%s of thread %d reads shared memory +%u, which %s wrote @%p; nothing orders "
         "the two",
         self->op, thread.id, offset, name_of(r.writer).c_str(), r.pc);
}

}  // namespace

uint32_t shared_offset(uint32_t address, int bytes, int alignment) {
  const int64_t offset = int64_t(address) - kWindow;
  if (offset < 0 || offset + bytes > block.shared_bytes)
    fail(Kind::bounds, "thread %d: %s of %d bytes at shared memory %+lld; the block has %u bytes",
         self->id, self->op, bytes, (long long)offset, block.shared_bytes);
  if (offset % alignment)
    fail(Kind::protocol, "thread %d: %s at shared memory +%lld, no multiple of %d", self->id,
         self->op, (long long)offset, alignment);
  return uint32_t(offset);
}

void read_shared(uint32_t offset, int bytes, const Thread& thread) {
  if (!launch->checked) return;
  for (uint32_t i = first_record(offset), end = end_record(offset, bytes); i < end; ++i) {
    const Record& r = records[i];
    if (r.mbarrier || r.in_flight || !r.written || !knows(thread.seen, r.writer, r.moment))
      check_readable(i, thread);
    reader(i, thread.id) = {thread.seen[thread.id], thread.id};
  }
}

void write_shared(uint32_t offset, int bytes, const Thread& thread) {
  check_free(offset, bytes, thread);
  set_written(offset, bytes, thread.id, thread.seen[thread.id], self->pc);
}

void check_free(uint32_t offset, int bytes, const Thread& thread) {
  if (!launch->checked) return;
  for (uint32_t i = first_record(offset), end = end_record(offset, bytes); i < end; ++i) {
    const Record& r = records[i];
    const uint32_t at = i * kRecordBytes;
    if (r.mbarrier)
      fail(Kind::protocol, "%s of thread %d writes shared memory +%u, which holds an mbarrier",
           self->op, thread.id, at);
    if (r.in_flight)
      fail(Kind::in_flight,
           "%s of thread %d writes shared memory +%u, into which a copy is under way", self->op,
           thread.id, at);
    if (r.async_readers)
      fail(Kind::in_flight,
           "%s of thread %d writes shared memory +%u, which an unfinished operation reads",
           self->op, thread.id, at);
    if (r.written && !knows(thread.seen, r.writer, r.moment))
      fail(Kind::race,
           "%s of thread %d writes shared memory +%u, which %s wrote @%p; nothing orders "
           "the two",
           self->op, thread.id, at, name_of(r.writer).c_str(), r.pc);
    for (int k = 0; k < n_readers; ++k) {
      const Reader& reader = readers[i * n_readers + k];
      if (reader.moment && !knows(thread.seen, reader.agent, reader.moment))
        fail(Kind::race,
             "%s of thread %d writes shared memory +%u, which %s has read; nothing orders "
             "the two",
             self->op, thread.id, at, name_of(reader.agent).c_str());
    }
  }
}

void set_written(uint32_t offset, int bytes, int agent, Moment moment, const void* pc) {
  for (uint32_t i = first_record(offset), end = end_record(offset, bytes); i < end; ++i) {
    records[i] = {pc, moment, uint16_t(agent), 0, true, false, false};
    std::fill_n(&readers[i * n_readers], n_readers, Reader{});
  }
}

void set_in_flight(uint32_t offset, int bytes) {
  for (uint32_t i = first_record(offset), end = end_record(offset, bytes); i < end; ++i)
    records[i].in_flight = true;
}

void set_mbarrier(uint32_t offset) {
  for (uint32_t i = first_record(offset); i < end_record(offset, 8); ++i)
    records[i].mbarrier = true;
}

void check_async_read(uint32_t offset, int bytes, const Thread& thread) {
  if (!launch->checked) return;
  for (uint32_t i = first_record(offset), end = end_record(offset, bytes); i < end; ++i) {
    check_readable(i, thread);
    const Record& r = records[i];
    if (r.writer < block.n_threads && block.threads[r.writer].fenced < r.moment)
      fail(Kind::race,
           "%s of thread %d reads shared memory +%u, which thread %d wrote @%p with no "
           "fence.proxy.async since",
           self->op, thread.id, i * kRecordBytes, r.writer, r.pc);
  }
}

void begin_async_read(uint32_t offset, int bytes) {
  for (uint32_t i = first_record(offset), end = end_record(offset, bytes); i < end; ++i)
    ++records[i].async_readers;
}

void end_async_read(uint32_t offset, int bytes, int agent, Moment moment) {
  for (uint32_t i = first_record(offset), end = end_record(offset, bytes); i < end; ++i) {
    --records[i].async_readers;
    reader(i, agent) = {moment, agent};
  }
}

uint8_t* dynamic_shared_memory() { return block.shared; }
uint32_t shared_address(const void* p) {
  return kWindow + uint32_t(static_cast<const uint8_t*>(p) - block.shared);
}

void begin_shared() {
  if (!block.shared) block.shared = static_cast<uint8_t*>(aligned_alloc(1024, kMaxSharedBytes));
  if (block.shared_bytes > kMaxSharedBytes)
    fail(Kind::protocol, "%u bytes of shared memory: more than any card has", block.shared_bytes);
  memset(block.shared, 0xff, block.shared_bytes);  // NaN in every float format
  n_readers = block.n_warps + block.n_warpgroups;
  const size_t n = block.shared_bytes / kRecordBytes + 1;
  records.assign(n, {});
  readers.assign(n * n_readers, {});
}

}  // namespace emu
