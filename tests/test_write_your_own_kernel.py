"""The guide's example: its checks, what it refuses, and the CUDA kernels' arithmetic where there is no GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ops.contract import DEVICE, assert_compiles, assert_deterministic, assert_near_truth, layouts
from test_docs import generate
from tilewright import ops
from tilewright.bench import lltm

example = lltm._example()
PAGE = (Path(__file__).parent.parent / "docs" / "write_your_own_kernel.md").read_text(encoding="utf-8")
FUSED = [
    "triton",
    pytest.param("cuda", marks=pytest.mark.skipif(bool(example.why_no_cuda()), reason=example.why_no_cuda())),
]

# What nvcc knows of itself, for a compiler of the host; the threads of a launch run one after the other.
HOST = """
#include <cmath>
#define __global__
#define __device__
struct { unsigned x; } blockIdx, threadIdx, blockDim;
using std::exp; using std::expm1; using std::tanh;
"""
RUN = """
template <int WIDTH> void run(double* const* at, long long elements, int state) {
  blockDim.x = 4;
  for (blockIdx.x = 0; blockIdx.x * 4 * WIDTH < elements; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < 4; ++threadIdx.x)
      if (at[4] == nullptr) tilewright_lltm_cuda_forward<double, WIDTH>(at[0], at[1], at[2], at[3], elements, state);
      else tilewright_lltm_cuda_backward<double, WIDTH>(at[0], at[1], at[2], at[3], at[4], at[5], elements, state);
}
extern "C" void run(double* const* at, long long elements, int state, int width) {
  width == 1 ? run<1>(at, elements, state) : run<2>(at, elements, state);
}
"""


@pytest.mark.parametrize("name", ["eager", *FUSED])
def test_the_checks_of_the_example_pass(name):
    example.check(name)


def test_a_wrong_gradient_is_found_by_the_checks(monkeypatch):
    def wrong(gates, old_cell):
        new_h, new_cell = example.pointwise_eager(gates, old_cell)
        return new_h, new_cell + (new_h - new_h.detach()) * 0.1

    monkeypatch.setattr(example, "pointwise_functions", lambda: {"eager": wrong})
    with pytest.raises(GradcheckError):
        example.check("eager")


@pytest.mark.parametrize("name", FUSED)
def test_any_layout_is_read_and_reruns_are_bit_equal(name):
    function = example.pointwise_functions()[name]
    for (_, gates), (_, cell) in zip(layouts(5, 21, torch.float32), layouts(5, 7, torch.float32), strict=True):
        inputs = [gates.detach().requires_grad_(), cell.detach().requires_grad_()]
        truth = [each.detach().double().requires_grad_() for each in inputs]
        outputs, exact = function(*inputs), example.pointwise_eager(*truth)
        assert_near_truth(outputs, exact, 1)
        # The gradient of a sum is one number everywhere, at strides of 0; new_cell alone leaves new_h without one.
        assert_near_truth(torch.autograd.grad(outputs[1].sum(), inputs), torch.autograd.grad(exact[1].sum(), truth), 1)

    def run():
        outputs = function(*inputs)
        return [*outputs, *torch.autograd.grad(outputs, inputs, [torch.ones_like(each) for each in outputs])]

    assert_deterministic(run)


@pytest.mark.parametrize("name", FUSED)
def test_a_compiler_sees_one_graph(name):
    inputs = example.example_inputs(3, 8, torch.float32)
    assert_compiles(example.pointwise_functions()[name], inputs)


def test_the_cell_trains_alike_with_either_function():
    cells = [example.LLTM(3, 5, each).double() for each in (example.pointwise_eager, example.pointwise_triton)]
    cells[1].load_state_dict(cells[0].state_dict())
    x, h, old_cell = (torch.randn(4, n, dtype=torch.float64) for n in (3, 5, 5))
    with ops.explain() as called:
        for cell in cells:
            state = h, old_cell
            for _ in range(3):
                state = cell(x, *state)
            (state[0].sum() + state[1].square().sum()).backward()
    assert {path.ran for path in called} == {"kernel"} and sum(called.calls.values()) == 3
    for ours, plain in zip(cells[1].parameters(), cells[0].parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-10, atol=1e-12)


def test_bad_input_and_a_second_derivative_are_refused_in_a_sentence():
    gates, cell = example.example_inputs(2, 4, torch.float32)
    for arguments, said in [
        ((gates[:, :8], cell), r"gates has shape \(2, 8\), but \(2, 12\) is needed"),
        ((gates, cell[0]), r"old_cell has shape \(4,\), but \(batch, state\) is needed"),
        ((gates.half(), cell), "gates are torch.float16, but old_cell is torch.float32; convert one"),
    ]:
        with pytest.raises((TypeError, ValueError), match=said):
            example.pointwise_triton(*arguments)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(example.pointwise_triton(gates, cell)[0].sum(), gates, create_graph=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here to compile the CUDA kernels for the host")
def test_the_arithmetic_of_the_cuda_kernels_is_right_on_the_host(tmp_path):
    source, library = tmp_path / "kernels.cpp", tmp_path / "kernels.so"
    source.write_text(HOST + example.CUDA_KERNELS + RUN)
    subprocess.run(["g++", "-std=c++17", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    run = ctypes.CDLL(str(library)).run

    def start(width, state, *tensors):
        addresses = (ctypes.c_void_p * 6)(*[tensor.data_ptr() for tensor in tensors])
        run(addresses, ctypes.c_longlong(tensors[-1].numel()), state, width)

    for batch, state, width in ((3, 5, 1), (5, 6, 2), (1, 1, 1)):
        gates, cell = (torch.randn(batch, n * state, dtype=torch.float64).requires_grad_() for n in (3, 1))
        expected = example.pointwise_eager(gates, cell)
        found = [torch.full_like(cell, float("nan")) for _ in range(2)]
        start(width, state, gates, cell, *found)
        torch.testing.assert_close(found, [each.detach() for each in expected])
        upstream = [torch.randn_like(cell) for _ in range(2)]
        gradients = [torch.full_like(each, float("nan")) for each in (gates, cell)]
        start(width, state, *upstream, gates, found[1], *gradients)
        torch.testing.assert_close(gradients, list(torch.autograd.grad(expected, (gates, cell), upstream)))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here to compile the CUDA kernels with")
def test_nvcc_makes_loads_of_16_bytes_and_spills_nothing(tmp_path):
    source = tmp_path / "kernels.cu"
    name, kind = "template __global__ void tilewright_lltm_cuda_", "__nv_bfloat16"
    arguments = f"const {kind}*, const {kind}*, {kind}*, {kind}*, long long, int"
    forward = f"{name}forward<{kind}, 8>({arguments});\n"
    backward = f"{name}backward<{kind}, 8>(const {kind}*, const {kind}*, {arguments});\n"
    source.write_text(example.CUDA_HEADERS + example.CUDA_KERNELS + forward + backward)
    command = ["nvcc", "-std=c++17", "-arch=sm_90", "-ptx", "-o", str(tmp_path / "kernels.ptx"), str(source)]
    subprocess.run(command, check=True)
    ptx = (tmp_path / "kernels.ptx").read_text()
    assert len(re.findall(r"ld\.global\S*\.v[24]\.", ptx)) == 10  # 4 of forward and 6 of backward
    assert len(re.findall(r"st\.global\S*\.v[24]\.", ptx)) == 6
    assert ".local" not in ptx


def test_the_benchmark_prepares_the_cell_and_its_pointwise_part(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for part in ("cell", "pointwise"):
        steps, errors = lltm.prepare({"part": part, "dtype": "fp32", "batch": 2, "features": 3, "state": 4})
        names = {"tilewright", "eager", "compile"} | ({"cuda"} if "cuda" in example.pointwise_functions() else set())
        assert not errors and set(steps) == {"forward", "backward"}
        assert all(set(runs) == names for runs in steps.values())
        gradients = steps["backward"]["tilewright"]()
        assert len(gradients) == (5 if part == "cell" else 2) and all(each.isfinite().all() for each in gradients)


def test_the_benchmark_counts_what_the_guide_counts():
    sizes = 16384, 512, 1024, 2
    elements = 16384 * 1024
    for backward, count in ((False, 6), (True, 10)):
        cost = lltm.cost(*sizes, part="pointwise", backward=backward)
        assert cost.bytes == 2 * count * elements
    forward, backward = (lltm.cost(*sizes, part="cell", backward=each) for each in (False, True))
    assert backward.flops == 2 * forward.flops == 2 * 2 * 16384 * 1536 * 3072
    labels = [lltm._label(case) for case in lltm.cases(quick=False)]
    assert len(set(labels)) == len(labels) == 8 and "cell fp32 16 x 32 + 128" in labels
    assert {case["part"] for case in lltm.cases(quick=True)} == {"cell", "pointwise"}


class _Count(TorchDispatchMode):
    """What PyTorch's ops read and write, and how many of them are no views."""

    numbers = launches = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if not function.is_view and function is not torch.ops.aten.detach.default:
            tensors = [each for each in tree_leaves((arguments, result)) if isinstance(each, torch.Tensor)]
            self.numbers += sum(tensor.numel() for tensor in tensors)
            self.launches += 1
        return result


