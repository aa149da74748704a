// Declarations only, for the type check: here a pointer's address space is part of its type.
#pragma once
#define MSL_DEVICE __attribute__((address_space(1)))
#define MSL_SHARED __attribute__((address_space(3)))
namespace metal {
#define MSL_DECLARE1(name) \
  template <class T>       \
  T name(T value);
MSL_DECLARE1(simd_sum)
MSL_DECLARE1(simd_product)
MSL_DECLARE1(simd_and)
MSL_DECLARE1(simd_or)
MSL_DECLARE1(simd_xor)
MSL_DECLARE1(simd_max)
MSL_DECLARE1(simd_min)
MSL_DECLARE1(simd_prefix_inclusive_sum)
MSL_DECLARE1(simd_prefix_exclusive_sum)
MSL_DECLARE1(simd_prefix_inclusive_product)
MSL_DECLARE1(simd_prefix_exclusive_product)
MSL_DECLARE1(simd_broadcast_first)
MSL_DECLARE1(quad_sum)
MSL_DECLARE1(quad_max)
MSL_DECLARE1(quad_min)
#undef MSL_DECLARE1
#define MSL_DECLARE2(name) \
  template <class T>       \
  T name(T value, ushort argument);
MSL_DECLARE2(simd_shuffle)
MSL_DECLARE2(simd_broadcast)
MSL_DECLARE2(simd_shuffle_xor)
MSL_DECLARE2(simd_shuffle_up)
MSL_DECLARE2(simd_shuffle_down)
MSL_DECLARE2(simd_shuffle_rotate_up)
MSL_DECLARE2(simd_shuffle_rotate_down)
MSL_DECLARE2(quad_shuffle_xor)
#undef MSL_DECLARE2
template <class T>
T simd_shuffle_and_fill_up(T value, T fill, ushort delta, ushort modulo = 32);
template <class T>
T simd_shuffle_and_fill_down(T value, T fill, ushort delta, ushort modulo = 32);
struct simd_vote {
  typedef ulong vote_t;
  explicit simd_vote(ulong);
  explicit operator ulong() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
bool simd_any(bool);
bool simd_all(bool);
bool simd_is_first();

template <class T, int Columns, int Rows = Columns>
struct simdgroup_matrix {
  typedef vec<T, 2> storage_type;
  simdgroup_matrix();
  explicit simdgroup_matrix(T diagonal);
  storage_type& thread_elements();
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int Columns, int Rows = Columns>
simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value);
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&,
                                   const simdgroup_matrix<B, 8, 8>&, const simdgroup_matrix<C, 8, 8>&);
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&, const simdgroup_matrix<B, 8, 8>&);

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

// Whatever takes a pointer exists once for device and once for threadgroup memory.
#define MSL_ATOMIC_UPDATE(name, space) \
  template <class T>                   \
  T atomic_##name##_explicit(volatile space _atomic<T>*, msl::identity_t<T>, memory_order);
#define MSL_IN_SPACE(space)                                                                                    \
  template <class T>                                                                                           \
  void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, const space T* from, ulong row_stride = 8,                \
                      ulong2 origin = ulong2{0, 0}, bool transpose = false);                                   \
  template <class T>                                                                                           \
  void simdgroup_store(const simdgroup_matrix<T, 8, 8>& from, space T* to, ulong row_stride = 8,               \
                       ulong2 origin = ulong2{0, 0}, bool transpose = false);                                  \
  template <class T>                                                                                           \
  T atomic_load_explicit(const volatile space _atomic<T>*, memory_order);                                      \
  template <class T>                                                                                           \
  void atomic_store_explicit(volatile space _atomic<T>*, msl::identity_t<T>, memory_order);                    \
  template <class T>                                                                                           \
  bool atomic_compare_exchange_weak_explicit(volatile space _atomic<T>*, T*, msl::identity_t<T>, memory_order, \
                                             memory_order);                                                    \
  MSL_ATOMIC_UPDATE(exchange, space)                                                                           \
  MSL_ATOMIC_UPDATE(fetch_add, space)                                                                          \
  MSL_ATOMIC_UPDATE(fetch_sub, space)                                                                          \
  MSL_ATOMIC_UPDATE(fetch_max, space)                                                                          \
  MSL_ATOMIC_UPDATE(fetch_min, space)                                                                          \
  MSL_ATOMIC_UPDATE(fetch_or, space)                                                                           \
  MSL_ATOMIC_UPDATE(fetch_and, space)                                                                          \
  MSL_ATOMIC_UPDATE(fetch_xor, space)
MSL_IN_SPACE(MSL_DEVICE)
MSL_IN_SPACE(MSL_SHARED)
// `*(device Wide<half, 4>*)p` is written `msl_wide->*(device Wide<half, 4>*)p`.
struct msl_wide_t {};
extern msl_wide_t msl_wide;
template <class T>
T& operator->*(msl_wide_t, const MSL_DEVICE T* pointer);
template <class T>
T& operator->*(msl_wide_t, const MSL_SHARED T* pointer);
template <class T>
T& operator->*(msl_wide_t, const __attribute__((address_space(2))) T* pointer);
#undef MSL_IN_SPACE
#undef MSL_ATOMIC_UPDATE

struct os_log {
  template <class... A>
  void log_debug(A...) const;
};
}  // namespace metal

template <class T>
MSL_SHARED T& msl_threadgroup_reference();
