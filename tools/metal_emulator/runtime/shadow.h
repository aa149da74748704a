// What the check mode knows of every byte that threads share: who wrote it last, who has read it since.
#pragma once
#include <stddef.h>
#include <stdint.h>

// An access packed into 64 bits: atomic 1, thread in its threadgroup 10, threadgroup 29, barrier clock 24; 0 is none.
// Launches with more threadgroups, and threadgroups with more barriers, are refused rather than wrapped around.
constexpr uint64_t kMaxGroups = 1ull << 29;
constexpr uint32_t kMaxClock = (1u << 24) - 1;

struct Cell {
  uint64_t write;
  // Readers since that write. Two are enough if they are of different SIMD-groups whenever there are such: whoever
  // writes next without a barrier then races with at least one of them.
  uint64_t reader, other_reader;
  uint64_t atomic_reader;
};

struct SharedBytes {
  Cell* cells;  // of the first byte accessed
  size_t count;
  const char* name;
  size_t offset;  // of the first byte in the object
  uint32_t memory;
  bool initialised;
};

#ifdef MSL_CHECK
Cell* shadow_map(size_t bytes);
void shadow_unmap(Cell* cells, size_t bytes);
void shadow_forget(Cell* cells, size_t bytes);
void shadow_read(const SharedBytes& bytes, bool atomic, const void* pc);
void shadow_write(const SharedBytes& bytes, bool atomic, const void* pc);
#else
inline Cell* shadow_map(size_t) { return nullptr; }
inline void shadow_unmap(Cell*, size_t) {}
inline void shadow_forget(Cell*, size_t) {}
#endif
