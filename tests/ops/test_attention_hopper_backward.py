"""Backward of attention on a Hopper, against float64.

Without a Hopper the kernel's own source runs on the CPU, as that of forward does in `test_attention_hopper.py`; blocks
run in the order of their numbers, so a block that waited for a later one would be an error.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import random
import subprocess
from ctypes import c_char_p
from types import SimpleNamespace

import pytest
import torch

from ops.contract import DEVICE, assert_deterministic, assert_equal, assert_near_truth, on_hopper
from ops.test_attention_hopper import (
    BF16,
    EMULATOR,
    FP16,
    PACKED,
    _Map,
    compiler,
    inputs,
    needs_compiler,
    on_device,
    packed_draws,
    packed_inputs,
    poison,
    truth,
    truth_of_packed,
)
from tilewright.ops.attention import hopper as backend
from tilewright.ops.attention import hopper_backward as hopper
from tilewright.ops.attention import kernels
from tilewright.ops.attention.op import attention, reference

WRAPPER = """
#include "kernel.cu"
static Map maps[6];
static const float *starts, *slopes;
static float* sums;
static int* counted;
static Sizes asked;
static float by;
static void start() {
  tilewright_attention_backward(maps[0], maps[1], maps[2], maps[3], maps[4], maps[5], starts, slopes, sums, counted,
                                asked, by);
}
extern "C" const char* run(int blocks, const Map* six, const float* first, const float* second, float* third,
                           int* fourth, const Sizes* sizes, float scale, int seed) {
  std::copy(six, six + 6, maps);
  starts = first, slopes = second, sums = third, counted = fourth, asked = *sizes, by = scale;
  dice.seed(seed);
  return run_blocks(blocks, THREADS, start);
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiler(hopper.SOURCE, WRAPPER, tmp_path_factory)


@pytest.fixture
def emulate(compiled, monkeypatch):
    """`hopper.backward` on the CPU, with so many blocks to a section."""
    monkeypatch.setattr(hopper.nvrtc, "_tensor_map", _Map)
    poison(monkeypatch)

    def backward(*call, section=None, seed=0, **options):
        def kernel(device, config):
            def start(programs, arguments):
                *maps, starts, slopes, sums, counts, sizes, scale = arguments
                if section is not None:
                    sizes.section = section
                pointers = starts, slopes, sums, counts, ctypes.byref(sizes)
                failure = compiled(config).run(programs, (_Map * 6)(*maps), *pointers, scale, seed)
                assert failure is None, failure

            return start

        monkeypatch.setattr(hopper, "_kernel", kernel)
        if "starts" in options and section is not None:
            monkeypatch.setattr(hopper, "_section_of", lambda *call: section)
        return hopper.backward(*call, **options)

    return backward


def gradients_of_truth(q, k, v, dout, causal, left, scale):
    """(out as forward saves it, log-sum-exp) and the gradients in float64, which take delta from that rounded out."""
    parts = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = truth(*parts, causal, None if left < 0 else left + 1, scale)
    saved = out.detach().to(q.dtype)
    # By autograd delta is the sum of out dout. What is lost of out adds P times its share to the slopes of the scores.
    lost = ((out.detach() - saved.double()) * dout.double()).sum(3).transpose(1, 2)
    seen = lse.detach() > -torch.inf
    slopes = dout.double(), torch.where(seen, lost, 0.0)
    return saved, lse.detach(), torch.autograd.grad((out, torch.where(seen, lse, 0.0)), parts, slopes)


def assert_gradients(actual, expected, noise=1e-5):
    """Within the rounding of 16 bits: of probabilities, their slopes and the result itself; `noise` where all are 0."""
    for name, got, true in zip("qkv", actual, expected, strict=True):
        unit = torch.finfo(got.dtype).eps / 2
        if not true.abs().max() > 1e-9:  # each query sees one key, or none
            assert got.shape == true.shape and got.abs().max() <= noise, f"d{name}: {got.abs().max():.2e}, and not 0"
            continue
        error, size = (got.double() - true).norm(), true.norm()
        floor = 2e-6 * max(1.0, true.numel() ** 0.5)  # where the truth is 0: the rounding of float32
        assert got.shape == true.shape and error <= 2.5 * unit * size + floor, f"d{name}: error {error / size:.2e}"
        worst, largest = (got.double() - true).abs().max(), true.abs().max()
        assert worst <= 6 * unit * largest + 1e-5, f"d{name}: worst {worst / largest:.2e}"


def given(shape, dtype, causal, left, scale=None, grown=1.0):
    """The arguments of `backward`, and what it should return."""
    q, k, v = inputs(*shape, dtype)
    q = q * grown
    dout = torch.randn(q.shape, device=q.device).to(dtype)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    out, lse, expected = gradients_of_truth(q, k, v, dout, causal, left, scale)
    return (q, k, v, out, lse.float(), dout, causal, left, scale), expected


def noise_of(call):
    """What the rounding of float32 makes of a gradient that is 0: of two equal sums, over all queries of a key."""
    q, k, v, dout = (call[i].nan_to_num(0.0) for i in (0, 1, 2, 5))  # of what is of no packed sequence
    scale = call[8]
    rows = max(t.double().norm(dim=3).max() for t in (q, k))
    slopes = 2**-20 * dout.double().norm(dim=3).max() * v.double().norm(dim=3).max()
    return 1e-5 + float(scale * rows * slopes) * (q.shape[1] * q.shape[2] / k.shape[2]) ** 0.5


CASES = {  # batch, queries, keys, heads, key heads, head_dim; causal, left; dtype, how queries are scaled
    "wide heads share keys": ((1, 256, 256, 4, 2, 128), True, -1, BF16, 1.0),
    "a last tile cut short": ((2, 200, 200, 2, 2, 128), True, -1, BF16, 1.0),
    "narrow heads share keys": ((1, 300, 300, 2, 1, 64), True, -1, FP16, 1.0),
    "every key": ((1, 130, 200, 2, 1, 128), False, -1, BF16, 10.0),
    "every key, narrow": ((1, 200, 70, 1, 1, 64), False, -1, BF16, 1.0),
    "queries that see no key": ((1, 400, 70, 1, 1, 128), True, -1, BF16, 1.0),
    "keys that no query sees": ((1, 70, 400, 1, 1, 64), True, 60, BF16, 1.0),
    "a window": ((1, 330, 330, 2, 1, 128), True, 100, FP16, 10.0),
    "a window of one": ((1, 150, 150, 1, 1, 64), True, 0, BF16, 1.0),
    "one query": ((2, 1, 300, 2, 1, 128), True, -1, BF16, 1.0),
    "one key": ((1, 65, 1, 1, 1, 128), False, -1, FP16, 1.0),
}

LENGTHS = (1, 63, 64, 65, 127, 129, 200, 1000, 1500)


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_the_source_is_right_whatever_the_order(case, emulate):
    shape, causal, left, dtype, grown = CASES[case]
    call, expected = given(shape, dtype, causal, left, grown=grown)
    for seed, section in enumerate((None, 1)):
        assert_gradients(emulate(*call, section=section, seed=seed), expected)


@needs_compiler
def test_every_bit_is_the_same_whoever_is_ahead(emulate):
    call, _ = given((1, 200, 200, 2, 1, 128), BF16, True, -1)
    assert_equal(emulate(*call, seed=1), emulate(*call, seed=2))


def given_packed(starts, others, tokens, sizes, causal, window, dtype):
    """The arguments of `backward`, and what it should return: of each sequence, and 0 for tokens of none."""
    q, k, v = packed_inputs(starts, others, tokens, *sizes, dtype)
    dout, out = torch.randn(q.shape, device=DEVICE).to(dtype), q.clone()
    dout[:, : starts[0]] = dout[:, starts[-1] :] = math.nan
    lse = torch.full((1, *q.shape[2:0:-1]), -torch.inf, device=DEVICE)
    left, scale = -1 if window is None else window - 1, q.shape[3] ** -0.5
    gradients = [t.double().fill_(0.0) for t in (q, k, v)]
    for (a, b), (c, d) in zip(itertools.pairwise(starts), itertools.pairwise(others), strict=True):
        if a < b and c < d:
            one = (q[:, a:b], k[:, c:d], v[:, c:d], dout[:, a:b], causal, left, scale)
            out[:, a:b], lse[:, :, a:b], found = gradients_of_truth(*one)
            for whole, part, rows in zip(gradients, found, ((a, b), (c, d), (c, d)), strict=True):
                whole[:, slice(*rows)] = part
        else:
            out[:, a:b] = 0.0
    return (q, k, v, out, lse, dout, causal, left, scale), gradients


@needs_compiler
@pytest.mark.parametrize("case", PACKED)
def test_gradients_of_packed_sequences_are_their_own(case, emulate):
    call, expected = given_packed(*PACKED[case])
    starts = on_device(*PACKED[case][:2])
    assert_gradients(emulate(*call, starts=starts, seed=1), expected)
    first = emulate(*call, starts=starts, section=1, seed=2)
    assert_gradients(first, expected)
    assert_equal(first, emulate(*call, starts=starts, section=1, seed=3))


@needs_compiler
def test_drawn_gradients_of_packed_sequences_are_their_own(emulate):
    """Others in each run."""
    for drawn in packed_draws(64, True, BF16, 2, 4, (0, 1, 65, 130)):
        call, expected = given_packed(*drawn)
        assert_gradients(emulate(*call, starts=on_device(*drawn[:2])), expected, noise_of(call))


@needs_compiler
@pytest.mark.parametrize("bad", [(-5, 50, 70), (0, 60, 50), (0, 50, 2**31 - 1), (80, 90, 100)])
def test_starts_out_of_place_give_gradients_of_0(bad, emulate):
    call, _ = given_packed((0, 70), (0, 70), (70, 70), (1, 1, 64), True, None, BF16)
    for starts in (bad, (0, 20, 70)), ((0, 20, 70), bad):
        assert not any(gradient.any() for gradient in emulate(*call, starts=on_device(*starts)))


@needs_compiler
def test_the_backend_takes_packed_sequences_forward_and_backward(emulate, monkeypatch):
    """What lies between the public function and the kernels."""
    starts = (3, 70, 70, 150)
    q, k, v = (x.nan_to_num(0.0) for x in packed_inputs(starts, starts, (160, 160), 2, 1, 64, BF16))
    monkeypatch.setattr(backend, "_DEVICES", ("cpu",))
    monkeypatch.setattr(backend.hopper_forward, "is_there", lambda *kind: True)

    def forward(q, k, v, causal, window, scale, given):
        out, lse = truth_of_packed(q, k, v, *(each.tolist() for each in given), causal, window, scale)
        return out.to(q.dtype), lse.float()

    monkeypatch.setattr(backend.hopper_forward, "forward", forward)
    emulated = SimpleNamespace(
        why_not=lambda *call: "", foresee=lambda *kind: None,
        backward=lambda *call: emulate(*call[:9], starts=call[9]),
    )  # fmt: skip
    monkeypatch.setattr(backend, "hopper_backward", emulated)
    inputs = [x.squeeze(0).requires_grad_() for x in (q, k, v)]
    options = {"cu_seqlens_q": on_device(starts)[0], "max_seqlen_q": 80, "window": 40}
    out = attention(*inputs, backend="hopper", **options)
    expected = reference(*(x.double() for x in inputs), **options)
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, upstream)
    assert_near_truth([out, *found], [expected, *torch.autograd.grad(expected, inputs, upstream.double())], 80)


