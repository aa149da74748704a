// Metal's own words, last of all: from here on `device`, `thread` and float4(...) mean what a kernel means by them.
#pragma once
#ifdef MSL_AS
#define device MSL_DEVICE
#define constant const __attribute__((address_space(2)))
#define threadgroup MSL_SHARED
#else
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define kernel
#define double msl_error_double_is_not_a_Metal_type

// The rewriter turns `threadgroup float t[8];` in a kernel into one of these.
#if defined(MSL_AS)
#define MSL_THREADGROUP_VARIABLE(id, name, ...)                \
  threadgroup msl::identity_t<__typeof__(__VA_ARGS__)>& name = \
      msl_threadgroup_reference<msl::identity_t<__typeof__(__VA_ARGS__)>>()
#elif defined(__NVPTX__)
#define MSL_THREADGROUP_VARIABLE(id, name, ...)                                                           \
  static __attribute__((address_space(3), loader_uninitialized)) msl::identity_t<__typeof__(__VA_ARGS__)> \
      name##_shared;                                                                                      \
  msl::identity_t<__typeof__(__VA_ARGS__)>& name = *(msl::identity_t<__typeof__(__VA_ARGS__)>*)&name##_shared
#else
#define MSL_THREADGROUP_VARIABLE(id, name, ...)                                                     \
  msl::identity_t<__typeof__(__VA_ARGS__)>& name =                                                  \
      *(msl::identity_t<__typeof__(__VA_ARGS__)>*)msl_threadgroup_variable(id, sizeof(__VA_ARGS__), \
                                                                           alignof(__VA_ARGS__), #name)
#endif

#define char2(...) msl_make<char2>(__VA_ARGS__)
#define char3(...) msl_make<char3>(__VA_ARGS__)
#define char4(...) msl_make<char4>(__VA_ARGS__)
#define uchar2(...) msl_make<uchar2>(__VA_ARGS__)
#define uchar3(...) msl_make<uchar3>(__VA_ARGS__)
#define uchar4(...) msl_make<uchar4>(__VA_ARGS__)
#define short2(...) msl_make<short2>(__VA_ARGS__)
#define short3(...) msl_make<short3>(__VA_ARGS__)
#define short4(...) msl_make<short4>(__VA_ARGS__)
#define ushort2(...) msl_make<ushort2>(__VA_ARGS__)
#define ushort3(...) msl_make<ushort3>(__VA_ARGS__)
#define ushort4(...) msl_make<ushort4>(__VA_ARGS__)
#define int2(...) msl_make<int2>(__VA_ARGS__)
#define int3(...) msl_make<int3>(__VA_ARGS__)
#define int4(...) msl_make<int4>(__VA_ARGS__)
#define uint2(...) msl_make<uint2>(__VA_ARGS__)
#define uint3(...) msl_make<uint3>(__VA_ARGS__)
#define uint4(...) msl_make<uint4>(__VA_ARGS__)
#define long2(...) msl_make<long2>(__VA_ARGS__)
#define long3(...) msl_make<long3>(__VA_ARGS__)
#define long4(...) msl_make<long4>(__VA_ARGS__)
#define ulong2(...) msl_make<ulong2>(__VA_ARGS__)
#define ulong3(...) msl_make<ulong3>(__VA_ARGS__)
#define ulong4(...) msl_make<ulong4>(__VA_ARGS__)
#define half2(...) msl_make<half2>(__VA_ARGS__)
#define half3(...) msl_make<half3>(__VA_ARGS__)
#define half4(...) msl_make<half4>(__VA_ARGS__)
#define float2(...) msl_make<float2>(__VA_ARGS__)
#define float3(...) msl_make<float3>(__VA_ARGS__)
#define float4(...) msl_make<float4>(__VA_ARGS__)
#define bfloat2(...) msl_make<bfloat2>(__VA_ARGS__)
#define bfloat4(...) msl_make<bfloat4>(__VA_ARGS__)

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_huge_valf()
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.1920929e-7f
#define HALF_MAX ((half)65504.0f)
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
#define M_PI_F 3.14159265358979323846f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
