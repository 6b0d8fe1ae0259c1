// The layer as ops of PyTorch: `self_attention` with its C++ autograd node, and the two ops that the node calls.
//
// `op.py` refuses bad input with a sentence. What is checked here keeps memory safe for every caller.
#include "layer.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;             // out, qkv, context, lse
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;  // of x, both of qkv, both of out
using Needs = std::array<bool, 5>;

constexpr const char* kOnce =
    "self_attention has no second derivative: leave out create_graph=True, or use torch's scaled_dot_product_attention.";

Tensor or_undefined(const OptionalTensor& tensor) { return tensor.value_or(Tensor()); }

void check_shape(const char* name, const Tensor& tensor, at::IntArrayRef shape, const Tensor& x) {
  TORCH_CHECK(
      tensor.sizes() == shape && tensor.device() == x.device() && tensor.scalar_type() == x.scalar_type(),
      "self_attention: ", name, " must have shape ", shape, " and the dtype and device of x.");
}

tilewright::Shape check(
    const Tensor& x, const Tensor& qkv_weight, const Tensor& out_weight, int64_t heads, bool causal,
    const OptionalTensor& key_mask) {
  TORCH_CHECK(x.dim() == 3 && heads > 0 && x.size(2) % heads == 0, "self_attention: heads must divide the width of x.");
  const int64_t width = x.size(2);
  check_shape("qkv_weight", qkv_weight, {3 * width, width}, x);
  check_shape("out_weight", out_weight, {width, width}, x);
  TORCH_CHECK(
      !key_mask || (key_mask->sizes() == x.sizes().slice(0, 2) && key_mask->scalar_type() == at::kBool &&
                    key_mask->device() == x.device()),
      "self_attention: key_mask must be a bool tensor of shape (batch, sequence) on the device of x.");
  return {x.size(0), x.size(1), heads, width / heads, causal};
}

// Each input contiguous, for as long as this lives.
template <typename T>
struct Packed {
  Packed(
      const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
      const OptionalTensor& out_bias, const OptionalTensor& key_mask)
      : pointers{take<T>(x), take<T>(qkv_weight), take<T>(or_undefined(qkv_bias)), take<T>(out_weight),
                 take<T>(or_undefined(out_bias)), take<bool>(or_undefined(key_mask))} {}

  template <typename Element>
  const Element* take(const Tensor& tensor) {
    if (!tensor.defined()) return nullptr;
    tensors.push_back(tensor.contiguous());
    return tensors.back().template const_data_ptr<Element>();
  }

  std::vector<Tensor> tensors;
  tilewright::Inputs<T> pointers;
};

template <typename T>
tilewright::Saved<T> saved_in(const Tensor& qkv, const Tensor& context, const Tensor& lse) {
  return {qkv.data_ptr<T>(), context.data_ptr<T>(), lse.data_ptr<T>()};
}

template <typename Call>
void for_dtype(const Tensor& x, const Call& call) {
  TORCH_CHECK(
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kDouble, "self_attention: x must be float32 or float64.");
  if (x.scalar_type() == at::kFloat) {
    call(float());
  } else {
    call(double());
  }
}

Outputs forward_cpu(
    const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
    const OptionalTensor& out_bias, int64_t heads, bool causal, const OptionalTensor& key_mask) {
  const auto shape = check(x, qkv_weight, out_weight, heads, causal, key_mask);
  const int64_t width = shape.width();
  if (qkv_bias) check_shape("qkv_bias", *qkv_bias, {3 * width}, x);
  if (out_bias) check_shape("out_bias", *out_bias, {width}, x);
  const Tensor qkv = at::empty({shape.batch, shape.sequence, 3 * width}, x.options());
  const Tensor context = at::empty({shape.batch, shape.sequence, width}, x.options());
  const Tensor lse = at::empty({shape.batch, heads, shape.sequence}, x.options());
  const Tensor out = at::empty({shape.batch, shape.sequence, width}, x.options());
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const Packed<T> inputs(x, qkv_weight, qkv_bias, out_weight, out_bias, key_mask);
    if (out.numel() > 0) {
      tilewright::forward<T>(shape, inputs.pointers, saved_in<T>(qkv, context, lse), out.data_ptr<T>());
    }
  });
  return {out, qkv, context, lse};
}

Gradients backward_cpu(
    const Tensor& d_out, const Tensor& x, const Tensor& qkv_weight, const Tensor& out_weight, const Tensor& qkv,
    const Tensor& context, const Tensor& lse, int64_t heads, bool causal, const OptionalTensor& key_mask, Needs needs) {
  const auto shape = check(x, qkv_weight, out_weight, heads, causal, key_mask);
  const int64_t width = shape.width();
  check_shape("the gradient", d_out, x.sizes(), x);
  check_shape("qkv", qkv, {shape.batch, shape.sequence, 3 * width}, x);
  check_shape("context", context, x.sizes(), x);
  check_shape("lse", lse, {shape.batch, heads, shape.sequence}, x);
  const auto make = [&](bool needed, at::IntArrayRef sizes) {
    // Without tokens nothing is written.
    return !needed ? at::empty({0}, x.options()) : x.numel() ? at::empty(sizes, x.options()) : at::zeros(sizes, x.options());
  };
  const Gradients results{
      make(needs[0], x.sizes()), make(needs[1], {3 * width, width}), make(needs[2], {3 * width}),
      make(needs[3], {width, width}), make(needs[4], {width})};
  if (x.numel() == 0) return results;
  const Tensor d_context = at::empty(x.sizes(), x.options()), d_qkv = at::empty(qkv.sizes(), x.options());
  for_dtype(x, [&](auto zero) {
    using T = decltype(zero);
    const Packed<T> inputs(x, qkv_weight, std::nullopt, out_weight, std::nullopt, key_mask);
    const auto place = [&](int index, const Tensor& result) { return needs[index] ? result.data_ptr<T>() : nullptr; };
    const auto& [d_x, d_qkv_weight, d_qkv_bias, d_out_weight, d_out_bias] = results;
    const Tensor upstream = d_out.contiguous(), q = qkv.contiguous(), c = context.contiguous(), l = lse.contiguous();
    tilewright::backward<T>(
        shape, inputs.pointers, saved_in<T>(q, c, l), upstream.const_data_ptr<T>(), d_context.data_ptr<T>(),
        d_qkv.data_ptr<T>(),
        {place(0, d_x), place(1, d_qkv_weight), place(2, d_qkv_bias), place(3, d_out_weight), place(4, d_out_bias)});
  });
  return results;
}

