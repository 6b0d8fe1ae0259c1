"""Forward of attention on a Hopper, against float64.

Without a Hopper the kernel's own source runs on the CPU, by `hopper_emulator`: indices, masks, barriers and the order
of tiles are the kernel's, what a Hopper does beside its threads is the emulator's.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import random
import shutil
import subprocess
from ctypes import c_char_p, c_int, c_longlong, c_void_p
from pathlib import Path

import pytest
import torch

from ops.contract import DEVICE, assert_deterministic, assert_equal, assert_no_worse, on_hopper
from tilewright.ops.attention import hopper_backward
from tilewright.ops.attention import hopper_forward as hopper
from tilewright.ops.attention.op import attention
from tilewright.runtime import nvrtc

EMULATOR = Path(__file__).with_name("hopper_emulator")
BF16, FP16 = torch.bfloat16, torch.float16


def truth(q, k, v, causal, window=None, scale=None):
    """The result and its logarithm in float64, written out, a query head at a time."""
    (queries, heads), (keys, key_heads) = q.shape[1:3], k.shape[1:3]
    last = torch.arange(queries, device=q.device)[:, None] + keys - queries
    key = torch.arange(keys, device=q.device)[None, :]
    hidden = (key > last) if causal else torch.zeros_like(key > last)
    if window is not None:
        hidden = hidden | (key <= last - window)
    outs, logs = [], []
    for head in range(heads):
        mine = [t[:, :, head * t.shape[2] // heads].double() for t in (q, k, v)]
        scores = mine[0] @ mine[1].transpose(1, 2) * (q.shape[3] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill(hidden, -torch.inf)
        log = scores.logsumexp(2)
        logs.append(log)
        outs.append((scores - log[..., None]).exp().nan_to_num(0.0) @ mine[2])
    assert heads % key_heads == 0
    return torch.stack(outs, 2), torch.stack(logs, 1)


def assert_true(actual, expected):
    """Within the rounding of 16 bits: of probabilities, whose sum is 1, and of the result itself."""
    (out, lse), (true_out, true_lse) = actual, expected
    unit = torch.finfo(out.dtype).eps / 2
    assert out.shape == true_out.shape and lse.shape == true_lse.shape and lse.dtype == torch.float32
    error, size = (out.double() - true_out).norm(), true_out.norm()
    assert error <= 1.5 * unit * size, f"error {error / size:.2e}"
    worst, largest = (out.double() - true_out).abs().max(), true_out.abs().max()
    assert worst <= 4 * unit * largest, f"worst {worst / largest:.2e}"
    unseen = true_lse == -torch.inf
    assert torch.equal(lse == -torch.inf, unseen) and not out.transpose(1, 2)[unseen].any()
    seen = (lse.double() - true_lse)[~unseen].abs()
    assert seen.numel() == 0 or seen.max() <= 1e-5 * max(1.0, float(true_lse[~unseen].abs().max()))


def inputs(batch, queries, keys, heads, key_heads, head_dim, dtype=BF16, how="alone", scale=1.0):
    torch.manual_seed(queries + keys)
    if how == "packed":
        assert queries == keys
        packed = torch.randn(batch, queries, heads + 2 * key_heads, head_dim, device=DEVICE).mul(scale).to(dtype)
        return packed.split((heads, key_heads, key_heads), 2)
    shapes = (batch, queries, heads, head_dim), *[(batch, keys, key_heads, head_dim)] * 2
    parts = [torch.randn(shape, device=DEVICE).mul(scale).to(dtype) for shape in shapes]
    if how == "heads first":
        parts = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in parts]
    return parts


def truth_of_packed(q, k, v, starts, others, *options):
    """That of each sequence, and 0 and -inf for tokens of none."""
    out, lse = q.double() * 0.0, torch.full((1, *q.shape[2:0:-1]), -torch.inf, dtype=torch.float64, device=q.device)
    for (a, b), (c, d) in zip(itertools.pairwise(starts), itertools.pairwise(others), strict=True):
        if a < b and c < d:
            out[:, a:b], lse[:, :, a:b] = truth(q[:, a:b], k[:, c:d], v[:, c:d], *options)
    return out, lse


class _Map(ctypes.Structure):
    """What `nvrtc` tells the driver about a tensor."""

    _fields_ = (("data", c_void_p), ("sizes", c_longlong * 4), ("strides", c_longlong * 4), ("rows", c_int))

    def __init__(self, address, dtype, sizes, strides, box):
        assert dtype.itemsize == 2 and box[:2] == (64, 1) and box[3] == 1 and not any(stride % 8 for stride in strides)
        super().__init__(address, (c_longlong * 4)(*sizes), (c_longlong * 4)(1, *strides), box[2])


def poison(monkeypatch):
    """New memory holds what would show."""
    empty = torch.Tensor.new_empty

    def poisoned(t, *size, **how):
        new = empty(t, *size, **how)
        return new.fill_(math.nan if new.is_floating_point() else 77)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


WRAPPER = """
#include "kernel.cu"
static Map maps[3];
static void* to;
static float* logs;
static Sizes asked;
static float by;
static void start() { tilewright_attention_forward(maps[0], maps[1], maps[2], to, logs, asked, by); }
extern "C" const char* run(int blocks, const Map* three, void* out, float* lse, const Sizes* sizes, float scale,
                           int seed) {
  std::copy(three, three + 3, maps);
  to = out, logs = lse, asked = *sizes, by = scale;
  dice.seed(seed);
  return run_blocks(blocks, THREADS, start);
}
"""


def compiler(source, wrapper, folders):
    """Builds a kernel's source for the CPU, once for each of its configs."""
    built = {}

    def build(config):
        if config not in built:
            folder = folders.mktemp("emulated")
            shutil.copy(source, folder / "kernel.cu")
            shutil.copy(source.with_name("packed.cuh"), folder)
            (folder / "run.cpp").write_text(wrapper)
            macros = [f"-D{name}={value}" for name, value in {**config.macros, "BOUNDED_WAITS": 1}.items()]
            command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{EMULATOR}", *macros]
            subprocess.run([*command, "-o", folder / "run.so", folder / "run.cpp"], check=True)
            built[config] = ctypes.CDLL(str(folder / "run.so"))
            built[config].run.restype = c_char_p
        return built[config]

    return build


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return compiler(hopper.SOURCE, WRAPPER, tmp_path_factory)


