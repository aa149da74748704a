// <metal_geometric> and <metal_relational>: dot, length, select, any, all; and the unpack function of <metal_pack>.
#pragma once
namespace metal {
template <class V>
MSL_FN typename msl::shape<msl::float_vector<V>>::element dot(V x, V y) {
  typename msl::shape<V>::element r = x[0] * y[0];
  for (int i = 1; i < msl::shape<V>::size; i++) r += x[i] * y[i];
  return r;
}
template <class V>
MSL_FN typename msl::shape<msl::float_vector<V>>::element length_squared(V x) {
  return dot(x, x);
}
template <class V>
MSL_FN typename msl::shape<msl::float_vector<V>>::element length(V x) {
  return sqrt(dot(x, x));
}
template <class V>
MSL_FN msl::float_vector<V> normalize(V x) {
  return x * rsqrt(dot(x, x));
}

template <class T>
MSL_FN T select(T if_false, T if_true, bool condition) {
  return condition ? if_true : if_false;
}
template <class T, class C, class = msl::enable_if_t<msl::is_vector<T> && msl::is_vector<C>>>
MSL_FN T select(T if_false, T if_true, C condition) {
  T r;
  for (int i = 0; i < msl::shape<T>::size; i++) r[i] = condition[i] ? if_true[i] : if_false[i];
  return r;
}
template <class C, class = msl::enable_if_t<msl::is_vector<C>>>
MSL_FN bool any(C condition) {
  bool r = false;
  for (int i = 0; i < msl::shape<C>::size; i++) r |= (bool)condition[i];
  return r;
}
template <class C, class = msl::enable_if_t<msl::is_vector<C>>>
MSL_FN bool all(C condition) {
  bool r = true;
  for (int i = 0; i < msl::shape<C>::size; i++) r &= (bool)condition[i];
  return r;
}

MSL_FN float4 unpack_unorm4x8_to_float(uint x) {
  float4 r;
  for (int i = 0; i < 4; i++) r[i] = (float)(x >> 8 * i & 255) / 255.0f;
  return r;
}
}  // namespace metal
