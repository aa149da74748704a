// Float primitives under one name: the compiler's builtins on a CPU, libdevice on an NVIDIA GPU.
#pragma once
#ifdef __NVPTX__
#define MSL_PRIMITIVE1(name)                               \
  extern "C" float __nv_##name##f(float);                  \
  namespace msl::f32 {                                     \
  MSL_FN float name(float x) { return __nv_##name##f(x); } \
  }
#define MSL_PRIMITIVE2(name)                                           \
  extern "C" float __nv_##name##f(float, float);                       \
  namespace msl::f32 {                                                 \
  MSL_FN float name(float x, float y) { return __nv_##name##f(x, y); } \
  }
extern "C" float __nv_ldexpf(float, int);
extern "C" float __nv_frexpf(float, int*);
namespace msl::f32 {
MSL_FN float ldexp(float x, int e) { return __nv_ldexpf(x, e); }
MSL_FN float frexp(float x, int* e) { return __nv_frexpf(x, e); }
}  // namespace msl::f32
#else
#define MSL_PRIMITIVE1(name)                                    \
  namespace msl::f32 {                                          \
  MSL_FN float name(float x) { return __builtin_##name##f(x); } \
  }
#define MSL_PRIMITIVE2(name)                                                \
  namespace msl::f32 {                                                      \
  MSL_FN float name(float x, float y) { return __builtin_##name##f(x, y); } \
  }
namespace msl::f32 {
MSL_FN float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
MSL_FN float frexp(float x, int* e) { return __builtin_frexpf(x, e); }
}  // namespace msl::f32
#endif

MSL_PRIMITIVE1(acos)
MSL_PRIMITIVE1(acosh)
MSL_PRIMITIVE1(asin)
MSL_PRIMITIVE1(asinh)
MSL_PRIMITIVE1(atan)
MSL_PRIMITIVE1(atanh)
MSL_PRIMITIVE1(cos)
MSL_PRIMITIVE1(cosh)
MSL_PRIMITIVE1(exp)
MSL_PRIMITIVE1(exp2)
MSL_PRIMITIVE1(log)
MSL_PRIMITIVE1(log2)
MSL_PRIMITIVE1(log10)
MSL_PRIMITIVE1(round)
MSL_PRIMITIVE1(sin)
MSL_PRIMITIVE1(sinh)
MSL_PRIMITIVE1(tan)
MSL_PRIMITIVE1(tanh)
MSL_PRIMITIVE2(atan2)
MSL_PRIMITIVE2(fdim)
MSL_PRIMITIVE2(fmod)
MSL_PRIMITIVE2(nextafter)
MSL_PRIMITIVE2(pow)
#undef MSL_PRIMITIVE1
#undef MSL_PRIMITIVE2

namespace msl::f32 {
constexpr float pi = 3.14159265358979323846f;
MSL_FN float floor(float x) { return __builtin_floorf(x); }
MSL_FN float max(float x, float y) { return __builtin_fmaxf(x, y); }
MSL_FN float min(float x, float y) { return __builtin_fminf(x, y); }
MSL_FN float median(float x, float y, float z) { return max(min(x, y), min(max(x, y), z)); }
// The argument of the ...pi functions is reduced exactly before pi comes in.
MSL_FN float turn(float x) { return pi * (x - 2.0f * floor(0.5f * x)); }
MSL_FN float sign(float x) { return x > 0 ? 1.0f : x < 0 ? -1.0f : x; }
}  // namespace msl::f32

// name, value for floats x, y, z. half and vectors follow from these (math.h), and so do MLX's __metal_ builtins.
#define MSL_UNARY_MATH(M)                    \
  M(acos, msl::f32::acos(x))                 \
  M(acosh, msl::f32::acosh(x))               \
  M(asin, msl::f32::asin(x))                 \
  M(asinh, msl::f32::asinh(x))               \
  M(atan, msl::f32::atan(x))                 \
  M(atanh, msl::f32::atanh(x))               \
  M(ceil, __builtin_ceilf(x))                \
  M(cos, msl::f32::cos(x))                   \
  M(cosh, msl::f32::cosh(x))                 \
  M(cospi, msl::f32::cos(msl::f32::turn(x))) \
  M(exp, msl::f32::exp(x))                   \
  M(exp2, msl::f32::exp2(x))                 \
  M(exp10, msl::f32::pow(10.0f, x))          \
  M(fabs, __builtin_fabsf(x))                \
  M(floor, msl::f32::floor(x))               \
  M(fract, x - msl::f32::floor(x))           \
  M(log, msl::f32::log(x))                   \
  M(log2, msl::f32::log2(x))                 \
  M(log10, msl::f32::log10(x))               \
  M(rint, __builtin_rintf(x))                \
  M(round, msl::f32::round(x))               \
  M(rsqrt, 1.0f / __builtin_sqrtf(x))        \
  M(sin, msl::f32::sin(x))                   \
  M(sinh, msl::f32::sinh(x))                 \
  M(sinpi, msl::f32::sin(msl::f32::turn(x))) \
  M(sqrt, __builtin_sqrtf(x))                \
  M(tan, msl::f32::tan(x))                   \
  M(tanh, msl::f32::tanh(x))                 \
  M(tanpi, msl::f32::tan(msl::f32::turn(x))) \
  M(trunc, __builtin_truncf(x))
#define MSL_BINARY_MATH(M)                \
  M(atan2, msl::f32::atan2(x, y))         \
  M(copysign, __builtin_copysignf(x, y))  \
  M(divide, x / y)                        \
  M(fdim, msl::f32::fdim(x, y))           \
  M(fmax, msl::f32::max(x, y))            \
  M(fmin, msl::f32::min(x, y))            \
  M(fmod, msl::f32::fmod(x, y))           \
  M(nextafter, msl::f32::nextafter(x, y)) \
  M(pow, msl::f32::pow(x, y))             \
  M(powr, msl::f32::pow(x, y))
#define MSL_TERNARY_MATH(M)                       \
  M(fma, __builtin_fmaf(x, y, z))                 \
  M(fmax3, msl::f32::max(x, msl::f32::max(y, z))) \
  M(fmin3, msl::f32::min(x, msl::f32::min(y, z))) \
  M(fmedian3, msl::f32::median(x, y, z))
