// The kernels between the matmuls, as `cuda.cpp` starts them.
#pragma once

#include <cuda_runtime_api.h>

namespace tilewright {

constexpr int kLongest = 64;  // tokens of a sequence
constexpr int kWidest = 128;  // elements of a head

enum class Element { kFloat, kHalf, kBFloat16 };

struct Heads {
  Element element;
  int batch, sequence, heads, head_dim;
  bool causal;
  const bool* key_mask;  // (batch, sequence), or null
};

// From qkv, (batch, sequence, 3, heads, head_dim), to context and the logarithms of the sums of exponentials.
cudaError_t attend(const Heads& heads, const void* qkv, void* context, float* lse, cudaStream_t stream);

// From the gradient of context to that of qkv.
cudaError_t differentiate(
    const Heads& heads, const void* qkv, const void* d_context, const float* lse, void* d_qkv, cudaStream_t stream);

}  // namespace tilewright
