// In the place of MLX's type_traits.h, which has one specialisation for each address space.
#pragma once
#include <metal_stdlib>
namespace metal {
template <class T>
struct is_empty : bool_constant<__is_empty(T)> {};
template <class T>
constexpr bool is_empty_v = __is_empty(T);
template <class T>
struct is_static : bool_constant<__is_empty(remove_cv_t<T>)> {};
template <class T>
struct pointer_element {};
template <class T>
struct pointer_element<T*> {
  using type = remove_cv_t<T>;
};
template <class T>
using pointer_element_t = typename pointer_element<remove_cv_t<T>>::type;
template <class T>
using remove_addrspace_t = remove_cv_t<T>;
}  // namespace metal
