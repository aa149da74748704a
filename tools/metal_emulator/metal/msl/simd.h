// SIMD-group functions on a CPU: each lane parks with what it brings, the runtime calls the combining function once
// for the lanes that arrived together, and the lanes go on with their results.
#pragma once
namespace msl {
#define MSL_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))

template <class T>
constexpr bool simd_type = sizeof(typename shape<T>::element) <= 4 && !same<typename shape<T>::element, bool>;
#define MSL_CHECK_SIMD_TYPE(T)                                                                   \
  static_assert(msl::simd_type<T>,                                                               \
                "Metal's SIMD-group functions take 8, 16 and 32-bit scalars and their vectors, " \
                "not bool or 64-bit types")

// What one lane brings and takes.
template <class T>
struct offer {
  T value, result = {}, fill = {};
  uint32_t lane = 0, modulo = 32;
};
template <class T>
struct gathering {
  void* const* slots;
  uint32_t mask;
  MSL_UNCHECKED bool has(uint32_t lane) const { return lane < 32 && (mask >> lane & 1); }
  MSL_UNCHECKED offer<T>& operator[](uint32_t lane) const { return *(offer<T>*)slots[lane]; }
};
template <class Rule, class T>
MSL_UNCHECKED void combine(void* const* slots, uint32_t mask) {
  Rule::run(gathering<T>{slots, mask});
}
template <class Rule, class T>
MSL_FN T collective(offer<T> mine, const char* name) {
  MSL_CHECK_SIMD_TYPE(T);
  msl_simd(&mine, &combine<Rule, T>, name);
  return mine.result;
}

// --- reductions: a tree over the lanes, in the order of the hardware's butterfly ---
struct sum {
  template <class T>
  MSL_UNCHECKED static T of(T x, T y) {
    return T(x + y);
  }
};
struct product {
  template <class T>
  MSL_UNCHECKED static T of(T x, T y) {
    return T(x * y);
  }
};
struct bit_and {
  template <class T>
  MSL_UNCHECKED static T of(T x, T y) {
    return T(x & y);
  }
};
struct bit_or {
  template <class T>
  MSL_UNCHECKED static T of(T x, T y) {
    return T(x | y);
  }
};
struct bit_xor {
  template <class T>
  MSL_UNCHECKED static T of(T x, T y) {
    return T(x ^ y);
  }
};
// A NaN loses against a number, as in fmax.
struct largest {
  template <class T>
  MSL_UNCHECKED static T of(T x, T y) {
    if constexpr (is_vector<T>) {
      T r;
      for (int i = 0; i < shape<T>::size; i++) r[i] = of(x[i], y[i]);
      return r;
    } else {
      return x != x ? y : y != y ? x : x > y ? x : y;
    }
  }
};
struct smallest {
  template <class T>
  MSL_UNCHECKED static T of(T x, T y) {
    if constexpr (is_vector<T>) {
      T r;
      for (int i = 0; i < shape<T>::size; i++) r[i] = of(x[i], y[i]);
      return r;
    } else {
      return x != x ? y : y != y ? x : x < y ? x : y;
    }
  }
};
template <class Op>
struct reduce {
  template <class T>
  MSL_UNCHECKED static void run(gathering<T> lanes) {
    T value[32];
    bool has[32];
    for (int i = 0; i < 32; i++)
      if ((has[i] = lanes.has(i))) value[i] = lanes[i].value;
    for (int half_width = 16; half_width; half_width /= 2)
      for (int i = 0; i < half_width; i++) {
        if (!has[i + half_width]) continue;
        value[i] = has[i] ? Op::of(value[i], value[i + half_width]) : value[i + half_width];
        has[i] = true;
      }
    for (int i = 0; i < 32; i++)
      if (lanes.has(i)) lanes[i].result = value[0];
  }
};
template <class Op, bool inclusive>
struct scan {
  template <class T>
  MSL_UNCHECKED static void run(gathering<T> lanes) {
    T total = T(same<Op, product> ? 1 : 0);
    for (int i = 0; i < 32; i++) {
      if (!lanes.has(i)) continue;
      T next = Op::of(total, lanes[i].value);
      lanes[i].result = inclusive ? next : total;
      total = next;
    }
  }
};

// --- shuffles ---
// All bits one: a NaN in every float format.
template <class T>
MSL_UNCHECKED T poison() {
  T t;
  __builtin_memset((void*)&t, 0xFF, sizeof t);
  return t;
}
template <class T>
MSL_UNCHECKED T value_of(gathering<T> lanes, uint32_t lane, uint32_t source, const char* name) {
  if (lanes.has(source)) return lanes[source].value;
  msl_lane_absent(lane, source, name);
  return poison<T>();
}
struct from_lane {
  static constexpr const char* name = "simd_shuffle";
  MSL_UNCHECKED static uint32_t source(uint32_t, uint32_t argument) { return argument; }
};
struct from_xor {
  static constexpr const char* name = "simd_shuffle_xor";
  MSL_UNCHECKED static uint32_t source(uint32_t lane, uint32_t argument) { return lane ^ argument; }
};
struct from_below {  // the lanes without a source keep their own value, as the specification says
  static constexpr const char* name = "simd_shuffle_up";
  MSL_UNCHECKED static uint32_t source(uint32_t lane, uint32_t argument) {
    return lane >= argument ? lane - argument : lane;
  }
};
struct from_above {
  static constexpr const char* name = "simd_shuffle_down";
  MSL_UNCHECKED static uint32_t source(uint32_t lane, uint32_t argument) {
    return lane + argument < 32 ? lane + argument : lane;
  }
};
struct from_rotated_down {
  static constexpr const char* name = "simd_shuffle_rotate_down";
  MSL_UNCHECKED static uint32_t source(uint32_t lane, uint32_t argument) { return (lane + argument) % 32; }
};
struct from_rotated_up {
  static constexpr const char* name = "simd_shuffle_rotate_up";
  MSL_UNCHECKED static uint32_t source(uint32_t lane, uint32_t argument) { return (lane - argument) % 32; }
};
template <class From>
struct shuffle {
  template <class T>
  MSL_UNCHECKED static void run(gathering<T> lanes) {
    for (uint32_t i = 0; i < 32; i++)
      if (lanes.has(i)) lanes[i].result = value_of(lanes, i, From::source(i, lanes[i].lane), From::name);
  }
};
struct first_lane {
  template <class T>
  MSL_UNCHECKED static void run(gathering<T> lanes) {
    T first = lanes[__builtin_ctz(lanes.mask)].value;
    for (int i = 0; i < 32; i++)
      if (lanes.has(i)) lanes[i].result = first;
  }
};
// Shuffles that take from a second operand where the source falls out of the lane's block of `modulo` lanes.
template <bool up>
struct fill_shuffle {
  template <class T>
  MSL_UNCHECKED static void run(gathering<T> lanes) {
    const char* name = up ? "simd_shuffle_and_fill_up" : "simd_shuffle_and_fill_down";
    for (uint32_t i = 0; i < 32; i++) {
      if (!lanes.has(i)) continue;
      uint32_t width = lanes[i].modulo, block = i / width * width, within = i - block, delta = lanes[i].lane % width;
      uint32_t source = block + (up ? within + width - delta : within + delta) % width;
      bool inside = up ? within >= delta : within + delta < width;
      T value = value_of(lanes, i, source, name);
      lanes[i].result = inside ? value : lanes.has(source) ? lanes[source].fill : value;
    }
  }
};
struct vote {
  MSL_UNCHECKED static void run(gathering<uint32_t> lanes) {
    uint32_t ballot = 0;
    for (int i = 0; i < 32; i++)
      if (lanes.has(i) && lanes[i].value) ballot |= 1u << i;
    for (int i = 0; i < 32; i++)
      if (lanes.has(i)) lanes[i].result = ballot;
  }
};
struct lowest_lane {
  MSL_UNCHECKED static void run(gathering<uint32_t> lanes) {
    for (int i = 0; i < 32; i++)
      if (lanes.has(i)) lanes[i].result = i == __builtin_ctz(lanes.mask);
  }
};
}  // namespace msl

