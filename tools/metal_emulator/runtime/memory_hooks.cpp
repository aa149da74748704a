// Check mode: the calls that -fsanitize=thread puts before every access, answered by the rules of a GPU's memory.
// Types and names of the calls are the compiler's.
#include <string.h>

#include "arena.h"
#include "buffers.h"
#include "findings.h"

enum Direction { kRead, kWrite };

static msl_finding out_of_bounds(Direction direction, size_t bytes, const char* memory, const void* pc) {
  msl_finding f = make_finding(MSL_OUT_OF_BOUNDS, worker->current, pc);
  f.detail = direction == kWrite ? "write" : "read";
  f.memory = memory;
  f.bytes = bytes;
  return f;
}

static void access_threadgroup(const char* p, size_t bytes, Direction direction, bool atomic, const void* pc) {
  size_t offset = (size_t)(p - worker->arena);
  const ThreadgroupVariable* nearest;
  const ThreadgroupVariable* v = arena_variable(worker, offset, &nearest);
  if (!v || offset + bytes > v->offset + v->bytes) {
    msl_finding f = out_of_bounds(direction, bytes, "threadgroup", pc);
    if (!v) v = nearest;
    f.object = v ? v->name : nullptr;
    f.offset = v ? (int64_t)offset - (int64_t)v->offset : 0;
    f.extent = v ? v->bytes : 0;
    report(f);
    stop_fiber();
  }
  SharedBytes shared = {worker->arena_shadow + offset, bytes, v->name, offset - v->offset, kThreadgroup, false};
  (direction == kWrite ? shadow_write : shadow_read)(shared, atomic, pc);
}

static void access_buffer(const Buffer& b, const char* p, size_t bytes, Direction direction, bool atomic,
                          const void* pc) {
  size_t offset = (size_t)(p - b.data);
  if (offset + bytes > b.bytes || (direction == kWrite && !b.writable)) {
    msl_finding f = out_of_bounds(direction, bytes, "device", pc);
    if (offset + bytes <= b.bytes) f.kind = MSL_WRITE_TO_INPUT;
    f.object = b.name;
    f.offset = (int64_t)offset;
    f.extent = b.bytes;
    report(f);
    stop_fiber();
  }
  if (!b.shadow) return;  // an input: no one writes it
  SharedBytes shared = {b.shadow + offset, bytes, b.name, offset, kDevice, b.initialised};
  (direction == kWrite ? shadow_write : shadow_read)(shared, atomic, pc);
}

static void access_elsewhere(const char* p, size_t bytes, Direction direction, const void* pc) {
  bool program = p >= launch.image_low && p < launch.image_high;
  if (program && direction == kRead) return;
  msl_finding f = out_of_bounds(direction, bytes, "device", pc);
  const Buffer* nearest = nearest_buffer(p);
  if (program) {
    f.kind = MSL_WRITE_TO_INPUT;
    f.object = "program-scope constants";
  } else if (nearest) {
    f.object = nearest->name;
    f.offset = p - nearest->data;
    f.extent = nearest->bytes;
  }
  report(f);
  stop_fiber();
}

// A loop that touches memory has no other place at which to end.
[[noreturn]] static void stop_late(const void* pc) {
  if (launch.timed_out) {
    msl_finding f = make_finding(MSL_TIMEOUT, worker->current, pc);
    f.extent = launch.request->timeout_ms;
    report(f);
  }
  stop_fiber();
}

static void access(const volatile void* address, size_t bytes, Direction direction, bool atomic, const void* pc) {
  Worker* w = worker;
  if (!w || !w->current || !bytes) return;  // the compiler's module constructor
  const char* p = (const char*)address;
  if (launch.stopping) stop_late(pc);
  if (w->current->on_stack(p)) return;  // thread memory is the compiler's own affair (-fsanitize=bounds)
  if (in_arena(w, p))
    access_threadgroup(p, bytes, direction, atomic, pc);
  else if (const Buffer* b = buffer_at(p))
    access_buffer(*b, p, bytes, direction, atomic, pc);
  else
    access_elsewhere(p, bytes, direction, pc);
}