@pytest.fixture
def emulate(compiled, monkeypatch):
    """`hopper.forward` on the CPU, on so many processors, with so many heads to a section."""
    monkeypatch.setattr(nvrtc, "_tensor_map", _Map)
    poison(monkeypatch)

    def forward(*call, blocks=3, section=None, seed=0, **options):
        def kernel(device, config):
            def start(programs, arguments):
                assert 1 <= programs <= blocks
                *maps, out, lse, sizes, scale = arguments
                sizes.section = sizes.section if section is None else section
                failure = compiled(config).run(programs, (_Map * 3)(*maps), out, lse, ctypes.byref(sizes), scale, seed)
                assert failure is None, failure

            return start

        monkeypatch.setattr(hopper, "_kernel", kernel)
        monkeypatch.setattr(hopper.dispatch, "multiprocessors", lambda device: blocks)
        return hopper.forward(*call, **options)

    return forward


CASES = {  # batch, queries, keys, heads, key heads, head_dim; causal, window; dtype, how queries are scaled
    "batches side by side, a last tile cut short": ((2, 300, 300, 2, 1, 64), True, None, BF16, 1.0),
    "queries that see no key": ((1, 200, 70, 1, 1, 64), True, None, BF16, 1.0),
    "a window": ((1, 70, 300, 2, 2, 64), True, 100, BF16, 1.0),
    "a window of one": ((1, 200, 200, 1, 1, 64), True, 1, BF16, 1.0),
    "scores that grow": ((1, 65, 700, 1, 1, 64), True, None, BF16, 20.0),
    "wide heads": ((2, 150, 290, 4, 2, 128), True, None, BF16, 1.0),
    "wide heads, more queries, a window": ((1, 310, 200, 1, 1, 128), True, 129, BF16, 20.0),
    "one query": ((3, 1, 129, 2, 1, 128), True, None, BF16, 1.0),
    "every key": ((2, 130, 200, 2, 1, 128), False, None, FP16, 20.0),
    "one key": ((1, 65, 1, 1, 1, 128), False, None, FP16, 1.0),
}


