"""Values of packed weights, in the kernel: a struct a format, whose `part` gives a lane 16 columns of a row.

A block is 32 columns, whatever the format's own is. Of block b a lane with h = 0 or 1 takes `q[0..7]`, columns 8h to
8h + 7, and `q[8..15]`, those plus 16. The values are

    scale * q - offset        scales(row, b) = (scale of the low 8, of the high 8, offset of the low 8, of the high 8)

`q` is exact: whole numbers in half precision, or the stored values of F32, F16 and BF16 with scale 1. Codes become half
precision without a conversion, which takes Apple's GPUs four cycles, as a shift does, where an AND, an OR, a sum or a
product takes one: 16-bit fields are put into the mantissa of 1024, and 1024 (plus the format's zero) is subtracted, with a
factor where a field stands higher. Float32 sums take half operands at no cost. docs/metal.md counts the cycles.
"""

from __future__ import annotations

from functools import cache

from quarrel.gguf import GGMLType
from quarrel.mlx_backend.pack import LAYOUTS, Packed

_COMMON = """
// Eight neighbours, loaded in pieces of 16 bytes.
template <class T>
struct alignas(sizeof(T) > 2 ? 16 : sizeof(T) * 8) Eight {
  T v[8];
};

// Two fields below 1024, minus ZERO; and two fields that hold sixteen times that.
template <int ZERO>
inline half2 whole(uint v) { return as_type<half2>(v | 0x64006400u) - half2(half(1024 + ZERO)); }
template <int ZERO>
inline half2 sixteenth(uint v) {
  return fma(as_type<half2>(v | 0x64006400u), half2(half(0.0625f)), half2(half(-64 - ZERO)));
}

// The upper bits of low pair L, moved to bit 4 of both halves; those of the high pair beside it are then at bit 8.
template <int BITS>
inline uint aligned(uint upper, int l) {
  if (BITS == 1) return upper << uint(4 - l);
  return l < 2 ? upper << uint(4 - 2 * l) : upper >> uint(2 * l);
}

// The 16 fields of one bit, eight in each byte, with the second byte in the upper half.
inline uint spread(ushort word) { return (uint(word) & 0xffu) | (uint(word) & 0xff00u) << 8; }

// Column of the first of pair p among a lane's 16; the second is two further.
inline int first_of(int p) { return (p >> 1 & 1) * 8 + (p >> 2) * 4 + (p & 1); }

// 16 codes of 4 bits, and UPPER more bits of each from `upper`.
template <int UPPER, int ZERO>
inline void nibbles(uint2 words, uint upper, thread half* q) {
  constexpr uint mask = UPPER == 1 ? 0x00010001u : 0x00030003u;
  #pragma clang loop unroll(full)
  for (int p = 0; p < 8; p++) {
    uint v = p < 4 ? words.x : words.y;
    if (p & 1) v >>= 8;
    const uint more = UPPER ? aligned<UPPER>(upper, (p >> 2) * 2 + (p & 1)) : 0u;
    half2 pair;
    if (p & 2) {
      v &= 0x00f000f0u;
      if (UPPER) v |= more & mask << 8;
      pair = sixteenth<ZERO>(v);
    } else {
      v &= 0x000f000fu;
      if (UPPER) v |= more & mask << 4;
      pair = whole<ZERO>(v);
    }
    q[first_of(p)] = pair.x;
    q[first_of(p) + 2] = pair.y;
  }
}

// 16 codes of 2 bits, and a third bit of each; fields up to bit 9 are in the mantissa as they stand.
template <int UPPER, int ZERO>
inline void twos(uint word, uint upper, thread half* q) {
  #pragma clang loop unroll(full)
  for (int p = 0; p < 8; p++) {
    const uint at = uint(p % 4 * 2);
    uint v = (p < 4 ? word : word >> 8) & 0x00030003u << at;
    if (UPPER) v |= (p < 4 ? upper << 2 : upper << 1) & 0x00040004u << at;
    const float scale = 1.0f / float(1 << at);
    const half2 pair = fma(as_type<half2>(v | 0x64006400u), half2(half(scale)), half2(half(-1024.0f * scale - ZERO)));
    q[first_of(p)] = pair.x;
    q[first_of(p) + 2] = pair.y;
  }
}

// Eight signed bytes.
inline void eights(uint2 words, thread half* q) {
  #pragma clang loop unroll(full)
  for (int p = 0; p < 4; p++) {
    const uint v = ((p < 2 ? words.x : words.y) ^ 0x80808080u) >> uint(p % 2 * 8) & 0x00ff00ffu;
    const half2 pair = whole<128>(v);
    q[(p >> 1) * 4 + (p & 1)] = pair.x;
    q[(p >> 1) * 4 + (p & 1) + 2] = pair.y;
  }
}

// The 16 values of IQ4_NL: a polynomial within 0.44 of every one of them, then the nearest whole number.
inline void bent(uint2 words, thread half* q) {
  nibbles<0, 0>(words, 0u, q);
  #pragma clang loop unroll(full)
  for (int i = 0; i < 16; i++) {
    const float x = float(q[i]);
    float y = fma(x, 0.001585999969393015f, 0.031085999682545662f);
    y = fma(x, y, -1.37192702293396f);
    y = fma(x, y, 24.173830032348633f);
    y = fma(x, y, -126.56700897216797f);
    q[i] = half((y + 12582912.0f) - 12582912.0f);  // the nearest whole number, at half the price of rint
  }
}

// Twice the value of e2m1: its bits are those of a half whose exponent is 14 too small.
inline void fours(uint2 words, thread half* q) {
  #pragma clang loop unroll(full)
  for (int p = 0; p < 8; p++) {
    const uint v = p < 4 ? words.x : words.y, at = uint((p & 1) * 8 + (p & 2) * 2);
    const uint size = v & 0x00070007u << at, sign = v & 0x00080008u << at;
    const uint bits = (at <= 9u ? size << (9u - at) : size >> (at - 9u)) | sign << (12u - at);
    const half2 pair = as_type<half2>(bits) * half2(half(32768.0f));
    q[first_of(p)] = pair.x;
    q[first_of(p) + 2] = pair.y;
  }
}
"""

