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
    on_hopper,
    randn,
)
from tilewright.measure.numerics import relative_error, tolerance
from tilewright.measure.work import Observation
from tilewright.ops import cross_entropy
from tilewright.ops.linear.kernels import pack_and_sum, sum_rows
from tilewright.ops.linear.op import linear, linear_parts, reference
from tilewright.runtime import cublaslt, cublaslt_library, hopper
from tilewright.runtime.cublaslt import Choice
from tilewright.runtime.cublaslt_library import Config, Description, Epilogue, Preference

op = sys.modules["tilewright.ops.linear.op"]
launch = sys.modules["tilewright.ops.linear.launch"]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NOT_SUPPORTED = 15
WIDTHS = {
    **dict.fromkeys((Description.TRANSA, Description.TRANSB, Description.EPILOGUE), 4),
    Description.BIAS_POINTER: 8,
}
# CUBLASLT_ALGO_CONFIG_*, for a report of what a candidate is.
CONFIGURATION = {
    "ID": (0, ctypes.c_int32),
    "TILE_ID": (1, ctypes.c_uint32),
    "SPLITK_NUM": (cublaslt_library.Config.SPLITK_NUM, ctypes.c_int32),
    "REDUCTION_SCHEME": (cublaslt_library.Config.REDUCTION_SCHEME, ctypes.c_uint32),
    "CTA_SWIZZLING": (4, ctypes.c_uint32),
    "CUSTOM_OPTION": (5, ctypes.c_uint32),
    "STAGES_ID": (6, ctypes.c_uint32),
    "INNER_SHAPE_ID": (7, ctypes.c_uint16),
    "CLUSTER_SHAPE_ID": (8, ctypes.c_uint16),
}
DTYPES = {number: dtype for dtype, number in cublaslt_library.TYPES.items()}


class Emulator:
    """cuBLASLt's C interface over memory of the CPU: matrices by columns, arithmetic in float64, rounded once."""

    def __init__(self):
        self.things, self.refused, self.launched, self.asked = {}, set(), [], []
        self.splits, self.noise = (1, 1, 2, 1), {}  # of each candidate; what its order of summation adds
        self.family, self.checked, self.verdict, self.version = 66, 0, 0, 130000

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
        assert preferred[Preference.REDUCTION_SCHEME_MASK] == cublaslt_library.REDUCTION_SCHEME_NONE
        if settings[Description.EPILOGUE] in self.refused:
            return NOT_SUPPORTED
        alignments = [preferred[Preference[f"MIN_ALIGNMENT_{name}_BYTES"]] for name in "ABCD"]
        address = settings.get(Description.BIAS_POINTER, 0) | 256
        self.asked.append([*alignments, address & -address])
        count._obj.value = min(most, len(self.splits))
        for index, result in enumerate(found._obj[: count._obj.value]):
            result.algorithm[0], result.algorithm[1] = len(self.asked) - 1, index
            result.workspace_bytes = 1024 * index
        return 0

    def cublasLtMatmulAlgoConfigGetAttribute(self, algorithm, attribute, value, size, written):
        assert size == ctypes.sizeof(value._obj) == ctypes.sizeof(CONFIGURATION[Config(attribute).name][1])
        index = algorithm._obj.algorithm[1]
        value._obj.value = {
            Config.ID: self.family, Config.SPLITK_NUM: self.splits[index], Config.REDUCTION_SCHEME: 0,
            Config.INNER_SHAPE_ID: 5,
        }[attribute]  # fmt: skip
        return 0

    def cublasLtMatmulAlgoCheck(self, handle, description, a, b, c, d, algorithm, result):
        assert self.get(handle) == "handle" and len(self.get(a)) == len(self.get(d)) == 4
        self.checked += 1
        result._obj.workspace_bytes = 1024 * algorithm._obj.algorithm[1]
        return self.verdict

    def cublasLtGetVersion(self):
        return self.version

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
        promised = self.asked[algorithm._obj.algorithm[0]]
        for address, alignment in zip((a, b, c, d, bias), promised, strict=True):
            assert address % alignment == 0
        left, right = self.matrix(a, self.get(a_layout)).double(), self.matrix(b, self.get(b_layout)).double()
        left = left.t() if settings[Description.TRANSA] else left
        right = right.t() if settings[Description.TRANSB] else right
        value, out = left @ right, self.matrix(d, layout)
        assert value.shape == out.shape
        index = algorithm._obj.algorithm[1]
        self.launched.append((epilogue, index))
        if epilogue == Epilogue.BIAS:
            value = value + self.matrix(bias, (layout[0], layout[1], 1, layout[1])).double()
        out.copy_(value + self.noise.get(index, 0.0))
        return 0

    def cublasLtMatmulDescDestroy(self, description):
        return 0

    cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy = cublasLtMatmulDescDestroy


def forget():
    cublaslt._handles.pop(torch.device("cpu"), None)  # the emulator's
    cublaslt._plans.clear()
    cublaslt._choices.clear()
    cublaslt._uses.clear()
    cublaslt._machine.cache_clear()
    cublaslt.Plan.choices = 0


@pytest.fixture
def emulator(monkeypatch, tmp_path):
    library = Emulator()
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cublaslt, "library", lambda device: library)
    monkeypatch.setattr(cublaslt, "_stream", lambda device: 0)
    monkeypatch.setattr(cublaslt, "_may_time", lambda: False)
    monkeypatch.setattr(cublaslt, "WORTH_CHOOSING", 0)
    monkeypatch.setattr(cublaslt, "_USES", 1)
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


