// The per-thread values of a kernel on an NVIDIA GPU, from the special registers. Blocks are whole threadgroups.
#pragma once
namespace msl {
MSL_FN msl_attributes gpu_attributes() {
  const uint32_t within[3] = {__nvvm_read_ptx_sreg_tid_x(), __nvvm_read_ptx_sreg_tid_y(), __nvvm_read_ptx_sreg_tid_z()};
  const uint32_t group[3] = {__nvvm_read_ptx_sreg_ctaid_x(), __nvvm_read_ptx_sreg_ctaid_y(),
                             __nvvm_read_ptx_sreg_ctaid_z()};
  const uint32_t size[3] = {__nvvm_read_ptx_sreg_ntid_x(), __nvvm_read_ptx_sreg_ntid_y(),
                            __nvvm_read_ptx_sreg_ntid_z()};
  const uint32_t groups[3] = {__nvvm_read_ptx_sreg_nctaid_x(), __nvvm_read_ptx_sreg_nctaid_y(),
                              __nvvm_read_ptx_sreg_nctaid_z()};
  msl_attributes a;
  for (int k = 0; k < 3; k++) {
    a.thread_position_in_threadgroup[k] = within[k];
    a.threadgroup_position_in_grid[k] = group[k];
    a.thread_position_in_grid[k] = group[k] * size[k] + within[k];
    a.threads_per_threadgroup[k] = a.dispatch_threads_per_threadgroup[k] = size[k];
    a.threadgroups_per_grid[k] = groups[k];
    a.threads_per_grid[k] = a.grid_size[k] = groups[k] * size[k];
    a.grid_origin[k] = 0;
  }
  uint32_t index = thread_index(), threads = size[0] * size[1] * size[2];
  a.thread_index_in_threadgroup = index;
  a.thread_index_in_simdgroup = index % 32;
  a.simdgroup_index_in_threadgroup = index / 32;
  a.simdgroups_per_threadgroup = a.dispatch_simdgroups_per_threadgroup = (threads + 31) / 32;
  a.threads_per_simdgroup = a.thread_execution_width = 32;
  a.thread_index_in_quadgroup = index % 4;
  a.quadgroup_index_in_threadgroup = index / 4;
  a.quadgroups_per_threadgroup = a.dispatch_quadgroups_per_threadgroup = (threads + 3) / 4;
  return a;
}
}  // namespace msl
