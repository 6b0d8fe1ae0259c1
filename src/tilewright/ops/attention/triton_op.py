"""`attention` by our own Triton kernels: everything that it can be asked for, on any GPU that Triton compiles for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tilewright.measure import work
from tilewright.ops.attention import launch as launches
from tilewright.ops.attention.arguments import NAME, ONCE, Inputs, Tensor
from tilewright.plan import cost
from tilewright.runtime import dispatch, register
from tilewright.runtime.philox import draw_seed, drop_threshold, split_seed


class Gradient(NamedTuple):
    """What the gradients of q, k, v and bias, as far as they are needed, follow from."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    alibi: Tensor | None
    q_starts: Tensor | None
    k_starts: Tensor | None
    seed: Tensor | int | None
    longest_q: int
    longest_k: int
    left: int
    right: int
    scale: float
    softcap: float
    p: float
    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    needs: Sequence[bool]


def _is_walkable(x: Tensor) -> bool:
    """Whether kernels take the tensor as it lies in memory: heads contiguous, all rows at multiples of 16 bytes."""
    unit = 16 // x.element_size()
    fit = all(size == 1 or stride % unit == 0 for size, stride in zip(x.shape[:3], x.stride(), strict=False))
    return fit and x.stride(3) == 1 and x.data_ptr() % 16 == 0 and not x.is_neg()


def _walkable(x: Tensor) -> Tensor:
    return x if _is_walkable(x) else x.resolve_neg().clone(memory_format=torch.contiguous_format)


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, token and head, in vectors of 16 bytes."""
    unit = 16 // x.element_size()
    return tuple(stride // unit for stride in x.stride()[:3])


class _Common(NamedTuple):
    """What all kernels of a call take first: tensors, and numbers of which some depend on the kernel."""

    tensors: tuple[Tensor | None, ...]
    seed: int
    sizes: tuple[int, ...]
    limits: tuple[float, ...]
    strides: tuple[int, ...]
    flags: launches.Flags

    def start(self, part: str, more: tuple[Tensor | None, ...], blocks: int, group: int, programs: int,
              strides: tuple[int, ...] = (), flops: float = 0.0) -> None:  # fmt: skip
        tensors = (*self.tensors, *more)
        q = self.tensors[0]
        assert q is not None
        _, launch = launches.launch(part, q.device, dispatch.dtypes(tensors), q.shape[3], self.flags)
        numbers = (self.seed, *self.sizes, blocks, group, *self.limits, *self.strides, *strides)
        with work.launching(launch.name, tensors, flops):
            launch((programs, 1), tensors, numbers)


def _prepare(inputs: Inputs | Gradient) -> _Common:
    q, k, v = (_walkable(x) for x in inputs[:3])
    bias, alibi = inputs.bias, inputs.alibi
    bias_strides: tuple[int, ...] = (0, 0, 0, 0)
    if bias is not None:
        bias = bias.resolve_neg()
        bias = bias.view(torch.uint8) if bias.dtype == torch.bool else bias
        if bias.data_ptr() % 16:
            bias = bias.clone()
        bias_strides = tuple(s if size > 1 else 0 for s, size in zip(bias.stride(), bias.shape, strict=True))
    alibi_stride = 0
    if alibi is not None:
        (alibi,) = dispatch.packed((alibi.float(),))
        alibi_stride = alibi.shape[1] if len(alibi) > 1 else 0
    q_starts, k_starts = dispatch.packed((inputs.q_starts, inputs.k_starts))
    seed_tensor, seed = split_seed(inputs.seed if inputs.p else None, q.device)
    sequences = q.shape[0] if q_starts is None else len(q_starts) - 1
    heads, shared = q.shape[2], q.shape[2] // k.shape[2]
    return _Common(
        (q, k, v, bias, alibi, q_starts, k_starts, seed_tensor), seed,
        (heads, shared, sequences, inputs.longest_q, inputs.longest_k, q.shape[1], k.shape[1]),
        (inputs.left, inputs.right, drop_threshold(inputs.p), inputs.scale, inputs.softcap, 1.0 / (1.0 - inputs.p)),
        (*_strides(q), *_strides(k), *_strides(v), *bias_strides, alibi_stride),
        launches.Flags(inputs.left >= 0, inputs.right >= 0, inputs.softcap > 0.0, inputs.p > 0.0),
    )  # fmt: skip


def _flops(inputs: Inputs | Gradient, sequences: int, matmuls: int) -> float:
    """Return the FLOPs of this many matmuls over all pairs of a query and a key that it sees."""
    heads, width = inputs.q.shape[2], inputs.q.shape[3]
    context = cost.mean_context(inputs.longest_q, inputs.longest_k, inputs.left, inputs.right)
    return 2.0 * matmuls * sequences * heads * inputs.longest_q * context * width


def _blocks(tokens: int, block: int) -> int:
    return -(-tokens // block)


def _empty_outputs(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Memory for the results; of packed sequences zeros, since none of them need have all tokens."""
    q = inputs.q
    batch, tokens, heads, _ = q.shape
    if inputs.q_starts is None:
        return q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=torch.float32)
    return q.new_zeros(q.shape), q.new_full((batch, heads, tokens), -torch.inf, dtype=torch.float32)


