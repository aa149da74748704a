// One launch: buffers in, threadgroups dealt out to workers, buffers out.
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "buffers.h"
#include "faults.h"
#include "findings.h"

__thread Worker* worker __attribute__((tls_model("initial-exec")));
Launch launch;

// Every fiber's stack is two mappings, and a process may have some 65,000.
static constexpr uint32_t kMaxWorkers = 16;
static constexpr size_t kStackGuard = 64 << 10;  // a multiple of every page size
static_assert(kStackGuard % 4096 == 0 && kStackBytes % kStackGuard == 0, "stacks begin on pages");

static void* map_memory(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

Worker* worker_create(uint32_t fibers) {
  Worker* w = (Worker*)calloc(1, sizeof(Worker));
  if (!w) return nullptr;
  w->fibers = (Fiber*)calloc(fibers, sizeof(Fiber));
  w->stack_count = fibers;
  w->stacks = (char*)map_memory((kStackGuard + kStackBytes) * fibers);
  w->arena = (char*)map_memory(kThreadgroupArena);
  w->arena_shadow = shadow_map(kThreadgroupArena);
  bool complete = w->fibers && w->stacks && w->arena;
#ifdef MSL_CHECK
  complete = complete && w->arena_shadow;
#endif
  if (!complete) {
    worker_destroy(w);
    return nullptr;
  }
  for (uint32_t i = 0; i < fibers; i++) {
    char* guard = w->stacks + (kStackGuard + kStackBytes) * i;
    mprotect(guard, kStackGuard, PROT_NONE);
    w->fibers[i].stack = guard + kStackGuard;
  }
  return w;
}

void worker_destroy(Worker* w) {
  if (w->stacks) munmap(w->stacks, (kStackGuard + kStackBytes) * w->stack_count);
  if (w->arena) munmap(w->arena, kThreadgroupArena);
  shadow_unmap(w->arena_shadow, kThreadgroupArena);
  free(w->fibers);
  free(w);
}

// Apple's GPUs flush float32 subnormals; half keeps its own.
static void flush_subnormals() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);
#elif defined(__aarch64__)
  uint64_t fpcr;
  asm volatile("mrs %0, fpcr" : "=r"(fpcr));
  asm volatile("msr fpcr, %0" ::"r"(fpcr | 1u << 24));
#endif
}

static uint64_t nth_group(uint64_t i) {
  uint64_t n = launch.group_count, seed = launch.request->seed;
  if (!seed) return i;
  uint64_t start = seed * 0x9E3779B97F4A7C15ull % n;
  return seed & 1 ? (start + n - i) % n : (start + i) % n;
}

static void* work(void* own) {
  Worker* w = worker = (Worker*)own;
  faults_attach(w);
  if (launch.request->flush_subnormals) flush_subnormals();
  while (!launch.stopping) {
    uint64_t i = __atomic_fetch_add(&launch.next_group, 1, __ATOMIC_RELAXED);
    if (i >= launch.group_count) break;
    run_threadgroup(w, nth_group(i));
  }
  faults_detach(w);
  worker = nullptr;
  return nullptr;
}

// The pages of the shared object that holds the entry: code, constants, static data.
static int find_image(dl_phdr_info* info, size_t, void*) {
  const char* entry = (const char*)launch.request->entry;
  const char *low = nullptr, *high = nullptr;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const char* begin = (const char*)info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
    const char* end = begin + info->dlpi_phdr[i].p_memsz;
    if (!low || begin < low) low = begin;
    if (!high || end > high) high = end;
  }
  if (entry < low || entry >= high) return 0;
  launch.image_low = low;
  launch.image_high = high;
  return 1;
}

static bool join_until(pthread_t thread, uint64_t milliseconds) {
  timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += (time_t)(milliseconds / 1000);
  until.tv_nsec += (long)(milliseconds % 1000) * 1000000;
  if (until.tv_nsec >= 1000000000) {
    until.tv_sec++;
    until.tv_nsec -= 1000000000;
  }
  return pthread_timedjoin_np(thread, nullptr, &until) != ETIMEDOUT;
}

static uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void report_limit(const char* what, uint64_t limit) {
  msl_finding f = make_finding(MSL_EMULATOR_LIMIT, nullptr, nullptr);
  f.object = what;
  f.extent = limit;
  report(f);
}

static void run_workers(const msl_request& request, msl_statistics* statistics) {
  uint32_t fibers = launch.threadgroup[0] * launch.threadgroup[1] * launch.threadgroup[2];
  uint32_t wanted = request.workers < 1 ? 1 : request.workers > kMaxWorkers ? kMaxWorkers : request.workers;
  if (wanted > launch.group_count) wanted = (uint32_t)launch.group_count;
  Worker* workers[kMaxWorkers];
  pthread_t threads[kMaxWorkers];
  uint32_t started = 0;
  for (uint32_t i = 0; i < wanted; i++) {
    Worker* w = worker_create(fibers);
    if (!w) break;
    if (pthread_create(&threads[started], nullptr, work, w)) {
      worker_destroy(w);
      break;
    }
    workers[started++] = w;
  }
  if (!started) report_limit("workers that could be started", 0);

  uint64_t deadline = now_ns() + request.timeout_ms * 1000000ull;
  for (uint32_t i = 0; i < started; i++) {
    uint64_t now = now_ns();
    if (!join_until(threads[i], now < deadline ? (deadline - now) / 1000000 : 0)) {
      launch.stopping = launch.timed_out = true;
      do pthread_kill(threads[i], kInterrupt);
      while (!join_until(threads[i], 5));
    }
    const msl_statistics& own = workers[i]->statistics;
    statistics->simd_operations += own.simd_operations;
    statistics->partial_simd_operations += own.partial_simd_operations;
    statistics->barriers += own.barriers;
    statistics->switches += own.switches;
    if (own.threadgroup_bytes > statistics->threadgroup_bytes) statistics->threadgroup_bytes = own.threadgroup_bytes;
    worker_destroy(workers[i]);
  }
}

// Returns the number of findings.
MSL_EXPORT int msl_launch(const msl_request* request, msl_statistics* statistics) {
  memset(statistics, 0, sizeof *statistics);
  clear_findings();
  launch = {};
  launch.request = request;
  launch.group_count = 1;
  for (int k = 0; k < 3; k++) {
    launch.threadgroup[k] = request->threadgroup[k] < request->grid[k] ? request->threadgroup[k] : request->grid[k];
    launch.groups[k] = (request->grid[k] + launch.threadgroup[k] - 1) / launch.threadgroup[k];
    launch.group_count *= launch.groups[k];
  }
  dl_iterate_phdr(find_image, nullptr);
  if (launch.group_count >= kMaxGroups) {
    report_limit("threadgroups", kMaxGroups - 1);
  } else if (request->buffer_count > kMaxBuffers) {
    report_limit("buffers", kMaxBuffers);
  } else if (!buffers_map(*request)) {
    report_limit("address space for guarded buffers", 0);
    buffers_unmap();
  } else {
    uint64_t start = now_ns();
    faults_install();
    run_workers(*request, statistics);
    faults_restore();
    statistics->nanoseconds = now_ns() - start;
    buffers_copy_back();
    buffers_unmap();
  }
  return (int)finding_count();
}
