// <metal_atomic> on a CPU: relaxed order, as Metal offers no other.
#pragma once
namespace metal {
enum memory_order { memory_order_relaxed };
template <class T>
struct _atomic {
  T value;
};
template <class T>
using atomic = _atomic<T>;
typedef _atomic<int> atomic_int;
typedef _atomic<uint> atomic_uint;
typedef _atomic<ulong> atomic_ulong;
typedef _atomic<float> atomic_float;
typedef _atomic<bool> atomic_bool;

template <class T>
MSL_FN T atomic_load_explicit(const volatile _atomic<T>* p, memory_order) {
  T r;
  __atomic_load(&p->value, &r, __ATOMIC_RELAXED);
  return r;
}
template <class T>
MSL_FN void atomic_store_explicit(volatile _atomic<T>* p, msl::identity_t<T> x, memory_order) {
  __atomic_store(&p->value, &x, __ATOMIC_RELAXED);
}
template <class T>
MSL_FN T atomic_exchange_explicit(volatile _atomic<T>* p, msl::identity_t<T> x, memory_order) {
  T r;
  __atomic_exchange(&p->value, &x, &r, __ATOMIC_RELAXED);
  return r;
}
template <class T>
MSL_FN bool atomic_compare_exchange_weak_explicit(volatile _atomic<T>* p, T* expected, msl::identity_t<T> x,
                                                  memory_order, memory_order) {
  return __atomic_compare_exchange(&p->value, expected, &x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
// Every other read-modify-write is a loop over compare-exchange, so that floats need no case of their own.
#define MSL_ATOMIC_UPDATE(name, new_value)                                                                \
  template <class T>                                                                                      \
  MSL_FN T atomic_fetch_##name##_explicit(volatile _atomic<T>* p, msl::identity_t<T> x, memory_order) {   \
    T old, next;                                                                                          \
    __atomic_load(&p->value, &old, __ATOMIC_RELAXED);                                                     \
    do next = (T)(new_value);                                                                             \
    while (!__atomic_compare_exchange(&p->value, &old, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)); \
    return old;                                                                                           \
  }
MSL_ATOMIC_UPDATE(add, old + x)
MSL_ATOMIC_UPDATE(sub, old - x)
MSL_ATOMIC_UPDATE(max, old > x ? old : x)
MSL_ATOMIC_UPDATE(min, old < x ? old : x)
MSL_ATOMIC_UPDATE(or, old | x)
MSL_ATOMIC_UPDATE(and, old& x)
MSL_ATOMIC_UPDATE(xor, old ^ x)
#undef MSL_ATOMIC_UPDATE
}  // namespace metal
