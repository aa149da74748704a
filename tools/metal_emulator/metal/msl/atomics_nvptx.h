// <metal_atomic> on an NVIDIA GPU: 32-bit types, every update a loop over compare-exchange.
#pragma once
namespace metal {
enum memory_order { memory_order_relaxed };
template <class T>
struct _atomic {
  static_assert(sizeof(T) == 4, "the PTX path has 32-bit atomics only");
  T value;
};
template <class T>
using atomic = _atomic<T>;
typedef _atomic<int> atomic_int;
typedef _atomic<uint> atomic_uint;
typedef _atomic<float> atomic_float;

template <class T>
MSL_FN T atomic_load_explicit(const volatile _atomic<T>* p, memory_order) {
  return __builtin_bit_cast(T, __atomic_load_n((const volatile uint*)&p->value, __ATOMIC_RELAXED));
}
template <class T>
MSL_FN void atomic_store_explicit(volatile _atomic<T>* p, msl::identity_t<T> x, memory_order) {
  __atomic_store_n((volatile uint*)&p->value, __builtin_bit_cast(uint, x), __ATOMIC_RELAXED);
}
template <class T>
MSL_FN bool atomic_compare_exchange_weak_explicit(volatile _atomic<T>* p, T* expected, msl::identity_t<T> x,
                                                  memory_order, memory_order) {
  return __atomic_compare_exchange_n((volatile uint*)&p->value, (uint*)expected, __builtin_bit_cast(uint, x), false,
                                     __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
#define MSL_ATOMIC_UPDATE(name, new_value)                                                              \
  template <class T>                                                                                    \
  MSL_FN T atomic_##name##_explicit(volatile _atomic<T>* p, msl::identity_t<T> x, memory_order order) { \
    T old = atomic_load_explicit(p, order);                                                             \
    while (!atomic_compare_exchange_weak_explicit(p, &old, (T)(new_value), order, order)) {             \
    }                                                                                                   \
    return old;                                                                                         \
  }
MSL_ATOMIC_UPDATE(exchange, x)
MSL_ATOMIC_UPDATE(fetch_add, old + x)
MSL_ATOMIC_UPDATE(fetch_sub, old - x)
MSL_ATOMIC_UPDATE(fetch_max, old > x ? old : x)
MSL_ATOMIC_UPDATE(fetch_min, old < x ? old : x)
MSL_ATOMIC_UPDATE(fetch_or, old | x)
MSL_ATOMIC_UPDATE(fetch_and, old& x)
MSL_ATOMIC_UPDATE(fetch_xor, old ^ x)
#undef MSL_ATOMIC_UPDATE
}  // namespace metal
