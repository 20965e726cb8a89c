// The functions that softmax and score modifications need, in the accumulator's type.
#pragma once
#include "base/dtype.cuh"
#include "ptx/math.cuh"

DEVICE Real infinity() { return Real(ptx::mov_f32(0x7f800000)); }

constexpr f64 kLog2e = 1.4426950408889634;
constexpr f64 kLn2 = 0.6931471805599453;

DEVICE f32 exp2_of(f32 x) { return ptx::ex2_approx(x); }
DEVICE f64 exp2_of(f64 x) { return exp2(x); }
DEVICE f32 exp2_with_denormals(f32 x) { return exp2f(x); }
DEVICE f64 exp2_with_denormals(f64 x) { return exp2(x); }
DEVICE f32 log2_of(f32 x) { return log2f(x); }
DEVICE f64 log2_of(f64 x) { return log2(x); }
DEVICE f32 abs_of(f32 x) { return fabsf(x); }
DEVICE f64 abs_of(f64 x) { return fabs(x); }

// max.f32 returns the other operand for a NaN; the NaN comes back through the sum of exponentials.
DEVICE f32 larger(f32 a, f32 b) { return fmaxf(a, b); }
DEVICE f64 larger(f64 a, f64 b) { return a < b ? b : a; }

DEVICE f32 tanh_of(f32 x) { return tanhf(x); }
DEVICE f64 tanh_of(f64 x) { return tanh(x); }
