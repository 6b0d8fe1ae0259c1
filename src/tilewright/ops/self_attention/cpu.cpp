// The layer on a CPU: BLAS for the large matmuls, vectors for what is between them, no call of the framework.
//
// The scores of a head lie with a row for each key and its queries in the lanes of vectors. So the softmax over keys is
// arithmetic on whole vectors, and weighted sums read keys, values and queries where the large matmuls left them.
#include "layer.h"

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

// BLAS as PyTorch brings it: matrices lie column by column, sizes are 32 bits.
extern "C" {
void sgemm_(
    const char*, const char*, const int*, const int*, const int*, const float*, const float*, const int*, const float*,
    const int*, const float*, float*, const int*);
void dgemm_(
    const char*, const char*, const int*, const int*, const int*, const double*, const double*, const int*,
    const double*, const int*, const double*, double*, const int*);
}

namespace tilewright {
namespace {

constexpr int64_t kWorthAThread = 1 << 15;  // multiply-adds

template <typename T>
using Vec = at::vec::Vectorized<T>;

// A matrix without gaps, or its transpose.
template <typename T>
struct Matrix {
  const T* data;
  int64_t columns;  // of what lies in memory
  bool transposed;
};

// c = a b, or a b + bias, on all of BLAS's threads; `inner` are the columns of a.
template <typename T>
void matmul(int64_t rows, int64_t columns, int64_t inner, Matrix<T> a, Matrix<T> b, const T* bias, T* c) {
  for (int64_t row = 0; bias != nullptr && row < rows; ++row) std::copy_n(bias, columns, c + row * columns);
  // To BLAS, all are transposes: it computes the transpose of c from those of b and a.
  const int n = columns, m = rows, k = inner, a_stride = a.columns, b_stride = b.columns;
  const T one = 1, beta = bias != nullptr;
  constexpr auto gemm = [](auto... arguments) {
    if constexpr (std::is_same_v<T, float>) {
      sgemm_(arguments...);
    } else {
      dgemm_(arguments...);
    }
  };
  gemm(
      b.transposed ? "T" : "N", a.transposed ? "T" : "N", &n, &m, &k, &one, b.data, &b_stride, a.data, &a_stride, &beta,
      c, &n);
}

// The sums of a matrix's columns, each from the first row to the last.
template <typename T>
void sum_columns(int64_t rows, int64_t columns, const T* matrix, T* sums) {
  constexpr int64_t width = 64;
  const int64_t grain = 1 + kWorthAThread / (width * rows);
  at::parallel_for(0, (columns + width - 1) / width, grain, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * width, last = std::min(end * width, columns);
    std::fill(sums + first, sums + last, T(0));
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t column = first; column < last; ++column) sums[column] += matrix[row * columns + column];
    }
  });
}

