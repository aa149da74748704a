// <metal_math> for float, half and their vectors. The emulator computes metal::, fast:: and precise:: alike.
#pragma once
namespace msl {
template <class V>
using float_vector =
    enable_if_t<is_vector<V> && (same<typename shape<V>::element, float> || same<typename shape<V>::element, half>), V>;
}  // namespace msl

#define MSL_MATH1(name, value)                                       \
  MSL_FN float name(float x) { return value; }                       \
  MSL_FN half name(half x_) {                                        \
    float x = (float)x_;                                             \
    return (half)(value);                                            \
  }                                                                  \
  template <class V>                                                 \
  MSL_FN msl::float_vector<V> name(V x) {                            \
    V r;                                                             \
    for (int i = 0; i < msl::shape<V>::size; i++) r[i] = name(x[i]); \
    return r;                                                        \
  }
#define MSL_MATH2(name, value)                                             \
  MSL_FN float name(float x, float y) { return value; }                    \
  MSL_FN half name(half x_, half y_) {                                     \
    float x = (float)x_, y = (float)y_;                                    \
    return (half)(value);                                                  \
  }                                                                        \
  template <class V>                                                       \
  MSL_FN msl::float_vector<V> name(V x, V y) {                             \
    V r;                                                                   \
    for (int i = 0; i < msl::shape<V>::size; i++) r[i] = name(x[i], y[i]); \
    return r;                                                              \
  }
#define MSL_MATH3(name, value)                                                   \
  MSL_FN float name(float x, float y, float z) { return value; }                 \
  MSL_FN half name(half x_, half y_, half z_) {                                  \
    float x = (float)x_, y = (float)y_, z = (float)z_;                           \
    return (half)(value);                                                        \
  }                                                                              \
  template <class V>                                                             \
  MSL_FN msl::float_vector<V> name(V x, V y, V z) {                              \
    V r;                                                                         \
    for (int i = 0; i < msl::shape<V>::size; i++) r[i] = name(x[i], y[i], z[i]); \
    return r;                                                                    \
  }
#define MSL_ALL_MATH                                                   \
  MSL_UNARY_MATH(MSL_MATH1)                                            \
  MSL_BINARY_MATH(MSL_MATH2)                                           \
  MSL_TERNARY_MATH(MSL_MATH3)                                          \
  MSL_MATH1(abs, __builtin_fabsf(x))                                   \
  MSL_MATH1(saturate, msl::f32::min(1.0f, msl::f32::max(0.0f, x)))     \
  MSL_MATH1(sign, msl::f32::sign(x))                                   \
  MSL_MATH2(max, msl::f32::max(x, y))                                  \
  MSL_MATH2(min, msl::f32::min(x, y))                                  \
  MSL_MATH2(step, y < x ? 0.0f : 1.0f)                                 \
  MSL_MATH3(clamp, msl::f32::min(msl::f32::max(x, y), z))              \
  MSL_MATH3(max3, msl::f32::max(x, msl::f32::max(y, z)))               \
  MSL_MATH3(min3, msl::f32::min(x, msl::f32::min(y, z)))               \
  MSL_MATH3(median3, msl::f32::median(x, y, z))                        \
  MSL_MATH3(mix, x + (y - x) * z)                                      \
  MSL_FN float ldexp(float x, int e) { return msl::f32::ldexp(x, e); } \
  MSL_FN half ldexp(half x, int e) { return (half)msl::f32::ldexp((float)x, e); }

namespace metal {
MSL_ALL_MATH
namespace fast {
MSL_ALL_MATH
}
namespace precise {
MSL_ALL_MATH
}
#undef MSL_MATH1
#undef MSL_MATH2
#undef MSL_MATH3
#undef MSL_ALL_MATH

MSL_FN bool isnan(float x) { return x != x; }
MSL_FN bool isnan(half x) { return x != x; }
MSL_FN bool isinf(float x) { return __builtin_isinf(x); }
MSL_FN bool isinf(half x) { return __builtin_isinf((float)x); }
MSL_FN bool isfinite(float x) { return __builtin_isfinite(x); }
MSL_FN bool isfinite(half x) { return __builtin_isfinite((float)x); }
MSL_FN bool signbit(float x) { return __builtin_signbit(x); }
MSL_FN bool signbit(half x) { return __builtin_signbit((float)x); }
}  // namespace metal
