// One operating-system thread at work on one threadgroup at a time; every thread of that group is a fiber.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "api.h"
#include "context.h"
#include "shadow.h"

constexpr uint32_t kSimdWidth = 32;
constexpr uint32_t kMaxThreads = 1024;           // of a threadgroup
constexpr size_t kStackBytes = 128 << 10;        // of a fiber
constexpr size_t kThreadgroupLimit = 32 << 10;   // of Metal
constexpr size_t kThreadgroupArena = 256 << 10;  // of the emulator, to go on after reporting more than the limit
constexpr size_t kMaxThreadgroupVariables = 128;
enum Memory : uint32_t { kDevice = 0, kThreadgroup = 1 };  // index of a mem_flags bit

enum class State : uint8_t { Running, AtSimdOperation, AtSimdBarrier, AtThreadgroupBarrier, Done };

struct Fiber {
  Context context;
  char* stack;
  State state;
  bool stopped;  // by a finding, not by returning

  // Where it waits and for what.
  uint64_t place;
  void** frame;
  void* pc;
  void* slot;
  msl_collective combine;
  const char* operation;
  uint32_t flags;

  // Check mode. The clock counts barriers. What the thread did at a clock below ordered_...[memory] is ordered before
  // what its SIMD-group (its threadgroup) does now.
  uint32_t clock;
  uint32_t ordered_in_simdgroup[2];
  uint32_t ordered_in_threadgroup[2];

  msl_attributes attributes;

  uint32_t thread() const { return attributes.thread_index_in_threadgroup; }
  uint32_t simdgroup() const { return attributes.simdgroup_index_in_threadgroup; }
  bool on_stack(const void* p) const { return (const char*)p >= stack && (const char*)p < stack + kStackBytes; }
  // At the far end of the stack, so that the memory check takes it for the kernel's own.
  msl_path* loop_path() const { return (msl_path*)(stack + kStackBytes - sizeof(msl_path)); }
};

struct ThreadgroupVariable {
  uint32_t id;
  size_t offset, bytes;
  const char* name;
};

struct Worker {
  Context scheduler;
  Fiber* current;  // null while the scheduler runs
  Fiber* fibers;
  uint32_t fiber_count;  // in the threadgroup at work
  uint64_t group;        // its linear index

  char* stacks;
  uint32_t stack_count;
  void* signal_stack;

  char* arena;
  size_t arena_used;
  size_t threadgroup_bytes;
  ThreadgroupVariable variables[kMaxThreadgroupVariables];
  uint32_t variable_count;
  Cell* arena_shadow;

  uint32_t fault_signal;
  void* fault_address;
  void* fault_pc;
  bool fault_without_address;

  msl_statistics statistics;
};

extern __thread Worker* worker __attribute__((tls_model("initial-exec")));

// One launch at a time: the Python side holds a lock.
struct Launch {
  const msl_request* request;
  uint32_t threadgroup[3];  // never more than the grid
  uint32_t groups[3];
  uint64_t group_count;
  uint64_t next_group;
  bool stopping;                       // threads are not resumed any more
  bool timed_out;                      // that is why
  const char *image_low, *image_high;  // the kernel's code and constants
};
extern Launch launch;

Worker* worker_create(uint32_t fibers);
void worker_destroy(Worker* w);
void run_threadgroup(Worker* w, uint64_t group);
// Back to the scheduler; returns when the fiber is resumed.
void yield_to_scheduler();
[[noreturn]] void stop_fiber();
// The threadgroup's coordinates from its linear index.
inline void group_position(uint64_t group, uint32_t* out) {
  out[0] = group % launch.groups[0];
  out[1] = group / launch.groups[0] % launch.groups[1];
  out[2] = group / launch.groups[0] / launch.groups[1];
}
