"""Attention masks that a model makes of positions: causal ones become `is_causal`, all others stay what they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright import ops
from tilewright.ops.attention import triton_op
from tilewright.ops.attention.reference import reference
from tilewright.optimize import api, optimized
from tilewright.optimize.report import Report
from tilewright.optimize.rules import mask as mask_rule
from tilewright.runtime import dispatch

BATCH, SEQUENCE, WIDTH, HEADS = 2, 9, 24, 4
Mask = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    torch._dynamo.reset()


class _Attention(nn.Module):
    """Two layers that share one mask; fewer heads of keys than of queries are repeated as Hugging Face does."""

    def __init__(
        self, mask: Mask, key_heads: int = HEADS, keys: int = SEQUENCE, dropout: float = 0.0, head_dim: int = 6
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.key_heads, self.keys, self.dropout = mask, key_heads, keys, dropout
        self.q, self.out = nn.Linear(WIDTH, HEADS * head_dim), nn.Linear(HEADS * head_dim, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * key_heads * head_dim)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        for layer in range(2):
            q = self.q(x).view(BATCH, SEQUENCE, HEADS, -1).transpose(1, 2)
            k, v = self.kv(x[:, : self.keys]).view(BATCH, self.keys, 2, self.key_heads, -1).permute(2, 0, 3, 1, 4)
            k, v = (self._repeated(each, layer) for each in (k, v))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=self.dropout)
            x = x + self.out(y.transpose(1, 2).reshape(BATCH, SEQUENCE, -1))
        return x

    def _repeated(self, x: Tensor, layer: int) -> Tensor:
        """In one layer by one way, in the next by another."""
        if self.key_heads == HEADS:
            return x
        if layer:
            return x.repeat_interleave(HEADS // self.key_heads, 1)
        batch, heads, keys, width = x.shape
        return x[:, :, None].expand(batch, heads, HEADS // heads, keys, width).reshape(batch, HEADS, keys, width)


def _distance() -> Tensor:
    return torch.arange(SEQUENCE)[:, None] - torch.arange(SEQUENCE)[None, :]


def _float(mask: Tensor, hidden: float = -torch.inf) -> Tensor:
    return torch.zeros(SEQUENCE, SEQUENCE).masked_fill(~mask, hidden)


def _packed(x: Tensor) -> Tensor:
    """As transformers tells packed sequences apart, of which this is one."""
    positions = torch.arange(SEQUENCE)[None].expand(BATCH, -1)
    part = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return ((_distance() >= 0) & (part[:, :, None] == part[:, None, :]))[:, None].expand(BATCH, 1, SEQUENCE, SEQUENCE)


def _tril() -> Tensor:
    return torch.ones(BATCH, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).tril()


def _padded(x: Tensor) -> Tensor:
    mask = _tril()
    mask[:, 0].logical_and_(x[:, None, :, 0] < 9)
    return mask


def _prefix(x: Tensor) -> Tensor:
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    mask[:, :4].fill_(True)
    return mask


def _by_unbind(x: Tensor) -> Tensor:
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    mask.unbind(0)[5][0] = False
    return mask


def _by_base(x: Tensor) -> Tensor:
    base = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
    view = base[None]
    base.transpose(0, 1)[0].fill_(True)
    torch.diagonal(base, 1).fill_(True)
    return view


def _by_modulo(x: Tensor) -> Tensor:
    numbers = torch.ones(SEQUENCE, SEQUENCE).long().tril()
    row = numbers[4]
    row %= 1
    return numbers > 0


MASKS: dict[str, tuple[Mask, str]] = {
    "by comparison": (lambda x: _distance() >= 0, "causal"),
    "by tril": (lambda x: torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()[None, None], "causal"),
    "of minus infinity": (lambda x: _float(_distance() >= 0), "causal"),
    "of the smallest number": (lambda x: _float(_distance() >= 0, torch.finfo(torch.float32).min), "causal"),
    "of one packed sequence": (_packed, "causal"),
    "of nothing": (lambda x: _distance() > -SEQUENCE, "nothing hidden"),
    "a wide window": (lambda x: (_distance() >= 0) & (_distance() < SEQUENCE), "causal"),
    "one step into the future": (lambda x: _distance() >= -1, ""),
    "of a bias": (lambda x: _float(_distance() >= 0) - 0.1 * _distance().abs(), ""),
    "of minus thousand": (lambda x: _float(_distance() >= 0, -1000.0), ""),
    "of two sequences": (lambda x: (_distance() >= 0) & (_distance() <= torch.arange(SEQUENCE)[:, None] % 5), ""),
    "of what comes in": (lambda x: (_distance() >= 0) & (x[:, None, None, :, 0] < 9), ""),
    "padded in place": (_padded, ""),
    "with a prefix written in place": (_prefix, ""),
    "written by unbind": (_by_unbind, ""),
    "written by its base": (_by_base, ""),
    "written by modulo": (_by_modulo, ""),
    "at random": (lambda x: (_distance() >= 0) | (torch.rand(SEQUENCE, SEQUENCE) < 0.0), ""),
}


def _grads(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    out = model(x)
    model.zero_grad()
    (out * torch.linspace(-1, 1, out.numel()).to(out).view(out.shape)).sum().backward()
    return [out.detach(), *(each.grad.clone() for each in (x, *model.parameters()))]


WINDOWS: dict[str, tuple[Mask, str]] = {
    "of four": (lambda x: (_distance() >= 0) & (_distance() < 4), "window of 4"),
    "of itself, whose queries have no gradient": (lambda x: _float(_distance() == 0), ""),
    "of most": (lambda x: (_distance() >= 0) & (_distance() < SEQUENCE - 1), "window of 8"),
    "of floats": (lambda x: _float((_distance() >= 0) & (_distance() < 6)).to(x.dtype), "window of 6"),
    "to both sides": (lambda x: _distance().abs() < 3, "window of 2 + 1 + 2"),
    "one step into the future": (lambda x: _distance() >= -1, "window of all + 1 + 1"),
    "with a hole": (lambda x: (_distance() >= 0) & (_distance() < 4) & (_distance() != 2), ""),
    "that grows": (lambda x: (_distance() >= 0) & (_distance() <= torch.arange(SEQUENCE)[:, None] // 2), ""),
}


def _keys(x: Tensor) -> Tensor:
    """Which keys are no padding, as transformers hands it on."""
    return (x[..., 0] < 9)[:, None, None, :]


def _as_transformers(x: Tensor) -> Tensor:
    rows = torch.arange(SEQUENCE)[None, None, :, None]
    seen = rows.new_ones((), dtype=torch.bool) & (torch.arange(SEQUENCE)[None, None, None] <= rows).to(x.device)
    keys = (x[..., 0] < 9)[torch.arange(BATCH)[:, None, None, None], torch.arange(SEQUENCE)[None, None, None]]
    return (seen & keys).expand(BATCH, -1, SEQUENCE, SEQUENCE)


def _written(x: Tensor) -> Tensor:
    keys = _keys(x)
    mask = (_distance() >= 0) & keys
    keys.logical_not_()
    return mask


def _of_segments(x: Tensor) -> Tensor:
    part = (x[..., 0] < 9).long().cumsum(1)
    return (part[:, None, :, None] == part[:, None, None, :]) & (_distance() >= 0)


def _all_of_them(x: Tensor) -> Tensor:
    """Padding alone wherever there is some, and nothing else where there is none."""
    return (_distance() >= 0) & (_keys(x) | _keys(x).all())


PADDED: dict[str, tuple[Mask, str]] = {
    "causal": (lambda x: (_distance() >= 0) & _keys(x), "causal, padding"),
    "as transformers makes it": (_as_transformers, "causal, padding"),
    "of keys alone": (_keys, "nothing hidden, padding"),
    "of keys alone, for each head": (
        lambda x: _keys(x).expand(-1, HEADS, SEQUENCE, -1).contiguous(), "nothing hidden, padding",
    ),
    "a window of two parts": (
        lambda x: ((_distance() >= 0) & _keys(x).to(torch.bool)).logical_and(_distance() < 4)[:, :, :, :SEQUENCE],
        "window of 4, padding",
    ),
    "of one row for all": (lambda x: _keys(x)[:1] & (_distance() >= 0), "causal, padding"),
    "all of it or none": (_all_of_them, "causal, padding"),  # whatever it is, it hides keys
    "by two tensors": (lambda x: (_distance() >= 0) & _keys(x) & _keys(-x), ""),
    "or": (lambda x: (_distance() >= 0) | _keys(x), ""),
    "of queries": (lambda x: (_distance() >= 0) & _keys(x).mT, ""),
    "of queries, expanded": (lambda x: (_distance() >= 0) & _keys(x).expand(BATCH, 1, SEQUENCE, SEQUENCE).mT, ""),
    "of each head": (lambda x: (_distance() >= 0) & (x[:, :, :HEADS] < 1).mT[:, :, None], ""),
    "hidden the other way": (lambda x: ~((_distance() >= 0) & _keys(x)), ""),
    "moved by one": (lambda x: ((_distance() >= 0) & _keys(x)).roll(1, -1), ""),
    "with a prefix": (lambda x: ((_distance() >= 0) | (torch.arange(SEQUENCE) < 2)) & _keys(x), ""),
    "of two sequences": (_of_segments, ""),
    "of floats": (lambda x: _float(_distance() >= 0) + _float(_distance() > -SEQUENCE) * _keys(x), ""),
    "written in place later": (_written, ""),
}  # fmt: skip
PADDINGS = ([(0, 0), (0, 0)], [(0, 4), (0, 0)], [(3, 0), (8, 0)], [(2, 3), (0, 8)], [(SEQUENCE, 0), (0, 1)])


def _padded_batch(paddings: list[tuple[int, int]]) -> Tensor:
    """Tokens, so many of them padding in front and behind."""
    x = torch.randn(BATCH, SEQUENCE, WIDTH).clamp(max=8)
    for row, (front, behind) in zip(x, paddings, strict=True):
        row[:front, 0] = row[SEQUENCE - behind :, 0] = 10
    return x


def _details(report: Report) -> set[str]:
    return {site.detail for site in report.changed if site.rule == "mask"}


@pytest.mark.parametrize(
    ("name", "key_heads"), [(name, heads) for name in MASKS for heads in (HEADS, 2) if heads == HEADS or MASKS[name][1]]
)
def test_only_a_mask_that_is_causal_in_every_call_becomes_is_causal(name: str, key_heads: int) -> None:
    mask, kind = MASKS[name]
    model, x = _Attention(mask, key_heads), torch.randn(BATCH, SEQUENCE, WIDTH)
    truth = _grads(model, x)
    double = _grads(copy.deepcopy(model).double(), x.double())
    with optimized(model, rules=["mask"]) as report:
        found = _grads(model, x)
    groups = "" if key_heads == HEADS else f", {HEADS // key_heads} queries a key"
    assert _details(report) == ({kind + groups} if kind else set()), f"{report}"
    for ours, theirs, true in zip(found, truth, double, strict=True):
        assert (ours - true).norm() <= 2 * (theirs - true).norm() + 1e-6 * true.norm()


@pytest.fixture
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("these tensors are on the CPU, and beside a GPU nothing interprets kernels")
    monkeypatch.setattr(dispatch, "INTERPRETED", True)


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", ["by our kernels", *WINDOWS])
def test_a_window_is_computed_without_its_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once by the kernels, else by their definition: as near to float64 as 16 bits are with the mask."""
    mask, kind = WINDOWS.get(name, WINDOWS["of four"])
    key_heads = HEADS if len(name) % 2 else 1
    if name in WINDOWS:
        monkeypatch.setattr(mask_rule, "attention", reference)
    model, x = _Attention(mask, key_heads, head_dim=16).bfloat16(), torch.randn(BATCH, SEQUENCE, WIDTH).bfloat16()
    double = _grads(copy.deepcopy(model).double(), x.double())
    theirs = _grads(model, x)
    with optimized(model, rules=["mask"]) as report, ops.explain() as paths:
        found = _grads(model, x)
    groups = "" if key_heads == HEADS else f", {HEADS // key_heads} queries a key"
    assert _details(report) == ({kind + groups} if kind else set()), f"{report}"
    assert [path.ran for path in paths] == ([] if name in WINDOWS else ["triton"])
    for ours, plain, true in zip(found, theirs, double, strict=True):
        assert (ours - true).norm() <= 2 * (plain - true).norm() + 2**-8 * true.norm()


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("name", ["by our kernels", *PADDED])
def test_a_padded_batch_is_computed_without_its_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row of it, on whichever side the padding is, by one graph; near misses stay, and nothing is waited for."""
    mask, kind = PADDED.get(name, PADDED["as transformers makes it"])
    key_heads = HEADS if len(name) % 2 else 1
    if name in PADDED:
        monkeypatch.setattr(mask_rule, "attention", reference)
    model = _Attention(mask, key_heads, head_dim=16).bfloat16()
    plain, double = copy.deepcopy(model), copy.deepcopy(model).double()
    with optimized(model, rules=["mask"]) as report:
        for paddings in PADDINGS if kind else PADDINGS[2:3]:
            x = _padded_batch(paddings).bfloat16()
            for ours, theirs, true in zip(_grads(model, x), _grads(plain, x), _grads(double, x.double()), strict=True):
                assert (ours - true).norm() <= 2 * (theirs - true).norm() + 2**-8 * true.norm(), paddings
    groups = "" if key_heads == HEADS else f", {HEADS // key_heads} queries a key"
    assert _details(report) == ({kind + groups} if kind else set()), f"{report}"
    assert len(report.captured.graphs) == 1


@pytest.mark.parametrize(("change", "why"), [
    ({"head_dim": 20}, "a window has kernels for heads of 16 to 256 in steps of 8"),
    ({"dtype": torch.float32}, "a window has kernels in 16 bits"),
    ({"interpreted": False}, "a window has kernels on a GPU alone"),
])  # fmt: skip
def test_a_window_that_has_no_kernel_stays(change: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRETED", change.get("interpreted", True))
    dtype = change.get("dtype", torch.bfloat16)
    model = _Attention(WINDOWS["of four"][0], head_dim=change.get("head_dim", 16)).to(dtype)
    with optimized(model, rules=["mask"]) as report:
        model(torch.randn(BATCH, SEQUENCE, WIDTH, dtype=dtype))
    assert not report.changed and {site.declined for site in report.sites} == {why}


@pytest.mark.usefixtures("_kernels")
def test_under_autocast_a_window_is_in_16_bits() -> None:
    model, x = _Attention(WINDOWS["of four"][0], head_dim=16), torch.randn(BATCH, SEQUENCE, WIDTH)
    with torch.autocast("cpu", torch.bfloat16), optimized(model, rules=["mask"]) as report, ops.explain() as paths:
        found = model(x)
    assert _details(report) == {"window of 4"} and [path.ran for path in paths] == ["triton"]
    assert torch.allclose(found, model(x), atol=0.05)


@pytest.mark.usefixtures("_kernels")
def test_a_window_keeps_its_dropout() -> None:
    model = _Attention(WINDOWS["of four"][0], dropout=0.5, head_dim=16).bfloat16()
    x = torch.randn(BATCH, SEQUENCE, WIDTH).bfloat16()
    with optimized(model, rules=["mask"]) as report:
        one, other = model(x), model(x)
    assert _details(report) == {"window of 4"} and not torch.equal(one, other)


@pytest.mark.usefixtures("_kernels")
def test_a_compiler_is_given_the_registered_op_of_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MODES", (*api.MODES, "aot_eager"))
    model, x = _Attention(WINDOWS["of four"][0], 1, head_dim=16).bfloat16(), torch.randn(BATCH, SEQUENCE, WIDTH)
    with optimized(model, rules=["mask"]):
        eager = _grads(model, x.bfloat16())
    traced, call = [], triton_op._OP.call_registered
    monkeypatch.setattr(triton_op._OP, "call_registered", lambda inputs: traced.append(1) or call(inputs))
    with optimized(model, rules=["mask"], compile="aot_eager"):
        compiled = _grads(model, x.bfloat16())
    assert traced
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


def test_nobody_computes_a_mask_that_nobody_reads() -> None:
    def computed(model: nn.Module) -> set[str]:
        with torch.profiler.profile() as profile:
            model(x)
        return {each.key for each in profile.key_averages()} & {"aten::cumsum", "aten::arange"}

    model, x = _Attention(MASKS["of one packed sequence"][0]), torch.randn(BATCH, SEQUENCE, WIDTH)
    assert computed(model) == {"aten::cumsum", "aten::arange"}
    with optimized(model, rules=["mask"]):
        model(x)
        assert not computed(model)


def test_fewer_keys_than_queries_are_hidden_as_is_causal_does() -> None:
    for keys, change in ((5, True), (SEQUENCE, True)):
        torch._dynamo.reset()
        model = _Attention(lambda x, keys=keys: _distance()[:, :keys] >= 0, keys=keys)
        x = torch.randn(BATCH, SEQUENCE, WIDTH)
        truth = _grads(model, x)
        with optimized(model, rules=["mask"]) as report:
            found = _grads(model, x)
        assert bool(_details(report)) == change
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(found, truth, strict=True))


def test_dropout_of_the_weights_is_still_there() -> None:
    model, x = _Attention(MASKS["by comparison"][0], dropout=0.5), torch.randn(BATCH, SEQUENCE, WIDTH)
    with optimized(model, rules=["mask"]) as report:
        one, other = model(x), model(x)
    assert _details(report) == {"causal"} and not torch.equal(one, other)


def test_a_mask_that_somebody_else_reads_stays() -> None:
    class _Reader(_Attention):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), self.mask(x).sum()

    model, x = _Reader(MASKS["by comparison"][0]), torch.randn(BATCH, SEQUENCE, WIDTH)
    with optimized(model, rules=["mask"]) as report:
        _, total = model(x)
    assert _details(report) == {"causal"} and int(total) == SEQUENCE * (SEQUENCE + 1) // 2


def test_a_length_that_changes_leaves_the_mask_alone() -> None:
    """What a mask is at one length says nothing of another: a window of 8 is causal up to 8."""

    class _Any(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None, :]
            q = x[:, None]
            return F.scaled_dot_product_attention(q, q, q, attn_mask=(distance >= 0) & (distance < 8))

    model, plain = _Any(), _Any()
    with optimized(model, rules=["mask"], dynamic=True) as report:
        for length in (5, 8, 12, 20):
            x = torch.randn(2, length, 8)
            assert torch.allclose(model(x), plain(x), atol=1e-6)
    assert not _details(report)