def _forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp), from one launch."""
    out, lse = _empty_outputs(inputs)
    common = _prepare(inputs)
    heads, shared, sequences, *_ = common.sizes
    config = launches.choose_config(out.device, "forward", out.shape[3], out.dtype)
    blocks = _blocks(inputs.longest_q, config.block_m)
    if programs := blocks * sequences * heads:
        pairs = sequences * heads // shared
        group = shared * launches.heads_in_l2(inputs.longest_k, out.shape[3], out.element_size(), pairs)
        common.start("forward", (out, lse), blocks, group, programs, flops=_flops(inputs, sequences, 2))
    return out, lse


def _fake_forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    q = inputs.q
    return q.new_empty(q.shape), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def backward(gradient: Gradient) -> list[Tensor | None]:
    """dq, dk, dv and that of the bias; None for one that is not needed."""
    common = _prepare(gradient)
    q, bias, needs = gradient.q, gradient.bias, gradient.needs
    heads, shared, sequences, *_ = common.sizes
    device, width, element = q.device, q.shape[3], q.element_size()
    dout = _walkable(gradient.dout)
    log, delta = _sum_up(gradient, dout)
    strides = _strides(dout)
    dq, dk, dv = (
        (x.new_empty if gradient.q_starts is None else x.new_zeros)(x.shape) if need else None
        for x, need in zip(gradient[:3], (needs[0], needs[1] or needs[2], needs[1] or needs[2]), strict=True)
    )
    if dk is not None:
        config = launches.choose_config(device, "keys", width, q.dtype)
        blocks, pairs = _blocks(gradient.longest_k, config.block_n), sequences * heads // shared
        group = launches.heads_in_l2(gradient.longest_q * shared, width, element, pairs)
        if programs := blocks * pairs:
            common.start(
                "keys", (dout, log, delta, dk, dv), blocks, group, programs, strides, _flops(gradient, sequences, 4)
            )
    if dq is not None:
        config = launches.choose_config(device, "queries", width, q.dtype)
        blocks, pairs = _blocks(gradient.longest_q, config.block_m), sequences * heads // shared
        group = shared * launches.heads_in_l2(gradient.longest_k, width, element, pairs)
        if programs := blocks * pairs * shared:
            common.start(
                "queries", (dout, log, delta, dq), blocks, group, programs, strides, _flops(gradient, sequences, 3)
            )
    dbias = _differentiate_bias(gradient, common, dout, log, delta) if needs[3] and bias is not None else None
    return [dq, dk if needs[1] else None, dv if needs[2] else None, dbias]


def _sum_up(gradient: Gradient, dout: Tensor) -> tuple[Tensor, Tensor]:
    """(the log-sum-exp as a power of 2, the mean that the gradient of softmax subtracts), for each query and head."""
    out, lse, dlse = dispatch.packed((gradient.out, gradient.lse, gradient.dlse))
    log, delta = torch.empty_like(lse), torch.empty_like(lse)
    tensors = (out, dout, lse, dlse, log, delta)
    launch = launches.delta_launch(out.device, dispatch.dtypes(tensors), out.shape[3])
    if programs := _blocks(delta.numel(), launches.DELTA_ROWS):
        launch((programs, 1), tensors, (delta.numel(), out.shape[2], out.shape[1], *_strides(dout)))
    return log, delta


def _differentiate_bias(gradient: Gradient, common: _Common, dout: Tensor, log: Tensor, delta: Tensor) -> Tensor:
    """Sum the bias's gradient over the batches and heads that share it by a kernel, then over queries or keys."""
    bias = gradient.bias
    assert bias is not None
    queries, keys = gradient.longest_q, gradient.longest_k
    shape = (*bias.shape[:2], queries, keys)
    is_whole = bias.shape == shape
    whole = bias.new_empty(shape, dtype=bias.dtype if is_whole else torch.float32)
    config = launches.choose_config(bias.device, "bias", gradient.q.shape[3], gradient.q.dtype)
    blocks = _blocks(queries, config.block_m) * _blocks(keys, config.block_n)
    if programs := blocks * shape[0] * shape[1]:
        tensors = (dout, log, delta, whole)
        strides = (*_strides(dout), *bias.shape[:2])
        flops = _flops(gradient, gradient.q.shape[0], 2)
        common.start("bias", tensors, blocks, 1, programs, strides, flops)
    return whole if is_whole else whole.sum_to_size(bias.shape).to(bias.dtype)