namespace metal {
#define MSL_SIMD_FUNCTION(function, ...)                        \
  template <class T>                                            \
  MSL_FN T function(T value) {                                  \
    return msl::collective<__VA_ARGS__, T>({value}, #function); \
  }
MSL_SIMD_FUNCTION(simd_sum, msl::reduce<msl::sum>)
MSL_SIMD_FUNCTION(simd_product, msl::reduce<msl::product>)
MSL_SIMD_FUNCTION(simd_and, msl::reduce<msl::bit_and>)
MSL_SIMD_FUNCTION(simd_or, msl::reduce<msl::bit_or>)
MSL_SIMD_FUNCTION(simd_xor, msl::reduce<msl::bit_xor>)
MSL_SIMD_FUNCTION(simd_max, msl::reduce<msl::largest>)
MSL_SIMD_FUNCTION(simd_min, msl::reduce<msl::smallest>)
MSL_SIMD_FUNCTION(simd_prefix_inclusive_sum, msl::scan<msl::sum, true>)
MSL_SIMD_FUNCTION(simd_prefix_exclusive_sum, msl::scan<msl::sum, false>)
MSL_SIMD_FUNCTION(simd_prefix_inclusive_product, msl::scan<msl::product, true>)
MSL_SIMD_FUNCTION(simd_prefix_exclusive_product, msl::scan<msl::product, false>)
MSL_SIMD_FUNCTION(simd_broadcast_first, msl::first_lane)
#undef MSL_SIMD_FUNCTION

#define MSL_SHUFFLE(function, from)                                                            \
  template <class T>                                                                           \
  MSL_FN T function(T value, ushort argument) {                                                \
    return msl::collective<msl::shuffle<from>, T>({value, value, value, argument}, #function); \
  }
MSL_SHUFFLE(simd_shuffle, msl::from_lane)
MSL_SHUFFLE(simd_broadcast, msl::from_lane)
MSL_SHUFFLE(simd_shuffle_xor, msl::from_xor)
MSL_SHUFFLE(simd_shuffle_up, msl::from_below)
MSL_SHUFFLE(simd_shuffle_down, msl::from_above)
MSL_SHUFFLE(simd_shuffle_rotate_up, msl::from_rotated_up)
MSL_SHUFFLE(simd_shuffle_rotate_down, msl::from_rotated_down)
#undef MSL_SHUFFLE

template <class T>
MSL_FN T simd_shuffle_and_fill_up(T value, T fill, ushort delta, ushort modulo = 32) {
  return msl::collective<msl::fill_shuffle<true>, T>({value, value, fill, delta, modulo}, "simd_shuffle_and_fill_up");
}
template <class T>
MSL_FN T simd_shuffle_and_fill_down(T value, T fill, ushort delta, ushort modulo = 32) {
  return msl::collective<msl::fill_shuffle<false>, T>({value, value, fill, delta, modulo},
                                                      "simd_shuffle_and_fill_down");
}
MSL_FN uint msl_ballot(bool predicate) { return msl::collective<msl::vote, uint32_t>({predicate}, "simd_ballot"); }
MSL_FN bool simd_is_first() { return msl::collective<msl::lowest_lane, uint32_t>({0}, "simd_is_first"); }
MSL_FN bool simd_any(bool predicate) { return msl_ballot(predicate) != 0; }
MSL_FN bool simd_all(bool predicate) { return msl_ballot(!predicate) == 0; }
}  // namespace metal
