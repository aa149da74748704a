// 8x8 SIMD-group matrices: two neighbouring elements of a row in each lane, in the lane layout of Apple's hardware
// (Apple's own gemm code, which writes thread_elements() directly, is the test of it).
#pragma once
namespace msl {
struct matrix_place {
  uint row, column;
  MSL_FN explicit matrix_place(uint lane)
      : row((lane / 4 & 4) + lane / 2 % 4), column((lane / 4 & 2) * 2 + lane % 2 * 2) {}
};
}  // namespace msl

namespace metal {
template <class T, int Columns, int Rows = Columns>
struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8, "SIMD-group matrices are 8x8");
  typedef vec<T, 2> storage_type;
  storage_type elements;

  MSL_FN simdgroup_matrix() { __builtin_memset((void*)&elements, 0xFF, sizeof elements); }
  MSL_FN explicit simdgroup_matrix(T diagonal) {
    msl::matrix_place at(msl_lane());
    elements[0] = at.row == at.column ? diagonal : T(0);
    elements[1] = at.row == at.column + 1 ? diagonal : T(0);
  }
  MSL_FN storage_type& thread_elements() { return elements; }
  MSL_FN const storage_type& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Columns, int Rows = Columns>
MSL_FN simdgroup_matrix<T, Columns, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Columns, Rows> m;
  m.elements[0] = m.elements[1] = value;
  return m;
}

template <class T, class P>
MSL_FN void simdgroup_load(simdgroup_matrix<T, 8, 8>& to, const P* from, ulong row_stride = 8,
                           ulong2 origin = ulong2{0, 0}, bool transpose = false) {
  static_assert(is_same_v<T, P>, "simdgroup_load: element types differ");
  msl::matrix_place at(msl_lane());
  from += origin.y * row_stride + origin.x;
  for (uint k = 0; k < 2; k++)
    to.elements[k] =
        transpose ? from[(at.column + k) * row_stride + at.row] : from[at.row * row_stride + at.column + k];
}
template <class T, class P>
MSL_FN void simdgroup_store(const simdgroup_matrix<T, 8, 8>& from, P* to, ulong row_stride = 8,
                            ulong2 origin = ulong2{0, 0}, bool transpose = false) {
  static_assert(is_same_v<T, P>, "simdgroup_store: element types differ");
  msl::matrix_place at(msl_lane());
  to += origin.y * row_stride + origin.x;
  for (uint k = 0; k < 2; k++)
    to[transpose ? (at.column + k) * row_stride + at.row : at.row * row_stride + at.column + k] = from.elements[k];
}

#ifdef __NVPTX__
// Right, not fast: every lane fetches its row of A and its two columns of B by shuffles.
template <class D, class A, class B, class C>
MSL_FN void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c) {
  auto holder = [](uint row, uint column) { return row / 4 * 16 + column / 4 * 8 + row % 4 * 2 + column % 4 / 2; };
  msl::matrix_place at(msl_lane());
  float sum[2] = {(float)c.elements[0], (float)c.elements[1]};
  for (uint j = 0; j < 8; j++) {
    uint a_lane = holder(at.row, j), b_lane = holder(j, at.column);
    float a0 = msl::read_lane((float)a.elements[0], a_lane), a1 = msl::read_lane((float)a.elements[1], a_lane);
    float b0 = msl::read_lane((float)b.elements[0], b_lane), b1 = msl::read_lane((float)b.elements[1], b_lane);
    sum[0] += (j % 2 ? a1 : a0) * b0;
    sum[1] += (j % 2 ? a1 : a0) * b1;
  }
  d.elements[0] = (D)sum[0];
  d.elements[1] = (D)sum[1];
}
#else
}  // namespace metal
namespace msl {
struct matrix_offer {
  float a[2], b[2], c[2], d[2];
};
// Products in float, added in the order of k, as the hardware's accumulator for float results.
MSL_UNCHECKED inline void multiply_matrices(void* const* slots, uint32_t mask) {
  float a[8][8], b[8][8];
  for (uint lane = 0; lane < 32; lane++) {
    matrix_place at(lane);
    for (uint k = 0; k < 2; k++) {
      bool takes_part = mask >> lane & 1;
      a[at.row][at.column + k] = takes_part ? ((matrix_offer*)slots[lane])->a[k] : __builtin_nanf("");
      b[at.row][at.column + k] = takes_part ? ((matrix_offer*)slots[lane])->b[k] : __builtin_nanf("");
    }
  }
  for (uint lane = 0; lane < 32; lane++) {
    if (!(mask >> lane & 1)) continue;
    matrix_place at(lane);
    matrix_offer& mine = *(matrix_offer*)slots[lane];
    for (uint k = 0; k < 2; k++) {
      float sum = mine.c[k];
      for (uint j = 0; j < 8; j++) sum = __builtin_fmaf(a[at.row][j], b[j][at.column + k], sum);
      mine.d[k] = sum;
    }
  }
}
}  // namespace msl
namespace metal {
template <class D, class A, class B, class C>
MSL_FN void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                                          const simdgroup_matrix<B, 8, 8>& b, const simdgroup_matrix<C, 8, 8>& c) {
  msl::matrix_offer mine;
  for (int k = 0; k < 2; k++) {
    mine.a[k] = (float)a.elements[k];
    mine.b[k] = (float)b.elements[k];
    mine.c[k] = (float)c.elements[k];
  }
  msl_simd(&mine, &msl::multiply_matrices, "simdgroup_multiply_accumulate");
  for (int k = 0; k < 2; k++) d.elements[k] = (D)mine.d[k];
}
#endif
template <class D, class A, class B>
MSL_FN void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a,
                               const simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)));
}
}  // namespace metal
