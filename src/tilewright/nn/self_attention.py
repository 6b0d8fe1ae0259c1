"""`ops.self_attention` as a module, which a CUDA graph can replay."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewright.nn.hooks import is_own
from tilewright.nn.linear import Linear
from tilewright.ops.self_attention.op import attend, self_attention
from tilewright.runtime import paths

_WARM_UPS = 3  # calls before a capture, as PyTorch has it


class SelfAttention(torch.nn.Module):
    """Multi-head self-attention, the whole layer: ``out(attention(qkv(x)))``, for short sequences in one call of C++.

    Args:
        width: size of the last dimension, in and out.
        heads: how many; a divisor of the width.
        bias: whether the two projections have one.
        causal: a token sees itself and those before it.

    The rows of ``qkv`` are all queries, then all keys, then all values. Either projection may be replaced or hooked
    (LoRA, a quantised layer); it is then called, and PyTorch's attention between the two.

    >>> layer = SelfAttention(16, 4, causal=True)
    >>> layer(torch.randn(2, 5, 16)).shape, sorted(layer.state_dict())
    (torch.Size([2, 5, 16]), ['out.bias', 'out.weight', 'qkv.bias', 'qkv.weight'])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        bias: bool = True,
        causal: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if heads < 1 or width < 1 or width % heads:
            raise ValueError(f"SelfAttention: heads is {heads}; give a divisor of the width, {width}.")
        self.heads, self.causal = heads, causal
        self.qkv = Linear(width, 3 * width, bias, device=device, dtype=dtype)
        self.out = Linear(width, width, bias, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor, *, key_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Attend; `key_mask`, ``(batch, sequence)``, is True where a token may be seen."""
        qkv, out = self.qkv, self.out
        if is_own(qkv, Linear, torch.nn.Linear) and is_own(out, Linear, torch.nn.Linear):
            tensors = x, qkv.weight, qkv.bias, out.weight, out.bias
            return self_attention(*tensors, self.heads, causal=self.causal, key_mask=key_mask)
        paths.note("self_attention", paths.PYTORCH, "a projection is replaced or has hooks")
        return out(attend(qkv(x), self.heads, causal=self.causal, key_mask=key_mask))

    def capture(
        self, sample: torch.Tensor, *, key_mask: torch.Tensor | None = None
    ) -> Callable[..., torch.Tensor]:  # fmt: skip
        """Return a function that replays the layer as a CUDA graph, for inputs of the sample's shape.

        Called as the layer is, with a `key_mask` if one was given here. Where gradients are enabled and something
        requires one, backward is a graph, too, and the gradients reach the parameters as ever. The result lies in the
        graph's memory: the next call overwrites it. Changes of the parameters in place, such as an optimizer's step,
        are seen; a parameter that is replaced is not.

        >>> SelfAttention(8, 2).capture(torch.randn(1, 2, 8))
        Traceback (most recent call last):
        ValueError: SelfAttention.capture makes a CUDA graph, and the sample is on cpu; move both to a GPU.
        """
        if not sample.is_cuda:
            raise ValueError(
                f"SelfAttention.capture makes a CUDA graph, and the sample is on {sample.device}; move both to a GPU."
            )
        masks = () if key_mask is None else (key_mask,)

        def call(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            return self(x, key_mask=rest[0] if masks else None)

        parameters = tuple(self.parameters())
        replay: Callable[..., torch.Tensor]
        has_backward = torch.is_grad_enabled() and any(each.requires_grad for each in (sample, *parameters))
        if has_backward:
            # The parameters are inputs of the graphs: so they get gradients.
            static = sample.detach().clone().requires_grad_(sample.requires_grad)
            replay = torch.cuda.make_graphed_callables(call, (static, *masks, *parameters), _WARM_UPS)  # type: ignore[assignment]
        else:
            replay, parameters = _capture_forward(call, (sample.detach().clone(), *masks)), ()

        def run(x: torch.Tensor, *, key_mask: torch.Tensor | None = None) -> torch.Tensor:
            given = () if key_mask is None else (key_mask,)
            if x.shape != sample.shape or x.dtype != sample.dtype or len(given) != len(masks):
                raise ValueError(
                    f"The captured layer takes {tuple(sample.shape)} in {sample.dtype} with{'' if masks else 'out'} a "
                    f"key_mask, not {tuple(x.shape)} in {x.dtype}; capture it again."
                )
            if torch.is_grad_enabled():
                _check_gradients(x, sample, has_backward, self)
            return replay(x, *given, *parameters)

        return run

    def extra_repr(self) -> str:
        return f"heads={self.heads}, causal={self.causal}"


def _check_gradients(x: torch.Tensor, sample: torch.Tensor, has_backward: bool, layer: torch.nn.Module) -> None:
    """Refuse a call whose gradients the captured graphs do not compute."""
    if x.requires_grad and not (has_backward and sample.requires_grad):
        raise ValueError(
            "The layer was captured for inputs without a gradient; capture it with sample.requires_grad_()."
        )
    if not has_backward and any(each.requires_grad for each in layer.parameters()):
        raise ValueError(
            "The layer was captured without gradients; call it under torch.no_grad(), or capture it again."
        )


def _capture_forward(
    function: Callable[..., torch.Tensor], static: tuple[torch.Tensor, ...]
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """Capture a call without gradients."""
    static = tuple(each.clone() for each in static)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                function(*static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = function(*static)

    def replay(*inputs: torch.Tensor) -> torch.Tensor:
        for own, given in zip(static, inputs, strict=True):
            own.copy_(given)
        graph.replay()
        return out

    return replay
