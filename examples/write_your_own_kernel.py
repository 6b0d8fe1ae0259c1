"""A recurrent cell by PyTorch's ops, by a Triton kernel and by a CUDA kernel: see docs/write_your_own_kernel.md.

    python examples/write_your_own_kernel.py            # checks; on a GPU it times all three as well

The cell is the LLTM of PyTorch's tutorial on C++ extensions, an LSTM without a forget gate:

    input_gate, output_gate, candidate = weight @ [h, x] + bias
    new_cell = old_cell + elu(candidate) * sigmoid(input_gate)
    new_h    = tanh(new_cell) * sigmoid(output_gate)

The matmul stays cuBLAS's. A kernel of your own does the rest, here called pointwise, in one launch forward and one
backward.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton's kernels run on the CPU, slowly; set before it is imported

import triton
import triton.language as tl

from tilewright.bench.protocol import configure, forward_backward
from tilewright.measure.clock import interleaved_graph_time, interleaved_wall_time
from tilewright.measure.numerics import relative_error, tolerance
from tilewright.runtime import dispatch, paths, register

Pair = tuple[Tensor, Tensor]

# ---------------------------------------------------------------------------------------------------------------------
# 1. PyTorch's own ops: the definition, and the oracle of the other two in float64.


def pointwise_eager(gates: Tensor, old_cell: Tensor) -> Pair:
    """(new_h, new_cell) of gates (batch, 3 * state) and old_cell (batch, state)."""
    input_gate, output_gate, candidate = gates.chunk(3, dim=1)
    new_cell = old_cell + F.elu(candidate) * torch.sigmoid(input_gate)
    return torch.tanh(new_cell) * torch.sigmoid(output_gate), new_cell


class LLTM(nn.Module):
    """The cell. `pointwise` is one of the three functions of this file; the parameters are the same for all."""

    def __init__(self, features: int, state: int, pointwise: Callable[[Tensor, Tensor], Pair] = pointwise_eager):
        super().__init__()
        self.pointwise = pointwise
        self.weight = nn.Parameter(torch.empty(3 * state, state + features).uniform_(-1, 1) / state**0.5)
        self.bias = nn.Parameter(torch.empty(3 * state).uniform_(-1, 1) / state**0.5)

    def forward(self, x: Tensor, h: Tensor, cell: Tensor) -> Pair:
        return self.pointwise(F.linear(torch.cat((h, x), dim=1), self.weight, self.bias), cell)


# ---------------------------------------------------------------------------------------------------------------------
# 2. Triton. A program takes BLOCK elements of (batch, state), reads their gates once and writes each result once.


@triton.jit
def _tanh(x):
    small = tl.exp(-2 * tl.abs(x))  # never overflows
    return tl.where(x < 0, small - 1, 1 - small) / (1 + small)


@triton.jit
def _load_gates(gates, index, inside, STATE: tl.constexpr, COMPUTE: tl.constexpr):
    """The three gates of each element: a row of `gates` holds input gates, then output gates, then candidates."""
    first = gates + index // STATE * (3 * STATE) + index % STATE
    input_gate = tl.sigmoid(tl.load(first, inside, 0).to(COMPUTE))
    output_gate = tl.sigmoid(tl.load(first + STATE, inside, 0).to(COMPUTE))
    return input_gate, output_gate, tl.load(first + 2 * STATE, inside, 0).to(COMPUTE)


@triton.jit(do_not_specialize=["batch"])
def tilewright_lltm_forward(
    gates, old_cell, new_h, new_cell, batch: tl.int64, STATE: tl.constexpr, BLOCK: tl.constexpr,
    DOUBLE: tl.constexpr,
):  # fmt: skip
    """Read 4 numbers an element and write 2."""
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < batch * STATE  # a multiple of STATE, which lets the compiler load 16 bytes at once
    input_gate, output_gate, raw = _load_gates(gates, index, inside, STATE, COMPUTE)
    candidate = tl.where(raw > 0, raw, tl.exp(tl.minimum(raw, 0)) - 1)
    # Rounded as it is stored: backward reads the stored one, and so differentiates what forward computed.
    cell = (tl.load(old_cell + index, inside, 0).to(COMPUTE) + candidate * input_gate).to(new_cell.dtype.element_ty)
    tl.store(new_cell + index, cell, inside)
    tl.store(new_h + index, (_tanh(cell.to(COMPUTE)) * output_gate).to(new_h.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["batch"])
def tilewright_lltm_backward(
    grad_h, grad_cell, gates, new_cell, grad_gates, grad_old_cell, batch: tl.int64, STATE: tl.constexpr,
    BLOCK: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """Read 6 numbers an element and write 4; computing sigmoid, ELU and tanh again costs no memory traffic."""
    COMPUTE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < batch * STATE
    input_gate, output_gate, raw = _load_gates(gates, index, inside, STATE, COMPUTE)
    slope = tl.exp(tl.minimum(raw, 0))  # of ELU: 1 above 0
    candidate = tl.where(raw > 0, raw, slope - 1)
    squashed = _tanh(tl.load(new_cell + index, inside, 0).to(COMPUTE))
    dh = tl.load(grad_h + index, inside, 0).to(COMPUTE)
    dcell = tl.load(grad_cell + index, inside, 0).to(COMPUTE) + dh * output_gate * (1 - squashed * squashed)
    first = grad_gates + index // STATE * (3 * STATE) + index % STATE
    kind = grad_gates.dtype.element_ty
    tl.store(first, (dcell * candidate * input_gate * (1 - input_gate)).to(kind), inside)
    tl.store(first + STATE, (dh * squashed * output_gate * (1 - output_gate)).to(kind), inside)
    tl.store(first + 2 * STATE, (dcell * input_gate * slope).to(kind), inside)
    tl.store(grad_old_cell + index, dcell.to(grad_old_cell.dtype.element_ty), inside)


BLOCK, WARPS = 1024, 4  # 8 elements a thread: 16 bytes of a 16-bit dtype in one load


@functools.cache
def _launch(kernel: Any, device: torch.device, dtypes: tuple[Any, ...], state: int) -> dispatch.Launch:
    """One for each binary. `kernel[grid](...)` does the same; a `Launch` takes a fraction of its host time."""
    return dispatch.Launch(kernel, device, (state, BLOCK, dtypes[0] == torch.float64), WARPS)


def _start(kernel: Any, tensors: list[Tensor]) -> None:
    batch, state = tensors[-1].shape
    if batch * state:
        tensors = dispatch.packed(tensors)  # contiguous: a copy of what is not
        launch = _launch(kernel, tensors[0].device, dispatch.dtypes(tensors), state)
        launch((triton.cdiv(batch * state, BLOCK), 1), tensors, (batch,))


class Inputs(NamedTuple):
    """The arguments of forward, from which the schema of `torch.ops.tilewright.lltm` follows."""

    gates: Tensor
    old_cell: Tensor


class Gradient(NamedTuple):
    """The arguments of backward."""

    grad_h: Tensor
    grad_cell: Tensor
    gates: Tensor
    new_cell: Tensor


def _forward(inputs: Inputs) -> Pair:
    new_h, new_cell = _fake_forward(inputs)
    _start(tilewright_lltm_forward, [*inputs, new_h, new_cell])
    return new_h, new_cell


def _fake_forward(inputs: Inputs) -> Pair:
    """The outputs without values: all that a compiler needs to know."""
    like = inputs.old_cell
    return like.new_empty(like.shape), like.new_empty(like.shape)


def _backward(gradient: Gradient) -> Pair:
    grad_gates, grad_old_cell = _fake_backward(gradient)
    _start(tilewright_lltm_backward, [*gradient, grad_gates, grad_old_cell])
    return grad_gates, grad_old_cell


def _fake_backward(gradient: Gradient) -> Pair:
    return gradient.gates.new_empty(gradient.gates.shape), gradient.new_cell.new_empty(gradient.new_cell.shape)


def _save(ctx: Any, inputs: Inputs, outputs: Pair) -> None:
    """Keep the gates, which cuBLAS has written anyway, and new_cell, an output: no memory beyond what is there."""
    ctx.save_for_backward(inputs.gates, outputs[1])


def _differentiate(ctx: Any, backward: Any, grad_h: Tensor, grad_cell: Tensor) -> tuple[Tensor, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError("lltm has no second derivative: leave out create_graph=True, or use pointwise_eager.")
    return tuple(backward(Gradient(grad_h, grad_cell, *ctx.saved_tensors)))


TRITON_OP = register.Op("lltm", _forward, _fake_forward)
_eager = TRITON_OP.differentiate(_save, _differentiate, register.Op("lltm_backward", _backward, _fake_backward))


def pointwise_triton(gates: Tensor, old_cell: Tensor) -> Pair:
    """`pointwise_eager` in one launch."""
    _check(gates, old_cell)
    path = paths.choose("lltm", gates, old_cell)
    if path == paths.REFERENCE:
        return pointwise_eager(gates, old_cell)
    return (_eager if path == paths.KERNEL else TRITON_OP.registered)(gates, old_cell)


def _check(gates: Tensor, old_cell: Tensor) -> None:
    """One sentence before any launch, instead of an illegal memory access after it."""
    dispatch.check_tensor("lltm", "old_cell", old_cell)
    if old_cell.ndim != 2:
        raise ValueError(f"lltm: old_cell has shape {tuple(old_cell.shape)}, but (batch, state) is needed.")
    batch, state = old_cell.shape
    dispatch.check_tensor("lltm", "gates", gates, torch.Size((batch, 3 * state)), old_cell)
    if gates.dtype != old_cell.dtype:
        raise TypeError(f"lltm: gates are {gates.dtype}, but old_cell is {old_cell.dtype}; convert one of them.")


# ---------------------------------------------------------------------------------------------------------------------
# 3. CUDA. The kernels need no header of torch, so nvcc takes seconds; the host's compiler does the part that does.

CUDA_HEADERS = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"

CUDA_KERNELS = r"""
template <typename T> struct Compute { using type = float; };
template <> struct Compute<double> { using type = double; };

