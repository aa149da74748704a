// The calls by which a kernel waits for others, and the identity of the place where it waits.
#include "findings.h"
#include "rendezvous.h"

// Two lanes are at the same place if they got there through the same calls, in the same rounds of the same loops.
static uint64_t place_of(const Fiber* fiber, void** frame) {
  uint64_t hash = 0xCBF29CE484222325ull ^ fiber->loop_path()->identity;
  for_each_caller(fiber, frame, [&](void* pc) { hash = (hash ^ (uint64_t)pc) * 0x100000001B3ull; });
  return hash;
}

// The earlier of two places, outermost call first: that is where diverged lanes wait for each other. Code addresses
// stand for source order, which the compiler keeps (-disable-block-placement).
bool is_earlier(const Fiber& a, const Fiber& b) {
  void *calls_a[kMaxCalls], *calls_b[kMaxCalls];
  uint32_t depth_a = 0, depth_b = 0;
  for_each_caller(&a, a.frame, [&](void* pc) { calls_a[depth_a++] = pc; });
  for_each_caller(&b, b.frame, [&](void* pc) { calls_b[depth_b++] = pc; });
  while (depth_a && depth_b) {
    void *call_a = calls_a[--depth_a], *call_b = calls_b[--depth_b];
    if (call_a != call_b) return call_a < call_b;
  }
  return a.loop_path()->order < b.loop_path()->order;
}

#define WAIT(new_state)                              \
  Fiber* fiber = worker->current;                    \
  fiber->frame = (void**)__builtin_frame_address(0); \
  fiber->pc = __builtin_return_address(0);           \
  fiber->place = place_of(fiber, fiber->frame);      \
  fiber->state = new_state

extern "C" {
void msl_simd(void* slot, msl_collective combine, const char* name) {
  WAIT(State::AtSimdOperation);
  fiber->slot = slot;
  fiber->combine = combine;
  fiber->operation = name;
  yield_to_scheduler();
}

void msl_barrier(uint32_t scope, uint32_t flags) {
  WAIT(scope == MSL_THREADGROUP ? State::AtThreadgroupBarrier : State::AtSimdBarrier);
  fiber->operation = scope == MSL_THREADGROUP ? "threadgroup_barrier" : "simdgroup_barrier";
  fiber->flags = flags;
  yield_to_scheduler();
}

uint32_t msl_lane() { return worker->current->attributes.thread_index_in_simdgroup; }

msl_path* msl_loop_path() { return worker->current->loop_path(); }

void msl_lane_absent(uint32_t lane, uint32_t source, const char* name) {
  // Called by a combining function, on the scheduler's stack: the fibers of this SIMD-group are all parked.
  const Fiber* fiber = absent_lane_group + lane;
  msl_finding f = make_finding(MSL_ABSENT_LANE, fiber, fiber->pc);
  f.object = name;
  f.offset = source;
  report(f);
}
}

__thread const Fiber* absent_lane_group __attribute__((tls_model("initial-exec")));
