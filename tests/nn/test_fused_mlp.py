import pytest
import torch

from tilewright.nn import FusedMLP, GatedMLP, GeluMLP


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


def test_wrong_arguments_are_a_sentence():
    with pytest.raises(ValueError, match="choose swiglu"):
        FusedMLP(8, 8, activation="relu")
    with pytest.raises(ValueError, match="choose plain"):
        FusedMLP(8, 8, mode="fast")
    with pytest.raises(ValueError, match="has no bias"):
        FusedMLP(8, 8, bias=True)
    with pytest.raises(ValueError, match="9 features, but 8 are needed"):
        FusedMLP(8, 8)(torch.ones(2, 9))
