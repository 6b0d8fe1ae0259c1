"""The library itself needs a GPU. Here its place is taken by an emulator of its C interface that works by columns, as
it does, so that whatever is said to it in rows is checked against float64; and its constants are compared with its
header, where there is one."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ops.contract import (
    DEVICE,
    assert_compiles,
    assert_deterministic,
    assert_equal,
    assert_near_truth,
    doubles,
    gradients,
    on_gpu,
    randn,
)
from tilewright.measure.numerics import relative_error, tolerance
from tilewright.ops import _cublaslt
from tilewright.ops._cublaslt import Description, Epilogue, Preference
from tilewright.ops.linear import linear, mlp, mlp_reference, reference

op = sys.modules["tilewright.ops.linear"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NOT_SUPPORTED = 15
GELUS = {Epilogue.GELU_AUX, Epilogue.GELU_AUX_BIAS}
DGELUS = {Epilogue.DGELU, Epilogue.DGELU_BGRAD}


WIDTHS = {
    **dict.fromkeys((Description.TRANSA, Description.TRANSB, Description.EPILOGUE), 4),
    **dict.fromkeys((Description.BIAS_POINTER, Description.EPILOGUE_AUX_POINTER, Description.EPILOGUE_AUX_LD), 8),
}
DTYPES = {number: dtype for dtype, number in _cublaslt.TYPES.items()}


class Emulator:
    """cuBLASLt's C interface over memory of the CPU: matrices by columns, arithmetic in float64, rounded once."""

    def __init__(self):
        self.things, self.refused, self.launched, self.asked = {}, set(), [], []

    @property
    def epilogues(self):
        return [epilogue for epilogue, _ in self.launched]

    def make(self, reference, thing):
        reference._obj.value = 1 + len(self.things)
        self.things[reference._obj.value] = thing
        return 0

    def get(self, handle):
        return self.things[handle.value]

    def cublasLtCreate(self, handle):
        return self.make(handle, "handle")

    def cublasLtMatmulDescCreate(self, description, compute, scale):
        assert (compute, scale) == (68, 0)
        return self.make(description, {Description.TRANSA: 0, Description.TRANSB: 0})

    def cublasLtMatmulDescSetAttribute(self, description, attribute, value, size):
        assert size == WIDTHS[attribute]
        self.get(description)[attribute] = value._obj.value
        if attribute == Description.BIAS_POINTER:
            time.sleep(1e-4)  # for another thread to come between
        return 0

    def cublasLtMatrixLayoutCreate(self, layout, kind, rows, columns, stride):
        assert stride >= rows
        return self.make(layout, (DTYPES[kind], rows, columns, stride))

    def cublasLtMatmulPreferenceCreate(self, preference):
        return self.make(preference, {})

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, value, size):
        assert size == (8 if attribute == Preference.MAX_WORKSPACE_BYTES else 4)
        self.get(preference)[attribute] = value._obj.value
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, description, a, b, c, d, preference, most, found, count):
        assert self.get(handle) == "handle"
        settings, preferred = self.get(description), self.get(preference)
        assert preferred[Preference.REDUCTION_SCHEME_MASK] == _cublaslt.REDUCTION_SCHEME_COMPUTE_TYPE
        if settings[Description.EPILOGUE] in self.refused:
            return NOT_SUPPORTED
        alignments = [preferred[Preference[f"MIN_ALIGNMENT_{name}_BYTES"]] for name in "ABCD"]
        for pointer in (Description.BIAS_POINTER, Description.EPILOGUE_AUX_POINTER):
            address = settings.get(pointer, 0) | 256
            alignments.append(address & -address)
        self.asked.append(alignments)
        for index, result in enumerate(found._obj[:2]):
            result.algorithm[0], result.algorithm[1] = len(self.asked) - 1, index
            result.workspace_bytes = 1024 * index
        count._obj.value = 2
        return 0

    def matrix(self, address, layout):
        dtype, rows, columns, stride = layout
        size = (stride * (columns - 1) + rows) * dtype.itemsize
        memory = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=dtype)
        return memory.as_strided((rows, columns), (1, stride))

    def cublasLtMatmul(
        self, handle, description, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm,
        workspace, workspace_bytes, stream,
    ):  # fmt: skip
        assert self.get(handle) == "handle" and (alpha._obj.value, beta._obj.value) == (1.0, 0.0) and c == d
        assert (workspace is None) == (workspace_bytes == 0 == algorithm._obj.workspace_bytes)
        settings, layout = self.get(description), self.get(d_layout)
        epilogue, bias = Epilogue(settings[Description.EPILOGUE]), settings.get(Description.BIAS_POINTER, 0)
        aux = settings.get(Description.EPILOGUE_AUX_POINTER, 0)
        promised = self.asked[algorithm._obj.algorithm[0]]
        for address, alignment in zip((a, b, c, d, bias, aux), promised, strict=True):
            assert address % alignment == 0
        left, right = self.matrix(a, self.get(a_layout)).double(), self.matrix(b, self.get(b_layout)).double()
        left = left.t() if settings[Description.TRANSA] else left
        right = right.t() if settings[Description.TRANSB] else right
        value, out = left @ right, self.matrix(d, layout)
        assert value.shape == out.shape
        self.launched.append((epilogue, algorithm._obj.algorithm[1]))
        out.copy_(self.finish(epilogue, value, right, layout, settings, bias, aux))
        return 0

    def finish(self, epilogue, value, right, layout, settings, bias, aux):
        dtype, rows, columns, _ = layout
        if aux:
            assert settings[Description.EPILOGUE_AUX_LD] % 8 == 0 and settings[Description.EPILOGUE_AUX_LD] >= rows
            kept = self.matrix(aux, (dtype, rows, columns, settings[Description.EPILOGUE_AUX_LD]))
        if epilogue in (Epilogue.BIAS, Epilogue.GELU_AUX_BIAS):
            value = value + self.matrix(bias, (dtype, rows, 1, rows)).double()
        if epilogue in GELUS:
            kept.copy_(value)
            value = torch.nn.functional.gelu(value, approximate="tanh")
        if epilogue in DGELUS:
            value = torch.ops.aten.gelu_backward(value, kept.double(), approximate="tanh")
        if epilogue == Epilogue.DGELU_BGRAD:
            self.matrix(bias, (dtype, rows, 1, rows)).copy_(value.sum(1, keepdim=True))
        if epilogue == Epilogue.BGRADB:
            self.matrix(bias, (dtype, columns, 1, columns)).copy_(right.sum(0)[:, None])
        return value

    def cublasLtMatmulDescDestroy(self, description):
        return 0

    cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy = cublasLtMatmulDescDestroy


