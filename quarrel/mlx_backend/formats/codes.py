"""Metal functions that turn the codes of a lane's 16 columns into halves; formats share them.

A code of up to 10 bits is a half as it stands: a subnormal number, 2^-24 of its worth, and more where it stands higher.
So an AND is all that it takes, and no conversion, which takes Apple's GPUs four cycles, as a shift does, where an AND, a
sum or a product takes one. Scales make up for the 2^24 (`ONE`), and for 16 more where a field stands at bit 4. Apple's
GPUs flush subnormal floats, but neither subnormal halves nor those among a float sum's operands, which cost nothing
(github.com/dougallj/applegpu; MLX's own fp4 and fp8 count on it). docs/metal.md counts the cycles. `fields.py` puts the
fields where these functions look for them.
"""

from __future__ import annotations

DECODE = """
// Eight neighbours, loaded in pieces of 16 bytes.
template <class T>
struct alignas(sizeof(T) > 2 ? 16 : sizeof(T) * 8) Eight {
  T v[8];
};

// What a code is worth in halves: the lowest bit of one is 2^-24.
constant constexpr float ONE = 16777216.0f;

// The upper bits of low pair L, moved to bit 4 of both halves; those of the high pair beside it are then at bit 8.
template <int BITS>
inline uint aligned(uint upper, int l) {
  if (BITS == 1) return upper << uint(4 - l);
  return l < 2 ? upper << uint(4 - 2 * l) : upper >> uint(2 * l);
}

// The 16 fields of one bit, eight in each byte, with the second byte in the upper half: loads widen for nothing.
inline uint spread(uchar2 bytes) { return as_type<uint>(ushort2(ushort(bytes.x), ushort(bytes.y))); }

// Column of the first of pair p among a lane's 16; the second is two further.
inline int first_of(int p) { return (p >> 1 & 1) * 8 + (p >> 2) * 4 + (p & 1); }

// 16 codes of 4 bits, and UPPER more bits of each from `upper`. The last eight stand at bit 4.
template <int UPPER>
inline void nibbles(uint2 words, uint upper, thread half* q) {
  constexpr uint mask = UPPER == 1 ? 0x00010001u : 0x00030003u;
  UNROLL for (int p = 0; p < 8; p++) {
    uint v = p < 4 ? words.x : words.y;
    if (p & 1) v >>= 8;
    const uint more = UPPER ? aligned<UPPER>(upper, (p >> 2) * 2 + (p & 1)) : 0u;
    v &= p & 2 ? 0x00f000f0u : 0x000f000fu;
    if (UPPER) v |= more & (p & 2 ? mask << 8 : mask << 4);
    const half2 pair = as_type<half2>(v);
    q[first_of(p)] = pair.x;
    q[first_of(p) + 2] = pair.y;
  }
}

// 16 codes of 2 bits, and with UPPER a third bit of each. They stand at bits 0 and 2, the last eight at bits 4 and 6: those
// in odd columns are four times as much.
template <int UPPER>
inline void twos(uint word, uint upper, thread half* q) {
  UNROLL for (int p = 0; p < 8; p++) {
    const uint at = uint(p % 4 * 2);
    uint v = (p < 4 ? word : word >> 8) & 0x00030003u << at;
    if (UPPER) v |= (p < 4 ? upper << 2 : upper << 1) & 0x00040004u << at;
    const half2 pair = as_type<half2>(v);
    q[first_of(p)] = pair.x;
    q[first_of(p) + 2] = pair.y;
  }
}

// Eight bytes.
inline void eights(uint2 words, thread half* q) {
  UNROLL for (int p = 0; p < 4; p++) {
    const uint v = (p < 2 ? words.x : words.y) >> uint(p % 2 * 8) & 0x00ff00ffu;
    const half2 pair = as_type<half2>(v);
    q[(p >> 1) * 4 + (p & 1)] = pair.x;
    q[(p >> 1) * 4 + (p & 1) + 2] = pair.y;
  }
}

// The 16 values of IQ4_NL: a polynomial within 0.44 of every one of them, then the nearest whole number, which is what a
// half between 1024 and 2048 holds.
inline void bent(uint2 words, thread half* q) {
  nibbles<0>(words, 0u, q);
  UNROLL for (int i = 0; i < 16; i++) {
    const float one = i < 8 ? ONE : ONE / 16;
    const float x = float(q[i]);
    float y = fma(x, 0.001585999969393015f * one * one * one * one, 0.031085999682545662f * one * one * one);
    y = fma(x, y, -1.37192702293396f * one * one);
    y = fma(x, y, 24.173830032348633f * one);
    q[i] = half(fma(x, y, 1536.0f - 126.56700897216797f)) - half(1536.0f);
  }
}

// Numbers in E2M1, 2^-14 of their worth: their bits are those of a half whose exponent is 14 too small. Of the four in a
// word of 16 bits the magnitudes stand three bits apart, the first at bit 9, and the signs at bits 15, 12, 14 and 13.
inline void fours(uint2 words, thread half* q) {
  UNROLL for (int p = 0; p < 8; p++) {
    const uint v = p < 4 ? words.x : words.y;
    const int at = p & 3;
    uint bits = v << uint(at * 3) & (at < 2 ? 0x8e008e00u : 0x0e000e00u);
    if (at > 1) bits |= v << uint(at - 1) & 0x80008000u;
    const half2 pair = as_type<half2>(bits);
    q[first_of(p)] = pair.x;
    q[first_of(p) + 2] = pair.y;
  }
}
"""
