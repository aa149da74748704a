// The names that MLX puts before every custom kernel (its utils.h), as far as kernels use them: for the type check,
// which cannot read MLX's own text, and for machines without MLX. Included after <metal_stdlib>.
#pragma once
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;
#define MLX_MTL_PRAGMA_UNROLL _Pragma("clang loop unroll(full)")

template <class T>
struct Limits {
  static constexpr T max = is_floating_point_v<T> ? (T)__builtin_inff() : numeric_limits<T>::max();
  static constexpr T min = is_floating_point_v<T> ? (T)-__builtin_inff() : numeric_limits<T>::min();
  static constexpr T finite_max = numeric_limits<T>::max();
  static constexpr T finite_min = numeric_limits<T>::lowest();
};
template <class T, class U>
inline T ceildiv(T n, U m) {
  return (n + m - 1) / m;
}
template <class Index = int64_t>
METAL_FUNC Index elem_to_loc(Index elem, constant int* shape, constant int64_t* strides, int ndim) {
  Index loc = 0;
  for (int i = ndim - 1; i >= 0 && elem > 0; --i) {
    loc += (elem % shape[i]) * Index(strides[i]);
    elem /= shape[i];
  }
  return loc;
}

namespace metal {
#define MSL_BFLOAT1(name, value) \
  METAL_FUNC bfloat name(bfloat x) { return (bfloat)name((float)x); }
#define MSL_BFLOAT2(name, value) \
  METAL_FUNC bfloat name(bfloat x, bfloat y) { return (bfloat)name((float)x, (float)y); }
#define MSL_BFLOAT3(name, value) \
  METAL_FUNC bfloat name(bfloat x, bfloat y, bfloat z) { return (bfloat)name((float)x, (float)y, (float)z); }
MSL_UNARY_MATH(MSL_BFLOAT1)
MSL_BINARY_MATH(MSL_BFLOAT2)
MSL_TERNARY_MATH(MSL_BFLOAT3)
MSL_BFLOAT1(abs, )
MSL_BFLOAT2(max, )
MSL_BFLOAT2(min, )
#undef MSL_BFLOAT1
#undef MSL_BFLOAT2
#undef MSL_BFLOAT3
}  // namespace metal
