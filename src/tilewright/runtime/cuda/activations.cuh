// SiLU and GELU with their slopes in float32, for results of 16 bits: value = z share, slope = share + z share'.
#pragma once
#include "hopper.cuh"

constexpr float TANH = 1.5957691216057308f, CUBIC = 0.07135481627260025f;

// By tanh, share = sigmoid(2 sqrt(2 / pi) (z + 0.044715 z^3)). Beyond 1e19, where z^2 is infinite, there is no slope, as
// there is none in PyTorch. The slope is times `scale`.
__device__ __forceinline__ void activate_by_tanh(float z, float scale, float& value, float& slope) {
  float square = z * z;
  float share = reciprocal(1.0f + power_of_two(z * fmaf(-LOG2E * CUBIC, square, -LOG2E * TANH)));
  value = z * share;
  slope = fmaf(fmaf(-value, share, value), fmaf(3.0f * scale * CUBIC, square, scale * TANH), scale * share);
}

// By erf, share is the normal distribution, and share' its density, exp(-z^2 / 2) / sqrt(2 pi). Below 0 the share is that
// exponential too, times a polynomial in 1 / (1 + 3/8 |z|) that is right to 4e-5 of itself, a hundredth of what rounding
// to bfloat16 takes; above 0 it is 1 less that of -z.
__device__ __forceinline__ void activate_by_erf(float z, float scale, float& value, float& slope) {
  const float bell = power_of_two(-0.5f * LOG2E * z * z), t = reciprocal(fmaf(0.375f, fabsf(z), 1.0f));
  float tail = fmaf(-0.09064376f, t, 0.20028377f);
  tail = fmaf(tail, t, 0.08356242f);
  tail = fmaf(tail, t, 0.1577345f);
  tail = fmaf(tail, t, 0.14906097f) * t * bell;
  const float share = z > 0.0f ? 1.0f - tail : tail;
  value = z * share;
  slope = fmaf(0.3989422804f * scale * z, bell, scale * share);
}

// SiLU: share = sigmoid(z).
__device__ __forceinline__ void activate_by_sigmoid(float z, float scale, float& value, float& slope) {
  const float share = reciprocal(1.0f + power_of_two(-LOG2E * z));
  value = z * share;
  slope = scale * share * fmaf(z, 1.0f - share, 1.0f);
}

constexpr int BY_TANH = 0, BY_ERF = 1, BY_SIGMOID = 2;

template <int KIND>
__device__ __forceinline__ void activate(float z, float scale, float& value, float& slope) {
  if (KIND == BY_SIGMOID)
    activate_by_sigmoid(z, scale, value, slope);
  else if (KIND == BY_ERF)
    activate_by_erf(z, scale, value, slope);
  else
    activate_by_tanh(z, scale, value, slope);
}
