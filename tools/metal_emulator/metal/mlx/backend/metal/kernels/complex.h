// In the place of MLX's complex.h, whose members are overloaded on the address space of the object.
#pragma once
#include <metal_stdlib>
using namespace metal;
template <typename T>
struct complex_t {
  T real, imag;
  constexpr complex_t() : real(0), imag(0) {}
  constexpr complex_t(T r) : real(r), imag(0) {}
  constexpr complex_t(T r, T i) : real(r), imag(i) {}
};
using complex64_t = complex_t<float>;
inline complex64_t operator+(complex64_t a, complex64_t b) { return {a.real + b.real, a.imag + b.imag}; }
inline complex64_t operator-(complex64_t a, complex64_t b) { return {a.real - b.real, a.imag - b.imag}; }
inline complex64_t operator*(complex64_t a, complex64_t b) {
  return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}
inline bool operator==(complex64_t a, complex64_t b) { return a.real == b.real && a.imag == b.imag; }
inline bool operator!=(complex64_t a, complex64_t b) { return !(a == b); }
