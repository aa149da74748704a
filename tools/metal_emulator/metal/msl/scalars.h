// Scalar types. half is the hardware's binary16; bfloat follows Metal 2.1: it widens by itself, it narrows only by a
// cast.
#pragma once
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

#ifdef MSL_AS
// A class has no methods on `device` objects, so the type check takes the compiler's own type.
typedef __bf16 bfloat;
#else
struct bfloat {
  unsigned short bits;

  bfloat() = default;
  constexpr explicit bfloat(float f) : bits(round_to_nearest_even(f)) {}
  constexpr explicit bfloat(half h) : bits(round_to_nearest_even((float)h)) {}
  template <class I, class = decltype(I(0) % I(1))>
  constexpr bfloat(I i) : bits(round_to_nearest_even((float)i)) {}
  constexpr operator float() const { return __builtin_bit_cast(float, (unsigned)bits << 16); }

  static constexpr unsigned short round_to_nearest_even(float f) {
    unsigned u = __builtin_bit_cast(unsigned, f);
    bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    return (unsigned short)(nan ? u >> 16 | 0x40u : (u + 0x7fffu + (u >> 16 & 1u)) >> 16);
  }
};

#define MSL_BFLOAT_OPERATOR(op)                                                                    \
  MSL_FN constexpr bfloat operator op(bfloat x, bfloat y) { return bfloat((float)x op(float) y); } \
  template <class I, class = decltype(I(0) % I(1))>                                                \
  MSL_FN constexpr bfloat operator op(bfloat x, I y) {                                             \
    return x op bfloat(y);                                                                         \
  }                                                                                                \
  template <class I, class = decltype(I(0) % I(1))>                                                \
  MSL_FN constexpr bfloat operator op(I x, bfloat y) {                                             \
    return bfloat(x) op y;                                                                         \
  }                                                                                                \
  MSL_FN bfloat& operator op## = (bfloat & x, bfloat y) { return x = x op y; }
MSL_BFLOAT_OPERATOR(+)
MSL_BFLOAT_OPERATOR(-)
MSL_BFLOAT_OPERATOR(*)
MSL_BFLOAT_OPERATOR(/)
#undef MSL_BFLOAT_OPERATOR
MSL_FN constexpr bfloat operator-(bfloat x) { return bfloat(-(float)x); }
static_assert(sizeof(bfloat) == 2, "bfloat is a storage type of two bytes");
#endif

namespace metal {
using ::bfloat;
using ::half;
using ::uchar;
using ::uint;
using ::ulong;
using ::ushort;
}  // namespace metal
