// SIMD-group functions on an NVIDIA GPU: a SIMD-group is a warp, the lanes that take part are the active ones.
#pragma once
namespace msl {
template <class T>
constexpr bool simd_type = sizeof(typename shape<T>::element) <= 4 && !same<typename shape<T>::element, bool>;
#define MSL_CHECK_SIMD_TYPE(T)                                                                   \
  static_assert(msl::simd_type<T>,                                                               \
                "Metal's SIMD-group functions take 8, 16 and 32-bit scalars and their vectors, " \
                "not bool or 64-bit types")

MSL_FN uint thread_index() {
  return __nvvm_read_ptx_sreg_tid_x() +
         __nvvm_read_ptx_sreg_ntid_x() *
             (__nvvm_read_ptx_sreg_tid_y() + __nvvm_read_ptx_sreg_ntid_y() * __nvvm_read_ptx_sreg_tid_z());
}

// Any value as the 32-bit words that a shuffle moves.
template <class T>
MSL_FN T read_lane(T value, uint source) {
  constexpr int words = (sizeof(T) + 3) / 4;
  int word[words] = {};
  __builtin_memcpy(word, &value, sizeof(T));
  for (int i = 0; i < words; i++) word[i] = __nvvm_shfl_sync_idx_i32(__nvvm_activemask(), word[i], source, 31);
  __builtin_memcpy(&value, word, sizeof(T));
  return value;
}

struct sum {
  template <class T>
  MSL_FN static T of(T x, T y) {
    return T(x + y);
  }
};
struct product {
  template <class T>
  MSL_FN static T of(T x, T y) {
    return T(x * y);
  }
};
struct bit_and {
  template <class T>
  MSL_FN static T of(T x, T y) {
    return T(x & y);
  }
};
struct bit_or {
  template <class T>
  MSL_FN static T of(T x, T y) {
    return T(x | y);
  }
};
struct bit_xor {
  template <class T>
  MSL_FN static T of(T x, T y) {
    return T(x ^ y);
  }
};
struct largest {
  template <class T>
  MSL_FN static T of(T x, T y) {
    return x != x ? y : y != y ? x : x > y ? x : y;
  }
};
struct smallest {
  template <class T>
  MSL_FN static T of(T x, T y) {
    return x != x ? y : y != y ? x : x < y ? x : y;
  }
};

template <class Op, class T>
MSL_FN T reduce(T value) {
  MSL_CHECK_SIMD_TYPE(T);
  uint active = __nvvm_activemask(), lane = thread_index() % 32;
  if (active == ~0u) {
    for (uint delta = 16; delta; delta /= 2) value = Op::of(value, read_lane(value, lane ^ delta));
    return value;
  }
  // A butterfly would read lanes that are not there.
  uint first = __builtin_ctz(active);
  T total = read_lane(value, first);
  for (uint rest = active & (active - 1); rest; rest &= rest - 1)
    total = Op::of(total, read_lane(value, __builtin_ctz(rest)));
  return total;
}
template <class Op, bool inclusive, class T>
MSL_FN T scan(T value, T start) {
  MSL_CHECK_SIMD_TYPE(T);
  uint lane = thread_index() % 32;
  T total = start;
  for (uint rest = __nvvm_activemask(); rest; rest &= rest - 1) {
    uint source = __builtin_ctz(rest);
    T theirs = read_lane(value, source);
    if (source < lane || (inclusive && source == lane)) total = Op::of(total, theirs);
  }
  return total;
}
template <bool up, class T>
MSL_FN T fill_shuffle(T value, T fill, uint delta, uint width) {
  uint lane = thread_index() % 32, block = lane / width * width, within = lane - block;
  delta %= width;
  uint source = block + (up ? within + width - delta : within + delta) % width;
  T theirs = read_lane(value, source), their_fill = read_lane(fill, source);
  return (up ? within >= delta : within + delta < width) ? theirs : their_fill;
}
}  // namespace msl
MSL_FN uint32_t msl_lane() { return msl::thread_index() % 32; }

namespace metal {
#define MSL_SIMD_FUNCTION(function, expression) \
  template <class T>                            \
  MSL_FN T function(T value) {                  \
    return expression;                          \
  }
MSL_SIMD_FUNCTION(simd_sum, msl::reduce<msl::sum>(value))
MSL_SIMD_FUNCTION(simd_product, msl::reduce<msl::product>(value))
MSL_SIMD_FUNCTION(simd_and, msl::reduce<msl::bit_and>(value))
MSL_SIMD_FUNCTION(simd_or, msl::reduce<msl::bit_or>(value))
MSL_SIMD_FUNCTION(simd_xor, msl::reduce<msl::bit_xor>(value))
MSL_SIMD_FUNCTION(simd_max, msl::reduce<msl::largest>(value))
MSL_SIMD_FUNCTION(simd_min, msl::reduce<msl::smallest>(value))
MSL_SIMD_FUNCTION(simd_prefix_inclusive_sum, (msl::scan<msl::sum, true>(value, T(0))))
MSL_SIMD_FUNCTION(simd_prefix_exclusive_sum, (msl::scan<msl::sum, false>(value, T(0))))
MSL_SIMD_FUNCTION(simd_prefix_inclusive_product, (msl::scan<msl::product, true>(value, T(1))))
MSL_SIMD_FUNCTION(simd_prefix_exclusive_product, (msl::scan<msl::product, false>(value, T(1))))
MSL_SIMD_FUNCTION(simd_broadcast_first, msl::read_lane(value, __builtin_ctz(__nvvm_activemask())))
#undef MSL_SIMD_FUNCTION

#define MSL_SHUFFLE(function, source)           \
  template <class T>                            \
  MSL_FN T function(T value, ushort argument) { \
    MSL_CHECK_SIMD_TYPE(T);                     \
    [[maybe_unused]] uint lane = msl_lane();    \
    return msl::read_lane(value, source);       \
  }
MSL_SHUFFLE(simd_shuffle, argument)
MSL_SHUFFLE(simd_broadcast, argument)
MSL_SHUFFLE(simd_shuffle_xor, lane ^ argument)
MSL_SHUFFLE(simd_shuffle_up, lane >= argument ? lane - argument : lane)
MSL_SHUFFLE(simd_shuffle_down, lane + argument < 32 ? lane + argument : lane)
MSL_SHUFFLE(simd_shuffle_rotate_up, (lane - argument) % 32)
MSL_SHUFFLE(simd_shuffle_rotate_down, (lane + argument) % 32)
#undef MSL_SHUFFLE

template <class T>
MSL_FN T simd_shuffle_and_fill_up(T value, T fill, ushort delta, ushort modulo = 32) {
  return msl::fill_shuffle<true>(value, fill, delta, modulo);
}
template <class T>
MSL_FN T simd_shuffle_and_fill_down(T value, T fill, ushort delta, ushort modulo = 32) {
  return msl::fill_shuffle<false>(value, fill, delta, modulo);
}
MSL_FN uint msl_ballot(bool predicate) { return __nvvm_vote_ballot_sync(__nvvm_activemask(), predicate); }
MSL_FN bool simd_is_first() { return msl_lane() == (uint)__builtin_ctz(__nvvm_activemask()); }
MSL_FN bool simd_any(bool predicate) { return msl_ballot(predicate) != 0; }
MSL_FN bool simd_all(bool predicate) { return msl_ballot(!predicate) == 0; }
}  // namespace metal