// WIDTH elements that one instruction loads or stores: 16 bytes, or one element where rows are not aligned to that.
template <typename T, int WIDTH> struct alignas(WIDTH * sizeof(T)) Vector {
  T at[WIDTH];
};

template <typename T, int WIDTH> __device__ Vector<T, WIDTH> load(const T* from) {
  return *reinterpret_cast<const Vector<T, WIDTH>*>(from);
}

template <typename T, int WIDTH> __device__ void store(T* to, const Vector<T, WIDTH>& values) {
  *reinterpret_cast<Vector<T, WIDTH>*>(to) = values;
}

template <typename C> __device__ C sigmoid(C x) { return C(1) / (C(1) + exp(-x)); }

template <typename T, int WIDTH>
__global__ void tilewright_lltm_cuda_forward(const T* gates, const T* old_cell, T* new_h, T* new_cell,
                                             long long elements, int state) {
  using C = typename Compute<T>::type;
  const long long index = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * WIDTH;
  if (index >= elements) return;
  const T* row = gates + index / state * (3LL * state) + index % state;
  const auto input = load<T, WIDTH>(row), output = load<T, WIDTH>(row + state);
  const auto candidate = load<T, WIDTH>(row + 2LL * state), old = load<T, WIDTH>(old_cell + index);
  Vector<T, WIDTH> h, cell;
  for (int i = 0; i < WIDTH; ++i) {
    const C raw = C(candidate.at[i]);
    cell.at[i] = T(C(old.at[i]) + (raw > C(0) ? raw : expm1(raw)) * sigmoid(C(input.at[i])));
    h.at[i] = T(tanh(C(cell.at[i])) * sigmoid(C(output.at[i])));
  }
  store<T, WIDTH>(new_cell + index, cell);
  store<T, WIDTH>(new_h + index, h);
}

