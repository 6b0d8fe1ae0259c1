"""A replaced or hooked submodule of a GPT does in the optimized block what it does in the standard one."""

import copy
import dataclasses
import random

import pytest
import torch
from torch import nn
from torch.nn.modules import module as every_module
from torch.nn.utils import parametrizations, prune

from models.test_gpt import SMALL, pair, tokens
from ops.contract import DEVICE
from tilewright.models import GPT
from tilewright.models import recompute as recompute_module
from tilewright.nn import DropoutAddNorm, GatedMLP, GeluMLP
from tilewright.plan.gpt import LLAMA
from tilewright.runtime import dispatch

STYLES = {
    "gpt": SMALL,
    "llama": dataclasses.replace(SMALL, heads=4, kv_heads=2, **{**LLAMA, "bias": True}),
}
NAMES = {
    style: [
        name
        for name, _ in GPT(config).named_modules()
        if name.startswith("blocks.0") or (name and "blocks" not in name)
    ]
    for style, config in STYLES.items()
}
CASES = [(style, name) for style, names in NAMES.items() for name in names]
POLICIES = ["none", "selective", "full"]
each_submodule = pytest.mark.parametrize(("style", "name"), CASES, ids=[":".join(case) for case in CASES])


def test_every_submodule_is_among_the_cases():
    found = {name.rpartition(".")[2] for _, name in CASES}
    assert found == {
        "token", "position", "rope", "0", "norm1", "attention", "qkv", "out", "norm2", "mlp", "up", "down",
        "gate_proj", "up_proj", "down_proj", "norm",
    }  # fmt: skip


class Adapter(nn.Module):
    """Calls the module it stands for with what it is given, and adds something learned to what comes out."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0
        generator = torch.Generator().manual_seed(0)
        self.term = nn.Parameter(0.1 * torch.randn(256, generator=generator).to(DEVICE))

    @property
    def weight(self):  # a token table's is the output layer's too
        return self.inner.weight

    def forward(self, *inputs):
        self.calls += 1
        out = self.inner(*inputs)
        first, rest = (out, ()) if isinstance(out, torch.Tensor) else (out[0], out[1:])
        term = self.term[: first.shape[-1]].to(first.dtype)
        first = first + term * first + term
        return (first, *rest) if rest else first


@pytest.fixture
def by_pytorch(monkeypatch, request):
    """Do without Triton's slow interpreter, but for a selective recompute, which asks whether there are kernels."""
    if "selective" not in request.node.name:
        monkeypatch.setattr(dispatch, "INTERPRETED", False)


def replace(model, name, make):
    parent, _, child = name.rpartition(".")
    parent = model.get_submodule(parent)
    new = make(parent.get_submodule(child))
    parent.register_module(child, new)
    return new