REGISTERS = """
#include "hopper.cuh"
template <int FEW>
static void start() {
  threadIdx.x < 128 ? shrink_registers<FEW>() : grow_registers<240>();
}
extern "C" const char* run_24() { return run_blocks(1, 384, start<24>); }
extern "C" const char* run_32() { return run_blocks(1, 384, start<32>); }
"""


@needs_compiler
def test_the_emulator_knows_who_waits_for_registers(tmp_path):
    """A Hopper gives a thread of 384 no more than 168 at first, and a group that wants more waits for others."""
    (tmp_path / "run.cpp").write_text(REGISTERS)
    command = ["g++", "-std=c++17", "-w", "-shared", "-fPIC", f"-I{EMULATOR}"]
    subprocess.run([*command, "-o", tmp_path / "run.so", tmp_path / "run.cpp"], check=True)
    library = ctypes.CDLL(str(tmp_path / "run.so"))
    for run in (library.run_24, library.run_32):
        run.restype = c_char_p
    assert library.run_24() is None
    assert library.run_32() == b"nobody can go on"


def test_kernels_around_it_are_of_one_dtype(monkeypatch):
    """A launch keeps the binary of its first call."""
    seen = {}
    real = kernels.dispatch.Launch._start

    def start(launch, grid, tensors, scalars):
        seen.setdefault(launch, set()).add(kernels.dispatch.dtypes(tensors))
        real(launch, grid, tensors, scalars)

    monkeypatch.setattr(kernels.dispatch.Launch, "_start", start)
    for dtype in (BF16, FP16):
        rows = torch.ones(1, 64, 1, 128, device=DEVICE, dtype=dtype)
        *_, counts = kernels.prepare(rows, rows, torch.zeros(1, 1, 64, device=DEVICE), 64, 1.0)
        kernels.finish(torch.zeros(64 * 128, device=DEVICE), counts, rows, 64, 1.0)
    assert len(seen) == 4 and all(len(dtypes) == 1 for dtypes in seen.values())


