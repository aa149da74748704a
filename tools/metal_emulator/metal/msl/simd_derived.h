// Functions of the SIMD-group that follow from its primitives, on a CPU and on a GPU alike.
#pragma once
namespace metal {
struct simd_vote {
  typedef ulong vote_t;
  ulong votes;
  explicit simd_vote(ulong v) : votes(v) {}
  explicit operator ulong() const { return votes; }
  bool all() const { return votes == 0xfffffffful; }
  bool any() const { return votes != 0; }
};
MSL_FN simd_vote simd_ballot(bool predicate) { return simd_vote((ulong)msl_ballot(predicate)); }

template <class T>
MSL_FN T quad_shuffle_xor(T value, ushort mask) {
  return simd_shuffle_xor(value, mask);
}
template <class T>
MSL_FN T quad_sum(T value) {
  T pair = T(value + simd_shuffle_xor(value, (ushort)1));
  return T(pair + simd_shuffle_xor(pair, (ushort)2));
}
template <class T>
MSL_FN T quad_max(T value) {
  T pair = max(value, simd_shuffle_xor(value, (ushort)1));
  return max(pair, simd_shuffle_xor(pair, (ushort)2));
}
template <class T>
MSL_FN T quad_min(T value) {
  T pair = min(value, simd_shuffle_xor(value, (ushort)1));
  return min(pair, simd_shuffle_xor(pair, (ushort)2));
}

// Logging is accepted and dropped.
struct os_log {
  constexpr os_log(const char*, const char*) {}
  template <class... A>
  void log_debug(const char*, A...) const {}
  template <class... A>
  void log_info(const char*, A...) const {}
};
}  // namespace metal
