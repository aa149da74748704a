// The context switch for x86-64 and aarch64.
#include "context.h"

#include <string.h>

#if defined(__x86_64__)
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size msl_switch, .-msl_switch
)");

void context_prepare(Context& context, char* stack, size_t bytes, void (*start)()) {
  // Six saved registers and the address that `ret` takes; a null frame pointer ends the chain of frames.
  // `start` must find the stack pointer 8 below a multiple of 16, as after a call.
  void** sp = (void**)(stack + bytes) - 8;
  memset(sp, 0, 8 * sizeof(void*));
  sp[6] = (void*)start;
  context.sp = sp;
}
#elif defined(__aarch64__)
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size msl_switch, .-msl_switch
)");

void context_prepare(Context& context, char* stack, size_t bytes, void (*start)()) {
  void** sp = (void**)(stack + bytes) - 20;
  memset(sp, 0, 20 * sizeof(void*));
  sp[11] = (void*)start;  // x30
  context.sp = sp;
}
#else
#error "the context switch is written for x86-64 and aarch64"
#endif
