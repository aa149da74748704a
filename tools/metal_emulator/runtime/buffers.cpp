#include "buffers.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "findings.h"

// Wide enough that an index a few million elements off lands in it, and only address space: no memory stands behind.
static constexpr size_t kGuardBytes = 256 << 20;
// Farther off, an address says nothing about the buffer it was meant for.
static constexpr uint64_t kNearBytes = 1ull << 32;
static constexpr unsigned char kMargin = 0xA5;

static Buffer buffers[kMaxBuffers];
static void* pointers[kMaxBuffers];
static uint32_t count;
static char* reserved;
static size_t reserved_bytes;

void* const* launch_buffers() { return pointers; }

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

bool buffers_map(const msl_request& request) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  count = request.buffer_count;
  reserved_bytes = kGuardBytes;
  for (uint32_t i = 0; i < count; i++) reserved_bytes += round_up(request.buffers[i].bytes, page) + page + kGuardBytes;
  void* p = mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    count = 0;
    reserved = nullptr;
    return false;
  }
  reserved = (char*)p;
  char* at = reserved + kGuardBytes;
  for (uint32_t i = 0; i < count; i++) {
    const msl_buffer& from = request.buffers[i];
    Buffer& to = buffers[i];
    to = {nullptr, from.bytes, from.name, from.writable != 0, from.initialised != 0, nullptr, at, at};
    pointers[i] = nullptr;
    if (!from.host) continue;
    // The end of the data meets the guard page, as far as its alignment allows.
    size_t whole = round_up(from.bytes, page) + page;
    to.high = at + whole;
    to.data = to.high - round_up(from.bytes, request.alignment);
    if (mprotect(at, whole, PROT_READ | PROT_WRITE)) return false;
    memset(at, kMargin, (size_t)(to.data - at));
    memcpy(to.data, from.host, from.bytes);
    memset(to.data + from.bytes, kMargin, (size_t)(to.high - to.data) - from.bytes);
    if (to.writable) to.shadow = shadow_map(from.bytes);
    pointers[i] = to.data;
    at = to.high + kGuardBytes;
  }
  return true;
}

static void check_margin(const Buffer& b, const char* from, const char* to) {
  for (const char* p = from; p < to; p++) {
    if ((unsigned char)*p == kMargin) continue;
    msl_finding f = make_finding(MSL_OUT_OF_BOUNDS, nullptr, nullptr);
    f.object = b.name;
    f.memory = "device";
    f.detail = "write";
    f.offset = p - b.data;
    f.bytes = 1;
    f.extent = b.bytes;
    report(f);
    return;
  }
}

void buffers_copy_back() {
  for (uint32_t i = 0; i < count; i++) {
    const Buffer& b = buffers[i];
    if (!b.data) continue;
    check_margin(b, b.low, b.data);
    check_margin(b, b.data + b.bytes, b.high);
    if (b.writable) memcpy(launch.request->buffers[i].host, b.data, b.bytes);
  }
}

void buffers_unmap() {
  for (uint32_t i = 0; i < count; i++) shadow_unmap(buffers[i].shadow, buffers[i].bytes);
  if (reserved) munmap(reserved, reserved_bytes);
  reserved = nullptr;
  count = 0;
}

const Buffer* buffer_at(const void* p) {
  const char* at = (const char*)p;
  if (at < reserved || at >= reserved + reserved_bytes) return nullptr;
  for (uint32_t i = 0; i < count; i++)
    if (at >= buffers[i].data && at < buffers[i].data + buffers[i].bytes) return &buffers[i];
  return nullptr;
}

const Buffer* nearest_buffer(const void* p) {
  const char* at = (const char*)p;
  const Buffer* best = nullptr;
  uint64_t best_distance = 0;
  for (uint32_t i = 0; i < count; i++) {
    const Buffer& b = buffers[i];
    if (!b.data) continue;
    uint64_t distance = at < b.data ? (uint64_t)(b.data - at) : (uint64_t)(at - (b.data + b.bytes));
    if (distance > kNearBytes || (best && distance >= best_distance)) continue;
    best = &b;
    best_distance = distance;
  }
  return best;
}
