// What the generated entry needs to call a kernel: the types of its parameters, and their values.
#pragma once
namespace msl {
template <class F, int I>
struct parameter;
template <class R, class A, class... B>
struct parameter<R (*)(A, B...), 0> {
  typedef A type;
};
template <class R, class A, class... B, int I>
struct parameter<R (*)(A, B...), I> {
  typedef typename parameter<R (*)(B...), I - 1>::type type;
};

template <class P>
struct from_buffer {
  MSL_FN static P get(void* p) { return (P)p; }
};
template <class P>
struct from_buffer<P&> {
  MSL_FN static P& get(void* p) { return *(P*)p; }
};

template <class P>
MSL_FN P from_attribute(const uint32_t (&value)[3]) {
  if constexpr (is_vector<P>) {
    P r;
    for (int i = 0; i < shape<P>::size; i++) r[i] = value[i];
    return r;
  } else {
    return (P)value[0];
  }
}
template <class P>
MSL_FN P from_attribute(const uint32_t& value) {
  return (P)value;
}
}  // namespace msl
