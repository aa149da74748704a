// Runs one threadgroup: each fiber until it waits or returns, then whatever the waiting ones have come together for.
#include <string.h>

#include "arena.h"
#include "buffers.h"
#include "findings.h"
#include "rendezvous.h"

void yield_to_scheduler() { context_switch(worker->current->context, worker->scheduler); }

void stop_fiber() {
  worker->current->state = State::Done;
  worker->current->stopped = true;
  yield_to_scheduler();
  __builtin_trap();
}

static void fiber_main() {
  Worker* w = worker;
  launch.request->entry((void* const*)launch_buffers(), &w->current->attributes);
  w->current->state = State::Done;
  yield_to_scheduler();
  __builtin_trap();
}

static void resume(Worker* w, Fiber* fiber) {
  w->current = fiber;
  w->statistics.switches++;
  context_switch(w->scheduler, fiber->context);
  w->current = nullptr;
}

// The order in which a round visits n things. Seed 0 is the plain order; any other order is as legal on a GPU.
struct Order {
  uint32_t start, count;
  bool backwards;
  uint32_t operator[](uint32_t i) const { return (backwards ? start + count - i : start + i) % count; }
};
class Schedule {
 public:
  Schedule(uint32_t seed, uint64_t group)
      : seed_(seed), state_((seed + 1) * 0x9E3779B97F4A7C15ull ^ (group + 1) * 0xBF58476D1CE4E5B9ull) {}
  Order order(uint32_t count) {
    if (!seed_) return {0, count, false};
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return {(uint32_t)(state_ >> 20) % count, count, (state_ >> 60 & 1) != 0};
  }

 private:
  uint32_t seed_;
  uint64_t state_;
};

static void start_fibers(Worker* w) {
  uint32_t position[3], extent[3];
  group_position(w->group, position);
  for (int k = 0; k < 3; k++) {  // the last threadgroup of a row may be smaller
    uint32_t left = launch.request->grid[k] - position[k] * launch.threadgroup[k];
    extent[k] = left < launch.threadgroup[k] ? left : launch.threadgroup[k];
  }
  uint32_t count = extent[0] * extent[1] * extent[2];
  uint32_t full = launch.threadgroup[0] * launch.threadgroup[1] * launch.threadgroup[2];
  w->fiber_count = count;
  for (uint32_t t = 0; t < count; t++) {
    Fiber& fiber = w->fibers[t];
    fiber.state = State::Running;
    fiber.stopped = false;
    fiber.pc = nullptr;
    fiber.clock = 1;
    for (int m = 0; m < 2; m++) fiber.ordered_in_simdgroup[m] = fiber.ordered_in_threadgroup[m] = 1;
    context_prepare(fiber.context, fiber.stack, kStackBytes - 64, fiber_main);
    *fiber.loop_path() = {0, 0};

    msl_attributes& a = fiber.attributes;
    uint32_t within[3] = {t % extent[0], t / extent[0] % extent[1], t / extent[0] / extent[1]};
    for (int k = 0; k < 3; k++) {
      a.thread_position_in_threadgroup[k] = within[k];
      a.threadgroup_position_in_grid[k] = position[k];
      a.thread_position_in_grid[k] = position[k] * launch.threadgroup[k] + within[k];
      a.threads_per_threadgroup[k] = extent[k];
      a.dispatch_threads_per_threadgroup[k] = launch.threadgroup[k];
      a.threadgroups_per_grid[k] = launch.groups[k];
      a.threads_per_grid[k] = a.grid_size[k] = launch.request->grid[k];
      a.grid_origin[k] = 0;
    }
    a.thread_index_in_threadgroup = t;
    a.thread_index_in_simdgroup = t % kSimdWidth;
    a.simdgroup_index_in_threadgroup = t / kSimdWidth;
    a.simdgroups_per_threadgroup = (count + kSimdWidth - 1) / kSimdWidth;
    a.dispatch_simdgroups_per_threadgroup = (full + kSimdWidth - 1) / kSimdWidth;
    a.threads_per_simdgroup = a.thread_execution_width = kSimdWidth;
    a.thread_index_in_quadgroup = t % 4;
    a.quadgroup_index_in_threadgroup = t / 4;
    a.quadgroups_per_threadgroup = (count + 3) / 4;
    a.dispatch_quadgroups_per_threadgroup = (full + 3) / 4;
  }
}

static void advance_clock(Fiber& fiber, uint32_t flags, bool whole_threadgroup) {
  if (++fiber.clock > kMaxClock) {
    msl_finding f = make_finding(MSL_EMULATOR_LIMIT, &fiber, fiber.pc);
    f.object = "barriers in one threadgroup";
    f.extent = kMaxClock;
    report(f);
    launch.stopping = true;
  }
  for (int memory = 0; memory < 2; memory++) {
    if (!(flags >> memory & 1)) continue;
    fiber.ordered_in_simdgroup[memory] = fiber.clock;
    if (whole_threadgroup) fiber.ordered_in_threadgroup[memory] = fiber.clock;
  }
}

