"""Small eager calls on a GPU are left to PyTorch's own ops: the same functions, with no Python in backward."""

import pytest
import torch

from ops.contract import DEVICE, gradients, on_gpu
from tilewright import ops
from tilewright.ops.embedding.op import tied_embedding
from tilewright.runtime import dispatch


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE, dtype=dtype).requires_grad_()


def tokens(*shape):
    return torch.randint(40, shape, device=DEVICE)


ROWS, WIDTH = 12, 32
CALLS = {
    "swiglu": (ops.swiglu, lambda: [leaf(ROWS, WIDTH), leaf(ROWS, WIDTH)]),
    "swiglu, packed, bias": (lambda x, b: ops.swiglu(x, bias=b), lambda: [leaf(ROWS, 2 * WIDTH), leaf(2 * WIDTH)]),
    "geglu": (ops.geglu, lambda: [leaf(ROWS, WIDTH), leaf(ROWS, WIDTH)]),
    "geglu, erf": (lambda g, u: ops.geglu(g, u, approximate="none"), lambda: [leaf(ROWS, WIDTH), leaf(ROWS, WIDTH)]),
    "bias_gelu": (ops.bias_gelu, lambda: [leaf(ROWS, WIDTH), leaf(WIDTH)]),
    "gelu_mlp": (
        ops.gelu_mlp,
        lambda: [leaf(ROWS, WIDTH), leaf(48, WIDTH), leaf(48), leaf(WIDTH, 48), leaf(WIDTH)],
    ),
    "embedding": (
        lambda weight, position: ops.embedding(tokens(2, 5).fill_(7), weight, position),
        lambda: [leaf(40, WIDTH), leaf(6, WIDTH)],
    ),
    "tied embedding": (
        lambda weight: torch.nn.functional.linear(*tied_embedding(tokens(2, 5).fill_(7), weight)),
        lambda: [leaf(40, WIDTH)],
    ),
    "linear_cross_entropy": (
        lambda x, weight, bias: ops.linear_cross_entropy(
            x, weight, torch.arange(ROWS, device=x.device) - 100 * (torch.arange(ROWS, device=x.device) == 3), bias,
            ignore_index=-97, softcap=5.0, z_loss=0.1,
        ),
        lambda: [leaf(ROWS, WIDTH), leaf(40, WIDTH), leaf(40)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_small_calls_are_the_same_function(name, monkeypatch):
    function, make = CALLS[name]
    leaves = make()
    found = []
    for small in (False, True):
        monkeypatch.setattr(dispatch, "is_host_bound", lambda x, most, *others, small=small: small)
        out = function(*leaves)
        found.append([out, *gradients([out], leaves, [torch.ones_like(out)])])
    for kernel, plain in zip(*found, strict=True):
        torch.testing.assert_close(kernel, plain, rtol=1e-4, atol=1e-5)


def test_options_that_only_the_kernel_has_are_not_left_to_pytorch(monkeypatch):
    """A bias of another dtype, a weight of another dtype, and a limit on the memory."""
    monkeypatch.setattr(dispatch, "is_host_bound", lambda *_: True)
    x, bias = leaf(ROWS, WIDTH, dtype=torch.bfloat16), leaf(WIDTH)
    assert ops.bias_gelu(x, bias).dtype == torch.bfloat16
    targets = torch.arange(ROWS, device=DEVICE)
    for weight, memory in ((leaf(40, WIDTH), None), (leaf(40, WIDTH, dtype=torch.bfloat16), 10**4)):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = ops.linear_cross_entropy(x, weight, targets, memory=memory)
        assert "_Function" in type(loss.grad_fn).__name__


@on_gpu
@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_runs_where_the_host_is_out_of_the_way(name, monkeypatch):
    """Of a small eager call no node of backward is ours, but those of cross-entropy; of a captured one some are."""
    import importlib

    for module in ("activation", "embedding", "gelu_mlp", "linear_cross_entropy"):
        monkeypatch.setattr(importlib.import_module(f"tilewright.ops.{module}.op"), "HOST_BOUND", 2**20)
    function, make = CALLS[name]
    leaves = make()

    def has_own_node(out):
        seen, left = set(), [out.grad_fn]
        while left:
            node = left.pop()
            if node is not None and node not in seen:
                seen.add(node)
                left += [following for following, _ in node.next_functions]
        return any("_Function" in type(node).__name__ for node in seen)

    assert has_own_node(function(*leaves)) == (name == "linear_cross_entropy")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        monkeypatch.setattr(dispatch, "is_host_bound", lambda *_: False)
        function(*leaves)  # compiled before the capture
        monkeypatch.undo()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = function(*leaves)
    assert has_own_node(out)
