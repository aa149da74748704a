// Vector types: clang's ext_vector_type has Metal's swizzles and operators; constructors come as macros (keywords.h).
#pragma once
namespace msl {
template <class T>
struct identity {
  typedef T type;
};
template <class T>
using identity_t = typename identity<T>::type;
template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;
template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

// What a type is made of: a scalar is a vector of one.
template <class T>
struct shape {
  typedef T element;
  static constexpr int size = 1;
  static constexpr bool is_vector = false;
};
template <class T, int N>
struct shape<T __attribute__((ext_vector_type(N)))> {
  typedef T element;
  static constexpr int size = N;
  static constexpr bool is_vector = true;
};
template <class T, int N>
struct vector {
  typedef T type __attribute__((ext_vector_type(N)));
};

#ifndef MSL_AS
// bfloat is a class here, and clang makes vectors of arithmetic types only.
template <int N>
struct bfloat_vector;
template <>
struct bfloat_vector<2> {
  bfloat x, y;
  bfloat& operator[](int i) { return (&x)[i]; }
  const bfloat& operator[](int i) const { return (&x)[i]; }
};
template <>
struct alignas(8) bfloat_vector<4> {
  bfloat x, y, z, w;
  bfloat& operator[](int i) { return (&x)[i]; }
  const bfloat& operator[](int i) const { return (&x)[i]; }
};
template <int N>
struct vector<bfloat, N> {
  typedef bfloat_vector<N> type;
};
template <int N>
struct shape<bfloat_vector<N>> {
  typedef bfloat element;
  static constexpr int size = N;
  static constexpr bool is_vector = true;
};
#endif

template <class T>
constexpr bool is_vector = shape<T>::is_vector;
template <class V, class... A>
MSL_FN void append(V& out, int& at, const A&... parts) {
  typedef typename shape<V>::element E;
  auto one = [&](auto part) __attribute__((always_inline, nodebug)) {
    if constexpr (is_vector<decltype(part)>) {
      for (int i = 0; i < shape<decltype(part)>::size; i++) out[at++] = (E)part[i];
    } else {
      out[at++] = (E)part;
    }
  };
  (one(parts), ...);
}
}  // namespace msl

// float4(1, v.xyz), float4(0.5f), half4(float4_value): one scalar is repeated, anything else must fill the vector.
template <class V, class... A>
constexpr bool msl_scalar_for_each = sizeof...(A) == msl::shape<V>::size && (!msl::is_vector<A> && ...);
template <class V, class... A, msl::enable_if_t<msl_scalar_for_each<V, A...>, int> = 0>
MSL_FN constexpr V msl_make(A... parts) {  // the one form that constants are written in
  return V{(typename msl::shape<V>::element)parts...};
}
template <class V, class... A, msl::enable_if_t<!msl_scalar_for_each<V, A...>, int> = 0>
MSL_FN V msl_make(A... parts) {
  typedef typename msl::shape<V>::element E;
  V out;
  if constexpr (sizeof...(A) == 0) {
    for (int i = 0; i < msl::shape<V>::size; i++) out[i] = E(0);
  } else if constexpr (sizeof...(A) == 1 && (__is_class(A) && ...) && (__is_convertible(A, V) && ...)) {
    out = (parts, ...);  // packed_float3
  } else if constexpr (sizeof...(A) == 1 && (!msl::is_vector<A> && ...)) {
    E value = (E)(parts, ...);
    for (int i = 0; i < msl::shape<V>::size; i++) out[i] = value;
  } else {
    static_assert((msl::shape<A>::size + ...) == msl::shape<V>::size, "vector constructor: wrong number of elements");
    int at = 0;
    msl::append(out, at, parts...);
  }
  return out;
}
template <class T, int N, class... A>
MSL_FN typename msl::vector<T, N>::type msl_make_vec(A... parts) {
  return msl_make<typename msl::vector<T, N>::type>(parts...);
}

template <class T, class F>
MSL_FN T as_type(F x) {
  static_assert(sizeof(T) == sizeof(F), "as_type: sizes differ");
  return __builtin_bit_cast(T, x);
}

#define MSL_VECTORS(T)                  \
  typedef msl::vector<T, 2>::type T##2; \
  typedef msl::vector<T, 3>::type T##3; \
  typedef msl::vector<T, 4>::type T##4; \
  namespace metal {                     \
  using ::T##2;                         \
  using ::T##3;                         \
  using ::T##4;                         \
  }
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(float)
#undef MSL_VECTORS
typedef msl::vector<bfloat, 2>::type bfloat2;
typedef msl::vector<bfloat, 4>::type bfloat4;
// A byte an element, as in Metal's memory; comparisons give integer vectors, which select/any/all take as they are.
typedef unsigned char bool2 __attribute__((ext_vector_type(2)));
typedef unsigned char bool3 __attribute__((ext_vector_type(3)));
typedef unsigned char bool4 __attribute__((ext_vector_type(4)));

#define MSL_PACKED(T)                                                              \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T)))); \
  struct packed_##T##3 {                                                           \
    T x, y, z;                                                                     \
    packed_##T##3() = default;                                                     \
    packed_##T##3(T##3 v) : x(v.x), y(v.y), z(v.z) {}                              \
    operator T##3() const { return msl_make<T##3>(x, y, z); }                      \
    T operator[](int i) const { return (&x)[i]; }                                  \
    T& operator[](int i) { return (&x)[i]; }                                       \
  };
MSL_PACKED(char)
MSL_PACKED(uchar)
MSL_PACKED(short)
MSL_PACKED(ushort)
MSL_PACKED(int)
MSL_PACKED(uint)
MSL_PACKED(half)
MSL_PACKED(float)
#undef MSL_PACKED

namespace metal {
template <class T, int N>
using vec = typename msl::vector<T, N>::type;
using ::as_type;
using ::bfloat2;
using ::bfloat4;
using ::bool2;
using ::bool3;
using ::bool4;
using ::msl_make;
using ::msl_make_vec;
}  // namespace metal