def forget():
    for cached in (_cublaslt._handle, _cublaslt._plan, op._choice):
        cached.cache_clear()


@pytest.fixture
def emulator(monkeypatch):
    library = Emulator()
    monkeypatch.setattr(_cublaslt, "library", lambda device: library)
    monkeypatch.setattr(_cublaslt, "_stream", lambda device: 0)
    monkeypatch.setattr(_cublaslt, "_may_time", lambda: False)
    monkeypatch.setattr(op, "_DEVICES", ("cpu",))
    forget()
    yield library
    forget()


def numbers(*shape, dtype=BF16, grad=True, device="cpu"):
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_(grad)


def of_linear(shape, out, dtype, parameter, *, bias=True, device="cpu"):
    width = shape[-1]
    return [
        numbers(*shape, dtype=dtype, device=device),
        numbers(out, width, dtype=parameter, device=device),
        numbers(out, dtype=parameter, device=device) if bias else None,
    ]


def of_mlp(shape, inner, out, dtype, parameter, *, biases=(True, True), device="cpu"):
    x, up, up_bias = of_linear(shape, inner, dtype, parameter, bias=biases[0], device=device)
    _, down, down_bias = of_linear((1, inner), out, dtype, parameter, bias=biases[1], device=device)
    with torch.no_grad():  # as large as a trained model's, so that the GELU sees both of its sides
        up.mul_(shape[-1] ** -0.5)
        down.mul_(inner**-0.5)
    return [x, up, up_bias, down, down_bias]


