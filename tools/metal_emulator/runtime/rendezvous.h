// Where fibers wait: the chain of calls that leads there, read from the frame pointers.
#pragma once
#include "worker.h"

constexpr uint32_t kMaxCalls = 32;

template <class F>
void for_each_caller(const Fiber* fiber, void** frame, F visit) {
  for (uint32_t i = 0; i < kMaxCalls && fiber->on_stack(frame) && fiber->on_stack(frame + 1); i++) {
    visit(frame[1]);
    void** outer = (void**)frame[0];
    if (outer <= frame) return;
    frame = outer;
  }
}

bool is_earlier(const Fiber& a, const Fiber& b);

// The SIMD-group whose operation is being computed.
extern __thread const Fiber* absent_lane_group __attribute__((tls_model("initial-exec")));