def _fake_backward(gradient: Gradient) -> list[Tensor | None]:
    given = gradient[:4]
    return [
        x.new_empty(x.shape) if need and x is not None else None for x, need in zip(given, gradient.needs, strict=True)
    ]


def _save(ctx: Any, inputs: Inputs, output: tuple[Tensor, Tensor]) -> None:
    seed = inputs.seed
    seed_tensor, ctx.seed = (seed, None) if isinstance(seed, torch.Tensor) else (None, seed)
    ctx.save_for_backward(*inputs[:7], seed_tensor, *output)
    ctx.options = inputs[8:15]
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, backward: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(ONCE)
    *saved, seed, out, lse = ctx.saved_tensors
    if dout is None and dlse is None:
        return ()
    dout = torch.zeros_like(out) if dout is None else dout
    seed = ctx.seed if seed is None else seed
    dlse = None if dlse is None else dlse.float()
    needs = list(ctx.needs_input_grad[:4])
    gradient = Gradient._make((*saved, seed, *ctx.options, out, lse, dout, dlse, needs))
    return tuple(backward(gradient))


def _foresee(ctx: Any, inputs: Inputs, output: tuple[Tensor, Tensor]) -> None:
    """The backward of one query and one key of each head."""
    out, lse = output[0][:, :1], output[1][:, :, :1].contiguous()
    bias = None if inputs.bias is None else inputs.bias[:, :, :1, :1]
    q, k, v = (x[:, :1] for x in inputs[:3])
    small = inputs._replace(q=q, k=k, v=v, bias=bias, longest_q=1, longest_k=1)
    backward(Gradient(*small[:15], out, lse, out, None, list(ctx.needs_input_grad[:4])))


_OP = register.Op(NAME, _forward, _fake_forward)
_BACKWARD = register.Op(f"{NAME}_backward", backward, _fake_backward)
_eager = _OP.differentiate(_save, _differentiate, _BACKWARD, _foresee)


def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, log-sum-exp)."""
    traced = dispatch.is_traced(*inputs[:7])
    inputs = inputs._replace(seed=draw_seed(inputs.q, as_tensor=traced) if inputs.p else None)
    out, lse = _OP.call_registered(inputs) if traced else _eager(*inputs)
    return out, lse
