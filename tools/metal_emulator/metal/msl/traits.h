// <metal_type_traits> and the small utilities that come with it.
#pragma once
namespace metal {
template <class A, class B>
constexpr bool is_same_v = msl::same<A, B>;
template <class T, T v>
struct integral_constant {
  typedef T value_type;
  typedef integral_constant type;
  static constexpr T value = v;
  constexpr operator T() const { return v; }
  constexpr T operator()() const { return v; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <class A, class B>
struct is_same : bool_constant<is_same_v<A, B>> {};

template <bool B, class T = void>
using enable_if = msl::enable_if<B, T>;
template <bool B, class T = void>
using enable_if_t = msl::enable_if_t<B, T>;
template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;
template <class...>
using void_t = void;

template <class T>
using remove_reference_t = __remove_reference_t(T);
template <class T>
using remove_cv_t = __remove_cv(T);

template <class T>
constexpr bool is_integral_v = __is_integral(T);
template <class T>
constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T>
constexpr bool is_arithmetic_v = is_integral_v<T> || is_floating_point_v<T>;
template <class T>
constexpr bool is_signed_v = T(-1) < T(0);
template <class T>
constexpr bool is_unsigned_v = is_integral_v<T> && !is_signed_v<T>;
template <class T>
constexpr bool is_pointer_v = __is_pointer(T);
template <class A, class B>
constexpr bool is_convertible_v = __is_convertible(A, B);
template <class T>
struct is_integral : bool_constant<is_integral_v<T>> {};
template <class T>
struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T>
struct is_arithmetic : bool_constant<is_arithmetic_v<T>> {};

template <class T, size_t N>
struct array {
  T elements[N];
  T& operator[](size_t i) { return elements[i]; }
  const T& operator[](size_t i) const { return elements[i]; }
  constexpr size_t size() const { return N; }
};
template <class T>
MSL_FN void swap(T& a, T& b) {
  T t = a;
  a = b;
  b = t;
}
}  // namespace metal
