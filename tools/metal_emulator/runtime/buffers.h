// The kernel's buffers: copies of the caller's arrays, each between guard pages that no one may touch.
#pragma once
#include "worker.h"

constexpr uint32_t kMaxBuffers = 64;

struct Buffer {
  char* data;
  size_t bytes;
  const char* name;
  bool writable, initialised;
  Cell* shadow;      // of a writable buffer in check mode
  char *low, *high;  // the accessible pages around the data
};

// False if the address space or the memory does not suffice.
bool buffers_map(const msl_request& request);
// Copies what the kernel wrote back to the caller, and reports bytes changed between a buffer and its guard page.
void buffers_copy_back();
void buffers_unmap();
void* const* launch_buffers();
// The buffer that holds the byte, or null.
const Buffer* buffer_at(const void* p);
// The buffer whose edge is closest to an address outside all of them, or null if none is near.
const Buffer* nearest_buffer(const void* p);
