import pytest
import torch

from tilewright import ops
from tilewright.nn import FusedMLP, GatedMLP, GeluMLP
from tilewright.tilesync import compiled


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh"])
def test_a_gated_one_is_gated_mlp(activation):
    theirs, ours = GatedMLP(16, 24, activation=activation), FusedMLP(16, 24, activation=activation)
    compare(theirs, ours)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_one_without_a_gate_is_gelu_mlp(approximate, bias):
    theirs = GeluMLP(16, 24, bias=bias, approximate=approximate)
    compare(theirs, FusedMLP(16, 24, activation="gelu_tanh" if approximate == "tanh" else "gelu", bias=bias))


def compare(theirs, ours):
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 16, requires_grad=True)
    for run in (ours, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(run(x), theirs(x))
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            gradients = [
                torch.autograd.grad(each.square().sum(), of)[0] for each, of in ((run(x), mine), (theirs(x), other))
            ]
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert ours(x[:0]).shape == (0, 3, 16)
    ours.zero_grad()
    ours(x[:0]).sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in ours.parameters())


@pytest.mark.parametrize("gated", [True, False])
def test_under_autocast_the_gradients_are_those_of_layers_in_16_bits(gated):
    theirs = GatedMLP(32, 64) if gated else GeluMLP(32, 64, bias=False)
    ours = FusedMLP(32, 64, activation="swiglu" if gated else "gelu_tanh")
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 32)
    found = []
    for mlp in (theirs, ours):
        for cast in (True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                y = mlp(x)
            assert y.dtype == (torch.bfloat16 if cast else torch.float32)
            found.append((y.float(), *torch.autograd.grad(y.float().square().sum(), list(mlp.parameters()))))
            assert all(each.dtype == torch.float32 for each in found[-1])
    (narrow, exact, mine, _) = found
    for other, truth, own in zip(narrow, exact, mine, strict=True):
        assert 0 < (own - truth).norm() < 1.5 * (other - truth).norm()


def test_a_graph_is_described_once_and_not_in_each_call(monkeypatch):
    described = []
    monkeypatch.setattr(compiled, "fingerprint", lambda graph, fingerprint=compiled.fingerprint: (
        described.append(graph), fingerprint(graph))[1])  # fmt: skip
    mlp, x = FusedMLP(24, 40), torch.randn(3, 24)
    for _ in range(3):
        mlp(x)
    assert len(described) == 1


def test_torch_compile_takes_one_number_of_rows_after_the_other():
    torch.compiler.reset()
    mlp = FusedMLP(16, 24)
    run = torch.compile(mlp, backend="eager", fullgraph=True)
    for rows in (3, 4, 5):
        x = torch.randn(rows, 16)
        torch.testing.assert_close(run(x), mlp(x))


def test_layers_that_are_hooked_or_replaced_are_called():
    for activation in ("swiglu", "geglu_tanh", "gelu"):
        ours, calls, x = FusedMLP(16, 24, activation=activation), [], torch.randn(3, 16)
        truth = ours(x)
        (ours.down_proj if ours.is_gated else ours.down).register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with ops.explain() as paths:
            torch.testing.assert_close(ours(x), truth)
        assert calls == [1] and any("hooked or replaced" in path.why for path in paths)


def test_wrong_arguments_are_a_sentence():
    with pytest.raises(ValueError, match="choose swiglu"):
        FusedMLP(8, 8, activation="relu")
    with pytest.raises(ValueError, match="choose plain"):
        FusedMLP(8, 8, mode="fast")
    with pytest.raises(ValueError, match="has no bias"):
        FusedMLP(8, 8, bias=True)
    with pytest.raises(ValueError, match="9 features, but 8 are needed"):
        FusedMLP(8, 8)(torch.ones(2, 9))