def test_shared_memory_holds_every_config():
    for head_dim in hopper.HEADS:
        config = hopper.launch_config(head_dim, BF16)
        assert config.shared_bytes <= 232_448 and config.queries * head_dim == 2 * 64 * 64
        assert config.macros == {**hopper.launch_config(head_dim, FP16).macros, "HALF": 0}


@pytest.fixture
def bounded(monkeypatch):
    """A wait for what never comes ends in an error, and not with the GPU lost."""
    monkeypatch.setattr(hopper, "BOUNDED_WAITS", 1)


def draws(head_dim, causal, dtype, count):
    """Arguments of `given`, others in each run, of every length as queries and as keys."""
    dice = random.Random(f"{os.environ['TILEWRIGHT_SEED']} {head_dim} {causal} {dtype}")
    for number in range(count):
        queries, keys = LENGTHS[number % len(LENGTHS)], dice.choice(LENGTHS)
        if number >= len(LENGTHS):
            queries, keys = keys, queries
        left = dice.choice((-1, -1, 0, 99, 127, 999)) if causal else -1
        shape = dice.choice((1, 3)), queries, keys, *dice.choice(((16, 4), (4, 1), (2, 2))), head_dim
        yield shape, dtype, causal, left, *dice.choice(((None, 1.0), (0.3, 1.0), (None, 10.0)))


