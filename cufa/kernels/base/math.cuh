// The functions that softmax and score modifications need, in the accumulator's type.
#pragma once
#include "base/dtype.cuh"
#include "ptx/math.cuh"

DEVICE Real infinity() { return Real(ptx::mov_f32(0x7f800000)); }
DEVICE Real nan() { return Real(ptx::mov_f32(0x7fffffff)); }

constexpr f64 kLog2e = 1.4426950408889634;
constexpr f64 kLn2 = 0.6931471805599453;

DEVICE f32 exp2_of(f32 x) { return ptx::ex2_approx(x); }

// For x up to 1000; where the result would be below 2^-1022 it is 0. 2^x = 2^n 2^f, |f| <= 1/2: a
// polynomial of degree 11 through the Chebyshev nodes is off by 2e-17 of 2^f. Half the instructions
// of exp2 in the CUDA library, and no branch.
DEVICE f64 exp2_of(f64 x) {
  constexpr f64 kRound = 6755399441055744.0;  // 1.5 * 2^52: n is in the lowest bits of the sum
  const f64 n = x + kRound, f = x - (n - kRound);
  f64 y = 4.4558179083360645e-10;
  y = y * f + 7.074194297288521e-09;
  y = y * f + 1.0178057087733941e-07;
  y = y * f + 1.3215432535912375e-06;
  y = y * f + 1.5252733841556773e-05;
  y = y * f + 1.5403530463724353e-04;
  y = y * f + 1.333355814640647e-03;
  y = y * f + 9.618129107587256e-03;
  y = y * f + 5.5504108664821625e-02;
  y = y * f + 0.24022650695910158;
  y = y * f + 0.6931471805599453;
  y = y * f + 1.0;
  const u64 bits = ptx::mov_b64(y) + (ptx::mov_b64(n) << 52);
  // From -1022 down to -inf, but not NaN, by the upper words: float64 units are busy enough.
  const bool tiny = u32(ptx::mov_b64(x) >> 32) - 0xc08ff000u <= 0xfff00000u - 0xc08ff000u;
  return ptx::mov_f64(tiny ? 0 : bits);
}
DEVICE f32 exp2_with_denormals(f32 x) { return exp2f(x); }
DEVICE f64 exp2_with_denormals(f64 x) { return exp2(x); }
DEVICE f32 log2_of(f32 x) { return log2f(x); }
DEVICE f64 log2_of(f64 x) { return log2(x); }
// The exponent of a normal number that is positive.
DEVICE f32 exponent_of(f32 x) { return f32(int(ptx::mov_b32(x) >> 23) - 127); }
DEVICE f32 abs_of(f32 x) { return fabsf(x); }
DEVICE f64 abs_of(f64 x) { return fabs(x); }

// max.f32 returns the other operand for a NaN; the NaN comes back through the sum of exponentials.
DEVICE f32 larger(f32 a, f32 b) { return fmaxf(a, b); }
DEVICE f64 larger(f64 a, f64 b) { return a < b ? b : a; }

DEVICE f32 tanh_of(f32 x) { return tanhf(x); }
DEVICE f64 tanh_of(f64 x) { return tanh(x); }