def run(function, leaves, upstream, dtype=None):
    """Outputs and gradients, under autocast where `dtype` is given."""
    with torch.autocast(leaves[0].device.type, dtype, enabled=dtype is not None):
        out = function(*leaves)
    return [out, *gradients([out], leaves, [upstream])]


def truth(function, leaves, upstream, dtype):
    """In float64, of what the matmuls see: all operands in `dtype`."""
    seen = [None if t is None else t.detach().to(dtype).requires_grad_(t.requires_grad) for t in leaves]
    return run(function, doubles(seen), upstream.double())


# The mapping, by the emulator.


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("right_transposed", [False, True])
@pytest.mark.parametrize("left_transposed", [False, True])
@pytest.mark.parametrize("out_dtype", [BF16, FP32], ids=str)
def test_a_matmul_by_rows(has_bias, left_transposed, right_transposed, out_dtype, emulator):
    rows, inner, columns = 5, 24, 16
    left = numbers(inner, rows, grad=False).t() if left_transposed else numbers(rows, inner, grad=False)
    right = numbers(columns, inner, grad=False).t() if right_transposed else numbers(inner, columns, grad=False)
    bias = numbers(columns, dtype=out_dtype, grad=False) if has_bias else None
    out = torch.full((rows, columns), float("nan"), dtype=out_dtype)
    assert cublaslt.matmul(left, right, out, bias)
    assert_near_truth([out], [left.double() @ right.double() + (bias.double() if has_bias else 0.0)], reduced=1)


def test_one_shape_in_many_layouts(emulator):
    """All with the same addresses: a plan must not be taken for another layout's."""
    memory = [numbers(16, 32, grad=False) for _ in range(2)]
    for left in (memory[0][:, :16], memory[0].view(32, 16)[:16], memory[0].view(32, 16)[:16].t()):
        for right in (memory[1][:, :16], memory[1].view(32, 16)[:16], memory[1].view(32, 16)[:16].t()):
            out = numbers(16, 16, grad=False)
            assert cublaslt.matmul(left, right, out)
            assert_near_truth([out], [left.double() @ right.double()], reduced=1)


def test_what_the_library_cannot_do_is_left_to_the_caller(emulator):
    left, right, out = numbers(4, 16, grad=False), numbers(16, 8, grad=False), torch.full((4, 8), 7.0, dtype=BF16)
    for a, b, d in ((left.half(), right, out), (left.float(), right.float(), out), (left, right, out.double())):
        assert not cublaslt.matmul(a, b, d)
    assert not cublaslt.matmul(left[:, :0], right[:0], out) and not cublaslt.matmul(left[:0], right, out[:0])
    emulator.refused = set(Epilogue)
    assert not cublaslt.matmul(left, right, out)
    assert (out == 7.0).all() and not emulator.launched


def test_no_library_no_matmul():
    if DEVICE == "cpu":
        assert not cublaslt.matmul(*(numbers(8, 8, grad=False) for _ in range(3)))