def test_eager_moves_and_launches_what_the_page_says():
    gates, old_cell = example.example_inputs(16, 32, torch.float32)
    with _Count() as forward:
        outputs = example.pointwise_eager(gates, old_cell)
    with _Count() as backward:
        torch.autograd.grad(outputs, (gates, old_cell), [each.detach() for each in outputs])
    for step, count, ours in (("forward", forward, 6), ("backward", backward, 10)):
        numbers = count.numbers // old_cell.numel()
        assert f"| {step}: numbers read and written an element | {numbers} | {ours} | {ours} |" in PAGE
        assert f"| {step}: launches | {count.launches} | 1 | |" in PAGE
    cell = example.LLTM(8, 32).to(DEVICE)
    inputs = [torch.randn(16, width, device=DEVICE).requires_grad_() for width in (8, 32, 32)]
    with _Count() as forward:
        outputs = cell(*inputs)
    with _Count() as backward:
        torch.autograd.grad(outputs, [*inputs, *cell.parameters()], [each.detach() for each in outputs])
    said = f"(concatenation, matmul, pointwise) replace {forward.launches}, and 4 backward replace {backward.launches}."
    assert said in PAGE


def test_the_code_on_the_page_is_the_example_s():
    source = Path(example.__file__).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4 and all(block in source for block in blocks)