template <typename T, int WIDTH>
__global__ void tilewright_lltm_cuda_backward(const T* grad_h, const T* grad_cell, const T* gates, const T* new_cell,
                                              T* grad_gates, T* grad_old_cell, long long elements, int state) {
  using C = typename Compute<T>::type;
  const long long index = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * WIDTH;
  if (index >= elements) return;
  const long long at = index / state * (3LL * state) + index % state;
  const auto input = load<T, WIDTH>(gates + at), output = load<T, WIDTH>(gates + at + state);
  const auto candidate = load<T, WIDTH>(gates + at + 2LL * state), cell = load<T, WIDTH>(new_cell + index);
  const auto dh = load<T, WIDTH>(grad_h + index), dcell = load<T, WIDTH>(grad_cell + index);
  Vector<T, WIDTH> dinput, doutput, dcandidate, dold;
  for (int i = 0; i < WIDTH; ++i) {
    const C i_gate = sigmoid(C(input.at[i])), o_gate = sigmoid(C(output.at[i])), squashed = tanh(C(cell.at[i]));
    const C raw = C(candidate.at[i]), d = C(dcell.at[i]) + C(dh.at[i]) * o_gate * (C(1) - squashed * squashed);
    dinput.at[i] = T(d * (raw > C(0) ? raw : expm1(raw)) * i_gate * (C(1) - i_gate));
    doutput.at[i] = T(C(dh.at[i]) * squashed * o_gate * (C(1) - o_gate));
    dcandidate.at[i] = T(d * i_gate * (raw > C(0) ? C(1) : exp(raw)));
    dold.at[i] = T(d);
  }
  store<T, WIDTH>(grad_gates + at, dinput);
  store<T, WIDTH>(grad_gates + at + state, doutput);
  store<T, WIDTH>(grad_gates + at + 2LL * state, dcandidate);
  store<T, WIDTH>(grad_old_cell + index, dold);
}
"""

CUDA_LAUNCH = r"""
constexpr int THREADS = 256;

