"""What is said of the path that a call takes."""

import os
import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ops.contract import DEVICE
from tilewright import ops
from tilewright.ops.attention.op import attention
from tilewright.runtime import dispatch, paths


def randn(*shape):
    return torch.randn(*shape, device=DEVICE, requires_grad=True)


def norm(x):
    return ops.dropout_add_norm(x, x, torch.ones(8, device=DEVICE))


def turn(x):
    return ops.rope(x.view(1, 4, 2, 4), None, *ops.rope_tables(4, 4, device=DEVICE))


def decode(x):
    cache = torch.zeros(2, 1, 6, 8, device=DEVICE)
    return ops.decode_attention(x, cache, cache, torch.tensor([3, 6], dtype=torch.int32, device=DEVICE))


TARGETS = torch.tensor([1, 2, 3, 4], device=DEVICE)
CODES, SCALE = torch.ones(16, 8, device=DEVICE), torch.ones(2, 16, device=DEVICE)
CALLS = {
    "rope": turn,
    "swiglu": lambda x: ops.swiglu(x, x),
    "geglu": lambda x: ops.geglu(x, x),
    "bias_gelu": lambda x: ops.bias_gelu(x, None),
    "cross_entropy": lambda x: ops.cross_entropy(x, TARGETS),
    "linear_cross_entropy": lambda x: ops.linear_cross_entropy(x, randn(16, 8), TARGETS),
    "dropout_add_norm": norm,
    "embedding": lambda x: ops.embedding(TARGETS, x.repeat(2, 1)),
    "linear": lambda x: ops.linear(x, randn(16, 8)),
    "int8_linear": lambda x: ops.int8_linear(x.half(), CODES.to(torch.int8), SCALE[0]),
    "fp8_linear": lambda x: ops.fp8_linear(x.half(), CODES.to(torch.float8_e4m3fn), SCALE[0]),
    "int4_linear": lambda x: ops.int4_linear(x.half().repeat(1, 8), CODES.to(torch.uint8).repeat(1, 4), SCALE),
    "gelu_mlp": lambda x: ops.gelu_mlp(x, randn(16, 8), None, randn(8, 16)),
    "few_rows_linear": lambda x: ops.few_rows_linear(x.detach()[:2], randn(16, 8).detach()),
    "decode_attention": lambda x: decode(x.detach().view(2, 1, 2, 8)),
    "attention": lambda x: attention(*[x.view(1, 4, 2, 4)] * 3),
}


@pytest.mark.parametrize("op", CALLS)
def test_every_op_says_once_a_call_how_it_ran(op):
    x = randn(4, 8)
    with ops.explain() as found:
        CALLS[op](x)
        CALLS[op](x)
    (path,) = (path for path in found if path.op == op)
    assert found.calls[path] == 2
    assert (path.ran == paths.KERNEL) == (path.why == ""), path
    CALLS[op](x)
    assert found.calls[path] == 2, "nobody listens behind the context"


KERNELS = ("rope", "swiglu", "geglu", "bias_gelu", "cross_entropy", "linear_cross_entropy", "dropout_add_norm")
QUANTIZED = ("int8_linear", "fp8_linear", "int4_linear")


@pytest.mark.parametrize("op", KERNELS + QUANTIZED)
def test_a_path_is_the_one_that_was_taken(op, monkeypatch):
    x = randn(4, 8)

    def ran():
        with ops.explain() as found:
            CALLS[op](x)
        return next((path.ran, path.why) for path in found if path.op == op)

    assert ran() == (paths.KERNEL, "")
    with FlopCounterMode(display=False):
        assert ran()[0] == paths.REGISTERED
    launched = []
    monkeypatch.setattr(dispatch.Launch, "__call__", lambda *inputs: launched.append(inputs))
    monkeypatch.setattr(dispatch, "runs_kernel", lambda x: False)
    name, why = ran()
    assert name == paths.REFERENCE and "kernels run on cuda" in why and not launched


def test_what_is_left_to_pytorch_is_said_to_be(monkeypatch):
    monkeypatch.setattr(dispatch, "is_host_bound", lambda *_: True)
    for op in ("swiglu", "linear_cross_entropy", "embedding", "gelu_mlp"):
        with ops.explain() as found:
            CALLS[op](randn(4, 8))
        (path,) = (path for path in found if path.op == op)
        assert path.ran == paths.PYTORCH, path
        assert "less of the host's time" in path.why


def test_a_function_transform_is_named():
    with ops.explain() as found:
        torch.func.grad(lambda x: ops.cross_entropy(x, TARGETS))(randn(4, 8).detach())
    assert [path.why for path in found if "torch.func" in path.why]


def test_contexts_nest_and_a_table_is_printed():
    x = randn(4, 8)
    with ops.explain() as outer:
        assert str(outer) == "No op of Tilewright was called."
        with ops.explain() as inner:
            norm(x)
        with ops.explain() as nothing:
            pass
        turn(x)
        ops.linear(x, randn(16, 8))
    assert len(inner.calls) == 1 and len(outer.calls) == 3 and not nothing.calls
    lines = str(outer).splitlines()
    assert lines[0].split() == ["dropout_add_norm", "1", "kernel"] and lines[1].startswith("linear ")
    assert "PyTorch" in lines[1] and len(lines) == 3


def test_a_compiled_function_stays_one_graph():
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    with ops.explain() as found:
        out = compiled(randn(4, 8))
    assert out.shape == (4, 8) and not found.calls


def test_the_log_names_a_path_once():
    program = (
        "import torch\nfrom tilewright import ops\n"
        "for _ in range(3): ops.cross_entropy(torch.randn(4, 8), torch.tensor([1, 2, 3, 4]))\n"
    )
    environment = {**os.environ, "TILEWRIGHT_LOG": "paths", "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    said = [line for line in done.stderr.splitlines() if "tilewright" in line]
    assert done.returncode == 0 and len(said) == 1, done.stderr
    assert said[0].endswith("cross_entropy: reference (the tensors are on cpu, and kernels run on cuda)")
