// What the Python side calls and reads; launcher.py mirrors these structures field by field.
#pragma once
#include "../metal/msl/abi.h"

struct msl_buffer {
  void* host;  // null: an optional buffer that is not bound
  uint64_t bytes;
  const char* name;
  uint32_t writable;
  uint32_t initialised;  // false: reading a byte before it is written is a finding
};

struct msl_request {
  msl_entry entry;
  uint64_t code_low, code_high;  // the kernel's own instructions
  const msl_buffer* buffers;
  uint32_t buffer_count;
  uint32_t grid[3];         // in threads, as in dispatchThreads
  uint32_t threadgroup[3];  // in threads
  uint32_t workers;         // operating-system threads; threadgroups are dealt out to them
  uint32_t seed;            // 0: the order of the indices; others: another legal schedule each
  uint32_t strict;          // report SIMD-group operations that part of the live lanes take part in
  uint32_t flush_subnormals;
  uint32_t alignment;  // of each buffer's first byte
  uint32_t timeout_ms;
};

struct msl_statistics {
  uint64_t simd_operations;
  uint64_t partial_simd_operations;
  uint64_t barriers;
  uint64_t switches;
  uint64_t threadgroup_bytes;
  uint64_t nanoseconds;
};

enum msl_kind : uint32_t {
  MSL_RACE,
  MSL_WEAK_BARRIER,  // a race across a barrier that does not order this memory
  MSL_OUT_OF_BOUNDS,
  MSL_WRITE_TO_INPUT,
  MSL_UNINITIALISED,
  MSL_MISALIGNED,
  MSL_DIVERGENT_SIMD,
  MSL_DIVERGENT_BARRIER,
  MSL_MISSED_BARRIER,
  MSL_ABSENT_LANE,
  MSL_UNDEFINED,
  MSL_THREADGROUP_MEMORY,
  MSL_FAULT,
  MSL_TIMEOUT,
  MSL_EMULATOR_LIMIT,
};

struct msl_finding {
  uint32_t kind;
  uint32_t count;  // how often it happened at this place
  uint64_t pc;     // 0: no place in the code
  const char* file;
  uint32_t line, column;   // from the compiler's own data where it has them, else from the pc
  const char* object;      // buffer, variable or operation
  const char* detail;      // "read", "write", a type, a rule
  const char* memory;      // "device" or "threadgroup"
  int64_t offset;          // of the access in the object
  uint64_t bytes, extent;  // of the access, of the object
  uint64_t group;          // linear index of the threadgroup
  uint32_t thread;         // linear index in it
  uint32_t has_other;      // the other side of a race
  uint64_t other_group;
  uint32_t other_thread;
  uint32_t mask, live;  // lanes that take part, lanes that are alive; for barriers counts of threads
};

#define MSL_EXPORT extern "C" __attribute__((visibility("default")))
MSL_EXPORT int msl_launch(const msl_request* request, msl_statistics* statistics);
MSL_EXPORT const msl_finding* msl_findings();
