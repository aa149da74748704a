#include "arena.h"

#include <string.h>

#include "findings.h"

static constexpr size_t kGap = 64;

void arena_reset(Worker* w) {
  w->arena_used = kGap;
  w->threadgroup_bytes = 0;
  w->variable_count = 0;
}

bool in_arena(const Worker* w, const void* p) {
  return (const char*)p >= w->arena && (const char*)p < w->arena + kThreadgroupArena;
}

const ThreadgroupVariable* arena_variable(const Worker* w, size_t offset, const ThreadgroupVariable** nearest) {
  *nearest = nullptr;
  for (uint32_t i = 0; i < w->variable_count; i++) {
    const ThreadgroupVariable& v = w->variables[i];
    if (offset >= v.offset && offset < v.offset + v.bytes) return &v;
    if (offset + kGap >= v.offset && offset < v.offset + v.bytes + kGap && !*nearest) *nearest = &v;
  }
  return nullptr;
}

extern "C" void* msl_threadgroup_variable(uint32_t id, size_t bytes, size_t align, const char* name) {
  Worker* w = worker;
  for (uint32_t i = 0; i < w->variable_count; i++)
    if (w->variables[i].id == id) return w->arena + w->variables[i].offset;

  if (align < 16) align = 16;
  size_t offset = (w->arena_used + align - 1) & ~(align - 1);
  w->threadgroup_bytes += (bytes + 15) & ~(size_t)15;
  if (w->threadgroup_bytes > w->statistics.threadgroup_bytes) w->statistics.threadgroup_bytes = w->threadgroup_bytes;
  bool full = offset + bytes + kGap > kThreadgroupArena || w->variable_count == kMaxThreadgroupVariables;
  if (w->threadgroup_bytes > kThreadgroupLimit || full) {
    msl_finding f = make_finding(MSL_THREADGROUP_MEMORY, w->current, __builtin_return_address(0));
    f.object = name;
    f.bytes = w->threadgroup_bytes;
    f.extent = kThreadgroupLimit;
    report(f);
    if (full) stop_fiber();
  }
  w->variables[w->variable_count++] = {id, offset, bytes, name};
  w->arena_used = offset + bytes + kGap;
  memset(w->arena + offset, 0xFF, bytes);  // a NaN in every float format
  shadow_forget(w->arena_shadow + offset, bytes);
  return w->arena + offset;
}