Outputs call_forward(
    const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
    const OptionalTensor& out_bias, int64_t heads, bool causal, const OptionalTensor& key_mask) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tilewright::self_attention_forward", "")
                             .typed<decltype(forward_cpu)>();
  return op.call(x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal, key_mask);
}

Tensor without_autograd(
    const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
    const OptionalTensor& out_bias, int64_t heads, bool causal, const OptionalTensor& key_mask) {
  return std::get<0>(call_forward(x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal, key_mask));
}

struct Node : torch::autograd::Function<Node> {
  using Context = torch::autograd::AutogradContext;

  static Tensor forward(
      Context* context, const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias,
      const Tensor& out_weight, const OptionalTensor& out_bias, int64_t heads, bool causal,
      const OptionalTensor& key_mask) {
    at::AutoDispatchBelowADInplaceOrView below;
    auto [out, qkv, weighted, lse] =
        call_forward(x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal, key_mask);
    context->save_for_backward({x, qkv_weight, out_weight, qkv, weighted, lse, or_undefined(key_mask)});
    context->saved_data["has_qkv_bias"] = qkv_bias.has_value();
    context->saved_data["has_out_bias"] = out_bias.has_value();
    context->saved_data["heads"] = heads;
    context->saved_data["causal"] = causal;
    return out;
  }

  static torch::autograd::variable_list backward(Context* context, torch::autograd::variable_list upstream) {
    TORCH_CHECK(!at::GradMode::is_enabled(), kOnce);
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("tilewright::self_attention_backward", "")
                               .typed<decltype(backward_cpu)>();
    const auto saved = context->get_saved_variables();
    torch::autograd::variable_list gradients(8);  // one for each argument of forward
    if (!upstream[0].defined()) return gradients;
    const bool has_qkv_bias = context->saved_data["has_qkv_bias"].toBool();
    const bool has_out_bias = context->saved_data["has_out_bias"].toBool();
    const Needs is_there{true, true, has_qkv_bias, true, has_out_bias};
    Needs needs;
    size_t edge = 0;  // only tensors that are there have one
    for (size_t index = 0; index < needs.size(); ++index) {
      needs[index] = is_there[index] && context->needs_input_grad(edge++);
    }
    at::AutoDispatchBelowADInplaceOrView below;
    const auto [d_x, d_qkv_weight, d_qkv_bias, d_out_weight, d_out_bias] = op.call(
        upstream[0], saved[0], saved[1], saved[2], saved[3], saved[4], saved[5],
        context->saved_data["heads"].toInt(), context->saved_data["causal"].toBool(),
        saved[6].defined() ? OptionalTensor(saved[6]) : std::nullopt, needs);
    const std::array<Tensor, 5> results{d_x, d_qkv_weight, d_qkv_bias, d_out_weight, d_out_bias};
    for (size_t index = 0; index < needs.size(); ++index) {
      if (needs[index]) gradients[index] = results[index];
    }
    return gradients;
  }
};

Tensor with_autograd(
    const Tensor& x, const Tensor& qkv_weight, const OptionalTensor& qkv_bias, const Tensor& out_weight,
    const OptionalTensor& out_bias, int64_t heads, bool causal, const OptionalTensor& key_mask) {
  return Node::apply(x, qkv_weight, qkv_bias, out_weight, out_bias, heads, causal, key_mask);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tilewright, library) {
  library.def(
      "self_attention(Tensor x, Tensor qkv_weight, Tensor? qkv_bias, Tensor out_weight, Tensor? out_bias, int heads, "
      "bool causal, Tensor? key_mask) -> Tensor");
  library.def(
      "self_attention_forward(Tensor x, Tensor qkv_weight, Tensor? qkv_bias, Tensor out_weight, Tensor? out_bias, "
      "int heads, bool causal, Tensor? key_mask) -> (Tensor, Tensor, Tensor, Tensor)");
  library.def(
      "self_attention_backward(Tensor d_out, Tensor x, Tensor qkv_weight, Tensor out_weight, Tensor qkv, "
      "Tensor context, Tensor lse, int heads, bool causal, Tensor? key_mask, bool[5] needs) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(tilewright, CPU, library) {
  library.impl("self_attention_forward", forward_cpu);
  library.impl("self_attention_backward", backward_cpu);
}

TORCH_LIBRARY_IMPL(tilewright, CompositeExplicitAutograd, library) { library.impl("self_attention", without_autograd); }

TORCH_LIBRARY_IMPL(tilewright, Autograd, library) { library.impl("self_attention", with_autograd); }