needs_compiler = pytest.mark.skipif(
    DEVICE != "cpu" or shutil.which("g++") is None, reason="the emulator is for where there is no GPU, and needs g++"
)


@needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_the_source_is_right_whatever_the_order(case, emulate):
    shape, causal, window, dtype, grown = CASES[case]
    q, k, v = inputs(*shape, dtype)
    q = q * grown
    expected = truth(q, k, v, causal, window)
    for seed, (blocks, section) in enumerate([(3, None), (2, 1)]):
        out, lse = emulate(q, k, v, causal, window, blocks=blocks, section=section, seed=seed)
        assert_true((out, lse), expected)


@needs_compiler
def test_every_bit_is_the_same_on_any_number_of_processors(emulate):
    parts = inputs(2, 200, 200, 2, 2, 64)
    first = emulate(*parts, True)
    for blocks in (1, 5):
        assert_equal(emulate(*parts, True, blocks=blocks, section=2, seed=blocks), first)


@needs_compiler
@pytest.mark.parametrize("how", ["packed", "heads first"])
def test_views_are_read_as_they_lie_and_scores_are_scaled(how, emulate):
    q, k, v = inputs(2, 90, 90, 4, 2, 64, how=how)
    assert not q.is_contiguous()
    assert_true(emulate(q, k, v, True, None, 0.3), truth(q, k, v, True, None, 0.3))


@needs_compiler
def test_no_keys_and_no_queries(emulate):
    q, k, v = inputs(2, 5, 5, 2, 1, 64)
    for nothing in (q[:0], k[:0], v[:0]), (q[:, :0], k, v):
        assert [t.numel() for t in emulate(*nothing, True)] == [0, 0]
    out, lse = emulate(q, k[:, :0], v[:, :0], False)
    assert not out.any() and (lse == -torch.inf).all()


@needs_compiler
def test_what_tma_cannot_read_is_packed_first(emulate):
    q, k, v = inputs(1, 70, 70, 2, 1, 64)
    expected = emulate(q, k, v, True)
    for odd in (
        q.mT.contiguous().mT,
        torch.cat((q, q[..., :4]), 3)[..., :64],
        torch.cat((q.flatten()[:1], q.flatten()))[1:].view_as(q),
    ):
        assert torch.equal(odd, q)
        assert_equal(emulate(odd, k, v, True), expected)


PACKED = {  # where queries begin, where keys do, tokens of both; heads, key heads, head_dim; causal, window; dtype
    "of one length each": ((0, 1, 1, 200, 330), (0, 1, 1, 200, 330), (330, 330), (2, 1, 64), True, None, BF16),
    "a window": ((7, 8, 240), (7, 8, 240), (260, 260), (1, 1, 64), True, 100, BF16),
    "other lengths": ((3, 40, 40, 190), (0, 90, 120, 260), (190, 300), (2, 1, 128), False, None, FP16),
}


def packed_inputs(starts, others, tokens, heads, key_heads, head_dim, dtype):
    """Queries, keys and values of a batch of 1; what is of no sequence is not a number."""
    torch.manual_seed(sum(starts))
    shapes = (tokens[0], heads), *[(tokens[1], key_heads)] * 2
    parts = [torch.randn(1, *shape, head_dim, device=DEVICE).to(dtype) for shape in shapes]
    for part, ends in zip(parts, (starts, others, others), strict=True):
        part[:, : ends[0]] = part[:, ends[-1] :] = math.nan
    return parts


