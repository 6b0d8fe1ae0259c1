"""`ops.cross_entropy` and `ops.linear_cross_entropy` as modules."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.ops import cross_entropy, linear, linear_cross_entropy


class CrossEntropyLoss(torch.nn.Module):
    """``torch.nn.CrossEntropyLoss`` for class indices, its gradient computed in the same pass.

    Classes are the last dimension, as a model leaves its logits; torch has them in the second, which of a matrix is the
    same. The weight of classes is a buffer of the same name as torch's.

    Args:
        weight, ignore_index, reduction, label_smoothing: as in ``torch.nn.CrossEntropyLoss``.
        z_loss, softcap, inplace: as in ``tilewright.ops.cross_entropy``.

    >>> loss = CrossEntropyLoss(label_smoothing=0.1)
    >>> logits, targets = torch.randn(2, 3, 10), torch.tensor([[1, 2, 3], [4, 5, -100]])
    >>> torch.allclose(loss(logits, targets), torch.nn.CrossEntropyLoss(label_smoothing=0.1)(logits.mT, targets))
    True
    """

    weight: torch.Tensor | None

    def __init__(
        self,
        weight: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        inplace: bool = False,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing, "z_loss": z_loss,
            "softcap": softcap, "inplace": inplace,
        }  # fmt: skip

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> Any:
        return cross_entropy(logits, targets, weight=self.weight, **self.options)

    def extra_repr(self) -> str:
        return _words(self.options)


class LinearCrossEntropyLoss(torch.nn.Linear):
    """A classifier with its loss: a ``torch.nn.Linear`` which, given targets too, returns their loss without holding
    all logits.

    Parameters, their names and how they begin are those of ``torch.nn.Linear``; tied to an embedding with
    ``head.weight = embedding.weight``. Without targets it is the linear layer: its logits.

    Args:
        in_features, out_features, bias, device, dtype: as in ``torch.nn.Linear``, but that there is no bias unless
            asked for.
        ignore_index, reduction, label_smoothing, z_loss, softcap, memory, sum_dtype: as in
            ``tilewright.ops.linear_cross_entropy``.

    >>> head = LinearCrossEntropyLoss(8, 50)
    >>> x, targets = torch.randn(2, 3, 8), torch.randint(50, (2, 3))
    >>> torch.allclose(head(x, targets), CrossEntropyLoss()(head(x), targets)), list(head.state_dict())
    (True, ['weight'])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float = 0.0,
        memory: int | None = None,
        sum_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing, "z_loss": z_loss,
            "softcap": softcap, "memory": memory, "sum_dtype": sum_dtype,
        }  # fmt: skip

    def forward(self, input: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        if targets is None:
            return linear(input, self.weight, self.bias)
        return linear_cross_entropy(input, self.weight, targets, self.bias, **self.options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_words(self.options)}"


def _words(options: dict[str, Any]) -> str:
    return ", ".join(
        f"{name}={value}"
        for name, value in options.items()
        if value not in (None, False, 0.0) or name == "ignore_index"
    )