def gradients(model, autocast=False, batch=None):
    torch.manual_seed(1)
    batch = tokens() if batch is None else batch
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        loss = model(batch, batch)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_alike(standard, optimized, rtol=1e-4, atol=1e-5):
    assert standard.keys() == optimized.keys()
    for name, value in standard.items():
        assert value is not None and optimized[name] is not None, name
        torch.testing.assert_close(optimized[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.usefixtures("by_pytorch")
@pytest.mark.parametrize("recompute", POLICIES)
@each_submodule
def test_a_submodule_that_is_replaced_is_called_and_learns(style, name, recompute):
    found = []
    for model in pair(dataclasses.replace(STYLES[style], recompute=recompute)):
        adapter = replace(model, name, Adapter)
        found.append(gradients(model))
        times = SMALL.layers if name == "rope" else 1
        assert adapter.calls == times if recompute == "none" else adapter.calls >= times
        assert adapter.term.grad.any()
    assert_alike(*found)


@pytest.mark.parametrize("seed", range(4))
def test_any_submodules_that_are_replaced_together(seed):
    draw = random.Random(seed)
    style = draw.choice(list(STYLES))
    names = draw.sample(NAMES[style], 3)
    config = dataclasses.replace(STYLES[style], recompute=draw.choice(POLICIES), mlp=draw.choice(["auto", "recompute"]))
    found = []
    for model in pair(config):
        for name in sorted(names, key=len, reverse=True):  # what is inside first: its name changes with its parent
            replace(model, name, Adapter)
        found.append(gradients(model))
    assert_alike(*found)


class NoisyAdapter(Adapter):
    """As LoRA's dropout: what runs again must draw the same."""

    def forward(self, *inputs):
        return super().forward(*[x if x is None else nn.functional.dropout(x, 0.5) for x in inputs])


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["attention.qkv", "attention.out", "mlp.up", "mlp.down", "norm1", "norm2"])
def test_a_replaced_submodule_with_dropout_has_the_gradient_of_its_forward(name, recompute):
    """Against no recompute, on the same seed."""
    found = []
    for how in ("none", recompute):
        _, model = pair(dataclasses.replace(SMALL, recompute=how))
        replace(model, f"blocks.0.{name}", NoisyAdapter)
        found.append(gradients(model))
    assert_alike(*found)


def flat(values):
    """The tensors among what a hook is given."""
    if isinstance(values, torch.Tensor):
        return [values.detach().clone()]
    if isinstance(values, dict):
        assert not values
    return [tensor for value in values for tensor in flat(value)] if isinstance(values, (tuple, list)) else []


class Heard:
    """What hooks of one kind were given, and in how many pieces."""

    def __init__(self):
        self.seen, self.kinds = [], []

    def forward_hook(self, module, inputs, options, output):
        assert not options
        self.kinds.append((len(inputs), type(output)))
        self.seen += flat(inputs) + flat(output)

    def forward_pre_hook(self, module, inputs, options):
        assert not options
        self.kinds.append(len(inputs))
        self.seen += flat(inputs)

    def full_backward_hook(self, module, grad_input, grad_output):
        self.seen += flat(grad_input) + flat(grad_output)

    def full_backward_pre_hook(self, module, grad_output):
        self.seen += flat(grad_output)

    def register(self, module, kind):
        options = {"with_kwargs": True} if kind.startswith("forward") else {}
        return getattr(module, f"register_{kind}")(getattr(self, kind), **options)


HOOKS = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"]


@pytest.mark.usefixtures("by_pytorch")
@each_submodule
def test_a_hook_sees_what_it_would_see_of_the_standard_block(style, name):
    found = []
    for model in pair(STYLES[style]):
        heard = {kind: Heard() for kind in HOOKS}
        for kind, one in heard.items():
            one.register(model.get_submodule(name), kind)
        results = gradients(model)
        found.append((results, heard))
    (expected, theirs), (actual, ours) = found
    assert_alike(expected, actual)
    for kind in HOOKS:
        assert ours[kind].kinds == theirs[kind].kinds
        assert len(ours[kind].seen) == len(theirs[kind].seen) > 0
        for a, b in zip(theirs[kind].seen, ours[kind].seen, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("by_pytorch")
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("style", STYLES)
def test_one_hook_alone_is_heard(style, kind):
    """Of every submodule in turn, and each of them sees as much as in the standard block."""
    for name in NAMES[style]:
        seen = []
        for model in pair(STYLES[style]):
            heard = Heard()
            heard.register(model.get_submodule(name), kind)
            gradients(model)
            seen.append(heard.seen)
        assert len(seen[0]) == len(seen[1]), name
        for a, b in zip(*seen, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.usefixtures("by_pytorch")
@pytest.mark.parametrize("style", STYLES)
def test_a_hook_of_all_modules_sees_every_one(style):
    found = []
    for model in pair(STYLES[style]):
        names, seen = {id(module): name for name, module in model.named_modules()}, []

        def hook(module, inputs, output, names=names, seen=seen):
            seen.append((names[id(module)], [t.shape for t in flat(inputs)], [t.shape for t in flat(output)]))

        handle = every_module.register_module_forward_hook(hook)
        try:
            gradients(model)
        finally:
            handle.remove()
        found.append(seen)
    assert found[0] == found[1]


@pytest.mark.usefixtures("by_pytorch")
@pytest.mark.parametrize(
    ("style", "name", "recompute"),
    [*[(*case, "none") for case in CASES], *[("gpt", name, "selective") for name in NAMES["gpt"]]],
)
def test_a_hook_that_changes_the_output_is_obeyed(style, name, recompute):
    def change(module, inputs, output):
        return output * 1.5 if isinstance(output, torch.Tensor) else (output[0] * 1.5, *output[1:])

    found = []
    for model in pair(dataclasses.replace(STYLES[style], recompute=recompute)):
        model.get_submodule(name).register_forward_hook(change)
        found.append(gradients(model))
    assert_alike(*found)


class Quantised(nn.Module):
    """A linear layer that has no `weight`, as one in few bits has."""

    def __init__(self, linear):
        super().__init__()
        self.register_buffer("codes", (linear.weight.detach() * 512).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.codes.to(x.dtype) / 512, self.bias)


def pruned(linear):
    prune.random_unstructured(linear, "weight", 0.5)
    prune.random_unstructured(linear, "bias", 0.5)
    return linear


CHANGES = {
    "weight_norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight_norm": pytest.param(nn.utils.weight_norm, marks=pytest.mark.filterwarnings("ignore")),
    "pruned": pruned,
    "quantised": Quantised,
    "another": lambda old: nn.Sequential(nn.Linear(old.in_features, old.out_features, device=DEVICE), nn.Identity()),
}


@pytest.mark.usefixtures("by_pytorch")
@pytest.mark.parametrize("change", list(CHANGES.values()), ids=list(CHANGES))
@pytest.mark.parametrize("style", STYLES)
def test_what_pytorch_does_to_a_linear_layer_counts(style, change):
    linears = [name for name in NAMES[style] if name.endswith(("qkv", "out", "up", "down", "proj"))]
    for name in linears:
        found = []
        for model in pair(STYLES[style]):
            torch.manual_seed(2)
            replace(model, name, change)
            found.append(gradients(model))
        assert_alike(*found, rtol=2e-4, atol=2e-5)


@pytest.mark.usefixtures("by_pytorch")
@pytest.mark.parametrize("changes", [{"scale_grad_by_freq": True}, {"padding_idx": 3}, {"max_norm": 0.05}], ids=str)
def test_a_table_with_options_keeps_them(changes):
    found = []
    for model in pair():

        def make(table):
            new = nn.Embedding(table.num_embeddings, table.embedding_dim, device=DEVICE, **changes)
            new.load_state_dict(table.state_dict())
            return new

        replace(model, "token", make)
        found.append(gradients(model))
    assert_alike(*found)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [GatedMLP, GeluMLP])
def test_an_mlp_calls_what_stands_in_for_its_linear_layers(kind, recompute):
    """By itself, outside of a GPT, with a projection that reads its input transposed and one that writes to it."""

    class Transposed(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.weight, self.bias = linear.weight, linear.bias

        def forward(self, x):
            return (self.weight @ x.transpose(-1, -2)).transpose(-1, -2) + self.bias

    class InPlace(nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return self.linear(x.mul_(2.0))

    for make in (Transposed, InPlace):
        mlp = kind(16, 48, bias=True, recompute=recompute).to(DEVICE)
        last = "down" if kind is GeluMLP else "down_proj"
        x = torch.randn(3, 4, 16, device=DEVICE, requires_grad=True)
        setattr(mlp, last, make(getattr(mlp, last)))
        actual = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
        mlp.recompute = False
        plain = copy.deepcopy(mlp)
        expected = torch.autograd.grad(plain(x).square().sum(), [x, *plain.parameters()])
        torch.testing.assert_close(actual, expected)
        hidden = (
            nn.functional.gelu(mlp.up(x), approximate="tanh")
            if kind is GeluMLP
            else (nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
        )
        reference = getattr(mlp, last)(hidden)
        torch.testing.assert_close(actual, torch.autograd.grad(reference.square().sum(), [x, *mlp.parameters()]))


# The norms' options, under recompute.

FEW = tokens(1)[:, :5]  # rows are what the interpreter's time goes by


def scaled(config, recompute, layerscale, p=0.0, frozen=False, **options):
    """A model whose norms have a learned scale for each column."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(config, gpt_block="optimized", recompute=recompute)).to(DEVICE)
    generator = torch.Generator().manual_seed(0)
    for block in model.blocks:
        for name in ("norm1", "norm2"):
            norm = DropoutAddNorm(config.width, p, layerscale=layerscale, **options).to(DEVICE)
            setattr(block, name, norm)
            for parameter in norm.parameters():
                parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator).to(DEVICE)
            if frozen:
                norm.weight.requires_grad_(False)
        for linear in (block.attention.out, getattr(block.mlp, "down", None)):
            if linear is not None:
                linear.bias.data += 0.1
    return model


NORMS = {
    "plain": {"layerscale": None},
    "layerscale": {"layerscale": 0.5},
    "layerscale, dropout": {"layerscale": 0.5, "p": 0.3},
    "layerscale, rms": {"layerscale": 0.5, "norm": "rms"},
    "zero-centered": {"layerscale": 0.5, "norm": "rms", "zero_centered": True},
    "no bias": {"layerscale": 0.5, "bias": False},
    "another eps": {"layerscale": 0.5, "eps": 0.1},
    "frozen": {"layerscale": 0.5, "frozen": True},
    "wide stream": {"layerscale": 0.5, "residual_dtype": torch.float32},
}


@pytest.mark.parametrize(("kernels", "autocast"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize(
    ("options", "recompute"), [*[(name, "selective") for name in NORMS], ("layerscale, dropout", "full")]
)
def test_recompute_has_the_gradients_of_none_whatever_the_norms_are(options, recompute, kernels, autocast, monkeypatch):
    if not kernels:  # what a compiler takes
        monkeypatch.setattr(recompute_module, "runs_kernel", lambda x: False)
    if NORMS[options].get("p") and recompute == "selective" and not kernels:
        pytest.skip("draws its masks by PyTorch, and no recompute by the kernel")
    found = []
    for how in ("none", recompute):
        model = scaled(SMALL, how, **NORMS[options])
        results = gradients(model, autocast, FEW)
        found.append({name: value for name, value in results.items() if value is not None})
    assert_alike(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("weights", "stream"), [
    (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("kernels", [True, False])
def test_recompute_without_autocast_beside_a_stream_of_another_dtype(weights, stream, kernels, monkeypatch):
    """The residual stream in another dtype than that of the matmuls: from the first norm's `residual_dtype` on."""
    if not kernels:
        monkeypatch.setattr(recompute_module, "runs_kernel", lambda x: False)
    found = []
    for how in ("none", "selective"):
        model = scaled(SMALL, how, 0.5).to(weights)
        model.blocks[0].norm1.residual_dtype = stream
        found.append(gradients(model, batch=FEW))
    assert found[0]["loss"].dtype == found[1]["loss"].dtype
    for name, expected in found[0].items():  # a number that lies between two of 16 bits may be rounded the other way
        apart = (found[1][name] - expected).double().norm() / expected.double().norm()
        assert apart < 0.02, (name, float(apart))
