import copy
import weakref

import pytest
import torch
import torch.nn.functional as F

from ops.contract import DEVICE
from tilewright.nn import GEGLU, SwiGLU
from tilewright.nn.activation import GatedMLP, GeluMLP

GATES = {"swiglu": F.silu, "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"), "geglu": F.gelu}


class LlamaMLP(torch.nn.Module):
    """As in Hugging Face's transformers."""

    def __init__(self, width, inner, bias, activation):
        super().__init__()
        self.gate_proj = torch.nn.Linear(width, inner, bias)
        self.up_proj = torch.nn.Linear(width, inner, bias)
        self.down_proj = torch.nn.Linear(inner, width, bias)
        self.act_fn = activation

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PlainMLP(torch.nn.Module):
    def __init__(self, width, inner, bias, approximate):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, inner, bias), torch.nn.Linear(inner, width, bias)
        self.approximate = approximate

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


def assert_replaces(fused, plain):
    """The checkpoint of the plain module loads, and output and every gradient are the same."""
    fused, plain = fused.to(DEVICE), plain.to(DEVICE)
    fused.load_state_dict(copy.deepcopy(plain.state_dict()))
    x = torch.randn(2, 5, 24, device=DEVICE)
    upstream = torch.randn(2, 5, 24, device=DEVICE)
    results = []
    for module in (fused, plain):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        out.backward(upstream)
        results.append([out, leaf.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", GATES)
def test_a_gated_mlp_replaces_that_of_llama(activation, bias):
    assert_replaces(GatedMLP(24, 40, activation=activation, bias=bias), LlamaMLP(24, 40, bias, GATES[activation]))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_a_gelu_mlp_replaces_two_linears(approximate, bias):
    assert_replaces(GeluMLP(24, 40, bias, approximate), PlainMLP(24, 40, bias, approximate))


def test_under_autocast_a_float32_bias_meets_bfloat16_activations():
    module = GeluMLP(24, 40).to(DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = module(torch.randn(3, 24, device=DEVICE))
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and module.up.bias.grad.dtype == torch.float32
    assert module.up.bias.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("module", "gated"),
    [
        (SwiGLU(), F.silu),
        (GEGLU(), GATES["geglu_tanh"]),
        (GEGLU("tanh"), GATES["geglu_tanh"]),
        (GEGLU("none"), F.gelu),
    ],
    ids=["swiglu", "geglu", "geglu tanh", "geglu erf"],
)
def test_a_gated_activation_takes_two_tensors_or_a_packed_one(module, gated):
    gate, up, upstream = (torch.randn(3, 24, device=DEVICE) for _ in range(3))
    results = []
    for function in (lambda a, b: gated(a) * b, module, lambda a, b: module(torch.cat([a, b], -1))):
        leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, upstream)])
    for result in results[1:]:
        for a, b in zip(result, results[0], strict=True):
            torch.testing.assert_close(a, b)
    assert not module.state_dict()


def test_geglu_of_an_unknown_gelu_is_one_sentence():
    with pytest.raises(ValueError, match="choose 'tanh' or 'none'"):
        GEGLU("erf")


def test_an_unknown_activation_is_one_sentence():
    with pytest.raises(ValueError, match="choose swiglu, geglu_tanh, geglu"):
        GatedMLP(8, 16, activation="relu")


@pytest.mark.parametrize("kind", [GatedMLP, GeluMLP])
def test_recompute_lets_go_of_the_activation(kind):
    kept = {}
    for recompute in (False, True):
        mlp = kind(16, 48, recompute=recompute).to(DEVICE)
        down = mlp.down if kind is GeluMLP else mlp.down_proj
        down.register_forward_pre_hook(lambda _, inputs, at=recompute: kept.update({at: weakref.ref(inputs[0])}))
        out = mlp(torch.randn(4, 16, device=DEVICE))
        assert (kept[recompute]() is None) == recompute
        del out


@pytest.mark.parametrize("kind", [GatedMLP, GeluMLP])
def test_recompute_compiles_into_one_graph(kind):
    mlp = kind(16, 48, recompute=True).to(DEVICE)
    x = torch.randn(4, 16, device=DEVICE, requires_grad=True)
    compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)
    expected, actual = (torch.autograd.grad(f(x).square().sum(), [x, *mlp.parameters()]) for f in (mlp, compiled))
    torch.testing.assert_close(expected, actual)
