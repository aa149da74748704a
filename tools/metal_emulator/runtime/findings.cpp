#include "findings.h"

#include <string.h>

static constexpr uint32_t kMaxFindings = 64;
static msl_finding findings[kMaxFindings];
static uint32_t count;
static bool lock;

msl_finding make_finding(msl_kind kind, const Fiber* fiber, const void* pc) {
  msl_finding f;
  memset(&f, 0, sizeof f);
  f.kind = kind;
  f.pc = (uint64_t)pc;
  if (fiber) {
    f.group = worker->group;
    f.thread = fiber->thread();
  }
  return f;
}

void report(const msl_finding& finding) {
  while (__atomic_test_and_set(&lock, __ATOMIC_ACQUIRE)) {
  }
  msl_finding* same = nullptr;
  for (uint32_t i = 0; i < count && !same; i++)
    if (findings[i].kind == finding.kind && findings[i].pc == finding.pc && findings[i].line == finding.line)
      same = &findings[i];
  if (same) {
    same->count++;
  } else if (count < kMaxFindings) {
    findings[count] = finding;
    findings[count++].count = 1;
  }
  __atomic_clear(&lock, __ATOMIC_RELEASE);
}

void clear_findings() { count = 0; }
uint32_t finding_count() { return count; }
MSL_EXPORT const msl_finding* msl_findings() { return findings; }
