// Check mode: the calls of -fsanitize=undefined. Structures and names are the compiler's; every one starts with a
// place.
#include "findings.h"

struct SourceLocation {
  const char* file;
  uint32_t line, column;
};
struct TypeDescriptor {
  uint16_t kind, info;
  char name[1];
};
struct TypeMismatch {
  SourceLocation at;
  const TypeDescriptor* type;
  uint8_t log_alignment;
  uint8_t use;
};

static msl_finding undefined(const char* rule, const SourceLocation* at, const void* pc) {
  msl_finding f = make_finding(MSL_UNDEFINED, worker->current, pc);
  f.detail = rule;
  if (at) {
    f.file = at->file;
    f.line = at->line;
    f.column = at->column;
  }
  return f;
}
static bool in_kernel() { return worker && worker->current; }

#define PC __builtin_return_address(0)
#define RULE(name, text)                                 \
  void __ubsan_handle_##name(const SourceLocation* at) { \
    if (in_kernel()) report(undefined(text, at, PC));    \
  }
// After these there is no way on.
#define FATAL_RULE(name, text)                           \
  void __ubsan_handle_##name(const SourceLocation* at) { \
    report(undefined(text, at, PC));                     \
    stop_fiber();                                        \
  }

#pragma GCC visibility push(default)
extern "C" {
RULE(add_overflow, "signed addition overflows")
RULE(sub_overflow, "signed subtraction overflows")
RULE(mul_overflow, "signed multiplication overflows")
RULE(negate_overflow, "signed negation overflows")
RULE(shift_out_of_bounds, "shift by a negative count, by the width or more, or out of the type")
RULE(float_cast_overflow, "the float does not fit the integer type")
RULE(load_invalid_value, "the byte is not a value of its type")
RULE(invalid_builtin, "count of leading or trailing zeros of 0")
RULE(vla_bound_not_positive, "array of no positive length")
FATAL_RULE(divrem_overflow, "integer division by zero or overflow")
FATAL_RULE(out_of_bounds, "index outside its array")
FATAL_RULE(builtin_unreachable, "unreachable place reached")
FATAL_RULE(missing_return, "end of a function that returns a value")

void __ubsan_handle_local_out_of_bounds() {
  report(undefined("access outside a variable of the thread", nullptr, PC));
  stop_fiber();
}

void __ubsan_handle_type_mismatch_v1(const TypeMismatch* data, uintptr_t pointer) {
  if (!in_kernel()) return;
  msl_finding f = undefined(nullptr, &data->at, PC);
  f.kind = MSL_MISALIGNED;
  f.detail = data->type->name;
  f.bytes = 1ull << data->log_alignment;
  f.offset = (int64_t)(pointer & (f.bytes - 1));
  report(f);
  stop_fiber();  // the processor may take the compiler's word for the alignment
}
}
#pragma GCC visibility pop