_DENSE = """
template <typename E, typename P, bool TAIL>
struct Dense {
  device const E* codes;
  int K;
  typedef P Q;
  enum { OFFSET = 0, PLAIN = 1 };
  inline void part(int row, int block, int h, thread P* q) const {
    const int column = block * 32 + h * 8;
    device const E* from = codes + ulong(row) * ulong(K) + ulong(column);
    if (TAIL) {
      for (int i = 0; i < 8; i++) {
        q[i] = column + i < K ? P(from[i]) : P(0);
        q[8 + i] = column + 16 + i < K ? P(from[16 + i]) : P(0);
      }
    } else {
      const Eight<E> low = *(device const Eight<E>*)from, high = *(device const Eight<E>*)(from + 16);
      for (int i = 0; i < 8; i++) {
        q[i] = P(low.v[i]);
        q[8 + i] = P(high.v[i]);
      }
    }
  }
  inline float4 scales(int, int) const { return float4(1.0f, 1.0f, 0.0f, 0.0f); }
};
"""

_STRUCT = """
struct @NAME {
@FIELDS
  int K;
  typedef half Q;
  enum { OFFSET = @OFFSET, PLAIN = 0 };
  inline void part(int row, int block, int h, thread half* q) const {
    const int at = row * (K / 32) + block;
    @PART
  }
  inline float4 scales(int row, int block) const {
    const int at = row * (K / 32) + block;
    @SCALES
  }
};
"""

_CODES = "codes[at * 2 + h]"
_UPPER = "spread(bits[at * 2 + h])"
_NIBBLES = f"nibbles<0, @ZERO>({_CODES}, 0u, q);"
_ONE_SCALE = "const float d = float(scale[at]);\n    return float4(d, d, 0.0f, 0.0f);"
_SCALE_AND_MIN = "const half2 s = scale[at];\n    return float4(float(s.x), float(s.x), -float(s.y), -float(s.y));"
_K_SCALE_AND_MIN = """const half2 d = top[at >> 3];
    const uchar2 s = scale[at];
    const float a = float(d.x) * float(s.x), m = float(d.y) * float(s.y);
    return float4(a, a, m, m);"""

