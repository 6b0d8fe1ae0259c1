"""Forward of attention on a Hopper, against float64.

Without a Hopper the kernel's own source runs on the CPU, by `hopper_emulator`: indices, masks, barriers and the order of
tiles are the kernel's, what a Hopper does beside its threads is the emulator's.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from ctypes import c_char_p, c_float, c_int, c_longlong, c_void_p
from pathlib import Path

import pytest
import torch

from ops.contract import DEVICE, on_hopper
from tilewright.ops.attention import hopper

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


class _Map(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("sizes", c_longlong * 4), ("strides", c_longlong * 4), ("rows", c_int))

    def __init__(self, t, rows):
        order = 3, 2, 1, 0
        sizes, strides = ((c_longlong * 4)(*(of[i] for i in order)) for of in (t.shape, t.stride()))
        super().__init__(t.data_ptr(), sizes, strides, rows)


WRAPPER = """
#include "kernel.cu"
static Map maps[3];
static void* to;
static float* logs;
static Sizes asked;
static float by;
static void start() { tilewright_attention_forward(maps[0], maps[1], maps[2], to, logs, asked, by); }
extern "C" const char* run(int blocks, const Map* three, void* out, float* lse, const Sizes* sizes, float scale, int seed) {
  std::copy(three, three + 3, maps);
  to = out, logs = lse, asked = *sizes, by = scale;
  dice.seed(seed);
  return run_blocks(blocks, THREADS, start);
}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Builds a kernel's source for the CPU, once for each of its configs."""
    built = {}

    def build(config):
        if config not in built:
            folder = tmp_path_factory.mktemp("emulated")
            shutil.copy(hopper.SOURCE, folder / "kernel.cu")
            (folder / "run.cpp").write_text(WRAPPER)
            macros = [f"-D{name}={value}" for name, value in config.macros.items()]
            command = ["g++", "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{EMULATOR}", *macros]
            subprocess.run([*command, "-o", folder / "run.so", folder / "run.cpp"], check=True)
            built[config] = ctypes.CDLL(str(folder / "run.so"))
            built[config].run.restype = c_char_p
        return built[config]

    return build


def emulate(build, q, k, v, causal, window=None, scale=None, blocks=3, section=None, seed=0):
    config = hopper.launch_config(q.shape[3], causal, q.dtype)
    out = torch.full(q.shape, math.nan, dtype=q.dtype)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), math.nan)
    maps = (_Map * 3)(_Map(q, 64), _Map(k, config.keys), _Map(v, config.keys))
    sizes = hopper._sizes(q, k, window)
    sizes.section = sizes.section if section is None else section
    scale = c_float(q.shape[3] ** -0.5 if scale is None else scale)
    pointers = c_void_p(out.data_ptr()), c_void_p(lse.data_ptr())
    failure = build(config).run(blocks, maps, *pointers, ctypes.byref(sizes), scale, seed)
    assert failure is None, failure
    return out, lse


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


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ here to build the emulator with")
@pytest.mark.parametrize("case", CASES)
def test_the_source_is_right_whatever_the_order(case, compiled):
    shape, causal, window, dtype, grown = CASES[case]
    q, k, v = inputs(*shape, dtype)
    q = q * grown
    expected = truth(q, k, v, causal, window)
    for seed, (blocks, section) in enumerate([(3, None), (2, 1)]):
        assert_true(emulate(compiled, q, k, v, causal, window, None, blocks, section, seed), expected)
