// What is wrong with the kernel, once for each place in its code.
#pragma once
#include "worker.h"

// A finding of this kind by this fiber (null: by none) at this address in the code.
msl_finding make_finding(msl_kind kind, const Fiber* fiber, const void* pc);
void report(const msl_finding& finding);
void clear_findings();
uint32_t finding_count();