# Format -> plane -> how its pointer is read; whether values have an offset; the codes of a lane; its scales.
_TEXT: dict[GGMLType, tuple[dict[str, str], bool, str, str]] = {
    GGMLType.Q4_0: ({"codes": "uint2", "scale": "half"}, False, _NIBBLES.replace("@ZERO", "8"), _ONE_SCALE),
    GGMLType.Q4_1: ({"codes": "uint2", "scale": "half2"}, True, _NIBBLES.replace("@ZERO", "0"), _SCALE_AND_MIN),
    GGMLType.Q5_0: (
        {"codes": "uint2", "bits": "ushort", "scale": "half"},
        False,
        f"nibbles<1, 16>({_CODES}, {_UPPER}, q);",
        _ONE_SCALE,
    ),
    GGMLType.Q5_1: (
        {"codes": "uint2", "bits": "ushort", "scale": "half2"},
        True,
        f"nibbles<1, 0>({_CODES}, {_UPPER}, q);",
        _SCALE_AND_MIN,
    ),
    GGMLType.Q8_0: (
        {"codes": "uint2", "scale": "half"},
        False,
        "eights(codes[at * 4 + h], q);\n    eights(codes[at * 4 + 2 + h], q + 8);",
        _ONE_SCALE,
    ),
    GGMLType.IQ4_NL: ({"codes": "uint2", "scale": "half"}, False, f"bent({_CODES}, q);", _ONE_SCALE),
    GGMLType.MXFP4: (
        {"codes": "uint2", "scale": "uchar"},
        False,
        f"fours({_CODES}, q);",
        # 2^(e - 128), where the two smallest are below the normal numbers.
        """const uint e = uint(scale[at]);
    const float d = as_type<float>(e < 2u ? 0x00200000u << e : (e - 1u) << 23);
    return float4(d, d, 0.0f, 0.0f);""",
    ),
    GGMLType.Q2_K: (
        {"codes": "uint", "scale": "uchar2", "top": "half2"},
        True,
        f"twos<0, 0>({_CODES}, 0u, q);",
        """const half2 d = top[at >> 3];
    const uchar2 s = scale[at];
    return float4(float(d.x) * float(s.x & 15), float(d.x) * float(s.y & 15),
                  float(d.y) * float(s.x >> 4), float(d.y) * float(s.y >> 4));""",
    ),
    GGMLType.Q3_K: (
        {"codes": "uint", "bits": "ushort", "scale": "uchar", "top": "ushort"},
        False,
        f"twos<1, 4>({_CODES}, {_UPPER}, q);",
        # `top` is d, then the upper two bits of the sixteen 6-bit scales, a nibble for each block.
        """const int over = (at >> 3) * 3, b = at & 7;
    const float d = float(as_type<half>(top[over]));
    const uint upper = uint(top[over + 1 + (b >> 2)]) >> uint((b & 3) * 4), lower = uint(scale[at]);
    const int low = int((lower & 15u) | (upper & 3u) << 4) - 32, high = int(lower >> 4 | (upper & 12u) << 2) - 32;
    return float4(d * float(low), d * float(high), 0.0f, 0.0f);""",
    ),
    GGMLType.Q4_K: (
        {"codes": "uint2", "scale": "uchar2", "top": "half2"},
        True,
        _NIBBLES.replace("@ZERO", "0"),
        _K_SCALE_AND_MIN,
    ),
    GGMLType.Q5_K: (
        {"codes": "uint2", "bits": "ushort", "scale": "uchar2", "top": "half2"},
        True,
        f"nibbles<1, 0>({_CODES}, {_UPPER}, q);",
        _K_SCALE_AND_MIN,
    ),
    GGMLType.Q6_K: (
        {"codes": "uint2", "bits": "uint", "scale": "char2", "top": "half"},
        False,
        f"nibbles<2, 32>({_CODES}, bits[at * 2 + h], q);",
        """const float d = float(top[at >> 3]);
    const char2 s = scale[at];
    return float4(d * float(s.x), d * float(s.y), 0.0f, 0.0f);""",
    ),
    GGMLType.IQ4_XS: (
        {"codes": "uint2", "scale": "char", "top": "half"},
        False,
        f"bent({_CODES}, q);",
        "const float d = float(top[at >> 3]) * float(scale[at]);\n    return float4(d, d, 0.0f, 0.0f);",
    ),
}

# Stored type, type of q.
_WIDE = {GGMLType.F32: ("float", "float"), GGMLType.F16: ("half", "half"), GGMLType.BF16: ("bfloat16_t", "float")}


@cache
def header(*types: GGMLType) -> str:
    """The Metal structs of some formats, each once."""
    text = _COMMON
    if any(t in _WIDE for t in types):
        text += _DENSE
    for type in dict.fromkeys(types):
        if type not in _WIDE:
            planes, offset, part, scales = _TEXT[type]
            fields = "\n".join(f"  device const {what}* {name};" for name, what in planes.items())
            whole = _STRUCT.replace("@NAME", type.name).replace("@FIELDS", fields).replace("@OFFSET", str(int(offset)))
            text += whole.replace("@PART", part).replace("@SCALES", scales)
    return text


def plane_names(type: GGMLType, prefix: str = "w") -> tuple[str, ...]:
    """The kernel's inputs that hold such a weight, in the order of `Packed.planes`."""
    return tuple(f"{prefix}_{p.name}" for p in LAYOUTS[type].planes)


def bind(weight: Packed, k: str, prefix: str = "w") -> str:
    """Metal text that makes the struct out of the kernel's inputs: `auto prefix = ...;`; `k` is K's name there."""
    names = plane_names(weight.type, prefix)
    if weight.type in _WIDE:
        stored, q = _WIDE[weight.type]
        tail = "true" if weight.k % 32 else "false"
        return f"const Dense<{stored}, {q}, {tail}> {prefix} = {{{names[0]}, {k}}};\n"
    reads = _TEXT[weight.type][0].values()
    given = ", ".join(f"(device const {what}*){name}" for name, what in zip(names, reads, strict=True))
    return f"const {weight.type.name} {prefix} = {{{given}, {k}}};\n"