@pytest.mark.parametrize("shape", [(5, 24), (1, 24), (2, 3, 24), (24,), (0, 24), (129, 8)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("refused", [set(), {Epilogue.BIAS}, set(Epilogue)], ids=["both", "no bias", "plain"])
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
    wanted = [Epilogue.BIAS if has_bias else Epilogue.DEFAULT, Epilogue.DEFAULT]
    assert emulator.epilogues == ([] if 0 in shape else [one for one in wanted if one not in refused])


def parted(sizes, used, x, weight, bias=None):
    """The parts that are used, as attention sees them: a head's columns together."""
    parts = linear_parts(x, weight, bias, sizes)
    assert [part.shape for part in parts] == [(*x.shape[:-1], size) for size in sizes]
    return torch.cat([parts[i].unflatten(-1, (-1, 8)).transpose(-2, -3) for i in used], -3)


def reference_parted(sizes, used, x, weight, bias=None):
    parts = reference(x, weight, bias).split(sizes, -1)
    return torch.cat([parts[i].unflatten(-1, (-1, 8)).transpose(-2, -3) for i in used], -3)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("sizes", [(16, 16, 16), (32, 8, 8), (8, 24)], ids=str)
@pytest.mark.parametrize("alone", [False, True], ids=["all", "one alone"])
@pytest.mark.parametrize("autocast", [False, True], ids=["16 bits", "autocast"])
def test_parts_and_their_gradients(has_bias, sizes, alone, autocast, emulator):
    used = (1,) if alone else range(len(sizes))
    leaves = of_linear((2, 5, 24), sum(sizes), BF16, FP32 if autocast else BF16, bias=has_bias)
    functions = [functools.partial(function, sizes, used) for function in (parted, reference_parted)]
    upstream = torch.randn_like(functions[1](*(None if t is None else t.float() for t in leaves))).to(BF16)
    actual = run(functions[0], leaves, upstream, BF16 if autocast else None)
    assert [t.dtype for t in actual[1:]] == [t.dtype for t in leaves if t is not None]
    assert_near_truth(actual, truth(functions[1], leaves, upstream, BF16), reduced=sum(sizes))
    assert emulator.epilogues


def test_parts_have_no_second_derivative_and_must_add_up(emulator):
    leaves = of_linear((6, 16), 32, BF16, BF16)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(linear_parts(*leaves, (16, 8, 8))[1].sum(), leaves[0], create_graph=True)
    for sizes in ((16, 8), (16, 0, 16)):
        with pytest.raises(ValueError, match=r"the parts \(16, .*\) are not the 32 features; give positive sizes"):
            linear_parts(*leaves, sizes)


@pytest.mark.parametrize("index", range(3))
def test_only_one_input_wants_a_gradient(index, emulator):
    leaves = of_linear((6, 16), 32, BF16, FP32)
    for position, leaf in enumerate(leaves):
        leaf.requires_grad_(position == index)
    upstream = numbers(6, 32, grad=False)
    actual = run(linear, leaves, upstream, BF16)
    assert_near_truth(actual, truth(reference, leaves, upstream, BF16), reduced=32)
    assert len(emulator.launched) == (0 if index == 0 else 1)  # with the weight frozen it is plain: PyTorch keeps no x


def test_a_float32_weight_has_a_gradient_that_was_never_rounded_to_16_bits(emulator):
    leaves = of_linear((64, 32), 16, BF16, FP32)
    _, _, dweight, dbias = run(linear, leaves, numbers(64, 16, grad=False), BF16)
    for gradient in (dweight, dbias):
        assert relative_error(gradient.to(BF16), gradient) > 1e-4


def test_the_result_may_be_overwritten_as_one_of_pytorch_may(emulator):
    """As cross_entropy overwrites logits: it is the op's own memory, and nobody keeps it for a backward."""
    x, weight, _ = of_linear((2, 3, 16), 24, BF16, FP32, bias=False)
    targets = torch.randint(24, (2, 3))

    def loss(matmul, inplace):
        with torch.autocast("cpu", BF16):
            out = cross_entropy(matmul(x, weight), targets, inplace=inplace)
        return [out, *gradients([out], [x, weight], [torch.ones_like(out)])]

    found, expected = loss(linear, True), loss(torch.nn.functional.linear, False)
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2, check_dtype=False)


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
    """Candidates are as slow as the list says."""
    milliseconds = [1.0, 0.5, 0.1, 0.8]

    def measure(launch, candidate, times=2):
        return milliseconds[candidate.algorithm[1]] if launch(candidate) else float("inf")

    monkeypatch.setattr(cublaslt, "_may_time", lambda: True)
    monkeypatch.setattr(cublaslt, "_milliseconds", measure)
    return milliseconds


@pytest.fixture(scope="module")
def operands():
    """The same from call to call: with other addresses, hence alignments, it may be another plan."""
    return [numbers(*shape, grad=False) for shape in ((4, 16), (16, 8), (4, 8))]


def chosen(emulator, operands):
    """Which candidate does the matmul, the choice made: the last to be launched, twice."""
    (left, right, out), taken = operands, []
    for _ in range(2):
        assert cublaslt.matmul(left, right, out)
        assert_near_truth([out], [left.double() @ right.double()], reduced=1)
        taken.append(emulator.launched[-1][1])
    assert taken[0] == taken[1]
    return taken[0]


def test_the_quickest_candidate_that_sums_in_one_piece_is_taken_and_kept(emulator, operands, clock):
    assert chosen(emulator, operands) == 1  # and not the third, which splits its sums
    tried = len(emulator.launched)
    clock[3] = 0.01
    assert chosen(emulator, operands) == 1 and len(emulator.launched) == tried + 2


def test_the_first_candidate_wins_unless_another_is_clearly_quicker(emulator, operands, clock):
    clock[1:] = [0.995, 0.1, 0.995]
    assert chosen(emulator, operands) == 0


def test_a_short_timing_decides_nothing_between_two_that_are_close(emulator, operands, clock, monkeypatch):
    """Two launches differ by chance by more than two algorithms do, and a GPU at its limit of power is another one."""
    measure, tried = cublaslt._milliseconds, []

    def sometimes(launch, candidate, times=2):
        index = candidate.algorithm[1]
        tried.append((index, times))
        by_time = {0: (1.0, 1.0), 1: (0.90, 0.93), 3: (0.96, 0.95)} if times < 10 else {}
        return by_time[index][times > 2] if index in by_time and launch(candidate) else measure(launch, candidate)

    monkeypatch.setattr(cublaslt, "_milliseconds", sometimes)
    clock[1:] = [0.97, 0.1, 0.93]
    assert chosen(emulator, operands) == 3
    assert not any(index == 0 and times > 10 for index, times in tried)  # who has lost is not timed for long


@pytest.mark.parametrize("values", [numbers, lambda *shape, grad: torch.full(shape, float("nan"), dtype=BF16)])
def test_a_candidate_with_other_bits_is_not_taken(values, emulator, clock):
    left, right, out = (values(*shape, grad=False) for shape in ((4, 16), (16, 8), (4, 8)))
    emulator.noise = {1: 1.0}
    assert cublaslt.matmul(left, right, out)
    assert emulator.launched[-1][1] == (0 if out.isnan().all() else 3)


def test_a_matmul_of_nothing_decides_nothing(emulator, operands, clock):
    """On zeros all algorithms agree, whatever their order of summing."""
    (left, right, out), (emulator.noise) = operands, {1: 0.0}
    assert cublaslt.matmul(left, torch.zeros_like(right), out) and emulator.launched[-1][1] == 0
    forget()
    assert not os.path.exists(os.environ["TILEWRIGHT_CACHE"])  # nothing was decided
    zeros = torch.zeros_like(right)
    assert cublaslt.matmul(left, zeros, out)
    zeros.copy_(right)
    assert cublaslt.matmul(left, zeros, out) and emulator.launched[-1][1] == 1


def test_a_shape_is_timed_when_it_comes_again(emulator, operands, clock, monkeypatch):
    monkeypatch.setattr(cublaslt, "_USES", 3)
    left, right, out = operands
    taken = []
    for _ in range(4):
        assert cublaslt.matmul(left, right, out)
        taken.append(emulator.launched[-1][1])
    assert taken == [0, 0, 1, 1]


def test_a_choice_is_found_again_on_disk(emulator, operands, clock, caplog):
    caplog.set_level("DEBUG", "tilewright")
    assert chosen(emulator, operands) == 1
    assert "chose #1 of 3 for 4 x 16 x 8" in caplog.text
    forget()
    clock[3] = 0.01  # who searches again would take it
    emulator.launched.clear()
    assert chosen(emulator, operands) == 1 and len(emulator.launched) == 2 and emulator.checked == 1
    assert "loaded from disk" in caplog.text


def test_that_the_first_is_best_is_found_on_disk_too(emulator, operands, clock):
    clock[1:] = [1.5, 1.5, 1.5]
    assert chosen(emulator, operands) == 0
    forget()
    clock[3] = 0.01
    emulator.launched.clear()
    assert chosen(emulator, operands) == 0 and len(emulator.launched) == 2


@pytest.mark.parametrize("attribute", ["verdict", "family", "splits"])
def test_a_choice_that_the_library_does_not_confirm_is_not_taken(attribute, emulator, operands, clock):
    assert chosen(emulator, operands) == 1
    forget()
    setattr(emulator, attribute, {"verdict": NOT_SUPPORTED, "family": 67, "splits": (1, 2, 1, 1)}[attribute])
    emulator.launched.clear()
    assert chosen(emulator, operands) == 0 and len(emulator.launched) == 2


@pytest.mark.parametrize("what", ["version", "torch"])
def test_a_choice_of_another_version_is_not_found(what, emulator, operands, clock, monkeypatch):
    assert chosen(emulator, operands) == 1
    forget()
    clock[3] = 0.01
    if what == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    else:
        emulator.version += 1
    assert chosen(emulator, operands) == 3


def test_a_damaged_choice_is_made_again(emulator, operands, clock):
    assert chosen(emulator, operands) == 1
    (entry,) = Path(os.environ["TILEWRIGHT_CACHE"], "kernels").iterdir()
    entry.write_bytes(entry.read_bytes()[:-2])
    forget()
    clock[3] = 0.01
    assert chosen(emulator, operands) == 3


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"null", b"{}", b'{"algorithm": "00", "family": [1, 2]}', b'{"algorithm": "zz", "family": [1, 2]}',
        b'{"algorithm": 3, "family": [1, 2]}', b'{"algorithm": null, "family": [1]}',
        b'{"algorithm": null, "family": 3}', b'{"algorithm": null, "family": ["a", 1]}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_choice_is_not_taken_for_one(text):
    assert Choice.from_json(text) is None


def test_a_choice_survives_being_written():
    for choice in (Choice(None, (1, 2)), Choice(bytes(range(64)), (66, 5))):
        assert Choice.from_json(choice.to_json()) == choice


def test_row_counts_of_a_bucket_share_one_search(emulator, clock, monkeypatch):
    """Padded batches have ever other counts of tokens: the clock is asked once for those that are near each other."""
    monkeypatch.setattr(cublaslt, "_USES", 3)
    right, searches = numbers(16, 8, grad=False), []
    choose = cublaslt.Plan._choose

    def search(plan, *rest):
        searches.append(plan.bucket)
        choose(plan, *rest)

    monkeypatch.setattr(cublaslt.Plan, "_choose", search)
    for rows in range(225, 257):  # one bucket for each alignment that memory here happens to have
        left, out = numbers(rows, 16, grad=False), torch.empty(rows, 8, dtype=BF16)
        assert cublaslt.matmul(left, right, out)
        assert_near_truth([out], [left.double() @ right.double()], reduced=1)
    assert len(set(searches)) == len(searches) <= 3 and emulator.launched[-1][1] == 1
    for rows in range(1, 2049):
        assert cublaslt.matmul(numbers(rows, 16, grad=False), right, torch.empty(rows, 8, dtype=BF16))
    assert len(set(searches)) == len(searches) <= 3 * 4 * 11


def test_buckets_are_near_and_few():
    for rows in [*range(1, 3000), 2**20 + 1, 2**31]:
        bucket = cublaslt._bucket(rows)
        assert rows <= bucket <= max(rows * 1.25, 8) and cublaslt._bucket(bucket) == bucket
    assert len({cublaslt._bucket(rows) for rows in range(1, 4097)}) < 50


@pytest.mark.parametrize("gap", [lambda m: m[:, ::2], lambda m: m[:, ::2].t(), lambda m: m[:1].expand(16, -1)])
def test_a_matrix_with_gaps_between_its_elements_is_left_to_torch(gap, emulator):
    right = gap(numbers(16, 16, grad=False))
    left = numbers(4, right.shape[0], grad=False)
    assert not cublaslt.matmul(left, right, numbers(4, right.shape[1], grad=False))


def test_a_small_matmul_takes_the_first_candidate(emulator, operands, clock, monkeypatch):
    monkeypatch.setattr(cublaslt, "WORTH_CHOOSING", 2 * 4 * 16 * 8 + 1)
    assert chosen(emulator, operands) == 0 and len(emulator.launched) == 2


def test_nothing_is_timed_where_bits_must_not_depend_on_it(emulator, operands, clock):
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(emulator, operands) == 0 and len(emulator.launched) == 2
    finally:
        torch.use_deterministic_algorithms(False)
    assert chosen(emulator, operands) == 1
    torch.use_deterministic_algorithms(True)
    try:
        assert chosen(emulator, operands) == 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_capture_takes_the_first_and_decides_nothing(emulator, operands, clock, monkeypatch):
    with monkeypatch.context() as capture:
        capture.setattr(cublaslt, "_may_time", lambda: False)
        assert chosen(emulator, operands) == 0 and len(emulator.launched) == 2
    assert chosen(emulator, operands) == 1


def test_a_program_of_many_shapes_does_not_choose_for_ever(emulator, operands, clock, monkeypatch):
    monkeypatch.setattr(cublaslt, "_MOST_CHOICES", 0)
    assert chosen(emulator, operands) == 0


def test_plans_are_not_kept_without_end(emulator, monkeypatch):
    monkeypatch.setattr(cublaslt, "_PLANS", 3)
    right = numbers(16, 8, grad=False)
    for rows in range(1, 8):
        assert cublaslt.matmul(numbers(rows, 16, grad=False), right, numbers(rows, 8, grad=False))
        assert len(cublaslt._plans) <= 3


def test_small_layers_are_left_to_pytorch(emulator, monkeypatch):
    leaves = of_linear((6, 16), 24, BF16, FP32)
    monkeypatch.setattr(cublaslt, "WORTH_CHOOSING", 2 * 6 * 16 * 24)
    run(linear, leaves, numbers(6, 24, grad=False), BF16)
    assert len(emulator.launched) == 2
    monkeypatch.setattr(cublaslt, "WORTH_CHOOSING", 2 * 6 * 16 * 24 + 1)
    run(linear, leaves, numbers(6, 24, grad=False), BF16)
    assert len(emulator.launched) == 2


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
    expected |= {f"CUBLASLT_ALGO_CONFIG_{name}": number for name, (number, _) in CONFIGURATION.items()}
    types = {"CUDA_R_16BF": BF16, "CUDA_R_16F": FP16, "CUDA_R_32F": FP32}
    expected |= {name: cublaslt_library.TYPES[dtype] for name, dtype in types.items()}
    expected |= {
        "CUBLAS_COMPUTE_32F": cublaslt_library.COMPUTE_32F,
        "CUBLAS_OP_N": int(False),
        "CUBLAS_OP_T": int(True),
        "CUBLAS_STATUS_SUCCESS": 0,
        "CUBLAS_STATUS_NOT_SUPPORTED": NOT_SUPPORTED,
        "CUBLASLT_REDUCTION_SCHEME_NONE": cublaslt_library.REDUCTION_SCHEME_NONE,
        "sizeof(cublasLtMatmulHeuristicResult_t)": ctypes.sizeof(cublaslt_library.Heuristic),
    }
    members = {"algo": "algorithm", "workspaceSize": "workspace_bytes", "state": "state", "wavesCount": "waves"}
    for theirs, ours in members.items():
        offset = f"offsetof(cublasLtMatmulHeuristicResult_t, {theirs})"
        expected[offset] = getattr(cublaslt_library.Heuristic, ours).offset
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
    leaves = doubles(of_linear((3, 5), 7, FP32, FP32))
    assert torch.autograd.gradcheck(linear, leaves)


@pytest.mark.parametrize("refused", [set(), set(Epilogue)], ids=["fused", "plain"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_opcheck(refused, has_bias, emulator):
    emulator.refused = refused
    x, weight, bias = of_linear((6, 16), 24, BF16, FP32, bias=has_bias)
    cast = weight.detach().to(BF16)
    torch.library.opcheck(torch.ops.tilewright.linear.default, (x, weight, bias, cast), rtol=1e-2, atol=1e-2)
    inputs = (numbers(6, 24, grad=False), x.detach(), cast, [True, True], [True, True, has_bias])
    torch.library.opcheck(torch.ops.tilewright.linear_backward.default, inputs)


@pytest.mark.parametrize("autocast", [False, True], ids=["16 bits", "autocast"])
def test_compiles_into_one_graph_with_the_same_result(autocast, request, monkeypatch):
    if DEVICE == "cpu":
        request.getfixturevalue("emulator")
    monkeypatch.setattr(cublaslt, "WORTH_CHOOSING", 0)
    leaves = of_linear((4, 6, 16), 32, BF16, FP32 if autocast else BF16, device=DEVICE)

    def function(x, weight, bias):
        with torch.autocast(DEVICE, BF16, enabled=autocast):
            return (linear(linear(x, weight), weight.t(), bias[:16]),)

    assert_compiles(function, leaves)


def test_no_second_derivative(emulator):
    leaves = of_linear((6, 16), 32, BF16, BF16)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(linear(*leaves).sum(), leaves[0], create_graph=True)


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


@pytest.mark.parametrize("parts", [(), (8, 16)], ids=["whole", "parts"])
def test_who_observes_a_step_sees_the_matmuls_that_ever_run(parts, emulator):
    x, weight, bias = of_linear((6, 16), 24, BF16, BF16)

    def step():
        results = linear_parts(x, weight, bias, parts) if parts else (linear(x, weight, bias),)
        sum(result.sum() for result in results).backward()

    step()
    alone, emulator.launched = emulator.epilogues, []
    observation = Observation(compiled=False)
    observation.begin()
    step()
    found = observation.end()
    assert alone and emulator.epilogues == alone
    forward, backward = sorted(
        (each for each in found if each.op == "tilewright_linear_matmul"), key=lambda each: each.shapes
    )
    assert (forward.shapes, backward.shapes) == ("6x16, 16x24, 6x24, 24", "6x24, 24x16, 6x16")
    assert sum(each.flops for each in found if each.dtype) == 3 * 2 * 6 * 16 * 24


@pytest.mark.parametrize("sizes", [(12, 16), (16, 12)], ids=str)
def test_sizes_that_the_library_does_not_take_are_plain(sizes, emulator):
    width, out = sizes
    leaves = of_linear((6, width), out, BF16, BF16)
    assert torch.equal(linear(*leaves), reference(*leaves))
    full = of_linear((6, 16), 16, FP32, FP32)
    assert torch.equal(linear(*full), reference(*full))
    assert not emulator.epilogues


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ([3, (8, 8)], TypeError, "x must be a tensor"),
        ([(3, 8), 3], ValueError, "weight must be a matrix"),
        ([(), (8, 8)], ValueError, "x is a scalar"),
        ([(3, 8), (8, 7)], ValueError, r"weight has shape \(8, 7\), but \(8, 8\)"),
        ([(3, 8), (16, 8), (8,)], ValueError, r"bias has shape \(8,\), but \(16,\)"),
        ([(3, 8), torch.zeros(8, 8, dtype=BF16)], TypeError, "convert one, or use autocast"),
        ([(3, 8), torch.zeros(8, 8, dtype=torch.float64)], TypeError, "float64"),
    ],
)
def test_bad_input_is_one_sentence(arguments, kind, message):
    given = [torch.zeros(a) if isinstance(a, tuple) else a for a in arguments]
    with pytest.raises(kind, match=message) as caught:
        linear(*given)
    assert "\n" not in str(caught.value)


# The library itself.


@pytest.fixture
def always(monkeypatch):
    """The library, and its choice, for matmuls of any size."""
    monkeypatch.setattr(cublaslt, "WORTH_CHOOSING", 0)
    forget()
    yield
    forget()


def configuration(plan, candidate):
    """What the library tells of a candidate."""
    found = {"workspace": candidate.workspace_bytes}
    for name, (number, kind) in CONFIGURATION.items():
        value, written = kind(), ctypes.c_size_t()
        status = plan.loaded.cublasLtMatmulAlgoConfigGetAttribute(
            ctypes.byref(candidate), number, ctypes.byref(value), ctypes.sizeof(value), ctypes.byref(written)
        )
        found[name] = value.value if status == 0 else f"status {status}"
    return found


@on_gpu
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("right_transposed", [True, False], ids=["forward", "dx"])
@pytest.mark.parametrize(
    ("rows", "columns", "inner"),
    [(4096, 3072, 768), (4096, 768, 3072), (2048, 6144, 2048), (1000, 520, 1032), (8184, 1544, 264)],
)
def test_every_candidate_gives_the_same_bits(rows, columns, inner, right_transposed, has_bias):
    forget()
    left, out = randn(rows, inner, dtype=BF16, grad=False), randn(rows, columns, dtype=BF16, grad=False)
    right = randn(columns, inner, dtype=BF16, grad=False).t() if right_transposed else None
    right = randn(inner, columns, dtype=BF16, grad=False) if right is None else right
    bias = randn(columns, dtype=BF16, grad=False) if has_bias else None
    assert cublaslt.matmul(left, right, out, bias)
    (plan,) = cublaslt._plans.values()
    assert plan.candidates
    expected, different = None, []
    for index, candidate in enumerate(plan.candidates):
        out.fill_(float("nan"))
        if plan._launch(candidate, right.data_ptr(), left.data_ptr(), out.data_ptr()):
            expected = out.clone() if expected is None else expected
            count = int((out.view(torch.int16) != expected.view(torch.int16)).sum())
            if count:
                different.append(f"{index}: {count} elements, {configuration(plan, candidate)}")
    first = f"the first: {configuration(plan, plan.candidates[0])}"
    assert not different, "\n".join([f"{len(different)} of {len(plan.candidates)} differ", first, *different])


@on_gpu
@pytest.mark.parametrize("tokens", [1, 127, 1000])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["16 bits", "autocast"])
@pytest.mark.parametrize(("width", "out"), [(768, 2304), (1032, 520), (8, 16)])
def test_the_library_agrees_with_float64(tokens, dtype, autocast, width, out, always):
    leaves = of_linear((tokens, width), out, dtype, FP32 if autocast else dtype, device="cuda")
    upstream = randn(tokens, out, dtype=dtype, grad=False)
    actual = run(linear, leaves, upstream, dtype if autocast else None)
    assert_near_truth(actual, truth(reference, leaves, upstream, dtype), reduced=max(tokens, width, out))
    ours = dtype == BF16 and launch.hopper.ready(torch.device("cuda", 0))  # and the bias is added by a kernel of ours
    plans = [plan is not None and bool(plan.candidates) for plan in cublaslt._plans.values()]
    assert plans == [True] * (1 if ours else 2)


