// <metal_integer>: overloads for the exact integer types, so that max(float, int) is as ambiguous as on Metal.
#pragma once
namespace msl {
template <class V>
using integer_vector = enable_if_t<is_vector<V>&& __is_integral(typename shape<V>::element), V>;
}
#define MSL_INTEGER2(name, T, value) \
  MSL_FN T name(T x, T y) { return value; }
#define MSL_INTEGERS(T)                                 \
  MSL_INTEGER2(max, T, x > y ? x : y)                   \
  MSL_INTEGER2(min, T, x < y ? x : y)                   \
  MSL_INTEGER2(absdiff, T, x > y ? T(x - y) : T(y - x)) \
  MSL_FN T clamp(T x, T low, T high) { return min(max(x, low), high); }

namespace metal {
MSL_INTEGERS(char)
MSL_INTEGERS(uchar)
MSL_INTEGERS(short)
MSL_INTEGERS(ushort)
MSL_INTEGERS(int)
MSL_INTEGERS(uint)
MSL_INTEGERS(long)
MSL_INTEGERS(ulong)
#undef MSL_INTEGERS
#undef MSL_INTEGER2

#define MSL_INTEGER_VECTOR2(name)                                          \
  template <class V>                                                       \
  MSL_FN msl::integer_vector<V> name(V x, V y) {                           \
    V r;                                                                   \
    for (int i = 0; i < msl::shape<V>::size; i++) r[i] = name(x[i], y[i]); \
    return r;                                                              \
  }
MSL_INTEGER_VECTOR2(max)
MSL_INTEGER_VECTOR2(min)
MSL_INTEGER_VECTOR2(absdiff)
#undef MSL_INTEGER_VECTOR2
template <class V>
MSL_FN msl::integer_vector<V> clamp(V x, V low, V high) {
  return min(max(x, low), high);
}

MSL_FN char abs(char x) { return x < 0 ? -x : x; }
MSL_FN short abs(short x) { return x < 0 ? -x : x; }
MSL_FN int abs(int x) { return x < 0 ? -x : x; }
MSL_FN long abs(long x) { return x < 0 ? -x : x; }
template <class V>
MSL_FN msl::integer_vector<V> abs(V x) {
  V r;
  for (int i = 0; i < msl::shape<V>::size; i++) r[i] = abs(x[i]);
  return r;
}

MSL_FN int max3(int x, int y, int z) { return max(x, max(y, z)); }
MSL_FN int min3(int x, int y, int z) { return min(x, min(y, z)); }
MSL_FN uint max3(uint x, uint y, uint z) { return max(x, max(y, z)); }
MSL_FN uint min3(uint x, uint y, uint z) { return min(x, min(y, z)); }

MSL_FN uint popcount(uint x) { return __builtin_popcount(x); }
MSL_FN int popcount(int x) { return __builtin_popcount(x); }
MSL_FN ulong popcount(ulong x) { return __builtin_popcountl(x); }
MSL_FN uint clz(uint x) { return x ? __builtin_clz(x) : 32; }
MSL_FN uint ctz(uint x) { return x ? __builtin_ctz(x) : 32; }
MSL_FN uint reverse_bits(uint x) { return __builtin_bitreverse32(x); }
MSL_FN uint rotate(uint x, uint n) { return (n & 31) ? x << (n & 31) | x >> (32 - (n & 31)) : x; }
MSL_FN uint mulhi(uint x, uint y) { return (uint)((ulong)x * y >> 32); }
MSL_FN int mulhi(int x, int y) { return (int)((long)x * y >> 32); }
MSL_FN uint extract_bits(uint x, uint offset, uint bits) {
  return bits >= 32 ? x >> offset : x >> offset & ((1u << bits) - 1);
}
MSL_FN int extract_bits(int x, uint offset, uint bits) {
  return bits == 0 ? 0 : (int)((uint)x << (32 - offset - bits)) >> (32 - bits);
}
MSL_FN uint insert_bits(uint base, uint insert, uint offset, uint bits) {
  uint mask = (bits >= 32 ? ~0u : (1u << bits) - 1) << offset;
  return (base & ~mask) | (insert << offset & mask);
}
}  // namespace metal
