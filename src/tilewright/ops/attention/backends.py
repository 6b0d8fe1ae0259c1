"""Who computes a call of `attention`: what each backend takes, and which one `auto` picks.

A backend is a function of `Inputs` that returns (out, log-sum-exp or None), a `Capability`, and, where that does not
say all, a function that says why a call is not for it. A new one is an entry in `BACKENDS`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewright.ops.attention import hopper, table, triton_op
from tilewright.ops.attention.arguments import NAME, Inputs, Tensor
from tilewright.ops.attention.reference import compute
from tilewright.runtime import dispatch, paths

Outputs = tuple[Tensor, Tensor | None]
AUTO = "auto"
PYTORCH = "PyTorch"  # whichever of its own kernels PyTorch picks
_HALVES = (torch.bfloat16, torch.float16)
_SINGLES = (*_HALVES, torch.float32)
FEATURES = {  # what a call can ask for, in words
    "full": "attention without a causal mask", "causal": "a causal mask", "window": "a window",
    "lengths": "another number of keys than of queries",
    "aligned": "a causal mask or a window over another number of keys than of queries", "scale": "a scale of its own",
    "softcap": "a soft-cap", "alibi": "ALiBi", "bias": "a bias", "mask": "a boolean mask",
    "masked bias": "a bias beside a causal mask or a window", "dropout": "dropout", "packed": "packed sequences",
    "gqa": "heads of keys that serve several of queries", "lse": "log-sum-exp",
    "values": "values of another head_dim than keys",
}  # fmt: skip
_PYTORCHS = frozenset({"full", "causal", "lengths", "scale", "dropout"})
_HOPPERS = frozenset({"full", "causal", "window", "lengths", "aligned", "scale", "packed", "gqa"})
_EVERYTHING = frozenset(FEATURES)


# Devices where PyTorch's fused kernel for float32 has no shared key heads. With the heads repeated it takes 0.65 of the
# time of the unfused one that PyTorch would pick.
_FUSED_FLOAT32 = ("cuda",)
_OF_COMPILERS = ("FakeTensor", "FunctionalTensor")  # tensors that stand for others while a graph is captured
FEWEST_KEYS = 1024  # from which on hopper was measured


class Capability(NamedTuple):
    """What a backend takes."""

    features: frozenset[str]
    dtypes: tuple[torch.dtype, ...] = (*_SINGLES, torch.float64)
    head_dims: range = range(1, 2**20)
    only_kernels: bool = True  # only where kernels run: on a GPU, or under Triton's interpreter


class Backend(NamedTuple):
    """`why_not` says what `capability` does not."""

    run: Callable[[Inputs], Outputs]
    capability: Capability
    why_not: Callable[[Inputs], str] = lambda inputs: ""


def list_features(inputs: Inputs) -> Iterator[str]:
    """What a call asks for, by the names in `FEATURES`."""
    q, k, v = inputs[:3]
    is_masked = inputs.left >= 0 or inputs.right >= 0
    if inputs.left >= 0 or inputs.right > 0:
        yield "window"
    else:
        yield "causal" if is_masked else "full"
    if q.shape[1] != k.shape[1]:
        yield "aligned" if is_masked else "lengths"
    asked = {
        "softcap": inputs.softcap, "alibi": inputs.alibi is not None, "dropout": inputs.p,
        "packed": inputs.q_starts is not None, "lse": inputs.wants_lse, "gqa": q.shape[2] != k.shape[2],
        "values": q.shape[3] != v.shape[3], "scale": inputs.scale != q.shape[3] ** -0.5,
    }  # fmt: skip
    if inputs.bias is not None:
        yield "mask" if inputs.bias.dtype == torch.bool else "bias"
        asked["masked bias"] = is_masked
    yield from (name for name, is_asked in asked.items() if is_asked)


def _word(feature: str) -> str:
    return FEATURES[feature].removeprefix("a ")


def by_pytorch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by whichever kernel PyTorch picks; (batch, sequence, heads, head_dim)."""
    return _call_pytorch(q, k, v, causal=True)


