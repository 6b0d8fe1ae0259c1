"""The rules `linear` and `gelu_mlp`: what they find, that their ops run in eager and in compiled models, gradients."""

import copy
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilewright.optimize.backend import Backend
from tilewright.optimize.rules import chosen
from tilewright.runtime import cublaslt, hopper

WIDTH, INNER = 16, 24
linear = sys.modules["tilewright.ops.linear.op"]
gelu_mlp = sys.modules["tilewright.ops.gelu_mlp.op"]
rule = sys.modules["tilewright.optimize.rules.linear"]


class MLP(nn.Module):
    def __init__(self, activation, bias=True):
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(WIDTH, INNER, bias), nn.Linear(INNER, WIDTH, bias), activation

    def forward(self, x):
        return x + self.down(self.activation(self.up(x)))


def spelled_out(z):
    return 0.5 * z * (1.0 + torch.erf(z * 0.5**0.5))


class Emulator:
    """What stands on a CPU for the kernels; it counts their calls."""

    def __init__(self):
        self.matmuls, self.values, self.gradients = 0, 0, 0

    def matmul(self, *_):
        self.matmuls += 1
        return False  # so that PyTorch does it

    def value(self, x, up, bias, lean, erf):
        self.values += 1
        z, approximate = F.linear(x.float(), up.float(), bias), "none" if erf else "tanh"
        slope = torch.ops.aten.gelu_backward(torch.ones_like(z), z, approximate=approximate)
        return F.gelu(z, approximate=approximate).to(x.dtype), slope.to(x.dtype)

    def gradient(self, dy, down, slope, lean, erf):
        self.gradients += 1
        dz = dy.float() @ down.float() * slope.float()
        return dz.to(dy.dtype), dz.sum(0), None


@pytest.fixture
def emulator(monkeypatch):
    """Every matmul is large enough for the kernels."""
    found = Emulator()
    monkeypatch.setattr(rule, "_LEAST", 0.0)
    monkeypatch.setattr(linear, "_DEVICES", ("cpu",))
    monkeypatch.setattr(cublaslt, "WORTH_CHOOSING", 0)
    monkeypatch.setattr(cublaslt, "matmul", found.matmul)
    monkeypatch.setattr(gelu_mlp, "_LEAST_BUSY", 0.0)
    monkeypatch.setattr(hopper, "ready", lambda device, *names: names[0].startswith("tilewright_gelu_mlp"))
    monkeypatch.setattr(gelu_mlp, "_value", found.value)
    monkeypatch.setattr(gelu_mlp, "_gradient", found.gradient)
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
def test_the_matmuls_of_a_layer_reach_cublaslt(mode, emulator):
    sites = check(MLP(nn.ReLU()), "linear", mode)
    assert [site.is_changed for site in sites] == [True, True]
    assert emulator.matmuls == 4  # two forward, and two gradients of an input


@modes
@pytest.mark.parametrize("bias", [True, False], ids=["biases", "no biases"])
@pytest.mark.parametrize(
    ("activation", "kind"),
    [(nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"), (spelled_out, "gelu")],
    ids=["erf", "tanh", "spelled out"],
)
def test_the_gelu_of_an_mlp_goes_into_the_matmuls(activation, kind, bias, mode, emulator):
    sites = check(MLP(activation, bias), "gelu_mlp,gelu,linear", mode)
    assert [(site.rule, site.detail.split(",")[0]) for site in sites if site.is_changed] == [("gelu_mlp", kind)]
    assert emulator.values == emulator.gradients == 1


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.ReLU(), lambda z: F.gelu(z) * 2.0, lambda z: F.gelu(z) + z])
def test_what_is_no_mlp_of_a_gelu_is_left_alone(activation, emulator):
    sites = check(MLP(activation), "gelu_mlp", "none")
    assert not any(site.is_changed for site in sites) and not emulator.values


def test_what_somebody_reads_between_the_matmuls_stays(emulator):
    class Read(MLP):
        def forward(self, x):
            between = self.activation(self.up(x))
            return self.down(between) + between.mean(-1, keepdim=True)

    assert not check(Read(nn.GELU()), "gelu_mlp", "none") and not emulator.values


def test_without_gradients_the_gelu_is_a_pass_of_its_own(emulator):
    backend = Backend(chosen("gelu_mlp,gelu"))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.compile(MLP(nn.GELU()), backend=backend)(torch.randn(6, WIDTH))
    assert [site.rule for site in backend.captured.sites] == ["gelu"] and not emulator.values
