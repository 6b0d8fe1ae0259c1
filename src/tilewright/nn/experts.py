"""A mixture of experts: a router sends each token to a few of many MLPs. No token is dropped.

Rows are sorted by expert, so that one grouped matmul takes the rows of all experts, and the host need not know how many
each got. Sorting is stable and no gradient is added up by atomics: two runs have the same bits.

Experts stay in balance without a loss of their own: what the router chooses by has a bias, which `shift_balance` moves
after a step towards experts that got fewer tokens than the mean of all (Wang et al., arXiv 2408.15664). It decides who
is chosen, and not with which weight. It is added to logits: shares of a sure router are 0 for all experts but a few,
and a bias added to those would send the tokens of all others to and fro together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.nn.activation import GATED, project
from tilewright.nn.linear import Linear
from tilewright.ops.activation.op import bias_gelu
from tilewright.runtime import paths

_NAME = "grouped_linear"  # in `explain()`


def why_no_grouped_matmul(device: torch.device, dtype: torch.dtype, *widths: int) -> str:
    """Why PyTorch has no grouped matmul for these on a device; "" where it has one that does not wait for the host."""
    if device.type != "cuda":
        return "PyTorch's grouped matmul needs a GPU"
    major = torch.cuda.get_device_capability(device)[0]
    if major != 9 and not (major == 10 and torch.__version__ >= "2.13"):  # earlier ones fail there
        return "PyTorch's grouped matmul is for a Hopper, and from 2.13 on for a Blackwell"
    if dtype != torch.bfloat16:
        return "PyTorch's grouped matmul takes bfloat16"
    return "" if all(width % 8 == 0 for width in widths) else "rows are not whole pieces of 16 bytes"


def grouped_linear(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each row times the weight of its expert: rows of expert e lie before row `ends[e]` and behind those of e - 1.

    By one grouped matmul where PyTorch has a kernel for it, else by a matmul an expert, for which the host waits.

    >>> rows, weight = torch.randn(3, 4), torch.randn(2, 5, 4)
    >>> torch.equal(grouped_linear(rows, weight, torch.tensor([1, 3]))[1:], rows[1:] @ weight[1].T)
    True
    """
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight = rows.to(dtype), weight.to(dtype)
    why = why_no_grouped_matmul(rows.device, rows.dtype, *weight.shape[1:])
    why = why or ("" if len(rows) else "no rows")
    paths.note(_NAME, paths.PARTS if why else paths.PYTORCH, why)
    if not why:
        return F.grouped_mm(rows.contiguous(), weight.transpose(1, 2), offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    return torch.cat([F.linear(*one) for one in zip(rows.split(counts), weight.unbind(), strict=True)])


class _Reorder(torch.autograd.Function):
    """Rows in another order, each maybe several times, whose gradients are gathered and not scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (back,) = ctx.saved_tensors
        gradient = gradient.index_select(0, back)
        if ctx.copies > 1:
            gradient = gradient.view(len(back) // ctx.copies, ctx.copies, gradient.shape[-1]).sum(1)
        return gradient, None, None, None


class Order:
    """Rows sorted by their expert, and back.

    Args:
        experts: of each row.
        count: how many experts there are.

    >>> order = Order(torch.tensor([2, 0, 2]), 3)
    >>> order.ends.tolist(), order.sort(torch.tensor([[5.0], [6.0], [7.0]])).flatten().tolist()
    ([1, 1, 3], [6.0, 5.0, 7.0])
    """

    def __init__(self, experts: Tensor, count: int) -> None:
        grouped, self._there = experts.sort(stable=True)
        self._back = self._there.argsort()
        numbers = torch.arange(count, device=experts.device)
        self.ends = torch.searchsorted(grouped, numbers, right=True, out_int32=True)

    def sort(self, rows: Tensor, copies: int = 1) -> Tensor:
        """The rows in the order of experts; each of `rows` stands for so many that follow each other."""
        return _Reorder.apply(rows, self._there // copies, self._back, copies)

    def undo(self, rows: Tensor) -> Tensor:
        """Sorted rows where they were."""
        return _Reorder.apply(rows, self._back, self._there, 1)


class Experts(nn.Module):
    """The MLPs of a mixture, their weights stacked; takes rows that are sorted by expert. No biases.

    A gated activation has the gate's rows of `up` in front.
    """

    def __init__(self, count: int, width: int, inner: int, activation: str, **where: Any) -> None:
        super().__init__()
        self.activation = activation
        ups = 2 if activation in GATED else 1
        self.up = nn.Parameter(torch.empty(count, ups * inner, width, **where))
        self.down = nn.Parameter(torch.empty(count, width, inner, **where))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as `torch.nn.Linear` would."""
        for weight in (self.up, self.down):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, rows: Tensor, ends: Tensor, recompute: bool = False) -> Tensor:
        down = functools.partial(grouped_linear, weight=self.down, ends=ends)
        y: Tensor = project(down, self.activate, (grouped_linear(rows, self.up, ends),), recompute)
        return y

    def activate(self, hidden: Tensor) -> Tensor:
        """What lies between the two matmuls."""
        if self.activation in GATED:
            return GATED[self.activation](hidden)
        return bias_gelu(hidden, bias=None, approximate="tanh" if self.activation == "gelu_tanh" else "none")

    def extra_repr(self) -> str:
        return f"{len(self.up)}, activation={self.activation!r}"