template <typename T, int WIDTH> void start(void* const* tensors, long long batch, int state, cudaStream_t stream) {
  auto each = [&](int i) { return static_cast<T*>(tensors[i]); };
  const long long elements = batch * state;
  const unsigned blocks = unsigned((elements / WIDTH + THREADS - 1) / THREADS);
  if (tensors[4] == nullptr)
    tilewright_lltm_cuda_forward<T, WIDTH><<<blocks, THREADS, 0, stream>>>(each(0), each(1), each(2), each(3), elements,
                                                                           state);
  else
    tilewright_lltm_cuda_backward<T, WIDTH><<<blocks, THREADS, 0, stream>>>(each(0), each(1), each(2), each(3), each(4),
                                                                            each(5), elements, state);
}

template <typename T> void start(void* const* tensors, long long batch, int state, cudaStream_t stream) {
  constexpr int WIDTH = 16 / sizeof(T);
  bool wide = state % WIDTH == 0;
  for (int i = 0; i < 6; ++i) wide = wide && reinterpret_cast<unsigned long long>(tensors[i]) % 16 == 0;
  wide ? start<T, WIDTH>(tensors, batch, state, stream) : start<T, 1>(tensors, batch, state, stream);
}

// Four tensors start forward, six backward; the fifth is null in forward. `kind` counts the dtypes.
void launch(int kind, void* const* tensors, long long batch, int state, cudaStream_t stream) {
  if (kind == 0) start<__nv_bfloat16>(tensors, batch, state, stream);
  if (kind == 1) start<__half>(tensors, batch, state, stream);
  if (kind == 2) start<float>(tensors, batch, state, stream);
  if (kind == 3) start<double>(tensors, batch, state, stream);
}
"""

CPP_OP = r"""
#include <ATen/ATen.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

using at::Tensor;
using Pair = std::tuple<Tensor, Tensor>;
void launch(int kind, void* const* tensors, long long batch, int state, cudaStream_t stream);

void run(std::vector<Tensor> tensors, const Tensor& gates, const Tensor& cell) {
  TORCH_CHECK(cell.dim() == 2 && gates.dim() == 2 && gates.size(0) == cell.size(0) && gates.size(1) == 3 * cell.size(1),
              "lltm: gates must be (batch, 3 * state) and the cell (batch, state).");
  const at::ScalarType dtypes[] = {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble};
  const int kind = int(std::find(dtypes, dtypes + 4, cell.scalar_type()) - dtypes);
  void* addresses[6] = {};
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK(kind < 4 && tensors[i].scalar_type() == cell.scalar_type() && tensors[i].device() == cell.device(),
                "lltm: all tensors must have one floating dtype and one device.");
    addresses[i] = tensors[i].data_ptr();
  }
  if (cell.numel() == 0) return;
  const c10::cuda::CUDAGuard guard(cell.device());
  launch(kind, addresses, cell.size(0), int(cell.size(1)), c10::cuda::getCurrentCUDAStream());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

Pair fake_forward(const Tensor& gates, const Tensor& cell) {
  return {at::empty_symint(cell.sym_sizes(), cell.options()), at::empty_symint(cell.sym_sizes(), cell.options())};
}

Pair fake_backward(const Tensor& grad_h, const Tensor& grad_cell, const Tensor& gates, const Tensor& cell) {
  return {at::empty_symint(gates.sym_sizes(), gates.options()), at::empty_symint(cell.sym_sizes(), cell.options())};
}