def packed_draws(head_dim, causal, dtype, count, most=300, lengths=(0, 1, 64, 65, 129, 700)):
    """Cases as in `PACKED`, others in each run: sequences of any lengths, 0 too, with tokens of none around them."""
    dice = random.Random(f"{os.environ['TILEWRIGHT_SEED']} {head_dim} {causal} {dtype} packed")
    for number in range(count):
        sequences = min(most, dice.choice((1, 3, 40, 300)))
        drawn = [[dice.choice(lengths) for _ in range(sequences)] for _ in "qk"]
        if number % 2:
            drawn[1] = drawn[0]
        starts, others = (tuple(itertools.accumulate(each, initial=dice.choice((0, 5)))) for each in drawn)
        tokens = starts[-1] + dice.choice((1, 200)), others[-1] + dice.choice((1, 200))
        window = dice.choice((None, 1, 100, 1000)) if causal else None
        yield starts, others, tokens, (*dice.choice(((8, 2), (4, 1), (2, 2))), head_dim), causal, window, dtype


def on_device(*starts):
    return tuple(torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in starts)


@needs_compiler
@pytest.mark.parametrize("case", PACKED)
def test_packed_sequences_see_themselves_alone(case, emulate):
    starts, others, tokens, sizes, causal, window, dtype = PACKED[case]
    parts = packed_inputs(starts, others, tokens, *sizes, dtype)
    expected = truth_of_packed(*(part.nan_to_num(0.0) for part in parts), starts, others, causal, window)
    first = emulate(*parts, causal, window, starts=on_device(starts, others), seed=1)
    assert_true(first, expected)
    again = emulate(*parts, causal, window, starts=on_device(starts, others), blocks=2, section=1, seed=2)
    assert_equal(first, again)


@needs_compiler
@pytest.mark.parametrize("causal", [True, False])
def test_drawn_packed_sequences_see_themselves_alone(causal, emulate):
    """Others in each run."""
    head_dim, dtype = (64, BF16) if causal else (128, FP16)
    for starts, others, tokens, sizes, _, window, _ in packed_draws(head_dim, causal, dtype, 2, 4, (0, 1, 65, 130)):
        parts = packed_inputs(starts, others, tokens, *sizes, dtype)
        found = emulate(*parts, causal, window, starts=on_device(starts, others))
        assert_true(found, truth_of_packed(*(t.nan_to_num(0.0) for t in parts), starts, others, causal, window))


@needs_compiler
def test_a_packed_sequence_is_bit_for_bit_what_it_is_alone(emulate):
    starts = (0, 1, 1, 200, 330)
    q, k, v = packed_inputs(starts, starts, (330, 330), 2, 1, 64, BF16)
    out, lse = emulate(q, k, v, True, starts=on_device(starts, starts))
    alone = emulate(q[:, 1:200], k[:, 1:200], v[:, 1:200], True)
    assert_equal((out[:, 1:200], lse[:, :, 1:200]), alone)


@needs_compiler
@pytest.mark.parametrize("bad", [(-5, 50, 70), (0, 60, 50), (0, 50, 2**31 - 1), (80, 90, 100), (2, 3, 1)])
def test_starts_out_of_place_give_0(bad, emulate):
    parts = packed_inputs((0, 70), (0, 70), (70, 70), 1, 1, 64, BF16)
    for starts in (bad, (0, 20, 70)), ((0, 20, 70), bad):
        out, lse = emulate(*parts, True, starts=on_device(*starts))
        assert not out.any() and (lse == -torch.inf).all()


@needs_compiler
def test_no_packed_sequences(emulate):
    parts = packed_inputs((0, 70), (0, 70), (70, 70), 1, 1, 64, BF16)
    for starts in ((30,), (30, 30), (0, 0)):
        out, lse = emulate(*parts, True, starts=on_device(starts, starts))
        assert not out.any() and (lse == -torch.inf).all()