@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", hopper.HEADS)
def test_float64_agrees(head_dim, causal, dtype, bounded):
    for drawn in draws(head_dim, causal, dtype, 2 * len(LENGTHS)):
        call, expected = given(*drawn)
        assert hopper.why_not(*call[:3], *call[6:]) == ""
        try:
            assert_gradients(hopper.backward(*call), expected, noise_of(call))
        except AssertionError as error:
            raise AssertionError(f"{drawn}") from error


@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", hopper.HEADS)
def test_float64_agrees_on_packed_sequences(head_dim, causal, dtype, bounded):
    for drawn in packed_draws(head_dim, causal, dtype, 6):
        call, expected = given_packed(*drawn)
        assert hopper.why_not(*call[:3], *call[6:], True) == ""
        starts = on_device(*drawn[:2])
        assert_gradients(hopper.backward(*call, starts=starts), expected, noise_of(call))
        assert_deterministic(lambda call=call, starts=starts: hopper.backward(*call, starts=starts), times=3)


@on_hopper
@pytest.mark.parametrize(("causal", "left"), [(True, -1), (True, 300), (False, -1)])
@pytest.mark.parametrize("head_dim", hopper.HEADS)
def test_every_bit_is_written_and_the_same_on_every_run(head_dim, causal, left):
    """Where blocks wait for each other, too: of a full mask all begin at the same queries."""
    call, _ = given((1, 2000, 2000, 16, 8, head_dim), BF16, causal, left)
    assert_deterministic(lambda: hopper.backward(*call), times=50)