Pair cuda_forward(const Tensor& gates, const Tensor& cell) {
  const Pair out = fake_forward(gates, cell);
  run({gates.contiguous(), cell.contiguous(), std::get<0>(out), std::get<1>(out)}, gates, cell);
  return out;
}

Pair cuda_backward(const Tensor& grad_h, const Tensor& grad_cell, const Tensor& gates, const Tensor& cell) {
  const Pair out = fake_backward(grad_h, grad_cell, gates, cell);
  run({grad_h.contiguous(), grad_cell.contiguous(), gates.contiguous(), cell.contiguous(), std::get<0>(out),
       std::get<1>(out)}, gates, cell);
  return out;
}

TORCH_LIBRARY(write_your_own, m) {
  m.def("lltm(Tensor gates, Tensor old_cell) -> (Tensor, Tensor)");
  m.def("lltm_backward(Tensor grad_h, Tensor grad_cell, Tensor gates, Tensor new_cell) -> (Tensor, Tensor)");
}

// Both go through the dispatcher, so that a compiler sees the ops and not the launches.
struct Function : torch::autograd::Function<Function> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* ctx, Tensor gates, Tensor old_cell) {
    at::AutoDispatchBelowADInplaceOrView below;
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("write_your_own::lltm", "")
        .typed<Pair(const Tensor&, const Tensor&)>();
    auto [new_h, new_cell] = op.call(gates, old_cell);
    ctx->save_for_backward({gates, new_cell});
    return {new_h, new_cell};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "lltm has no second derivative: leave out create_graph=True, or use pointwise_eager.");
    static auto op = c10::Dispatcher::singleton().findSchemaOrThrow("write_your_own::lltm_backward", "")
        .typed<Pair(const Tensor&, const Tensor&, const Tensor&, const Tensor&)>();
    const auto saved = ctx->get_saved_variables();
    auto [grad_gates, grad_old_cell] = op.call(grads[0], grads[1], saved[0], saved[1]);
    return {grad_gates, grad_old_cell};
  }
};

Pair differentiable(const Tensor& gates, const Tensor& old_cell) {
  const auto out = Function::apply(gates, old_cell);
  return {out[0], out[1]};
}

TORCH_LIBRARY_IMPL(write_your_own, CUDA, m) {
  m.impl("lltm", cuda_forward);
  m.impl("lltm_backward", cuda_backward);
}
TORCH_LIBRARY_IMPL(write_your_own, Meta, m) {
  m.impl("lltm", fake_forward);
  m.impl("lltm_backward", fake_backward);
}
TORCH_LIBRARY_IMPL(write_your_own, Autograd, m) { m.impl("lltm", differentiable); }
"""


def why_no_cuda() -> str:
    """Say why the CUDA op cannot run here; empty where it can."""
    from torch.utils.cpp_extension import CUDA_HOME

    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA GPU"
    if CUDA_HOME is None or shutil.which("nvcc", path=os.path.join(CUDA_HOME, "bin")) is None:
        return "there is no nvcc: install the CUDA toolkit and set CUDA_HOME"
    return "" if shutil.which("ninja") else "there is no ninja: pip install ninja"


@functools.cache
def build_cuda() -> Any:
    """Compile the CUDA op, or find it compiled in torch's cache of extensions, and return it."""
    from torch.utils.cpp_extension import load_inline

    # torch defines these for its own code; the kernels convert 16-bit numbers as any others.
    allow = ["-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_BFLOAT16_CONVERSIONS__"]
    load_inline(
        "write_your_own_lltm", [CPP_OP], [CUDA_HEADERS, CUDA_KERNELS, CUDA_LAUNCH],
        extra_cflags=["-O2"], extra_cuda_cflags=["-O3", *allow], is_python_module=False, no_implicit_headers=True,
    )  # fmt: skip
    return torch.ops.write_your_own.lltm.default


def pointwise_cuda(gates: Tensor, old_cell: Tensor) -> Pair:
    """`pointwise_eager` in one launch, host code in C++ as well."""
    _check(gates, old_cell)
    return build_cuda()(gates, old_cell)