def test_what_keeps_the_kernel_from_a_call():
    """Each reason by itself, on meta tensors of what it would take on a Hopper."""
    q, k = (torch.empty(2, 300, heads, 64, dtype=BF16, device="meta") for heads in (4, 2))

    def why(q=q, k=k, v=None, causal=True, **more):
        return hopper.why_not(q, k, k if v is None else v, causal, **more)

    assert why() == "the kernel is for a Hopper, and needs NVRTC 13"  # and nothing else
    assert why(q=q.float()) == why(k=k[..., :32]) == "the kernel takes bfloat16 and float16, and heads of 64 or 128"
    for other in (q.half(), q[:1], q.new_empty(2, 300, 4, 128)):
        assert why(q=other).startswith("queries, keys and values differ")
    assert why(v=k[:, :200]).startswith("queries, keys and values differ")
    assert why(q=q[:, :, :3]) == "the query heads are no multiple of the key heads"
    assert why(window=0) == why(window=9, causal=False) == "a window needs a causal mask and at least one key"
    assert why(window=9).startswith("the kernel is for a Hopper")
    for scale in (0.0, -1.0, math.inf, math.nan):
        assert why(scale=scale) == "the scale is no positive number"
    for view in (
        q.new_empty(2, 300, 4, 68)[..., :64],
        q[:, :, :1].expand_as(q),
        q.new_empty(2, 300, 12, 64)[:, :, 4:8],
    ):
        assert why(q=view).startswith("the kernel is for a Hopper")


def test_shared_memory_holds_every_config():
    for head_dim in hopper.HEADS:
        for causal in (True, False):
            config = hopper.launch_config(head_dim, causal, BF16)
            assert config.shared_bytes <= 232_448 and config.keys % 16 == 0 and config.keys <= 256
            assert config == hopper.launch_config(head_dim, causal, FP16) or not config.half


BACKWARDS = {
    "causal": ((2, 512, 512, 4, 4, 64), {}),
    "shared keys": ((2, 640, 640, 8, 2, 64), {}),
    "wide heads": ((1, 777, 777, 4, 1, 128), {}),
    "full": ((2, 500, 500, 4, 4, 128), {"causal": False}),
    "a window": ((1, 700, 700, 4, 2, 128), {"window": 100}),
    "other lengths": ((1, 300, 555, 4, 2, 64), {}),
}

LENGTHS = (1, 63, 64, 65, 127, 129, 200, 1000, 4096)
HEADS = ((32, 8), (4, 1), (2, 2))


@pytest.fixture
def bounded(monkeypatch):
    """A wait for what never comes ends in an error, and not with the GPU lost."""
    monkeypatch.setattr(hopper, "BOUNDED_WAITS", 1)


def run(q, k, v, causal, window=None, scale=None):
    assert hopper.why_not(q, k, v, causal, window, scale) == ""
    return hopper.forward(q, k, v, causal, window, scale)


def draws(head_dim, causal, count):
    """Shapes, others in each run, of every length as queries and as keys."""
    dice = random.Random(f"{os.environ['TILEWRIGHT_SEED']} {head_dim} {causal}")
    for number in range(count):
        queries, keys = LENGTHS[number % len(LENGTHS)], dice.choice(LENGTHS)
        if number >= len(LENGTHS):
            queries, keys = keys, queries
        window = dice.choice((None, None, 1, 100, 128, 1000)) if causal else None
        yield (dice.choice((1, 3)), queries, keys, *dice.choice(HEADS), head_dim), window, dice.choice((1.0, 10.0))


@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", hopper.HEADS)
def test_float64_agrees(head_dim, causal, dtype, bounded):
    for shape, window, grown in draws(head_dim, causal, 2 * len(LENGTHS) if dtype == BF16 else 4):
        q, k, v = inputs(*shape, dtype)
        q = q * grown
        scale = 0.3 if grown == 1.0 else None
        try:
            assert_true(run(q, k, v, causal, window, scale), truth(q, k, v, causal, window, scale))
        except AssertionError as error:
            raise AssertionError(f"{shape}, window {window}, queries times {grown}") from error


@on_hopper
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", hopper.HEADS)
def test_float64_agrees_on_packed_sequences(head_dim, causal, dtype, bounded):
    for starts, others, tokens, sizes, _, window, _ in packed_draws(head_dim, causal, dtype, 6):
        parts = packed_inputs(starts, others, tokens, *sizes, dtype)
        assert hopper.why_not(*parts, causal, window, None, True) == ""
        expected = truth_of_packed(*(part.nan_to_num(0.0) for part in parts), starts, others, causal, window)
        device = on_device(starts, others)
        out, lse = hopper.forward(*parts, causal, window, starts=device)
        assert_true((out, lse), expected)

        def again(parts=parts, window=window, device=device):
            out, lse = hopper.forward(*parts, causal, window, starts=device)
            return out, lse.masked_fill(lse == -torch.inf, 0.0)  # of tokens of no sequence

        assert_deterministic(again, times=3)