// R rows and V vectors of c = a b, whose sums stay in registers. Of the last vector, only `last` lanes are there.
template <typename T, int R, int V>
inline void multiply_tile(
    int64_t inner, const T* a, int64_t row_stride, int64_t inner_stride, const T* b, int64_t b_stride, T* c,
    int64_t c_stride, int64_t last) {
  constexpr int64_t W = Vec<T>::size();
  Vec<T> sums[R][V];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) sums[r][v] = Vec<T>(T(0));
  }
  for (int64_t k = 0; k < inner; ++k) {
    Vec<T> columns[V];
    for (int v = 0; v < V; ++v) {
      const T* from = b + k * b_stride + v * W;
      columns[v] = v + 1 < V || last == W ? Vec<T>::loadu(from) : Vec<T>::loadu(from, last);
    }
    for (int r = 0; r < R; ++r) {
      const Vec<T> factor(a[r * row_stride + k * inner_stride]);
      for (int v = 0; v < V; ++v) sums[r][v] = at::vec::fmadd(factor, columns[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < V; ++v) {
      T* to = c + r * c_stride + v * W;
      v + 1 < V || last == W ? sums[r][v].store(to) : sums[r][v].store(to, last);
    }
  }
}

// c = a b for the small matrices of one head.
template <typename T>
void multiply(
    int64_t rows, int64_t columns, int64_t inner, const T* a, int64_t row_stride, int64_t inner_stride, const T* b,
    int64_t b_stride, T* c, int64_t c_stride) {
  constexpr int64_t W = Vec<T>::size();
  for (int64_t column = 0; column < columns; column += 2 * W) {
    const int64_t left = columns - column, last = left >= 2 * W ? W : left > W ? left - W : left;
    int64_t row = 0;
    const auto tile = [&]<int R>(std::integral_constant<int, R>) {
      const T *from = a + row * row_stride, *with = b + column;
      T* to = c + row * c_stride + column;
      if (left > W) {
        multiply_tile<T, R, 2>(inner, from, row_stride, inner_stride, with, b_stride, to, c_stride, last);
      } else {
        multiply_tile<T, R, 1>(inner, from, row_stride, inner_stride, with, b_stride, to, c_stride, last);
      }
      row += R;
    };
    while (row + 4 <= rows) tile(std::integral_constant<int, 4>());
    while (row < rows) tile(std::integral_constant<int, 1>());
  }
}

// One head of one sequence, with memory for its small matrices.
template <typename T>
class Head {
 public:
  Head(const Shape& shape, bool backward)
      : causal_(shape.causal),
        heads_(shape.heads),
        S_(shape.sequence),
        D_(shape.head_dim),
        width_(shape.width()),
        stride_(3 * shape.width()),
        lanes_((S_ + W - 1) / W * W),
        scale_(T(1) / std::sqrt(T(D_))),
        across_(D_ * lanes_),
        scores_(S_ * lanes_),
        slopes_(backward ? S_ * lanes_ : 0),
        lse_(lanes_) {}

  void forward(const Inputs<T>& inputs, const Saved<T>& saved, int64_t index) {
    place(inputs, index);
    const T* qkv = saved.qkv + token_ * stride_ + first_;
    score(qkv);
    softmax();
    std::copy_n(lse_.data(), S_, saved.lse + index * S_);
    T* context = saved.context + token_ * width_ + first_;
    multiply(S_, D_, S_, scores_.data(), 1, lanes_, qkv + 2 * width_, stride_, context, width_);
  }

  void backward(const Inputs<T>& inputs, const Saved<T>& saved, const T* d_context, T* d_qkv, int64_t index) {
    place(inputs, index);
    const T *q = saved.qkv + token_ * stride_ + first_, *k = q + width_, *v = k + width_;
    const T* d_out = d_context + token_ * width_ + first_;
    T *d_q = d_qkv + token_ * stride_ + first_, *d_k = d_q + width_, *d_v = d_k + width_;
    score(q);
    put_across(d_out, width_);
    multiply(S_, lanes_, D_, v, stride_, 1, across_.data(), lanes_, slopes_.data(), lanes_);
    std::copy_n(saved.lse + index * S_, S_, lse_.data());
    differentiate_softmax();
    multiply(S_, D_, S_, slopes_.data(), 1, lanes_, k, stride_, d_q, stride_);
    multiply(S_, D_, S_, slopes_.data(), lanes_, 1, q, stride_, d_k, stride_);
    multiply(S_, D_, S_, scores_.data(), lanes_, 1, d_out, width_, d_v, stride_);
  }

 private:
  static constexpr int64_t W = Vec<T>::size();
  static constexpr T kNever = -std::numeric_limits<T>::infinity();

  void place(const Inputs<T>& inputs, int64_t index) {
    token_ = index / heads_ * S_;
    first_ = index % heads_ * D_;
    key_mask_ = inputs.key_mask == nullptr ? nullptr : inputs.key_mask + token_;
  }

  // The transpose of rows; the lanes beyond the last stay 0.
  void put_across(const T* rows, int64_t stride) {
    for (int64_t d = 0; d < D_; ++d) {
      for (int64_t i = 0; i < S_; ++i) across_[d * lanes_ + i] = rows[i * stride + d];
    }
  }

  // Scores of each key and query; minus infinity where the query may not see the key.
  void score(const T* q) {
    put_across(q, stride_);
    multiply(S_, lanes_, D_, q + width_, stride_, 1, across_.data(), lanes_, scores_.data(), lanes_);
    for (int64_t j = 0; j < S_; ++j) {
      const bool is_hidden = key_mask_ != nullptr && !key_mask_[j];
      std::fill_n(&scores_[j * lanes_], is_hidden ? lanes_ : causal_ ? j : 0, kNever);
    }
  }

  // From scores to weights. A query that sees no key gets weights of 0, and infinity as its logarithm of the sum.
  void softmax() {
    const Vec<T> scale(scale_), none(T(0)), never(kNever);
    for (int64_t i = 0; i < lanes_; i += W) {
      Vec<T> most(std::numeric_limits<T>::lowest()), sum(T(0));
      for (int64_t j = 0; j < S_; ++j) most = at::vec::maximum(most, Vec<T>::loadu(&scores_[j * lanes_ + i]));
      const Vec<T> shift = most * scale;
      for (int64_t j = 0; j < S_; ++j) {
        T* score = &scores_[j * lanes_ + i];
        const Vec<T> weight = at::vec::fmsub(Vec<T>::loadu(score), scale, shift).exp();
        weight.store(score);
        sum = sum + weight;
      }
      const Vec<T> is_blind = sum == none, share = Vec<T>::blendv(Vec<T>(T(1)) / sum, none, is_blind);
      for (int64_t j = 0; j < S_; ++j) (Vec<T>::loadu(&scores_[j * lanes_ + i]) * share).store(&scores_[j * lanes_ + i]);
      Vec<T>::blendv(shift + sum.log(), none - never, is_blind).store(&lse_[i]);
    }
  }

  // From scores to weights P, and from slopes dP to scale P (dP - sum of P dP).
  void differentiate_softmax() {
    const Vec<T> scale(scale_);
    for (int64_t i = 0; i < lanes_; i += W) {
      const Vec<T> lse = Vec<T>::loadu(&lse_[i]);
      Vec<T> mean(T(0));
      for (int64_t j = 0; j < S_; ++j) {
        const int64_t at = j * lanes_ + i;
        const Vec<T> weight = at::vec::fmsub(Vec<T>::loadu(&scores_[at]), scale, lse).exp();
        weight.store(&scores_[at]);
        mean = at::vec::fmadd(weight, Vec<T>::loadu(&slopes_[at]), mean);
      }
      for (int64_t j = 0; j < S_; ++j) {
        const int64_t at = j * lanes_ + i;
        (Vec<T>::loadu(&scores_[at]) * (Vec<T>::loadu(&slopes_[at]) - mean) * scale).store(&slopes_[at]);
      }
    }
  }

  const bool causal_;
  const int64_t heads_, S_, D_, width_, stride_, lanes_;  // stride_: from token to token of qkv; lanes_: of all queries
  const T scale_;
  std::vector<T> across_, scores_, slopes_, lse_;
  int64_t token_ = 0, first_ = 0;  // the sequence's first token, the head's first column
  const bool* key_mask_ = nullptr;
};

template <typename T, typename Call>
void for_each_head(const Shape& shape, bool backward, const Call& call) {
  const int64_t work = shape.sequence * shape.sequence * shape.head_dim;
  at::parallel_for(0, shape.batch * shape.heads, 1 + kWorthAThread / work, [&](int64_t begin, int64_t end) {
    Head<T> head(shape, backward);
    for (int64_t index = begin; index < end; ++index) call(head, index);
  });
}

}  // namespace

