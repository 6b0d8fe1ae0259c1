// The layer on a GPU: matmuls as PyTorch's linear layers have them, and one kernel of `cuda.cu` between, each way.
//
// The ops are declared by `extension.cpp`, which has their autograd node, too.
#include "cuda.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/sum.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

tilewright::Heads check(const Tensor& x, const Tensor& qkv, int64_t heads, bool causal, const Tensor& key_mask) {
  TORCH_CHECK(x.dim() == 3 && heads > 0 && x.size(2) % heads == 0, "self_attention: heads must divide the width of x.");
  const int64_t head_dim = x.size(2) / heads;
  TORCH_CHECK(
      x.size(1) <= tilewright::kLongest && head_dim <= tilewright::kWidest, "self_attention: sequences of at most ",
      tilewright::kLongest, " tokens and heads of at most ", tilewright::kWidest, " elements are for this kernel.");
  TORCH_CHECK(
      qkv.dim() == 3 && qkv.size(0) == x.size(0) && qkv.size(1) == x.size(1) && qkv.size(2) == 3 * x.size(2),
      "self_attention: qkv_weight must have shape (3 width, width).");
  TORCH_CHECK(
      !key_mask.defined() || (key_mask.sizes() == x.sizes().slice(0, 2) && key_mask.scalar_type() == at::kBool &&
                              key_mask.device() == x.device()),
      "self_attention: key_mask must be a bool tensor of shape (batch, sequence) on the device of x.");
  const auto type = x.scalar_type();
  TORCH_CHECK(
      type == at::kFloat || type == at::kHalf || type == at::kBFloat16,
      "self_attention: on a GPU x must be float32, float16 or bfloat16.");
  const auto element = type == at::kFloat  ? tilewright::Element::kFloat
                       : type == at::kHalf ? tilewright::Element::kHalf
                                           : tilewright::Element::kBFloat16;
  return {
      element, static_cast<int>(x.size(0)), static_cast<int>(x.size(1)), static_cast<int>(heads),
      static_cast<int>(head_dim), causal, key_mask.defined() ? key_mask.const_data_ptr<bool>() : nullptr};
}

void must(cudaError_t error) {
  TORCH_CHECK(error == cudaSuccess, "self_attention: the kernel could not be started: ", cudaGetErrorString(error));
}

Tensor packed(const OptionalTensor& tensor) { return tensor ? tensor->contiguous() : Tensor(); }

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(
    const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
    const OptionalTensor& out_bias, int64_t heads, bool causal, const OptionalTensor& key_mask) {
  const c10::cuda::CUDAGuard guard(x.device());
  const Tensor qkv = at::linear(x, qkv_weight, qkv_bias).contiguous(), mask = packed(key_mask);
  const auto sizes = check(x, qkv, heads, causal, mask);
  const Tensor context = at::empty(x.sizes(), x.options());
  const Tensor lse = at::empty({x.size(0), heads, x.size(1)}, x.options().dtype(at::kFloat));
  if (x.numel() > 0) {
    must(tilewright::attend(
        sizes, qkv.const_data_ptr(), context.mutable_data_ptr(), lse.mutable_data_ptr<float>(),
        c10::cuda::getCurrentCUDAStream()));
  }
  return {at::linear(context, out_weight, out_bias), qkv, context, lse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& d_out, const Tensor& x, const Tensor& qkv_weight, const Tensor& out_weight, const Tensor& qkv,
    const Tensor& context, const Tensor& lse, int64_t heads, bool causal, const OptionalTensor& key_mask,
    std::array<bool, 5> needs) {
  const c10::cuda::CUDAGuard guard(x.device());
  const int64_t width = x.size(-1);
  const Tensor mask = packed(key_mask), packed_qkv = qkv.contiguous(), packed_lse = lse.contiguous();
  const auto sizes = check(x, packed_qkv, heads, causal, mask);
  const auto rows = [](const Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); };
  const Tensor nothing = at::empty({0}, x.options()), by_token = d_out.reshape({-1, width});
  Tensor d_x = nothing, d_qkv_weight = nothing, d_qkv_bias = nothing, d_out_weight = nothing, d_out_bias = nothing;
  if (needs[3]) d_out_weight = at::mm(by_token.t(), rows(context));
  if (needs[4]) d_out_bias = at::sum(by_token, 0);
  if (needs[0] || needs[1] || needs[2]) {
    const Tensor d_context = at::mm(by_token, out_weight).contiguous(), d_qkv = at::empty_like(packed_qkv);
    if (x.numel() > 0) {
      must(tilewright::differentiate(
          sizes, packed_qkv.const_data_ptr(), d_context.const_data_ptr(), packed_lse.const_data_ptr<float>(),
          d_qkv.mutable_data_ptr(), c10::cuda::getCurrentCUDAStream()));
    }
    const Tensor d_rows = rows(d_qkv);
    if (needs[0]) d_x = at::mm(d_rows, qkv_weight).view(x.sizes());
    if (needs[1]) d_qkv_weight = at::mm(d_rows.t(), x.reshape({-1, width}));
    if (needs[2]) d_qkv_bias = at::sum(d_rows, 0);
  }
  return {d_x, d_qkv_weight, d_qkv_bias, d_out_weight, d_out_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(tilewright, CUDA, library) {
  library.impl("self_attention_forward", forward);
  library.impl("self_attention_backward", backward);
}