@on_gpu
def test_same_bits_on_every_run(always):
    leaves = of_linear((4096, 768), 3072, BF16, FP32, device="cuda")
    upstream = randn(4096, 3072, dtype=BF16, grad=False)
    first = run(linear, leaves, upstream, BF16)
    for _ in range(100):
        assert_equal(first, run(linear, leaves, upstream, BF16))
    forget()  # another process, which chooses again
    assert_equal(first, run(linear, leaves, upstream, BF16))
    assert_deterministic(lambda: run(linear, leaves, upstream, BF16))


@on_gpu
@pytest.mark.parametrize("known", [False, True], ids=["first seen in the capture", "seen before"])
def test_a_captured_graph_replays_forward_and_backward(known, always):
    leaves = of_linear((512, 256), 1024, BF16, BF16, device="cuda")
    upstream = randn(512, 1024, dtype=BF16, grad=False)
    expected = truth(reference, leaves, upstream, BF16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(linear if known else reference, leaves, upstream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = run(linear, leaves, upstream)
        for tensor in captured:
            tensor.detach().zero_()
        graph.replay()
    stream.synchronize()
    assert_near_truth(captured, expected, reduced=1024)


@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (7, 33), (100, 300), (257, 129)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_sum_over_rows(shape, dtype):
    """By the kernel: on the CPU through the interpreter."""
    x = torch.randn(shape).to(DEVICE, dtype)
    assert_near_truth([sum_rows(x)], [x.double().sum(0)], shape[0])


@pytest.mark.parametrize("rows", [0, 1, 7, 257])
@pytest.mark.parametrize("sizes", [(16, 16, 16), (300, 33, 1), (512, 256, 256), (1, 700, 8)], ids=str)
def test_three_matrices_beside_each_other_and_their_sum(rows, sizes):
    parts = [torch.randn(rows, size).to(DEVICE, BF16) for size in sizes]
    packed, sums = pack_and_sum(parts)
    assert torch.equal(packed, torch.cat(parts, 1))
    assert_near_truth([sums], [packed.double().sum(0)], rows)
    assert torch.equal(sums, sum_rows(packed)) or sizes[0] % 256  # where the bands are the same, so are the bits


@pytest.mark.parametrize("full", [False, True])
def test_a_weights_gradient_in_two_matmuls_is_that_of_one(full, monkeypatch):
    matmuls, mm = [], torch.mm

    def watched(left, *others, **given):
        matmuls.append(len(left))
        return mm(left, *others, **given)

    monkeypatch.setattr(torch, "mm", watched)
    monkeypatch.setattr(launch, "_TILE", 8)
    monkeypatch.setattr(op.dispatch, "multiprocessors", lambda device: 11)  # 3 tiles, and 2 and 1 cut by 4 and by 8
    launch.split_point.cache_clear()
    dy, x = randn(40, 24, dtype=BF16, grad=False), randn(40, 8, dtype=BF16, grad=False)
    found = launch.backward(launch.Gradient(dy, x, x.new_empty(24, 8), [full, full], [False, True, False]))[1]
    launch.split_point.cache_clear()
    assert matmuls == [16, 8] and found.dtype == (FP32 if full else BF16)
    assert torch.allclose(found.double(), dy.double().t() @ x.double(), rtol=0.01, atol=1e-5 if full else 0.02)


@pytest.mark.parametrize(
    ("dtype", "inner", "has_bias", "takes"),
    [(BF16, 768, True, True), (BF16, 2056, True, False), (BF16, 768, False, False), (torch.float16, 768, True, False)],
)
def test_which_biases_a_kernel_adds(dtype, inner, has_bias, takes, emulator, monkeypatch):
    taken = []
    monkeypatch.setattr(launch.hopper, "ready", lambda device, *names: True)
    monkeypatch.setattr(launch, "matmul_with_bias", lambda tokens, matrix, bias, out: taken.append(tuple(out.shape)))
    weight, bias = numbers(16, inner, dtype=dtype), numbers(16, dtype=FP32) if has_bias else None
    with torch.autocast("cpu", dtype):
        assert linear(numbers(3, 5, inner, dtype=dtype), weight, bias).shape == (3, 5, 16)
    assert taken == ([(15, 16)] if takes else [])


@on_hopper
@pytest.mark.parametrize("rows", [1, 256, 300, 9000])
@pytest.mark.parametrize(("columns", "inner"), [(8, 8), (200, 72), (2304, 768), (3072, 1024)])
@pytest.mark.parametrize("stored", [BF16, FP32], ids=str)
def test_a_kernel_that_adds_the_bias(rows, columns, inner, stored, monkeypatch):
    torch.manual_seed(rows)
    x, matrix = (randn(size, inner, dtype=BF16, grad=False) for size in (rows, columns))
    bias = randn(columns, dtype=stored, grad=False)
    out, again = (x.new_full((rows, columns), float("nan")) for _ in range(2))
    launch.matmul_with_bias(x, matrix, bias, out)
    assert_near_truth([out], [x.double() @ matrix.double().t() + bias.double()], inner)
    monkeypatch.setattr(op.dispatch, "multiprocessors", lambda device: 6)
    launch.matmul_with_bias(x, matrix, bias, again)
    assert_equal([again], [out])


# Tiles are of 256 x 192, a step of 64: whole, cut short, less than one, several turns, columns of one tile, of many.
@on_hopper
@pytest.mark.parametrize("rows", [1, 256, 300, 9000])
@pytest.mark.parametrize(
    ("sizes", "columns"), [((64, 64, 64), 8), ((768, 768, 768), 768), ((512, 128, 128), 200), ((2048, 64, 192), 2048)]
)
def test_gradients_of_three_parts_where_they_are(rows, sizes, columns, monkeypatch):
    torch.manual_seed(rows)
    parts = [randn(rows, size, dtype=BF16, grad=False) for size in sizes]
    matrix = randn(sum(sizes), columns, dtype=BF16, grad=False)
    together = torch.cat([part.double() for part in parts], 1)
    found = launch.gradient_of_parts(parts, matrix, True)
    assert_near_truth(found, [together @ matrix.double(), together.sum(0)], max(sum(sizes), rows))
    assert_equal([launch.gradient_of_parts(parts, matrix, False)[0]], [found[0]])
    assert_equal(launch.gradient_of_parts(parts, matrix, True), found)
    monkeypatch.setattr(op.dispatch, "multiprocessors", lambda device: 6)
    few = launch.gradient_of_parts(parts, matrix, True)
    assert_equal([few[0]], [found[0]])
    assert_near_truth([few[1]], [together.sum(0)], rows)


@on_hopper
@pytest.mark.parametrize("autocast", [False, True], ids=["16 bits", "autocast"])
def test_large_parts_are_not_packed(autocast, monkeypatch):
    taken, real = [], op.gradient_of_parts
    monkeypatch.setattr(op, "gradient_of_parts", lambda *given: taken.append(len(given[0])) or real(*given))
    leaves = of_linear((4, 2048, 768), 2304, BF16, FP32 if autocast else BF16, device=DEVICE)
    functions = [functools.partial(function, (768,) * 3, range(3)) for function in (parted, reference_parted)]
    upstream = numbers(4, 3 * 96, 2048, 8, grad=False, device=DEVICE)
    actual = run(functions[0], leaves, upstream, BF16 if autocast else None)
    assert_near_truth(actual, truth(functions[1], leaves, upstream, BF16), reduced=8192)
    assert taken == [3]


@on_hopper
def test_an_observer_sees_the_matmul_of_parts():
    parts = [randn(4096, 768, dtype=BF16, grad=False) for _ in range(3)]
    matrix = randn(2304, 768, dtype=BF16, grad=False)
    launch.gradient_of_parts(parts, matrix, True)
    observation = Observation(compiled=False)
    observation.begin()
    launch.gradient_of_parts(parts, matrix, True)
    torch.cuda.synchronize()
    seen = [work for work in observation.end() if work.op.endswith("parts_gradient")]
    assert sum(work.flops for work in seen) == 2 * 4096 * 2304 * 768 and all(work.seconds > 0 for work in seen)


def test_which_gradients_of_parts_a_kernel_takes_as_they_are(monkeypatch):
    monkeypatch.setattr(hopper, "ready", lambda device, *names: True)
    part, cast = torch.empty(2, 64, dtype=BF16), torch.empty(192, 8, dtype=BF16)
    assert launch.takes_parts([part] * 3, cast)
    for parts in ([part] * 2, [part, None, part], [part, part, part[:, :32]], [part, part, torch.empty(2, 8192)]):
        assert not launch.takes_parts(parts, cast)
    assert not launch.takes_parts([part] * 3, cast.to(FP16))
    monkeypatch.setattr(hopper, "ready", lambda device, *names: False)
    assert not launch.takes_parts([part] * 3, cast)


@pytest.mark.parametrize(("width", "out"), [(9, 16), (16, 9), (7, 13), (8, 8)])
@pytest.mark.parametrize("biased", [True, False])
def test_odd_sizes_are_padded_to_whole_vectors_with_the_same_result(width, out, biased, monkeypatch):
    monkeypatch.setattr(op, "_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(op, "WORTH_PADDING", 0)
    sizes, matmul, plain = [], op.forward, op.reference
    monkeypatch.setattr(op, "forward", lambda layer: (sizes.extend(layer.cast.shape), matmul(layer))[1])
    monkeypatch.setattr(op, "reference", lambda x, w, b: (sizes.extend(w.shape), plain(x, w, b))[1])
    leaves = [torch.randn(*shape, device=DEVICE).bfloat16().requires_grad_() for shape in ((2, 5, width), (out, width))]
    bias = torch.randn(out, device=DEVICE).bfloat16().requires_grad_() if biased else None
    y = linear(*leaves, bias)
    assert sizes and all(size % 8 == 0 for size in sizes) and y.is_contiguous() and y.shape == (2, 5, out)
    upstream = torch.randn_like(y)
    leaves = [*leaves, *([bias] if biased else [])]
    found = [y, *torch.autograd.grad(y, leaves, upstream)]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    expected = torch.nn.functional.linear(*doubles)
    expected = [expected, *torch.autograd.grad(expected, doubles, upstream.double())]
    for a, e in zip(found, expected, strict=True):
        assert a.shape == e.shape and (a.double() - e).norm() <= 0.01 * e.norm()


@pytest.mark.parametrize("frozen", ["x", "weight", "bias", "none"])
def test_a_padded_matmul_under_autocast_has_the_gradients_of_its_parameters_dtypes(frozen, monkeypatch):
    monkeypatch.setattr(op, "_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(op, "WORTH_PADDING", 0)
    x, weight, bias = (torch.randn(*shape, device=DEVICE) for shape in ((3, 9), (13, 9), (13,)))
    leaves = {"x": x, "weight": weight, "bias": bias}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    with torch.autocast(DEVICE, BF16):
        y = linear(x, weight, bias)
    assert y.dtype == BF16
    upstream = torch.randn_like(y)
    y.backward(upstream)
    doubles = [leaf.detach().to(BF16).double().requires_grad_() for leaf in leaves.values()]
    torch.nn.functional.linear(*doubles).backward(upstream.double())
    for (name, leaf), double in zip(leaves.items(), doubles, strict=True):
        assert (leaf.grad is None) == (name == frozen)
        if leaf.grad is not None:
            assert leaf.grad.dtype == leaf.dtype and leaf.grad.shape == leaf.shape
            assert (leaf.grad.double() - double.grad).norm() <= 0.01 * double.grad.norm()


def test_small_matmuls_and_those_that_somebody_traces_are_not_padded(monkeypatch):
    monkeypatch.setattr(op, "_DEVICES", ("cuda", "cpu"))
    x, weight = torch.randn(4, 9).bfloat16(), torch.randn(7, 9).bfloat16()
    assert not op.is_worth_padding(x, weight)
    monkeypatch.setattr(op, "WORTH_PADDING", 0)
    assert op.is_worth_padding(x, weight) and not op.is_worth_padding(x.float(), weight.float())
    with FlopCounterMode(display=False):
        assert not op.is_worth_padding(x, weight)