def test_the_table_has_both_clocks_the_launches_and_what_is_missing():
    def cell(median):
        return {"median": median, "limit_share": 0.5, "wall": {"median": 2 * median}, "launches": 3}

    step = {"implementations": {"eager": cell(4e-6), "tilewright": cell(2e-6), "compile": {"error": "none"}}}
    sizes = {"dtype": "bf16", "batch": 2, "features": 3, "state": 4, "forward": step, "backward": step}
    gpu = {"name": "H200"}
    table = generate.lltm({
        "cases": [{"part": "cell", **sizes}, {"part": "pointwise", **sizes}], "without_cuda": "there is no nvcc",
        "machine": {"gpu": gpu, "torch": "2", "triton": "3", "commit": "c", "date": "2026-01-01T"}, "peers": {},
        "ceilings": {"copy_bytes_per_second": 1e12, "bf16_flops": 1e15},
    })  # fmt: skip
    for row in (
        "| bf16, 2 x (3 + 4) | forward, device | 4.0 µs | failed | 2.0 µs (2.00x) |  |",
        "| bf16, 2 x (3 + 4) | backward, wall | 8.0 µs | failed | 4.0 µs (2.00x) |  |",
        "| bf16, 2 x (3 + 4) | forward, launches | 3 |  | 3 |  |",
        "Without the CUDA op: there is no nvcc.",
        "| bf16, 2 x 4 | 2 µs, 50% | 2.00x | failed |  | 2 µs, 50% | 2.00x | failed |  |",
    ):
        assert row in table