class MixtureOfExperts(nn.Module):
    """An MLP of which each token takes a few of many: ``sum of weight x expert(x)`` over those that its router chooses.

    Weights are those of a softmax over all experts, of the chosen ones made to sum to 1, as in Mixtral. A token that
    takes a single expert keeps its weight, as in Switch: at 1 the router would learn nothing.

    Args:
        width: size of the last dimension, in and out.
        inner: size of the dimension between, of each expert.
        experts: how many there are.
        per_token: how many of them a token takes.
        activation: ``"swiglu"``, ``"geglu_tanh"``, ``"geglu"``, ``"gelu_tanh"`` or ``"gelu"``.
        recompute: compute the activation again in backward instead of keeping it.

    Attributes:
        bias: added to the router's logits for its choice, and not for the weights; see `shift_balance`.
        counts: rows that each expert got while training, since somebody set them to 0. Recompute counts them again.

    >>> moe = MixtureOfExperts(8, 24, experts=4, per_token=2)
    >>> moe(torch.randn(2, 3, 8)).shape, moe.counts.sum().item()
    (torch.Size([2, 3, 8]), 12)
    """

    linear: type[nn.Linear] = Linear
    kind: type[Experts] = Experts

    def __init__(
        self,
        width: int,
        inner: int,
        *,
        experts: int,
        per_token: int,
        activation: str = "swiglu",
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in (*GATED, "gelu_tanh", "gelu"):
            raise ValueError(
                f"MixtureOfExperts: activation is {activation!r}; choose {', '.join(GATED)}, gelu_tanh or gelu."
            )
        if not 1 <= per_token <= experts:
            raise ValueError(f"MixtureOfExperts: a token cannot take {per_token} of {experts} experts.")
        self.per_token, self.recompute = per_token, recompute
        self.router = self.linear(width, experts, False, device=device, dtype=dtype)
        self.experts = self.kind(experts, width, inner, activation, device=device, dtype=dtype)
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(experts, dtype=torch.float32, device=device))
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros(experts, dtype=torch.int64, device=device), persistent=False)

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        rows, each = x.flatten(0, -2), self.per_token
        weights, chosen = self.route(rows)
        order = Order(chosen.flatten(), len(self.counts))
        if self.training:
            self.counts += order.ends.diff(prepend=order.ends.new_zeros(1))
        y = order.undo(self.experts(order.sort(rows, each), order.ends, recompute or self.recompute))
        y = y.view(len(rows), each, y.shape[-1])
        return (weights[:, None].to(y.dtype) @ y).view(*x.shape[:-1], y.shape[-1])

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of the experts that each row takes, and which they are."""
        logits = self.router(rows)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        shares = logits.softmax(-1)
        chosen = (logits.detach() + self.bias).topk(self.per_token, -1).indices
        weights = shares.gather(-1, chosen)
        if self.per_token > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # by the bias all of them may be 0
        return weights, chosen

    def extra_repr(self) -> str:
        return f"per_token={self.per_token}"


def take_counts(mixtures: Sequence[MixtureOfExperts]) -> Tensor:
    """Rows that each expert of each mixture got, which are then forgotten."""
    counts = torch.stack([mixture.counts for mixture in mixtures])
    for mixture in mixtures:
        mixture.counts.zero_()
    return counts


@torch.no_grad()
def shift_balance(mixtures: Sequence[MixtureOfExperts], counts: Tensor, rate: float | Tensor) -> None:
    """Make experts that got fewer rows than the mean more likely to be chosen, and the others less, by `rate` each.

    >>> moe = MixtureOfExperts(8, 24, experts=3, per_token=1)
    >>> shift_balance([moe], torch.tensor([[4, 1, 1]]), 0.5)
    >>> moe.bias.tolist()
    [-0.5, 0.5, 0.5]
    """
    missing = (counts.sum(-1, keepdim=True) - counts.shape[-1] * counts).sign()
    for mixture, each in zip(mixtures, missing, strict=True):
        mixture.bias += rate * each