// Completes the earliest operation that lanes of this SIMD-group wait for; false if none of them does.
static bool complete_simd_operation(Worker* w, Fiber* lanes, uint32_t count) {
  uint32_t live = 0, waiting = 0, stopped = 0;
  const Fiber* first = nullptr;
  for (uint32_t i = 0; i < count; i++) {
    const Fiber& f = lanes[i];
    if (f.state != State::Done) live |= 1u << i;
    if (f.stopped) stopped |= 1u << i;
    if (f.state != State::AtSimdOperation && f.state != State::AtSimdBarrier) continue;
    waiting |= 1u << i;
    if (!first || (f.place != first->place && is_earlier(f, *first))) first = &f;
  }
  if (!waiting) return false;
  uint32_t mask = 0;
  void* slots[kSimdWidth] = {};
  for (uint32_t i = 0; i < count; i++) {
    if (!(waiting >> i & 1) || lanes[i].place != first->place) continue;
    mask |= 1u << i;
    slots[i] = lanes[i].slot;
  }
  if (mask != live) {
    w->statistics.partial_simd_operations++;
    if (launch.request->strict && !stopped) {
      msl_finding f = make_finding(MSL_DIVERGENT_SIMD, first, first->pc);
      f.object = first->operation;
      f.mask = mask;
      f.live = live;
      report(f);
    }
  }
  bool barrier = first->state == State::AtSimdBarrier;
  if (!barrier) {
    absent_lane_group = lanes;
    first->combine(slots, mask);
    w->statistics.simd_operations++;
  }
  for (uint32_t i = 0; i < count; i++) {
    if (!(mask >> i & 1)) continue;
    if (barrier) advance_clock(lanes[i], lanes[i].flags, false);
    lanes[i].state = State::Running;
  }
  return true;
}

// Where lanes wait, or waited last, that would have gone on for ever.
static void report_timeout(const Fiber* lanes, uint32_t count) {
  for (uint32_t i = 0; i < count; i++) {
    if (lanes[i].state == State::Done) continue;
    msl_finding f = make_finding(MSL_TIMEOUT, &lanes[i], lanes[i].pc);
    f.extent = launch.request->timeout_ms;
    report(f);
    return;
  }
}

// Lets one SIMD-group run until every lane has returned or waits at a threadgroup barrier.
static void run_simdgroup(Worker* w, Fiber* lanes, uint32_t count, Schedule& schedule) {
  do {
    Order order = schedule.order(count);
    for (uint32_t i = 0; i < count; i++) {
      Fiber& fiber = lanes[order[i]];
      if (fiber.state == State::Running && !launch.stopping) resume(w, &fiber);
    }
  } while (!launch.stopping && complete_simd_operation(w, lanes, count));
  if (launch.timed_out) report_timeout(lanes, count);
}

static void report_barrier(msl_kind kind, const Fiber& at, uint32_t reached, uint32_t total) {
  msl_finding f = make_finding(kind, &at, at.pc);
  f.object = at.operation;
  f.mask = reached;
  f.live = total;
  report(f);
}

// Opens the threadgroup barrier for those who wait there; false if every thread has returned.
static bool complete_threadgroup_barrier(Worker* w) {
  Fiber* first = nullptr;
  uint32_t waiting = 0, stopped = 0, flags = ~0u;
  for (uint32_t t = 0; t < w->fiber_count; t++) {
    Fiber& f = w->fibers[t];
    stopped += f.stopped;
    if (f.state != State::AtThreadgroupBarrier) continue;
    if (!first) first = &f;
    waiting++;
    flags &= f.flags;
  }
  if (!first) return false;
  w->statistics.barriers++;
  // A thread that a finding has stopped would only lead to further findings.
  if (launch.request->strict && !stopped && waiting < w->fiber_count)
    report_barrier(MSL_MISSED_BARRIER, *first, waiting, w->fiber_count);
  for (uint32_t t = 0; t < w->fiber_count; t++) {
    Fiber& f = w->fibers[t];
    if (f.state != State::AtThreadgroupBarrier) continue;
    if (f.place != first->place && !stopped) report_barrier(MSL_DIVERGENT_BARRIER, f, waiting, w->fiber_count);
    advance_clock(f, flags, true);
    f.state = State::Running;
  }
  return true;
}

void run_threadgroup(Worker* w, uint64_t group) {
  w->group = group;
  arena_reset(w);
  start_fibers(w);
  Schedule schedule(launch.request->seed, group);
  uint32_t simdgroups = (w->fiber_count + kSimdWidth - 1) / kSimdWidth;
  do {
    Order order = schedule.order(simdgroups);
    for (uint32_t i = 0; i < simdgroups; i++) {
      uint32_t first = order[i] * kSimdWidth, left = w->fiber_count - first;
      run_simdgroup(w, w->fibers + first, left < kSimdWidth ? left : kSimdWidth, schedule);
    }
  } while (!launch.stopping && complete_threadgroup_barrier(w));
}
