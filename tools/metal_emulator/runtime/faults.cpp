#include "faults.h"

#include <signal.h>
#include <stdlib.h>
#include <ucontext.h>

#include "buffers.h"
#include "findings.h"

static const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, kInterrupt};
static constexpr int kSignalCount = sizeof kSignals / sizeof *kSignals;
static constexpr size_t kSignalStackBytes = 64 << 10;
static struct sigaction previous[kSignalCount];
static_assert(kInterrupt == SIGURG, "the signal that is ignored by default");

// Runs on the stack of the fiber that raised the signal, in place of the code that did.
static void landing() {
  Worker* w = worker;
  const Fiber* fiber = w->current;
  msl_finding f = make_finding(MSL_FAULT, fiber, (const char*)w->fault_pc + 1);  // as if it were a return address
  const char* address = (const char*)w->fault_address;
  const Buffer* nearest = nearest_buffer(address);
  switch (w->fault_signal) {
    case kInterrupt:
      f.kind = MSL_TIMEOUT;
      f.extent = launch.request->timeout_ms;
      break;
    case SIGFPE:
      f.detail = "integer division by zero or overflow";
      break;
    case SIGILL:
    case SIGTRAP:
      f.kind = MSL_UNDEFINED;
      f.detail = "access outside a variable of the thread, or unreachable place reached";
      break;
    default:
      if (fiber->stack - address > 0 && fiber->stack - address <= (long)kStackBytes) {
        f.detail = "stack overflow: too much memory in the variables of a thread";
        break;
      }
      if (w->fault_without_address) {
        f.detail = "a wide access that is misaligned, or an address far outside of any buffer";
        break;
      }
      f.kind = MSL_OUT_OF_BOUNDS;
      f.detail = "access";
      f.memory = "device";
      if (!nearest) break;
      f.object = nearest->name;
      f.offset = address - nearest->data;
      f.extent = nearest->bytes;
  }
  report(f);
  stop_fiber();
}

static void set_landing(ucontext_t* context, const Fiber* fiber) {
  // The interrupted frames are given up: start over at the top of the stack, aligned as a call leaves it.
  uintptr_t top = ((uintptr_t)fiber->stack + kStackBytes - 256) & ~(uintptr_t)15;
#if defined(__x86_64__)
  worker->fault_pc = (void*)context->uc_mcontext.gregs[REG_RIP];
  context->uc_mcontext.gregs[REG_RIP] = (greg_t)&landing;
  context->uc_mcontext.gregs[REG_RSP] = (greg_t)(top - 8);
#elif defined(__aarch64__)
  worker->fault_pc = (void*)context->uc_mcontext.pc;
  context->uc_mcontext.pc = (unsigned long)&landing;
  context->uc_mcontext.sp = top;
#endif
}

static void handle(int signal, siginfo_t* info, void* context) {
  Worker* w = worker;
#if defined(__x86_64__)
  const char* pc = (const char*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#elif defined(__aarch64__)
  const char* pc = (const char*)((ucontext_t*)context)->uc_mcontext.pc;
#endif
  bool in_kernel = w && w->current;
  if (signal == kInterrupt) {
    // Only between two instructions of the kernel itself: elsewhere the emulator may hold its lock.
    uint64_t at = (uint64_t)pc;
    if (!in_kernel || at < launch.request->code_low || at >= launch.request->code_high) return;
  } else if (!in_kernel) {
    // Not ours: give the signal back and let the instruction raise it again.
    faults_restore();
    return;
  }
  w->fault_signal = (uint32_t)signal;
  w->fault_address = info->si_addr;
  w->fault_without_address = info->si_code == SI_KERNEL;  // a general protection fault of x86
  set_landing((ucontext_t*)context, w->current);
}

void faults_install() {
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int i = 0; i < kSignalCount; i++) sigaction(kSignals[i], &action, &previous[i]);
}

void faults_restore() {
  for (int i = 0; i < kSignalCount; i++) sigaction(kSignals[i], &previous[i], nullptr);
}

void faults_attach(Worker* w) {
  w->signal_stack = malloc(kSignalStackBytes);
  stack_t stack = {};
  stack.ss_sp = w->signal_stack;
  stack.ss_size = kSignalStackBytes;
  sigaltstack(&stack, nullptr);
}

void faults_detach(Worker* w) {
  stack_t stack = {};
  stack.ss_flags = SS_DISABLE;
  sigaltstack(&stack, nullptr);
  free(w->signal_stack);
}
