"""What blocks compute again in backward instead of keeping it for that.

"full" keeps what goes into a block. "selective" keeps the residual stream, once, attention, and the large matmuls but
the output's; norms and activations, which are cheap, and the output matmul, the smallest, run again.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tilewright.models.block import Attention, Block, add_norm
from tilewright.models.standard import StandardDropoutAddNorm
from tilewright.nn import DropoutAddNorm, GatedMLP, GeluMLP, Linear, MixtureOfExperts
from tilewright.nn.hooks import is_own
from tilewright.nn.recompute import Shared, forgetting, is_memory_of
from tilewright.runtime import philox
from tilewright.runtime.dispatch import forcing_kernels, is_traced, runs_kernel


def run_block(
    block: Any, how: str, x: Tensor, residual: Tensor | None, rope: nn.Module | None
) -> tuple[Tensor, Tensor]:
    """Run a block, or what somebody has put in its place, keeping for backward what `how` says."""
    if how == "none":
        return block(x, residual, rope)
    if how == "full" or not is_own(block, Block):
        return run_region(how, block, x, residual, rope)
    own = is_own(block.norm1, DropoutAddNorm) and is_own(block.norm2, DropoutAddNorm)
    if own and is_own(block.attention, Attention) and runs_kernel(x) and not is_traced(x):
        return _run_selectively(block, x, residual, rope)
    if not is_own(block.norm1, DropoutAddNorm, StandardDropoutAddNorm):
        return run_region(how, block, x, residual, rope)
    dtype = x.dtype

    def run_from_sum(total: Tensor) -> tuple[Tensor, Tensor]:
        return block.sublayers(_normalise(block.norm1, total, dtype), total, rope)

    return run_region(how, run_from_sum, block.norm1.add(x, residual))


def _normalise(norm: Any, total: Tensor, dtype: torch.dtype) -> Tensor:
    """What a norm returned beside this sum, for an x of this dtype."""
    out: Tensor
    if not isinstance(norm, DropoutAddNorm) or torch.is_autocast_enabled(total.device.type):
        out = norm.normalise(total)
    else:
        out = norm.normalise(total.to(torch.promote_types(total.dtype, dtype))).to(dtype)
    return out


@forcing_kernels()
def _run_selectively(block: Block, x: Tensor, residual: Tensor | None, rope: nn.Module | None) -> tuple[Tensor, Tensor]:
    """Give up tensors one by one, which a host can afford that launches op by op."""
    attention, norm1, norm2 = block.attention, block.norm1, block.norm2
    given = x.dtype
    x, first = add_norm(norm1, x, residual)
    with forgetting(is_memory_of(x), lambda: _normalise(norm1, first, given)):
        qkv = attention.project(x)
    mixed = attention.mix(qkv, rope)
    branch = attention.out(mixed)
    # With dropout, in the norm or in a module put in place of the matmul, the sum cannot be made twice alike.
    if norm2.p > 0 or not is_own(attention.out, Linear):
        narrow = branch.dtype
        x, second = add_norm(norm2, branch, first)
        del branch
        with forgetting(is_memory_of(x), lambda: _normalise(norm2, second, narrow)):
            return _feed(block, x), second
    again = Shared(lambda: norm2(attention.out(mixed), first))
    # Of this shape the norm saves the sum that it returns and, where a scale needs its gradient, the branch.
    place, shape = branch.untyped_storage()._cdata, first.shape

    def is_sum(saved: Tensor) -> bool:
        return saved.shape == shape and saved.untyped_storage()._cdata != place

    with forgetting(is_sum, lambda: again.take(1, last=True)):
        x, second = add_norm(norm2, branch, first)
    del branch
    with forgetting(is_memory_of(x), lambda: again.take(0)):
        return _feed(block, x), second


def _feed(block: Block, x: Tensor) -> Tensor:
    """Run the MLP, which keeps less for backward where it is one of ours."""
    y: Tensor = block.mlp(x, recompute=True) if is_own(block.mlp, GeluMLP, GatedMLP, MixtureOfExperts) else block.mlp(x)
    return y


def run_region(how: str, region: Any, *inputs: Any) -> Any:
    """Run a region. "full" keeps nothing of it for backward but what goes in, "selective" large matmuls too."""
    if not torch.compiler.is_compiling():  # a compiler keeps the seed among what goes in
        region = philox.bound(region)
    if how == "selective":
        contexts = functools.partial(create_selective_checkpoint_contexts, _keeps)
        return checkpoint(region, *inputs, use_reentrant=False, context_fn=contexts)
    return checkpoint(region, *inputs, use_reentrant=False) if how == "full" else region(*inputs)


def _keeps(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    """Keep a matmul that widens, attention's output, and what experts' ranks sent; the rest is computed again."""
    if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        left, right = arguments[-2:]
        keep = right.shape[1] > left.shape[1]
    elif op == torch.ops.aten._grouped_mm.default:
        keep = arguments[1].shape[2] > arguments[1].shape[1]
    elif op == torch.ops.tilewright.linear.default:
        keep = arguments[1].shape[0] > arguments[1].shape[1]
    else:
        keep = "scaled_dot_product" in op.name() or "all_to_all" in op.name()
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