// The compiler calls the plain hooks where the type's alignment is that of its size, or 8 and more for 16 bytes.
static void aligned_access(void* p, size_t bytes, Direction direction, const void* pc) {
  size_t alignment = bytes < 8 ? bytes : 8;
  if (worker && worker->current && (uintptr_t)p % alignment) {
    msl_finding f = make_finding(MSL_MISALIGNED, worker->current, pc);
    f.detail = "a value of its own size";
    f.bytes = alignment;
    f.offset = (int64_t)((uintptr_t)p % alignment);
    report(f);
    stop_fiber();
  }
  access(p, bytes, direction, false, pc);
}

#define PC __builtin_return_address(0)
#define PLAIN(N)                                                             \
  void __tsan_read##N(void* p) { aligned_access(p, N, kRead, PC); }          \
  void __tsan_write##N(void* p) { aligned_access(p, N, kWrite, PC); }        \
  void __tsan_unaligned_read##N(void* p) { access(p, N, kRead, false, PC); } \
  void __tsan_unaligned_write##N(void* p) { access(p, N, kWrite, false, PC); }

#define ATOMIC_UPDATE(N, T, name)                              \
  T __tsan_atomic##N##_fetch_##name(volatile T* p, T v, int) { \
    access(p, sizeof(T), kWrite, true, PC);                    \
    return __atomic_fetch_##name(p, v, __ATOMIC_RELAXED);      \
  }
#define ATOMIC(N, T)                                                                               \
  T __tsan_atomic##N##_load(const volatile T* p, int) {                                            \
    access(p, sizeof(T), kRead, true, PC);                                                         \
    return __atomic_load_n(p, __ATOMIC_RELAXED);                                                   \
  }                                                                                                \
  void __tsan_atomic##N##_store(volatile T* p, T v, int) {                                         \
    access(p, sizeof(T), kWrite, true, PC);                                                        \
    __atomic_store_n(p, v, __ATOMIC_RELAXED);                                                      \
  }                                                                                                \
  T __tsan_atomic##N##_exchange(volatile T* p, T v, int) {                                         \
    access(p, sizeof(T), kWrite, true, PC);                                                        \
    return __atomic_exchange_n(p, v, __ATOMIC_RELAXED);                                            \
  }                                                                                                \
  T __tsan_atomic##N##_compare_exchange_val(volatile T* p, T expected, T v, int, int) {            \
    access(p, sizeof(T), kWrite, true, PC);                                                        \
    __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);       \
    return expected;                                                                               \
  }                                                                                                \
  int __tsan_atomic##N##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {      \
    access(p, sizeof(T), kWrite, true, PC);                                                        \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
  }                                                                                                \
  int __tsan_atomic##N##_compare_exchange_weak(volatile T* p, T* expected, T v, int, int) {        \
    access(p, sizeof(T), kWrite, true, PC);                                                        \
    return __atomic_compare_exchange_n(p, expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
  }                                                                                                \
  ATOMIC_UPDATE(N, T, add)                                                                         \
  ATOMIC_UPDATE(N, T, sub)                                                                         \
  ATOMIC_UPDATE(N, T, and)                                                                         \
  ATOMIC_UPDATE(N, T, or)                                                                          \
  ATOMIC_UPDATE(N, T, xor)

#pragma GCC visibility push(default)
extern "C" {
void __tsan_init() {}
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)
ATOMIC(8, uint8_t)
ATOMIC(16, uint16_t)
ATOMIC(32, uint32_t)
ATOMIC(64, uint64_t)
void __tsan_atomic_thread_fence(int) {}
void __tsan_atomic_signal_fence(int) {}
void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  access(from, bytes, kRead, false, PC);
  access(to, bytes, kWrite, false, PC);
  return memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, size_t bytes) {
  access(from, bytes, kRead, false, PC);
  access(to, bytes, kWrite, false, PC);
  return memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, size_t bytes) {
  access(to, bytes, kWrite, false, PC);
  return memset(to, value, bytes);
}
}
#pragma GCC visibility pop
