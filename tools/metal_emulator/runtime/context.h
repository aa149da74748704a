// Switching between the stacks of emulated threads.
#pragma once
#include <stddef.h>

// Hand-written for each processor: a dozen instructions, where swapcontext makes a system call.
struct Context {
  void* sp;
};
extern "C" void msl_switch(void** save, void* load);
inline void context_switch(Context& from, Context& to) { msl_switch(&from.sp, to.sp); }

// Makes a context that starts in `start` on the given stack; `start` never returns.
void context_prepare(Context& context, char* stack, size_t bytes, void (*start)());
