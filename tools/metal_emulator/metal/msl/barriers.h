// Barriers. Which memory a barrier orders is part of the check, so the flags go through to the runtime.
#pragma once
#ifdef __NVPTX__
// A barrier of a PTX block orders every memory space; a SIMD-group is a warp.
MSL_FN void msl_barrier(uint32_t scope, uint32_t) {
  if (scope == MSL_THREADGROUP)
    __nvvm_barrier_sync(0);
  else
    __nvvm_bar_warp_sync(0xffffffff);
}
#endif
namespace metal {
enum class mem_flags : uint32_t {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
};
MSL_FN constexpr mem_flags operator|(mem_flags x, mem_flags y) { return (mem_flags)((uint32_t)x | (uint32_t)y); }
MSL_FN void threadgroup_barrier(mem_flags flags) { msl_barrier(MSL_THREADGROUP, (uint32_t)flags); }
MSL_FN void simdgroup_barrier(mem_flags flags) { msl_barrier(MSL_SIMDGROUP, (uint32_t)flags); }
}  // namespace metal
