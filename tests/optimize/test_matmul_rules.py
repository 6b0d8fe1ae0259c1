"""The rules `linear` and `gelu_mlp`: what they find, that their ops run in eager and in compiled models, gradients."""

import copy
import sys
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ops.matmul_stand_ins import gelu_gradient, gelu_value, glu_gradient, glu_value
from tilewright.optimize.backend import Backend
from tilewright.optimize.rules import chosen
from tilewright.runtime import cublaslt, hopper

WIDTH, INNER = 16, 24
linear = sys.modules["tilewright.ops.linear.op"]
gelu_mlp = sys.modules["tilewright.ops.gelu_mlp.op"]
glu_mlp = sys.modules["tilewright.ops.glu_mlp.op"]
rule = sys.modules["tilewright.optimize.rules.linear"]


class MLP(nn.Module):
    def __init__(self, activation, bias=True):
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(WIDTH, INNER, bias), nn.Linear(INNER, WIDTH, bias), activation

    def forward(self, x):
        return x + self.down(self.activation(self.up(x)))


class GatedMLP(nn.Module):
    def __init__(self, activation, bias=False):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias) for _ in range(2))
        self.down, self.activation = nn.Linear(INNER, WIDTH), activation

    def forward(self, x):
        return x + self.down(self.activation(self.gate(x)) * self.up(x))


def spelled_out(z):
    return 0.5 * z * (1.0 + torch.erf(z * 0.5**0.5))


@pytest.fixture
def called(monkeypatch):
    """Every matmul is large enough for the kernels; what stands for them here counts its calls."""
    found = Counter()

    def stand_in(module, name, function):
        monkeypatch.setattr(module, name, lambda *inputs: found.update([name]) or function(*inputs))

    monkeypatch.setattr(rule, "_LEAST", 0.0)
    monkeypatch.setattr(linear, "_DEVICES", ("cpu",))
    monkeypatch.setattr(cublaslt, "WORTH_CHOOSING", 0)
    monkeypatch.setattr(gelu_mlp, "_LEAST_BUSY", 0.0)
    monkeypatch.setattr(glu_mlp, "IS_ON", True)
    monkeypatch.setattr(hopper, "ready", lambda device, *names: "lu_mlp" in names[0])
    stand_in(cublaslt, "matmul", lambda *_: False)  # so that PyTorch does it
    stand_in(gelu_mlp, "_value", gelu_value)
    stand_in(gelu_mlp, "_gradient", gelu_gradient)
    stand_in(glu_mlp, "_value", glu_value)
    stand_in(glu_mlp, "_gradient", glu_gradient)
    yield found
    torch._dynamo.reset()


def step(model, x, backend=None):
    """The output and the gradients of x and the parameters; and the sites."""
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x) if backend is None else torch.compile(model, backend=backend)(x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y, *torch.autograd.grad((y.float() * upstream).sum(), [x, *model.parameters()])]


def check(model, rules, mode):
    """Run a step with the rules and without, compare, and return the sites."""
    x = torch.randn(6, WIDTH, requires_grad=True)
    exact = step_in_double(model, x)
    plain = step(model, x)
    backend = Backend(chosen(rules), mode)
    found = step(model, x, backend)
    assert not backend.captured.failures
    for one, other, truth in zip(found, plain, exact, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one.double() - truth).norm() <= 1.2 * (other.double() - truth).norm() + 1e-3 * truth.norm()
    return backend.captured.sites


def step_in_double(model, x):
    model, x = copy.deepcopy(model).double(), x.detach().double().requires_grad_()
    y = model(x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y, *torch.autograd.grad((y * upstream.double()).sum(), [x, *model.parameters()])]


modes = pytest.mark.parametrize("mode", ["none", "aot_eager"])


@modes
def test_the_matmuls_of_a_layer_reach_cublaslt(mode, called):
    sites = check(MLP(nn.ReLU()), "linear", mode)
    assert [site.is_changed for site in sites] == [True, True]
    assert called["matmul"] == 4  # two forward, and two gradients of an input


@modes
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize(
    ("activation", "kind"),
    [(nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"), (spelled_out, "gelu")],
    ids=["erf", "tanh", "spelled out"],
)
def test_the_gelu_of_an_mlp_goes_into_the_matmuls(activation, kind, bias, mode, called):
    sites = check(MLP(activation, bias), "gelu_mlp,gelu,linear", mode)
    assert [(site.rule, site.detail.split(",")[0]) for site in sites if site.is_changed] == [("gelu_mlp", kind)]
    assert called["_value"] == called["_gradient"] == 1


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.ReLU(), lambda z: F.gelu(z) * 2.0, lambda z: F.gelu(z) + z])
def test_what_is_no_mlp_of_a_gelu_is_left_alone(activation, called):
    sites = check(MLP(activation), "gelu_mlp", "none")
    assert not any(site.is_changed for site in sites) and not called["_value"]


def test_what_somebody_reads_between_the_matmuls_stays(called):
    class Read(MLP):
        def forward(self, x):
            between = self.activation(self.up(x))
            return self.down(between) + between.mean(-1, keepdim=True)

    assert not check(Read(nn.GELU()), "gelu_mlp", "none") and not called["_value"]


def test_without_gradients_the_gelu_is_a_pass_of_its_own(called):
    backend = Backend(chosen("gelu_mlp,gelu"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.compile(MLP(nn.GELU()), backend=backend)(torch.randn(6, WIDTH))
    assert [site.rule for site in backend.captured.sites] == ["gelu"] and not called["_value"]


@modes
@pytest.mark.parametrize(("activation", "kind"), [(nn.SiLU(), "silu"), (nn.GELU("tanh"), "gelu_tanh")], ids=str)
def test_the_activation_of_a_gated_mlp_goes_into_the_matmuls(activation, kind, mode, called):
    sites = check(GatedMLP(activation), "glu_mlp,glu,linear", mode)
    assert [(site.rule, site.detail.split(",")[0]) for site in sites if site.is_changed] == [("glu_mlp", kind)]
    assert called["_value"] == called["_gradient"] == 1


def test_a_gated_mlp_with_biases_or_of_two_inputs_is_left_to_other_rules(called):
    class TwoInputs(GatedMLP):
        def forward(self, x):
            return x + self.down(self.activation(self.gate(x)) * self.up(x * 2.0))

    for model in (GatedMLP(nn.SiLU(), bias=True), TwoInputs(nn.SiLU())):
        assert not check(model, "glu_mlp", "none") and not called["_value"]


def test_before_a_fused_loss_the_first_two_gated_mlps_compute_again_but_never_the_last(called):
    class Model(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = nn.Sequential(*(GatedMLP(nn.SiLU()) for _ in range(layers)))
            self.head = nn.Linear(WIDTH, 40, bias=False)

        def forward(self, x):
            return F.cross_entropy(self.head(self.layers(x)), torch.arange(6))

    for layers, forgetting in ((1, 0), (2, 1), (4, 2)):
        backend = Backend(chosen("linear_cross_entropy,glu_mlp"))
        with torch.autocast("cpu", torch.bfloat16):
            torch.compile(Model(layers), backend=backend)(torch.randn(6, WIDTH)).backward()
        details = [site.detail for site in backend.captured.sites if site.rule == "glu_mlp" and site.is_changed]
        assert len(details) == layers and ["again" in each for each in details].count(True) == forgetting
        assert not any("again" in each for each in details[forgetting:])