template <typename T>
void forward(const Shape& shape, const Inputs<T>& inputs, const Saved<T>& saved, T* out) {
  const int64_t tokens = shape.tokens(), width = shape.width();
  matmul<T>(
      tokens, 3 * width, width, {inputs.x, width, false}, {inputs.qkv_weight, width, true}, inputs.qkv_bias, saved.qkv);
  for_each_head<T>(shape, false, [&](Head<T>& head, int64_t index) { head.forward(inputs, saved, index); });
  matmul<T>(
      tokens, width, width, {saved.context, width, false}, {inputs.out_weight, width, true}, inputs.out_bias, out);
}

template <typename T>
void backward(
    const Shape& shape, const Inputs<T>& inputs, const Saved<T>& saved, const T* d_out, T* d_context, T* d_qkv,
    const Gradients<T>& gradients) {
  const int64_t tokens = shape.tokens(), width = shape.width();
  if (gradients.out_weight != nullptr) {
    matmul<T>(
        width, width, tokens, {d_out, width, true}, {saved.context, width, false}, nullptr, gradients.out_weight);
  }
  if (gradients.out_bias != nullptr) sum_columns(tokens, width, d_out, gradients.out_bias);
  if (gradients.x == nullptr && gradients.qkv_weight == nullptr && gradients.qkv_bias == nullptr) return;

  matmul<T>(tokens, width, width, {d_out, width, false}, {inputs.out_weight, width, false}, nullptr, d_context);
  for_each_head<T>(shape, true, [&](Head<T>& head, int64_t index) {
    head.backward(inputs, saved, d_context, d_qkv, index);
  });
  if (gradients.x != nullptr) {
    matmul<T>(
        tokens, width, 3 * width, {d_qkv, 3 * width, false}, {inputs.qkv_weight, width, false}, nullptr, gradients.x);
  }
  if (gradients.qkv_weight != nullptr) {
    matmul<T>(
        3 * width, width, tokens, {d_qkv, 3 * width, true}, {inputs.x, width, false}, nullptr, gradients.qkv_weight);
  }
  if (gradients.qkv_bias != nullptr) sum_columns(tokens, 3 * width, d_qkv, gradients.qkv_bias);
}

#define TILEWRIGHT_INSTANTIATE(T)                                                \
  template void forward<T>(const Shape&, const Inputs<T>&, const Saved<T>&, T*); \
  template void backward<T>(                                                     \
      const Shape&, const Inputs<T>&, const Saved<T>&, const T*, T*, T*, const Gradients<T>&);
TILEWRIGHT_INSTANTIATE(float)
TILEWRIGHT_INSTANTIATE(double)

}  // namespace tilewright
