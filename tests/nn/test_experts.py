import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from ops.contract import DEVICE, on_hopper
from tilewright import ops
from tilewright.models.standard import StandardMixtureOfExperts
from tilewright.nn import MixtureOfExperts
from tilewright.nn import experts as module
from tilewright.nn.experts import grouped_linear, shift_balance, take_counts, why_no_grouped_matmul
from tilewright.runtime import dispatch

KINDS = [StandardMixtureOfExperts, MixtureOfExperts]
# Rows, experts, of them per token, width, inner width, activation.
SHAPES = [
    (6, 4, 2, 8, 12, "swiglu"), (1, 5, 3, 6, 7, "gelu_tanh"), (0, 3, 2, 4, 8, "geglu"), (9, 1, 1, 5, 3, "gelu"),
    (7, 4, 4, 3, 5, "geglu_tanh"), (4, 64, 1, 8, 4, "swiglu"), (50, 3, 1, 8, 4, "gelu"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def by_pytorch(monkeypatch):
    """What lies between the matmuls has tests of its own under Triton's interpreter."""
    monkeypatch.setattr(dispatch, "INTERPRETED", False)


def made(kind, shape, dtype=torch.float64):
    rows, experts, per_token, width, inner, activation = shape
    torch.manual_seed(rows + experts)
    moe = kind(width, inner, experts=experts, per_token=per_token, activation=activation).to(dtype)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    return moe, torch.randn(rows, width, dtype=dtype, requires_grad=True)


def definition(moe, x, activation):
    """Token by token."""
    outputs = []
    for row in x:
        logits = moe.router.weight @ row
        shares, chosen = logits.softmax(0), (logits + moe.bias).topk(moe.per_token).indices
        weights = shares[chosen] / (shares[chosen].sum() if moe.per_token > 1 else 1)
        total = torch.zeros_like(row)
        for weight, expert in zip(weights, chosen, strict=True):
            hidden = moe.experts.up[expert] @ row
            if activation in ("gelu", "gelu_tanh"):
                hidden = F.gelu(hidden, approximate="tanh" if activation == "gelu_tanh" else "none")
            else:
                gate, up = hidden.chunk(2)
                gelu = F.gelu(gate, approximate="tanh" if activation == "geglu_tanh" else "none")
                hidden = (F.silu(gate) if activation == "swiglu" else gelu) * up
            total = total + weight * (moe.experts.down[expert] @ hidden)
        outputs.append(total)
    return torch.stack(outputs) if outputs else x * 0


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_its_definition(kind, shape, biased):
    moe, x = made(kind, shape)
    if biased:
        moe.bias.copy_(torch.randn(shape[1]))
    y, expected = moe(x.unflatten(0, (1, len(x))))[0], definition(moe, x, shape[-1])
    torch.testing.assert_close(y, expected)
    inputs, weight = [x, *moe.parameters()], torch.randn_like(y)
    found = torch.autograd.grad((y * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs, allow_unused=True)
    for one, other in zip(found, wanted, strict=True):  # an expert without tokens has a gradient: zeros
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other)
    assert moe.counts.sum() == shape[0] * shape[2]


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind, shape):
    moe, x = made(kind, shape)
    names, parameters = zip(*moe.named_parameters(), strict=True)
    moe.eval()
    run = lambda x, *given: functional_call(moe, dict(zip(names, given, strict=True)), (x,))  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_kinds_have_the_same_state_and_results_in_every_dtype(shape):
    found = []
    for kind in KINDS:
        moe, _ = made(kind, shape, torch.float32)
        x = torch.randn(shape[0], shape[3], generator=torch.Generator().manual_seed(0))
        with torch.autocast("cpu", torch.bfloat16):
            y = moe(x)
        found.append((list(moe.state_dict()), y.dtype, moe(x), y))
    (names, dtype, plain, _), (others, other, result, narrow) = found
    assert names == others == ["bias", "router.weight", "experts.up", "experts.down"]
    assert dtype == other == torch.bfloat16 and narrow.shape == plain.shape
    torch.testing.assert_close(result, plain)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_grouped_matmul_is_the_loop(monkeypatch, recompute):
    """By PyTorch's definition of it on a CPU, with experts that get nothing and widths that need no padding."""
    found = []
    for why in ("as asked", ""):
        monkeypatch.setattr(module, "why_no_grouped_matmul", lambda *_, why=why: why)
        moe, x = made(MixtureOfExperts, (40, 16, 2, 8, 16, "swiglu"), torch.float32)
        moe.bias[3:] = torch.linspace(-99, 1, 13)  # some are never chosen
        try:
            y = moe(x, recompute=recompute)
        except RuntimeError as error:
            pytest.skip(f"this PyTorch has no grouped matmul on a CPU: {error}")
        y.backward(torch.ones_like(y))
        assert (moe.counts == 0).any()
        found.append([y, x.grad, *(parameter.grad for parameter in moe.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@on_hopper
@pytest.mark.parametrize("shape", [(300, 8, 2, 64, 96, "swiglu"), (5, 16, 3, 64, 40, "gelu")], ids=str)
def test_the_grouped_matmul_of_a_gpu_is_the_loop_and_waits_for_nobody(shape, monkeypatch):
    """In bfloat16 both, in which the router chooses alike; some experts get nothing, others any number of rows."""
    moe, x = made(MixtureOfExperts, shape, torch.bfloat16)
    moe, x = moe.to(DEVICE), x.detach().to(DEVICE).requires_grad_()
    moe.bias[-2:] = -99.0
    upstream = torch.randn_like(x)

    def step():
        y = moe(x)
        return [y, *torch.autograd.grad(y, [x, *moe.parameters()], upstream)]

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monkeypatch.setattr(module, "why_no_grouped_matmul", lambda *_: "as asked")
    for one, other in zip(found, step(), strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_the_path_says_why(monkeypatch):
    with ops.explain() as paths:
        grouped_linear(torch.ones(2, 8), torch.ones(1, 8, 8), torch.tensor([2]))
    assert [(path.op, path.ran, path.why) for path in paths] == [
        ("grouped_linear", "its parts", "PyTorch's grouped matmul needs a GPU")
    ]
    gpu = torch.device("cuda")
    for capability, dtype, widths, words in [
        ((8, 0), torch.bfloat16, (8, 8), "Hopper"), ((12, 0), torch.bfloat16, (8, 8), "Hopper"),
        ((9, 0), torch.float32, (8, 8), "bfloat16"), ((9, 0), torch.bfloat16, (8, 12), "16 bytes"),
        ((9, 0), torch.bfloat16, (8, 16), ""),
    ]:  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, is_it=capability: is_it)
        why = why_no_grouped_matmul(gpu, dtype, *widths)
        assert words in why and bool(words) == bool(why)


def test_the_bias_brings_balance_to_a_router_that_prefers_one_expert():
    moe, _ = made(MixtureOfExperts, (0, 8, 2, 16, 4, "gelu"))
    x = torch.randn(512, 16, dtype=torch.float64)
    x[:, 0] = 3.0
    moe.router.weight.data[:, 0] = torch.linspace(0, 3, 8)
    shares = []
    for _ in range(120):
        moe(x)
        counts = take_counts([moe])
        assert counts.sum() == 1024 and not moe.counts.any()
        shares.append(float(counts.max() / counts.sum()))
        shift_balance([moe], counts, 0.1)
    assert shares[0] > 0.2 and max(shares[-20:]) < 0.15, shares[-20:]


def test_wrong_arguments_are_a_sentence():
    with pytest.raises(ValueError, match="choose swiglu"):
        MixtureOfExperts(8, 8, experts=2, per_token=1, activation="relu")
    for per_token in (0, 3):
        with pytest.raises(ValueError, match=f"cannot take {per_token} of 2"):
            MixtureOfExperts(8, 8, experts=2, per_token=per_token)
