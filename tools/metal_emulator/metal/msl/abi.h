// The contract between a compiled kernel and the runtime that executes it.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Every per-thread value that a compute kernel may ask for with [[name]].
struct msl_attributes {
  uint32_t thread_position_in_grid[3];
  uint32_t threadgroup_position_in_grid[3];
  uint32_t thread_position_in_threadgroup[3];
  uint32_t threads_per_threadgroup[3];
  uint32_t dispatch_threads_per_threadgroup[3];
  uint32_t threadgroups_per_grid[3];
  uint32_t threads_per_grid[3];
  uint32_t grid_size[3];
  uint32_t grid_origin[3];
  uint32_t thread_index_in_threadgroup;
  uint32_t thread_index_in_simdgroup;
  uint32_t simdgroup_index_in_threadgroup;
  uint32_t simdgroups_per_threadgroup;
  uint32_t dispatch_simdgroups_per_threadgroup;
  uint32_t threads_per_simdgroup;
  uint32_t thread_execution_width;
  uint32_t thread_index_in_quadgroup;
  uint32_t quadgroup_index_in_threadgroup;
  uint32_t quadgroups_per_threadgroup;
  uint32_t dispatch_quadgroups_per_threadgroup;
};

typedef void (*msl_entry)(void* const* buffers, const msl_attributes* attributes);

// Computes one SIMD-group operation: slots[lane] is what the lane brought, mask says which lanes take part.
typedef void (*msl_collective)(void* const* slots, uint32_t mask);

// The rounds of all loops that a thread is in: which they are, and (as far as 64 bits go) which come first.
struct msl_path {
  uint64_t identity, order;
};

enum msl_scope : uint32_t { MSL_SIMDGROUP = 0, MSL_THREADGROUP = 1 };

#ifndef __NVPTX__
#pragma GCC visibility push(default)
extern "C" {
// `convergent` keeps a call under its own condition, `nomerge` keeps two calls two calls: the return address is then
// the identity of the place in the source.
__attribute__((noinline, convergent, nomerge)) void msl_simd(void* slot, msl_collective combine, const char* name);
__attribute__((noinline, convergent, nomerge)) void msl_barrier(uint32_t scope, uint32_t flags);
__attribute__((noinline)) void* msl_threadgroup_variable(uint32_t id, size_t bytes, size_t align, const char* name);
// The lane read a value from a lane that does not take part: undefined on a GPU.
void msl_lane_absent(uint32_t lane, uint32_t source, const char* name);
uint32_t msl_lane();
msl_path* msl_loop_path();
}
#pragma GCC visibility pop
#endif
