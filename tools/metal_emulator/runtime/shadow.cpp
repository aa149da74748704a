// Races and uninitialised reads, by the rules of Metal: a barrier orders the memory it names, for the threads it joins;
// nothing but atomics orders two threadgroups.
#include "shadow.h"

#include <string.h>
#include <sys/mman.h>

#include "findings.h"

struct Access {
  bool atomic;
  uint32_t thread;
  uint64_t group;
  uint32_t clock;
};
static uint64_t pack(const Fiber* fiber, bool atomic) {
  return (uint64_t)atomic << 63 | (uint64_t)fiber->thread() << 53 | worker->group << 24 | fiber->clock;
}
static Access unpack(uint64_t cell) {
  return {(cell >> 63) != 0, (uint32_t)(cell >> 53 & 1023), cell >> 24 & (kMaxGroups - 1),
          (uint32_t)(cell & kMaxClock)};
}
// Thread and threadgroup alone.
static uint64_t identity(uint64_t cell) { return cell << 1 >> 25; }

static bool is_ordered(uint64_t earlier, uint64_t now, uint32_t memory) {
  if (!earlier || identity(earlier) == identity(now)) return true;
  if (earlier >> 63 && now >> 63) return true;
  Access e = unpack(earlier), n = unpack(now);
  if (e.group != n.group) return false;
  const Fiber& them = worker->fibers[e.thread];
  bool same_simdgroup = e.thread / kSimdWidth == n.thread / kSimdWidth;
  return e.clock < (same_simdgroup ? them.ordered_in_simdgroup : them.ordered_in_threadgroup)[memory];
}

static bool in_same_simdgroup(uint64_t a, uint64_t b) {
  Access x = unpack(a), y = unpack(b);
  return x.group == y.group && x.thread / kSimdWidth == y.thread / kSimdWidth;
}

static void report_race(const SharedBytes& bytes, size_t at, uint64_t earlier, bool earlier_is_write, bool write,
                        const void* pc) {
  Access e = unpack(earlier);
  // The other thread has passed a barrier since, so there was one: of the wrong scope or for other memory.
  bool barrier = e.group == worker->group && worker->fibers[e.thread].clock > e.clock;
  msl_finding f = make_finding(barrier ? MSL_WEAK_BARRIER : MSL_RACE, worker->current, pc);
  f.object = bytes.name;
  f.memory = bytes.memory == kDevice ? "device" : "threadgroup";
  f.detail = write ? (earlier_is_write ? "write after write" : "write after read") : "read after write";
  f.offset = (int64_t)(bytes.offset + at);
  f.bytes = bytes.count;
  f.has_other = 1;
  f.other_group = e.group;
  f.other_thread = e.thread;
  report(f);
}

static void note_reader(Cell& cell, uint64_t me, uint32_t memory) {
  if (me >> 63) {
    cell.atomic_reader = me;
  } else if (is_ordered(cell.reader, me, memory)) {
    cell.reader = me;
  } else if (is_ordered(cell.other_reader, me, memory) || in_same_simdgroup(cell.other_reader, cell.reader)) {
    cell.other_reader = me;
  }
}

void shadow_read(const SharedBytes& bytes, bool atomic, const void* pc) {
  uint64_t me = pack(worker->current, atomic);
  bool reported = false;
  for (size_t i = 0; i < bytes.count; i++) {
    Cell& cell = bytes.cells[i];
    if (!reported && !is_ordered(cell.write, me, bytes.memory)) {
      report_race(bytes, i, cell.write, true, false, pc);
      reported = true;
    }
    if (!reported && !cell.write && !bytes.initialised) {
      msl_finding f = make_finding(MSL_UNINITIALISED, worker->current, pc);
      f.object = bytes.name;
      f.memory = bytes.memory == kDevice ? "device" : "threadgroup";
      f.offset = (int64_t)(bytes.offset + i);
      f.bytes = bytes.count;
      report(f);
      reported = true;
    }
    note_reader(cell, me, bytes.memory);
  }
}

void shadow_write(const SharedBytes& bytes, bool atomic, const void* pc) {
  uint64_t me = pack(worker->current, atomic);
  bool reported = false;
  for (size_t i = 0; i < bytes.count; i++) {
    Cell& cell = bytes.cells[i];
    if (!reported) {
      const uint64_t earlier[] = {cell.write, cell.reader, cell.other_reader, cell.atomic_reader};
      for (int k = 0; k < 4 && !reported; k++) {
        if (is_ordered(earlier[k], me, bytes.memory)) continue;
        report_race(bytes, i, earlier[k], k == 0, true, pc);
        reported = true;
      }
    }
    cell = {me, 0, 0, 0};
  }
}

Cell* shadow_map(size_t bytes) {
  void* p = mmap(nullptr, (bytes + 1) * sizeof(Cell), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : (Cell*)p;
}
void shadow_unmap(Cell* cells, size_t bytes) {
  if (cells) munmap(cells, (bytes + 1) * sizeof(Cell));
}
void shadow_forget(Cell* cells, size_t bytes) { memset(cells, 0, bytes * sizeof(Cell)); }
