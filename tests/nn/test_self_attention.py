import pytest
import torch

from ops.contract import DEVICE, on_gpu
from tilewright import ops
from tilewright.nn import SelfAttention
from tilewright.nn.self_attention import _check_gradients
from tilewright.ops.self_attention.op import reference


def paths_of(call):
    with ops.explain() as paths:
        result = call()
    return result, [(path.ran, path.why) for path in paths if path.op == "self_attention"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_is_the_layer_in_plain_pytorch(causal, bias):
    layer = SelfAttention(24, 3, bias=bias, causal=causal).to(DEVICE)
    x, mask = torch.randn(2, 7, 24, device=DEVICE), torch.rand(2, 7, device=DEVICE) < 0.7
    expected = reference(
        x, layer.qkv.weight, layer.qkv.bias, layer.out.weight, layer.out.bias, 3, causal=causal, key_mask=mask
    )
    out, ran = paths_of(lambda: layer(x, key_mask=mask))
    torch.testing.assert_close(out, expected)
    assert len(ran) == 1 and (ran[0][0] == "kernel" or "was found" in ran[0][1])
    assert sorted(layer.state_dict()) == sorted(
        f"{part}.{kind}" for part in ("qkv", "out") for kind in ("weight", "bias")[: 1 + bias]
    )


class Doubled(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


@pytest.mark.parametrize("part", ["qkv", "out"])
def test_a_replaced_or_hooked_projection_is_called(part):
    layer, x = SelfAttention(16, 2, causal=True).to(DEVICE), torch.randn(2, 5, 16, device=DEVICE)
    plain = layer(x)
    seen = []
    handle = getattr(layer, part).register_forward_hook(lambda module, inputs, output: seen.append(output))
    hooked, ran = paths_of(lambda: layer(x))
    assert len(seen) == 1 and ran == [("PyTorch", "a projection is replaced or has hooks")]
    torch.testing.assert_close(hooked, plain)
    handle.remove()
    setattr(layer, part, Doubled(getattr(layer, part)))
    doubled, ran = paths_of(lambda: layer(x))
    assert ran == [("PyTorch", "a projection is replaced or has hooks")]
    if part == "out":
        torch.testing.assert_close(doubled, 2 * plain)
    else:
        assert not torch.allclose(doubled, plain)


def test_trains_like_the_plain_layer():
    torch.manual_seed(1)
    ours, plain = SelfAttention(16, 4).to(DEVICE), SelfAttention(16, 4).to(DEVICE)
    plain.load_state_dict(ours.state_dict())
    plain.qkv.register_forward_hook(lambda *_: None)  # so that PyTorch's ops run
    x, target = torch.randn(4, 6, 16, device=DEVICE), torch.randn(4, 6, 16, device=DEVICE)
    for layer in (ours, plain):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            (layer(x) - target).square().mean().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="heads is 3; give a divisor of the width, 16"):
        SelfAttention(16, 3)


@pytest.mark.skipif(DEVICE == "cuda", reason="of the CPU")
def test_a_capture_on_a_cpu_is_refused():
    with pytest.raises(ValueError, match=r"capture makes a CUDA graph, and the sample is on cpu; move both to a GPU\."):
        SelfAttention(8, 2).capture(torch.randn(1, 2, 8))


@on_gpu
@pytest.mark.parametrize("masked", [False, True])
def test_a_captured_layer_replays_forward_and_backward(masked):
    layer = SelfAttention(64, 8, causal=True, device=DEVICE)
    sample = torch.randn(4, 10, 64, device=DEVICE)
    mask = torch.rand(4, 10, device=DEVICE) < 0.7 if masked else None
    replay = layer.capture(sample, key_mask=mask)
    for _ in range(3):
        x = torch.randn_like(sample)
        given = torch.rand(4, 10, device=DEVICE) < 0.7 if masked else None
        upstream = torch.randn_like(x)
        expected = torch.autograd.grad(layer(x, key_mask=given), list(layer.parameters()), upstream)
        layer.zero_grad()
        out = replay(x, key_mask=given)
        torch.testing.assert_close(out, layer(x, key_mask=given))
        out.backward(upstream)
        for parameter, gradient in zip(layer.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)
        with torch.no_grad():  # as an optimizer does
            for parameter in layer.parameters():
                parameter.mul_(0.9)
    with pytest.raises(ValueError, match="capture it again"):
        replay(sample[:2], key_mask=mask)


@on_gpu
def test_a_captured_layer_replays_without_gradients():
    layer = SelfAttention(64, 8, device=DEVICE).requires_grad_(False)
    sample = torch.randn(4, 10, 64, device=DEVICE)
    replay = layer.capture(sample)
    for _ in range(2):
        x = torch.randn_like(sample)
        torch.testing.assert_close(replay(x), layer(x))


def test_a_capture_refuses_what_its_graphs_have_no_gradient_of():
    layer, x = SelfAttention(8, 2), torch.randn(1, 2, 8)
    wanting, frozen = x.clone().requires_grad_(), SelfAttention(8, 2).requires_grad_(False)
    _check_gradients(x, x, True, layer)
    _check_gradients(wanting, wanting, True, layer)
    _check_gradients(x, x, False, frozen)
    for captured in (True, False):
        with pytest.raises(ValueError, match=r"capture it with sample\.requires_grad_\(\)"):
            _check_gradients(wanting, x, captured, layer)
    with pytest.raises(ValueError, match="captured without gradients; call it under"):
        _check_gradients(x, x, False, layer)
