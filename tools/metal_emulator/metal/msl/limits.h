// <metal_limits>: the least and greatest values of each type.
#pragma once
namespace metal {
template <class T>
struct numeric_limits;

#define MSL_INTEGER_LIMITS(T, least, greatest)    \
  template <>                                     \
  struct numeric_limits<T> {                      \
    static constexpr T min() { return least; }    \
    static constexpr T lowest() { return least; } \
    static constexpr T max() { return greatest; } \
  };
MSL_INTEGER_LIMITS(bool, false, true)
MSL_INTEGER_LIMITS(char, -128, 127)
MSL_INTEGER_LIMITS(signed char, -128, 127)
MSL_INTEGER_LIMITS(uchar, 0, 255)
MSL_INTEGER_LIMITS(short, -32768, 32767)
MSL_INTEGER_LIMITS(ushort, 0, 65535)
MSL_INTEGER_LIMITS(int, -__INT_MAX__ - 1, __INT_MAX__)
MSL_INTEGER_LIMITS(uint, 0, ~0u)
MSL_INTEGER_LIMITS(long, -__LONG_MAX__ - 1, __LONG_MAX__)
MSL_INTEGER_LIMITS(ulong, 0, ~0ul)
MSL_INTEGER_LIMITS(long long, -__LONG_LONG_MAX__ - 1, __LONG_LONG_MAX__)
MSL_INTEGER_LIMITS(unsigned long long, 0, ~0ull)
#undef MSL_INTEGER_LIMITS

// Metal's spelling of "the smallest positive normal number" is min(), as in C++.
#define MSL_FLOAT_LIMITS(T, smallest, greatest, ulp)                 \
  template <>                                                        \
  struct numeric_limits<T> {                                         \
    static constexpr T min() { return (T)smallest; }                 \
    static constexpr T max() { return (T)greatest; }                 \
    static constexpr T lowest() { return (T) - greatest; }           \
    static constexpr T epsilon() { return (T)ulp; }                  \
    static constexpr T infinity() { return (T)__builtin_inff(); }    \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); } \
  };
MSL_FLOAT_LIMITS(float, 1.175494351e-38f, 3.402823466e+38f, 1.1920929e-7f)
MSL_FLOAT_LIMITS(half, 6.103515625e-5f, 65504.0f, 9.765625e-4f)
MSL_FLOAT_LIMITS(bfloat, 1.175494351e-38f, 3.38953139e38f, 7.8125e-3f)
#undef MSL_FLOAT_LIMITS
}  // namespace metal
