// The compiler builtins that MLX's bf16_math.h calls by name. The trailing argument is Apple's math mode or group size.
#pragma once
#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 2

namespace metal {
#define MSL_BUILTIN1(name, value) \
  MSL_FN float __metal_##name(float x, int = 0) { return value; }
#define MSL_BUILTIN2(name, value) \
  MSL_FN float __metal_##name(float x, float y, int = 0) { return value; }
#define MSL_BUILTIN3(name, value) \
  MSL_FN float __metal_##name(float x, float y, float z, int = 0) { return value; }
MSL_UNARY_MATH(MSL_BUILTIN1)
MSL_BINARY_MATH(MSL_BUILTIN2)
MSL_TERNARY_MATH(MSL_BUILTIN3)
#undef MSL_BUILTIN1
#undef MSL_BUILTIN2
#undef MSL_BUILTIN3
MSL_FN float __metal_ldexp(float x, int e, int = 0) { return msl::f32::ldexp(x, e); }
MSL_FN float __metal_frexp(float x, int* e, int = 0) { return msl::f32::frexp(x, e); }

#define MSL_SIMD_BUILTIN(name)                 \
  template <class... A>                        \
  MSL_FN auto __metal_##name(A... arguments) { \
    return metal::name(arguments...);          \
  }
MSL_SIMD_BUILTIN(simd_sum)
MSL_SIMD_BUILTIN(simd_product)
MSL_SIMD_BUILTIN(simd_max)
MSL_SIMD_BUILTIN(simd_min)
MSL_SIMD_BUILTIN(simd_prefix_inclusive_sum)
MSL_SIMD_BUILTIN(simd_prefix_exclusive_sum)
MSL_SIMD_BUILTIN(simd_prefix_inclusive_product)
MSL_SIMD_BUILTIN(simd_prefix_exclusive_product)
MSL_SIMD_BUILTIN(simd_shuffle)
MSL_SIMD_BUILTIN(simd_broadcast)
MSL_SIMD_BUILTIN(simd_shuffle_up)
MSL_SIMD_BUILTIN(simd_shuffle_down)
MSL_SIMD_BUILTIN(simd_shuffle_xor)
MSL_SIMD_BUILTIN(simd_shuffle_rotate_up)
MSL_SIMD_BUILTIN(simd_shuffle_rotate_down)
MSL_SIMD_BUILTIN(simd_shuffle_and_fill_up)
MSL_SIMD_BUILTIN(simd_shuffle_and_fill_down)
#undef MSL_SIMD_BUILTIN
MSL_FN float __metal_simd_xor(float x) { return as_type<float>(simd_xor(as_type<uint>(x))); }
MSL_FN ushort __metal_get_simdgroup_size(ushort) { return 32; }
MSL_FN ushort __metal_get_thread_index_in_simdgroup(ushort) { return (ushort)msl_lane(); }
}  // namespace metal
