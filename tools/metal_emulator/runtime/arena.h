// Threadgroup memory: the variables of the threadgroup at work, with gaps between them.
#pragma once
#include "worker.h"

void arena_reset(Worker* w);
bool in_arena(const Worker* w, const void* p);
// The variable that holds the byte; null in a gap, where `nearest` is then the closest one.
const ThreadgroupVariable* arena_variable(const Worker* w, size_t offset, const ThreadgroupVariable** nearest);