def run(function, leaves, upstream, dtype=None):
    """Outputs and gradients, under autocast where `dtype` is given."""
    with torch.autocast(leaves[0].device.type, dtype, enabled=dtype is not None):
        out = function(*leaves)
    return [out, *gradients([out], leaves, [upstream])]


def truth(function, leaves, upstream, dtype):
    """In float64, of what the products see: all operands in `dtype`."""
    seen = [None if t is None else t.detach().to(dtype).requires_grad_(t.requires_grad) for t in leaves]
    return run(function, doubles(seen), upstream.double())


def assert_close_in_16_bits(actual, expected, dtype, reduced):
    """For what is made of numbers that were rounded to `dtype` on the way."""
    for index, (a, t) in enumerate(zip(actual, expected, strict=True)):
        assert a.shape == t.shape
        error = relative_error(a, t)
        assert error <= tolerance(dtype, reduced), f"tensor {index}: error {error:.2e}"


# The mapping, by the emulator.


@pytest.mark.parametrize("epilogue", list(Epilogue), ids=lambda e: e.name)
@pytest.mark.parametrize("right_transposed", [False, True])
@pytest.mark.parametrize("left_transposed", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
def test_a_product_by_rows_with_every_epilogue(epilogue, left_transposed, right_transposed, out_dtype, emulator):
    rows, inner, columns = 5, 24, 16
    left = numbers(inner, rows, grad=False).t() if left_transposed else numbers(rows, inner, grad=False)
    right = numbers(columns, inner, grad=False).t() if right_transposed else numbers(inner, columns, grad=False)
    value = left.double() @ right.double()
    out, aux = (torch.full((rows, columns), float("nan"), dtype=out_dtype) for _ in range(2))
    bias = numbers(rows if epilogue == Epilogue.BGRADB else columns, dtype=out_dtype, grad=False)
    has_bias = epilogue not in (Epilogue.DEFAULT, Epilogue.GELU_AUX, Epilogue.DGELU)
    has_aux = epilogue in GELUS | DGELUS
    if epilogue in (Epilogue.BIAS, Epilogue.GELU_AUX_BIAS):
        value = value + bias.double()
    if epilogue in DGELUS:
        aux.normal_()
        value = torch.ops.aten.gelu_backward(value, aux.double(), approximate="tanh")
    u = value
    if epilogue in GELUS:
        value = torch.nn.functional.gelu(value, approximate="tanh")
    assert _cublaslt.product(left, right, out, epilogue, bias if has_bias else None, aux if has_aux else None)
    assert_near_truth([out], [value], reduced=1)
    if epilogue in GELUS:
        assert_near_truth([aux], [u], reduced=1)
    if epilogue == Epilogue.BGRADB:
        assert_near_truth([bias], [left.double().sum(1)], reduced=1)
    if epilogue == Epilogue.DGELU_BGRAD:
        assert_near_truth([bias], [value.sum(0)], reduced=1)


@pytest.mark.parametrize("shape", [(5, 24), (1, 24), (2, 3, 24), (24,), (0, 24), (129, 8)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("refused", [set(), {Epilogue.BGRADB}, set(Epilogue)], ids=["fused", "apart", "plain"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["16 bits", "autocast"])
def test_linear_and_its_gradients(shape, has_bias, refused, dtype, autocast, emulator):
    emulator.refused = refused
    leaves = of_linear(shape, 40, dtype, FP32 if autocast else dtype, bias=has_bias)
    upstream = numbers(*shape[:-1], 40, dtype=dtype, grad=False)
    actual = run(linear, leaves, upstream, dtype if autocast else None)
    wanted = [dtype, *(t.dtype for t in leaves if t is not None)]
    assert [t.dtype for t in actual] == wanted
    assert_near_truth(actual, truth(reference, leaves, upstream, dtype), reduced=max(40, *shape))
    if 0 in shape or len(refused) > 1:
        assert emulator.epilogues in ([], [Epilogue.DEFAULT])  # dx has neither rows nor bias
    else:
        first = Epilogue.BIAS if has_bias else Epilogue.DEFAULT
        last = Epilogue.BGRADB if has_bias and not refused else Epilogue.DEFAULT
        assert emulator.epilogues == [first, Epilogue.DEFAULT, last]


@pytest.mark.parametrize("biases", [(True, True), (False, True), (True, False), (False, False)], ids=str)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recompute"])
@pytest.mark.parametrize(
    "refused",
    [set(), {Epilogue.DGELU_BGRAD}, DGELUS, GELUS, set(Epilogue)],
    ids=["fused", "sum apart", "backward apart", "forward apart", "plain"],
)
@pytest.mark.parametrize(("dtype", "autocast"), [(BF16, False), (BF16, True), (FP16, True)], ids=str)
def test_mlp_and_its_gradients(biases, recompute, refused, dtype, autocast, emulator):
    emulator.refused = refused
    leaves = of_mlp((3, 7, 24), 48, 32, dtype, FP32 if autocast else dtype, biases=biases)
    upstream = numbers(3, 7, 32, dtype=dtype, grad=False)
    actual = run(functools.partial(mlp, recompute=recompute), leaves, upstream, dtype if autocast else None)
    assert [t.dtype for t in actual] == [dtype, *(t.dtype for t in leaves if t is not None)]
    assert_close_in_16_bits(actual, truth(mlp_reference, leaves, upstream, dtype), dtype, reduced=48)
    if not refused:
        forward = [Epilogue.GELU_AUX_BIAS if biases[0] else Epilogue.GELU_AUX]
        forward += [Epilogue.BIAS if biases[1] else Epilogue.DEFAULT]
        backward = [Epilogue.BGRADB if biases[1] else Epilogue.DEFAULT]
        backward += [Epilogue.DGELU_BGRAD if biases[0] else Epilogue.DGELU, Epilogue.DEFAULT, Epilogue.DEFAULT]
        assert emulator.epilogues == forward + backward


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("function", ["linear", "mlp"])
def test_only_one_input_wants_a_gradient(function, index, emulator):
    leaves = of_mlp((6, 16), 32, 16, BF16, FP32)[: 3 if function == "linear" else 5]
    if index >= len(leaves):
        pytest.skip("linear has three inputs")
    for position, leaf in enumerate(leaves):
        leaf.requires_grad_(position == index)
    upstream = numbers(6, 32 if function == "linear" else 16, grad=False)
    ours, theirs = (linear, reference) if function == "linear" else (mlp, mlp_reference)
    actual = run(ours, leaves, upstream, BF16)
    assert_close_in_16_bits(actual, truth(theirs, leaves, upstream, BF16), BF16, reduced=32)


def test_a_float32_weight_has_a_gradient_that_was_never_rounded_to_16_bits(emulator):
    leaves = of_linear((64, 32), 16, BF16, FP32)
    _, _, dweight, dbias = run(linear, leaves, numbers(64, 16, grad=False), BF16)
    for gradient in (dweight, dbias):
        assert relative_error(gradient.to(BF16), gradient) > 1e-4


def test_recompute_keeps_one_tensor_less(emulator):
    def kept(recompute):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(tuple(t.shape)) or t, lambda t: t):
            mlp(*of_mlp((6, 16), 32, 16, BF16, BF16), recompute=recompute)
        return sizes.count((6, 32))

    assert (kept(False), kept(True)) == (2, 1)


def test_any_layout_and_any_alignment(emulator):
    """The emulator checks that no address is less aligned than the library was told."""
    whole = torch.randn(9 * 40, dtype=BF16)
    tokens = {
        "transposed": torch.randn(24, 6, dtype=BF16).t(),
        "every other column": torch.randn(6, 48, dtype=BF16)[:, ::2],
        "expanded": torch.randn(1, 24, dtype=BF16).expand(6, 24),
        "2 bytes off": whole[1:145].view(6, 24),
        "16 bytes off": whole[8:152].view(6, 24),
        "one row of many": torch.randn(6, 48, dtype=BF16)[:1, 3:27],
    }
    for name, x in tokens.items():
        leaves = [x.detach().requires_grad_(), numbers(24, 40).t().detach().requires_grad_(), numbers(40)]
        upstream = numbers(40, len(x), grad=False).t()
        assert_near_truth(run(linear, leaves, upstream), truth(reference, leaves, upstream, BF16), reduced=64)
        assert emulator.epilogues, name
    assert {alignments[1] for alignments in emulator.asked} >= {16}


def test_two_threads_share_a_plan_and_not_its_addresses(emulator):
    x, weight = numbers(4, 16, grad=False), numbers(8, 16, grad=False)
    wrong = []

    def work(level):
        bias = torch.full((8,), float(level), dtype=BF16)
        expected = reference(x.double(), weight.double(), bias.double())
        for _ in range(20):
            if relative_error(linear(x, weight, bias), expected) > tolerance(BF16):
                wrong.append(level)

    threads = [threading.Thread(target=work, args=(1000 * level,)) for level in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# Choosing.


@pytest.fixture
def clock(monkeypatch):
    """Ways are as slow as they say."""
    monkeypatch.setattr(_cublaslt, "_may_time", lambda: True)
    monkeypatch.setattr(_cublaslt, "_milliseconds", lambda way: way.milliseconds)


def way(name, milliseconds):
    def run():
        return name

    run.milliseconds = milliseconds
    return run


def test_the_quickest_way_is_taken_and_kept(clock):
    choice = _cublaslt.Choice()
    assert choice([way("a", 2.0), way("b", 1.0), way(None, 0.1)]) == "b"
    assert choice([way("a", 1.0), way("b", 2.0)]) == "b"


def test_the_first_way_wins_unless_another_is_clearly_quicker(clock):
    assert _cublaslt.Choice()([way("a", 1.0), way("b", 0.99)]) == "a"
    assert _cublaslt.Choice()([way(None, 1.0), way("b", 0.99)]) == "b"
    assert _cublaslt.Choice()([way(None, 1.0), way(None, 0.5)]) is None


def test_nothing_is_timed_where_bits_must_not_depend_on_it(clock):
    choice = _cublaslt.Choice()
    assert choice([way("a", 2.0), way("b", 1.0)]) == "b"
    torch.use_deterministic_algorithms(True)
    try:
        assert choice([way("a", 2.0), way("b", 1.0)]) == "a"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_capture_takes_the_first_and_decides_nothing(clock, monkeypatch):
    choice = _cublaslt.Choice()
    monkeypatch.setattr(_cublaslt, "_may_time", lambda: False)
    assert choice([way(None, 2.0), way("a", 2.0), way("b", 1.0)]) == "a" and choice.index is None


def test_a_timed_product_takes_the_quicker_candidate(emulator, monkeypatch):
    monkeypatch.setattr(_cublaslt, "_may_time", lambda: True)
    monkeypatch.setattr(_cublaslt, "_milliseconds", lambda way: 2.0 - way.args[0].algorithm[1])
    left, right, out = numbers(4, 16, grad=False), numbers(16, 8, grad=False), numbers(4, 8, grad=False)
    assert _cublaslt.product(left, right, out)
    assert_near_truth([out], [left.double() @ right.double()], reduced=1)
    assert [index for _, index in emulator.launched] == [0, 1, 1]  # both tried, the second for good


# The constants.


def header_folders():
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    roots = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    roots += [*packages.glob("cu*"), *Path("/usr/local").glob("cuda*")]
    return [root / "include" for root in roots if (root / "include").exists()]


def test_constants_and_sizes_are_those_of_the_header(tmp_path):
    compiler = shutil.which("cc") or shutil.which("gcc")
    folders = header_folders()
    if compiler is None or not any((folder / "cublasLt.h").exists() for folder in folders):
        pytest.skip("needs a C compiler and cublasLt.h, from the CUDA toolkit or NVIDIA's package")
    expected = {f"CUBLASLT_MATMUL_DESC_{e.name}": e.value for e in Description}
    expected |= {f"CUBLASLT_MATMUL_PREF_{e.name}": e.value for e in Preference}
    expected |= {f"CUBLASLT_EPILOGUE_{e.name}": e.value for e in Epilogue}
    types = {"CUDA_R_16BF": BF16, "CUDA_R_16F": FP16, "CUDA_R_32F": FP32}
    expected |= {name: _cublaslt.TYPES[dtype] for name, dtype in types.items()}
    expected |= {
        "CUBLAS_COMPUTE_32F": _cublaslt.COMPUTE_32F,
        "CUBLAS_OP_N": int(False),
        "CUBLAS_OP_T": int(True),
        "CUBLAS_STATUS_SUCCESS": 0,
        "CUBLAS_STATUS_NOT_SUPPORTED": NOT_SUPPORTED,
        "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE": _cublaslt.REDUCTION_SCHEME_COMPUTE_TYPE,
        "sizeof(cublasLtMatmulHeuristicResult_t)": ctypes.sizeof(_cublaslt.Heuristic),
    }
    members = {"algo": "algorithm", "workspaceSize": "workspace_bytes", "state": "state", "wavesCount": "waves"}
    for theirs, ours in members.items():
        offset = f"offsetof(cublasLtMatmulHeuristicResult_t, {theirs})"
        expected[offset] = getattr(_cublaslt.Heuristic, ours).offset
    lines = "".join(f'printf("%ld\\n", (long){name});' for name in expected)
    source, program = tmp_path / "constants.c", tmp_path / "constants"
    source.write_text(f"#include <stdio.h>\n#include <stddef.h>\n#include <cublasLt.h>\nint main() {{{lines}}}\n")
    include = [f"-I{folder}" for folder in folders]
    built = subprocess.run([compiler, *include, source, "-o", program], capture_output=True, text=True)
    if "fatal error" in built.stderr:
        pytest.skip("needs the headers of the CUDA runtime beside cublasLt.h")
    assert built.returncode == 0, built.stderr
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(expected, map(int, printed), strict=True)) == expected


# The contract.


def test_gradcheck_of_the_plain_path():
    leaves = [t.double().detach().requires_grad_() for t in of_mlp((3, 5), 7, 4, FP32, FP32)]
    assert torch.autograd.gradcheck(linear, leaves[:3]) and torch.autograd.gradcheck(mlp, leaves)


@pytest.mark.parametrize("refused", [set(), set(Epilogue)], ids=["fused", "plain"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_opcheck(refused, has_bias, emulator):
    emulator.refused = refused
    x, weight, bias = of_linear((6, 16), 24, BF16, FP32, bias=has_bias)
    cast = weight.detach().to(BF16)
    torch.library.opcheck(torch.ops.tilewright.linear.default, (x, weight, bias, cast), rtol=1e-2, atol=1e-2)
    inputs = (numbers(6, 24, grad=False), x.detach(), cast, [True, True], [True, True, has_bias])
    torch.library.opcheck(torch.ops.tilewright.linear_backward.default, inputs)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("refused", [set(), set(Epilogue)], ids=["fused", "plain"])
def test_opcheck_mlp(refused, recompute, emulator):
    emulator.refused = refused
    x, *parameters = of_mlp((2, 3, 16), 24, 8, BF16, FP32)
    casts = [parameters[index].detach().to(BF16) for index in (0, 2)]
    inputs = (x, *parameters, *casts, recompute)
    torch.library.opcheck(torch.ops.tilewright.mlp.default, inputs, rtol=1e-2, atol=1e-2)
    _, u, activated = torch.ops.tilewright.mlp(*(t.detach() if isinstance(t, torch.Tensor) else t for t in inputs))
    kept = (x.detach(), u, None if recompute else activated, *casts)
    rest = ([True] * 4, [True, False, True, True, True])
    torch.library.opcheck(torch.ops.tilewright.mlp_backward.default, (numbers(2, 3, 8, grad=False), *kept, *rest))


@pytest.mark.parametrize("autocast", [False, True], ids=["16 bits", "autocast"])
def test_compiles_into_one_graph_with_the_same_result(autocast, request):
    if DEVICE == "cpu":
        request.getfixturevalue("emulator")
    leaves = of_mlp((4, 6, 16), 32, 16, BF16, FP32 if autocast else BF16, device=DEVICE)

    def function(x, up, up_bias, down, down_bias):
        with torch.autocast(DEVICE, BF16, enabled=autocast):
            return (mlp(linear(x, down.t(), up_bias)[..., :16], up, up_bias, down, down_bias),)

    assert_compiles(function, leaves)


def test_no_second_derivative(emulator):
    leaves = of_mlp((6, 16), 32, 16, BF16, BF16)
    for out in (linear(*leaves[:3]), mlp(*leaves)):
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(out.sum(), leaves[0], create_graph=True)


def test_who_knows_only_pytorchs_ops_sees_them(emulator):
    x, weight, bias = of_linear((6, 16), 24, BF16, BF16)
    with FlopCounterMode(display=False) as counter:
        linear(x, weight, bias).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 16 * 24
    torch.func.vmap(torch.func.grad(lambda row: linear(row, weight.detach()).sum()))(x.detach())

    class Subclass(torch.Tensor):
        pass

    assert isinstance(linear(x.detach().as_subclass(Subclass), weight.detach()), Subclass)
    assert not emulator.epilogues


@pytest.mark.parametrize("sizes", [(12, 16), (16, 12)], ids=str)
def test_sizes_that_the_library_does_not_take_are_plain(sizes, emulator):
    width, out = sizes
    leaves = of_linear((6, width), out, BF16, BF16)
    assert torch.equal(linear(*leaves), reference(*leaves))
    full = of_linear((6, 16), 16, FP32, FP32)
    assert torch.equal(linear(*full), reference(*full))
    assert not emulator.epilogues


@pytest.mark.parametrize(
    ("function", "arguments", "kind", "message"),
    [
        (linear, [3, (8, 8)], TypeError, "x must be a tensor"),
        (linear, [(3, 8), 3], ValueError, "weight must be a matrix"),
        (linear, [(), (8, 8)], ValueError, "x is a scalar"),
        (linear, [(3, 8), (8, 7)], ValueError, r"weight has shape \(8, 7\), but \(8, 8\)"),
        (linear, [(3, 8), (16, 8), (8,)], ValueError, r"bias has shape \(8,\), but \(16,\)"),
        (linear, [(3, 8), torch.zeros(8, 8, dtype=BF16)], TypeError, "convert one, or use autocast"),
        (linear, [(3, 8), torch.zeros(8, 8, dtype=torch.float64)], TypeError, "float64"),
        (mlp, [(3, 8), (16, 8), None, (8, 8), None], ValueError, r"down_weight has shape \(8, 8\), but \(8, 16\)"),
        (mlp, [(3, 8), (16, 8), (8,), (8, 16), None], ValueError, "up_bias has shape"),
    ],
)
def test_bad_input_is_one_sentence(function, arguments, kind, message):
    given = [torch.zeros(a) if isinstance(a, tuple) else a for a in arguments]
    with pytest.raises(kind, match=message) as caught:
        function(*given)
    assert "\n" not in str(caught.value)


# The library itself.


@on_gpu
@pytest.mark.parametrize("tokens", [1, 127, 1000])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["16 bits", "autocast"])
@pytest.mark.parametrize(("width", "out"), [(768, 2304), (1032, 520), (8, 16)])
def test_the_library_agrees_with_float64(tokens, dtype, autocast, width, out):
    leaves = of_linear((tokens, width), out, dtype, FP32 if autocast else dtype, device="cuda")
    upstream = randn(tokens, out, dtype=dtype, grad=False)
    actual = run(linear, leaves, upstream, dtype if autocast else None)
    assert_near_truth(actual, truth(reference, leaves, upstream, dtype), reduced=max(tokens, width, out))
    leaves = of_mlp((tokens, width), 4 * width, out, dtype, FP32 if autocast else dtype, device="cuda")
    expected = truth(mlp_reference, leaves, upstream, dtype)
    for recompute in (False, True):
        actual = run(
            lambda *t, again=recompute: mlp(*t, recompute=again), leaves, upstream, dtype if autocast else None
        )
        assert_close_in_16_bits(actual, expected, dtype, reduced=max(tokens, 4 * width))


@on_gpu
@pytest.mark.parametrize("refused", [set(), {Epilogue.DGELU_BGRAD}, DGELUS, GELUS, {Epilogue.BGRADB}], ids=str)
def test_each_way_agrees_with_float64(refused, monkeypatch):
    product, taken = _cublaslt.product, []

    def some(left, right, out, epilogue=Epilogue.DEFAULT, *rest):
        able = epilogue not in refused and product(left, right, out, epilogue, *rest)
        taken.extend([epilogue] if able else [])
        return able

    monkeypatch.setattr(_cublaslt, "product", some)
    leaves = of_mlp((300, 256), 1024, 256, BF16, FP32, device="cuda")
    upstream = randn(300, 256, dtype=BF16, grad=False)
    torch.use_deterministic_algorithms(True, warn_only=True)  # the first way there is
    try:
        actual = run(mlp, leaves, upstream, BF16)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close_in_16_bits(actual, truth(mlp_reference, leaves, upstream, BF16), BF16, reduced=1024)
    expected = {Epilogue.GELU_AUX_BIAS, Epilogue.DGELU_BGRAD, Epilogue.BGRADB, Epilogue.BIAS} - refused
    assert expected <= set(taken), "this version of cuBLASLt lacks an epilogue"


@on_gpu
def test_same_bits_on_every_run():
    leaves = of_mlp((4096, 768), 3072, 768, BF16, FP32, device="cuda")
    upstream = randn(4096, 768, dtype=BF16, grad=False)
    first = run(mlp, leaves, upstream, BF16)
    for _ in range(100):
        assert_equal(first, run(mlp, leaves, upstream, BF16))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert_deterministic(lambda: run(mlp, leaves, upstream, BF16))
    finally:
        torch.use_deterministic_algorithms(False)


@on_gpu
@pytest.mark.parametrize("known", [False, True], ids=["first seen in the capture", "seen before"])
def test_a_captured_graph_replays_forward_and_backward(known):
    forget()
    leaves = of_mlp((512, 256), 1024, 256, BF16, BF16, device="cuda")
    upstream = randn(512, 256, dtype=BF16, grad=False)
    expected = truth(mlp_reference, leaves, upstream, BF16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(mlp if known else mlp_reference, leaves, upstream)
        _cublaslt._handle(torch.device("cuda", torch.cuda.current_device()))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run(mlp, leaves, upstream)
        for tensor in captured:
            tensor.detach().zero_()
        graph.replay()
    stream.synchronize()
    assert_close_in_16_bits(captured, expected, BF16, reduced=1024)


@on_gpu
def test_large_inputs_of_the_gelu_stay_finite():
    x = torch.tensor([[-3e4, -200.0, -20.0, 0.0, 20.0, 200.0, 3e4, 1.0]], dtype=BF16, device="cuda").requires_grad_()
    eye = torch.eye(8, dtype=BF16, device="cuda")
    out, gradient = run(lambda t: mlp(t, eye, None, eye, None), [x], torch.ones(1, 8, device="cuda"))
    assert out.isfinite().all() and gradient.isfinite().all()