# ---------------------------------------------------------------------------------------------------------------------
# 4. Checks, and times.

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pointwise_functions() -> dict[str, Callable[[Tensor, Tensor], Pair]]:
    """Those that run here, by name."""
    functions = {"eager": pointwise_eager, "triton": pointwise_triton}
    return functions if why_no_cuda() else {**functions, "cuda": pointwise_cuda}


def example_inputs(batch: int, state: int, dtype: torch.dtype, scale: float = 2.0) -> list[Tensor]:
    """Random gates and an old cell; `scale` reaches both tails of the sigmoids."""
    shapes = (batch, 3 * state), (batch, state)
    return [(torch.randn(shape, device=DEVICE) * scale).to(dtype).requires_grad_() for shape in shapes]


def check(name: str) -> None:
    """Gradients by finite differences in float64, agreement with float64 in every dtype, registration for compilers."""
    function = pointwise_functions()[name]
    assert torch.autograd.gradcheck(function, example_inputs(2, 3, torch.float64))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for batch, state in ((0, 4), (1, 129), (5, 127), (9, 128)):
            inputs = example_inputs(batch, state, dtype)
            exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
            outputs, truth = function(*inputs), pointwise_eager(*exact)
            upstream = [torch.randn_like(output) for output in outputs]
            found = [*outputs, *torch.autograd.grad(outputs, inputs, upstream)]
            expected = [*truth, *torch.autograd.grad(truth, exact, [each.double() for each in upstream])]
            for actual, true in zip(found, expected, strict=True):
                error = relative_error(actual, true)
                assert error <= tolerance(dtype), f"{name}, {dtype}, {batch} x {state}: error {error:.1e}"
    if name != "eager":
        op = TRITON_OP.registered if name == "triton" else build_cuda()
        torch.library.opcheck(op, tuple(example_inputs(4, 8, torch.float32)))


def passes(cell: nn.Module, batch: int, features: int) -> dict[str, Callable[[], Any]]:
    """Forward, and backward on the graph of one forward again and again, of the cell on random inputs."""
    weight, bias = cell.parameters()
    shapes = (batch, features), (batch, len(bias) // 3), (batch, len(bias) // 3)
    inputs = [torch.randn(shape, device=DEVICE, dtype=weight.dtype).requires_grad_() for shape in shapes]
    return forward_backward(lambda x, h, old_cell, *rest: cell(x, h, old_cell), [*inputs, weight, bias])


def cells(features: int, state: int, dtype: torch.dtype) -> dict[str, Any]:
    """What is timed, by name."""
    made = {name: LLTM(features, state, each).to(DEVICE, dtype) for name, each in pointwise_functions().items()}
    return {**made, "compile": torch.compile(made["eager"], dynamic=False)}


def time_cells(batch: int, features: int, state: int, dtype: torch.dtype) -> None:
    """Print wall time, which the caller waits, and device time, from CUDA graphs, which leave out the host."""
    functions: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "backward": {}}
    with torch.cuda.stream(torch.cuda.Stream()):  # graphs are captured on another stream than the default one
        for name, cell in cells(features, state, dtype).items():
            for step, run in passes(cell, batch, features).items():
                functions[step][name] = run
        print(f"\n{batch} x ({features} + {state}), {dtype}; us, and eager's time over it")
        for step, runs in functions.items():
            device, errors = interleaved_graph_time(runs)
            wall = interleaved_wall_time({name: run for name, run in runs.items() if name not in errors})
            for clock, times in (("device", device), ("wall", wall)):
                row = (f"{n} {t.median * 1e6:.1f} ({times['eager'].median / t.median:.2f}x)" for n, t in times.items())
                print(f"{step:8} {clock:6}  {'  '.join(row)}")


def main() -> None:
    """Check every function; on a GPU, time every cell."""
    torch.manual_seed(0)
    for name in pointwise_functions():
        check(name)
        print(f"{name}: gradients, agreement with float64{'' if name == 'eager' else ', registration'}: right")
    if why_no_cuda():
        print(f"cuda: skipped, {why_no_cuda()}")
    if DEVICE == "cpu":
        print("times: skipped, what Triton's interpreter takes says nothing about a GPU")
        return
    configure(backward_alone=True)  # or compiled code lets backward run once only
    for size in ((16, 32, 128, torch.float32), (4096, 256, 256, torch.bfloat16), (16384, 512, 512, torch.bfloat16)):
        time_cells(*size)


if __name__ == "__main__":
    main()