@on_hopper
def test_a_graph_replays_packed_sequences_of_other_lengths(bounded):
    parts = packed_inputs((0, 300), (0, 300), (300, 300), 4, 2, 128, BF16)
    starts = on_device((0, 100, 300))[0]
    hopper.forward(*parts, True, starts=(starts, starts))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = hopper.forward(*parts, True, starts=(starts, starts))
    starts.copy_(on_device((0, 7, 250))[0])
    graph.replay()
    assert_true(replayed, truth_of_packed(*parts, (0, 7, 250), (0, 7, 250), True))


@on_hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", hopper.HEADS)
@pytest.mark.parametrize("how", ["packed", "heads first"])
def test_views_are_read_as_they_lie(how, head_dim, causal, bounded):
    q, k, v = inputs(3, 333, 333, 8, 2, head_dim, how=how)
    assert not q.is_contiguous()
    first = run(q, k, v, causal)
    assert_true(first, truth(q, k, v, causal))
    assert_equal(first, run(q.contiguous(), k.contiguous(), v.contiguous(), causal))


@on_hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", hopper.HEADS)
def test_every_bit_is_written_and_the_same_on_every_run(head_dim, causal):
    parts = inputs(2, 2000, 2000, 32, 8, head_dim)
    assert_deterministic(lambda: run(*parts, causal), times=50)


@on_hopper
@pytest.mark.parametrize("head_dim", hopper.HEADS)
def test_no_further_from_the_truth_than_cudnn_and_with_its_logarithm(head_dim):
    """Backward takes either: the natural logarithm."""
    q, k, v = inputs(2, 1024, 1024, 4, 4, head_dim)
    by_head = [t.transpose(1, 2) for t in (q, k, v)]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(*by_head, None, True, 0.0, True, False)
    ours, expected = run(q, k, v, True), truth(q, k, v, True)
    assert_no_worse(ours[:1], [out.transpose(1, 2)], expected[:1])
    torch.testing.assert_close(ours[1], lse.view_as(ours[1]), rtol=1e-5, atol=1e-5)


@on_hopper
@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("name", BACKWARDS)
def test_gradients_are_no_further_from_the_truth_than_cudnns(name, is_own, monkeypatch):
    """By our own backward, and by those that stand in for it, behind the forward that saves for them."""
    if not is_own:
        monkeypatch.setattr(hopper_backward, "why_not", lambda *call: "it is another's")
    shape, options = BACKWARDS[name]
    q, k, v = (x.requires_grad_() for x in inputs(*shape))
    up = torch.randn_like(q)

    def gradients(function, *parts):
        out = function(*parts)
        return [out.detach(), *torch.autograd.grad(out, parts, up.to(out.dtype))]

    def plain(q, k, v):
        causal, window = options.get("causal", True), options.get("window")
        return truth(q, k, v, causal, None if window is None else window + 1)[0]

    ours = gradients(lambda *parts: attention(*parts, backend="hopper", **options), q, k, v)
    expected = gradients(plain, *(x.detach().double().requires_grad_() for x in (q, k, v)))
    for actual, true in zip(ours, expected, strict=True):
        assert (actual.double() - true).norm() <= 1.5e-2 * true.norm()
    if "window" not in options and q.shape[1] == k.shape[1]:
        assert_no_worse(
            ours, gradients(lambda *parts: attention(*parts, backend="cudnn", **options), q, k, v), expected
        )


@on_hopper
def test_a_graph_replays_it(bounded):
    q, k, v = inputs(1, 300, 300, 4, 2, 128)
    expected = run(q, k, v, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run(q, k, v, True)
    for t in replayed:
        t.fill_(math.nan)
    graph.replay()
    assert_equal(expected, replayed)
