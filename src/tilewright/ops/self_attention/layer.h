// A multi-head self-attention layer on plain memory: what `extension.cpp` asks of `cpu.cpp`.
//
// Matrices lie row by row and without gaps. T is float or double.
#pragma once

#include <cstdint>

namespace tilewright {

struct Shape {
  int64_t batch, sequence, heads, head_dim;
  bool causal;

  int64_t tokens() const { return batch * sequence; }
  int64_t width() const { return heads * head_dim; }
};

// What forward reads, and backward again. A bias or a mask that is not there is null.
template <typename T>
struct Inputs {
  const T* x;           // (tokens, width)
  const T* qkv_weight;  // (3 width, width)
  const T* qkv_bias;    // (3 width)
  const T* out_weight;  // (width, width)
  const T* out_bias;    // (width)
  const bool* key_mask; // (batch, sequence), true where a key takes part
};

// What forward computes on the way and backward needs.
template <typename T>
struct Saved {
  T* qkv;     // (tokens, 3 width): the queries, keys and values of a token
  T* context; // (tokens, width): the weighted sums of values
  T* lse;     // (batch, heads, sequence): logarithms of the sums of exponentials
};

// What backward writes; null where nobody asks for it.
template <typename T>
struct Gradients {
  T *x, *qkv_weight, *qkv_bias, *out_weight, *out_bias;
};

template <typename T>
void forward(const Shape& shape, const Inputs<T>& inputs, const Saved<T>& saved, T* out);

// `d_context` and `d_qkv` are memory of the shapes of `saved.context` and `saved.qkv`.
template <typename T>
void backward(
    const Shape& shape, const Inputs<T>& inputs, const Saved<T>& saved, const T* d_out, T* d_context, T* d_qkv,
    const Gradients<T>& gradients);

}  // namespace tilewright