def _call_pytorch(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, bias: Tensor | None = None, p: float = 0.0,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    heads, kv_heads = map(operator.index, (q.shape[1], k.shape[1]))  # PyTorch takes no symbol for whether they differ
    if q.dtype == torch.float32 and q.device.type in _FUSED_FLOAT32 and 0 < kv_heads < heads:
        k, v = (t.repeat_interleave(heads // kv_heads, 1) for t in (k, v))
        kv_heads = heads
    gqa = heads != kv_heads
    out = F.scaled_dot_product_attention(q, k, v, bias, p, is_causal=causal, scale=scale, enable_gqa=gqa)
    return out.transpose(1, 2)


def _run_pytorch(inputs: Inputs) -> Outputs:
    q, k, v, bias = inputs[:4]
    scale = None if inputs.scale == q.shape[3] ** -0.5 else inputs.scale
    bias = None if bias is None else bias.to(q.dtype)
    return _call_pytorch(q, k, v, inputs.right == 0, bias, inputs.p, scale), None


def _run_one_of_pytorchs(kernel: SDPBackend, inputs: Inputs) -> Outputs:
    try:
        with sdpa_kernel(kernel):
            return _run_pytorch(inputs)
    except RuntimeError as error:
        if not any(words in str(error) for words in ("No available kernel", "No viable backend")):
            raise
        name = kernel.name.removesuffix("_ATTENTION").lower()
        raise ValueError(
            f"{NAME}: PyTorch has no {name} kernel for this call on this device; leave backend at 'auto'."
        ) from error


def _pytorchs(kernel: SDPBackend, features: frozenset[str], dtypes: tuple[torch.dtype, ...]) -> Backend:
    run = functools.partial(_run_one_of_pytorchs, kernel)
    return Backend(run, Capability(_PYTORCHS | features, dtypes, range(8, 257, 8)))


BACKENDS = {
    "hopper": Backend(hopper.run, Capability(_HOPPERS, _HALVES, range(64, 129, 64)), hopper.why_not),
    "triton": Backend(triton_op.run, Capability(_EVERYTHING - {"values"}, _SINGLES, range(16, 257, 8))),
    "cudnn": _pytorchs(SDPBackend.CUDNN_ATTENTION, frozenset({"gqa"}), _HALVES),
    "flash": _pytorchs(SDPBackend.FLASH_ATTENTION, frozenset({"gqa"}), _HALVES),
    "efficient": _pytorchs(SDPBackend.EFFICIENT_ATTENTION, frozenset({"bias"}), _SINGLES),
    "math": Backend(compute, Capability(_EVERYTHING, only_kernels=False)),
}
_BY_PYTORCH = Backend(_run_pytorch, Capability(_PYTORCHS | {"gqa", "values"}, only_kernels=False))


def why_not(backend: Backend, inputs: Inputs) -> str:
    """Say why a backend cannot take a call; nothing where it can."""
    q, features, only_kernels = inputs.q, backend.capability.features, backend.capability.only_kernels
    if only_kernels and not dispatch.runs_kernel(q):
        return dispatch.why_no_kernel(q)
    for feature in list_features(inputs):
        if feature not in features:
            return f"it has no {_word(feature)}"
    head_dim = operator.index(q.shape[3])  # no range knows a compiler's symbol
    return _why_not_kind(backend.capability, head_dim, q.dtype) or backend.why_not(inputs)


def _why_not_kind(capability: Capability, head_dim: int, dtype: torch.dtype) -> str:
    head_dims = capability.head_dims
    if dtype not in capability.dtypes:
        return f"it does not take {dtype}"
    if head_dim not in head_dims:
        step = f" in steps of {head_dims.step}" if len(head_dims) > 1 else ""
        return f"it takes a head_dim of {head_dims[0]} to {head_dims[-1]}{step}, and this one is {head_dim}"
    return ""


def why_not_model(name: str, head_dim: int, dtype: torch.dtype) -> str:
    """Say why a backend takes no model with such heads, on any device; nothing where some device has it.

    >>> why_not_model("hopper", 96, torch.bfloat16), why_not_model("triton", 96, torch.bfloat16)
    ('it takes a head_dim of 64 to 128 in steps of 64, and this one is 96', '')
    """
    return _why_not_kind(BACKENDS[name].capability, head_dim, dtype)


def choose(inputs: Inputs, name: str) -> tuple[Backend, str, str]:
    """(backend, what `ops.explain()` calls it, and why); an error where a backend that was named cannot take it."""
    if name == AUTO:
        return _pick(inputs)
    if name not in BACKENDS:
        raise ValueError(f"{NAME}: there is no backend {name!r}; choose one of {', '.join((AUTO, *BACKENDS))}.")
    why = why_not(BACKENDS[name], inputs)
    if why:
        raise ValueError(f"{NAME}: backend {name!r} cannot take this call: {why}; leave it at 'auto', or name another.")
    return BACKENDS[name], name, "it was named"


def _pick(inputs: Inputs) -> tuple[Backend, str, str]:
    q, k = inputs[:2]
    if q.numel() == 0 or k.numel() == 0:
        return BACKENDS["math"], paths.REFERENCE, "there is nothing to compute"
    lacking = why_not(_BY_PYTORCH, inputs)
    if lacking:
        return _pick_ours(inputs, lacking.replace("it has", "PyTorch has"))
    if not dispatch.runs_kernel(q):
        return _BY_PYTORCH, paths.REFERENCE, dispatch.why_no_kernel(q)
    why = _why_pytorch(inputs)
    if why:
        return _BY_PYTORCH, paths.PYTORCH, why
    measured = _find_fastest(inputs)
    if measured:
        return BACKENDS[measured], measured, "it is the fastest measured on this GPU"
    why = _why_not_unasked("hopper", inputs)
    if not why and k.shape[1] < FEWEST_KEYS:
        why = f"with fewer than {FEWEST_KEYS:,} keys PyTorch's own kernels are as quick"
    if why:
        return _BY_PYTORCH, paths.PYTORCH, why.replace("it has", "the hopper backend has")
    return BACKENDS["hopper"], "hopper", "it was the fastest on an H200, and this length was not measured here"


def _pick_ours(inputs: Inputs, lacking: str) -> tuple[Backend, str, str]:
    """The backend of a call that PyTorch has no kernel for."""
    # Of packed sequences a measurement decides: its tiles do what those of one length do, but nobody has timed it yet.
    is_known = inputs.q_starts is None or _find_measured(inputs) == "hopper"
    if is_known and not _sees_other_ops(inputs) and not why_not(BACKENDS["hopper"], inputs):
        return BACKENDS["hopper"], "hopper", lacking
    why = why_not(BACKENDS["triton"], inputs)
    if why:
        return BACKENDS["math"], paths.REFERENCE, f"{lacking}, and triton cannot take it: {why}"
    return BACKENDS["triton"], "triton", lacking


def _why_pytorch(inputs: Inputs) -> str:
    """Say why PyTorch's own choice stays, whatever was measured; nothing where ours may take its place."""
    if _sees_other_ops(inputs):
        return "a dispatch mode or a tensor subclass sees PyTorch's own ops"
    if hopper.is_host_bound(inputs):
        return f"up to {hopper.HOST_BOUND:,} scores PyTorch's own ops take less of the host's time"
    return "" if _all_kernels_are_enabled() else "PyTorch was told which of its kernels to take"


def _all_kernels_are_enabled() -> bool:
    kernels = torch.backends.cuda
    return all((
        kernels.flash_sdp_enabled(), kernels.cudnn_sdp_enabled(), kernels.mem_efficient_sdp_enabled(),
        kernels.math_sdp_enabled(),
    ))  # fmt: skip


_all_kernels_are_enabled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # when it captures


def _sees_other_ops(inputs: Inputs) -> bool:
    """Whether somebody other than a compiler looks at the ops that run: a dispatch mode, a tensor subclass."""
    foreign = [x for x in inputs[:3] if type(x) not in dispatch.PLAIN]
    if foreign or torch.compiler.is_compiling():
        return any(type(x).__name__ not in _OF_COMPILERS for x in foreign)
    return dispatch.has_mode()


def _why_not_unasked(name: str, inputs: Inputs) -> str:
    """Say why `auto` leaves a backend out whose name nobody gave; nothing where it takes it."""
    is_fixed, is_traced = torch.are_deterministic_algorithms_enabled(), dispatch.is_traced(*inputs[:3])
    if name not in ("hopper", "triton") and (is_fixed or is_traced):
        return "PyTorch picks among its own kernels"
    why = why_not(BACKENDS[name], inputs)
    if why or name != "hopper":
        return why
    if not is_fixed and not is_traced and not hopper.is_cudnns(inputs):
        return "PyTorch itself would not take cuDNN's kernels, which those of hopper replace"
    return ""


def _is_on_gpu(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_available()


def _find_fastest(inputs: Inputs) -> str:
    """The backend that measurements name, if it can take the call."""
    if not set(list_features(inputs)) <= {"causal", "full", "gqa", "scale"}:
        return ""
    found = _find_measured(inputs)
    return found if found in BACKENDS and not _why_not_unasked(found, inputs) else ""


def _find_measured(inputs: Inputs) -> str:
    """The backend that measurements name for tensors of such sizes; nothing where there are none."""
    q, is_packed = inputs.q, inputs.q_starts is not None
    if torch.compiler.is_dynamo_compiling() or not _is_on_gpu(q):
        return ""
    gpu, length = table.gpu_name(q.device), inputs.longest_q
    return table.find(table.Key(gpu, q.dtype, q.shape[3], inputs.right == 0, length, is_packed))
