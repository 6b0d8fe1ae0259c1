"""What every op shares: where it runs, what it refuses, how its kernel starts."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tilewright.measure import work
from tilewright.runtime import pdl
from tilewright.runtime.background import Job
from tilewright.runtime.log import log

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
PLAIN = (torch.Tensor, torch.nn.Parameter)  # and no subclass of them
OF_COMPILERS = ("FakeTensor", "FunctionalTensor")  # stand for plain tensors

# Read once: Triton itself decides between interpreter and compiler when a kernel is decorated.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None


def dtypes(tensors: Sequence[torch.Tensor | None]) -> tuple[torch.dtype | None, ...]:
    """Return the dtype of each tensor, None for one that is not there."""
    return tuple([None if t is None else t.dtype for t in tensors])


def runs_kernel(x: torch.Tensor) -> bool:
    """Whether ops on `x` run their Triton kernel; everything else runs the plain PyTorch reference.

    So do function transforms (`torch.func`), which know how to differentiate and batch plain PyTorch only.
    """
    if not (x.is_cuda or (INTERPRETED and x.device.type == "cpu")) or torch._C._are_functorch_transforms_active():
        return False
    if not HAS_TRITON:
        raise RuntimeError("Tilewright's kernels need Triton 3.6 or later: pip install 'triton>=3.6'.")
    return True


def why_no_kernel(x: torch.Tensor) -> str:
    """Say why `runs_kernel` is false of `x`."""
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func differentiates or batches PyTorch's own ops only"
    return f"the tensors are on {x.device.type}, and kernels run on cuda"


def is_compiling() -> bool:
    """Whether a compiler traces. What comes behind Dynamo traces as well, and torch 2.11 does not say so of it."""
    return torch.compiler.is_compiling() or torch._guards.TracingContext.try_get() is not None


def is_traced(*tensors: torch.Tensor | None) -> bool:
    """Whether somebody other than eager autograd must see the op: a compiler, a dispatch mode, a tensor subclass."""
    for tensor in tensors:
        if tensor is not None and type(tensor) not in PLAIN:
            return True
    return torch.compiler.is_compiling() or has_mode()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no subclass, but for those that stand for plain ones where a compiler traces."""
    kind = type(tensor)
    return kind in PLAIN or (kind.__name__ in OF_COMPILERS and is_compiling())


def has_mode() -> bool:
    """Whether a dispatch mode is on, but for the one that sees the kernels themselves."""
    watch = work.watching
    return torch._C._len_torch_dispatch_stack() > (watch is not None and watch.is_mode)


class _Forced(threading.local):
    is_on = False


_forced = _Forced()


def kernels_are_forced() -> bool:
    """Whether this thread is inside of `forcing_kernels`."""
    return _forced.is_on


@contextlib.contextmanager
def forcing_kernels(on: bool = True) -> Iterator[None]:
    """Run kernels at every size: what runs twice, for recompute, must run alike."""
    before, _forced.is_on = _forced.is_on, on
    try:
        yield
    finally:
        _forced.is_on = before


def is_host_bound(x: torch.Tensor, most: int, *others: torch.Tensor | None) -> bool:
    """Whether an eager call with an `x` of at most `most` elements is left to PyTorch's own ops.

    The host takes longer than the device for a call this small, and PyTorch's backward, which is C++, takes less of it
    than ours, which is Python. A compiler or a captured graph takes the host out of the way: kernels run at every size.
    Under autocast they do, too, since PyTorch rounds a gradient to 16 bits that ours computes in float32.
    """
    if not x.is_cuda or x.numel() > most or _forced.is_on or torch.is_autocast_enabled() or is_traced(x, *others):
        return False
    return not torch._C._cuda_isCurrentStreamCapturing()


def eager(function: type[torch.autograd.Function]) -> Any:
    """`function.apply` without the wrapping for function transforms, which `runs_kernel` has ruled out."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def fake_of(op: Any) -> Callable[[Callable[..., Any]], None]:
    """Registers what a compiler runs in place of `op`; the first time it does, Inductor is told to call `op` as it is.

    Untold, torch 2.11's Inductor writes out all that an unknown op's inputs were made of, for a line in a log that
    nobody asked for. Through a stream of (x, residual) pairs that doubles with every block: 12 of them never compile.
    """

    def register(fake: Callable[..., Any]) -> None:
        def told(*inputs: Any) -> Any:
            if "torch._inductor" in sys.modules:
                from torch._inductor.lowering import FALLBACK_ALLOW_LIST

                FALLBACK_ALLOW_LIST.add(op._qualname)
            return fake(*inputs)

        op.register_fake(told)

    return register


def check_tensor(op: str, name: str, tensor: Any, shape: torch.Size | None = None, x: Any = None) -> None:
    """Refuse a tensor that the op cannot take, with one sentence. Beside an `x`, `None` passes: an option left out."""
    if tensor is None and x is not None:
        return
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, not {type(tensor).__name__}.")
    dtype = tensor.dtype
    if dtype not in FLOATS:
        allowed = "bfloat16, float16, float32 or float64"
        raise TypeError(f"{op}: {name} has dtype {dtype}; convert it to {allowed}.")
    if x is None:
        return
    if tensor.shape != shape:
        raise ValueError(f"{op}: {name} has shape {tuple(tensor.shape)}, but {tuple(shape or ())} is needed.")
    if tensor.device != x.device:
        raise ValueError(f"{op}: {name} is on {tensor.device}, but x is on {x.device}; move one of them.")
    if dtype is not x.dtype and torch.float64 in (dtype, x.dtype):
        raise TypeError(f"{op}: {name} is {dtype} and x is {x.dtype}; float64 mixes with no other dtype.")


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """What an op computes in: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def is_needed(x: torch.Tensor) -> bool:
    """Whether autograd minds `x` being overwritten: a parameter, or a result that its op keeps for its backward."""
    base = x if x._base is None else x._base
    kept = any(hasattr(type(each.grad_fn), "_saved_result") for each in (x, base))
    return torch.is_grad_enabled() and (base.is_leaf or kept)


def claim_storage(result: torch.Tensor | None, x: torch.Tensor | None) -> torch.Tensor | None:
    """A result without a graph of its own. Where it has taken the memory of `x`, autograd is told: a
    backward that saved `x` gets an error then, and not the wrong numbers."""
    if result is None:
        return None
    if result is x and not x.is_inference():
        torch.autograd.graph.increment_version(x)
    return result.detach()


def check_eps(op: str, eps: Any) -> None:
    """Refuse an epsilon that is no finite number of at least 0."""
    if not isinstance(eps, (int, float)) or not 0.0 <= eps < float("inf"):
        raise ValueError(f"{op}: eps is {eps!r}; give a number of at least 0.")


def check_probability(op: str, p: Any) -> None:
    """Refuse a dropout probability outside of [0, 1)."""
    if not isinstance(p, (int, float)) or not 0.0 <= p < 1.0:
        raise ValueError(f"{op}: p is {p!r}; a dropout probability lies in [0, 1).")


def packed(tensors: Sequence[Any]) -> list[Any]:
    """The tensors as kernels want them: contiguous, from a multiple of 16 bytes on, no lazy sign; copied where not."""
    return [
        t
        if t is None or (t.is_contiguous() and t.data_ptr() % 16 == 0 and not t.is_neg())
        else t.resolve_neg().clone(memory_format=torch.contiguous_format)
        for t in tensors
    ]


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run side by side; a small number under the interpreter, where they run one by one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take."""
    if device.type != "cuda":
        return 100_000
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]


def _load_triton() -> None:
    """Does once what Triton's first compilation does: imports its code generator and hashes its own installation."""
    with contextlib.suppress(Exception):  # the names are Triton's own; it does the same when they are others
        importlib.import_module("triton.compiler.code_generator")
        importlib.import_module("triton.runtime.cache").triton_key()


triton_ready = Job(_load_triton)
_rehearsing: set[int] = set()  # threads whose launches are only compiled


def rehearse(function: Callable[..., Any], *arguments: Any) -> None:
    """Calls `function` with every `Launch` in it replaced by the start of its compilation in the background.

    A forward calls its backward so, on tensors of one row, and the kernels are there when backward comes. Nothing
    depends on it: what was not foreseen, or fails here, is compiled when it is launched.
    """
    thread = threading.get_ident()
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return
    _rehearsing.add(thread)
    try:
        function(*arguments)
    except Exception as error:
        log.debug("triton: could not foresee a launch: %r", error)
    finally:
        _rehearsing.discard(thread)


def one_row(x: torch.Tensor | None) -> Any:
    """The first row of a tensor as a matrix, for `rehearse`."""
    return None if x is None else x[(0,) * (x.ndim - 1)].unsqueeze(0)


class Launch:
    """A kernel with its constants, ready to start on one device at a fraction of Triton's own host cost.

    Triton inspects every argument of every call to find the compiled kernel. Here the caller keeps one `Launch` for
    each combination of constants, argument dtypes and absent arguments (`functools.cache` on the function that makes
    it), tensors are `packed`, and scalars are annotated with a type and marked not to be specialised: nothing is left
    to inspect. The first call goes through Triton and keeps the binary; later ones start it directly.

    A `chained` kernel keeps the rule of `pdl.py`. Its last constant is PDL, which the caller leaves out. Inside of
    `pdl.chaining` a `ChainedLaunch` takes its calls.
    """

    firsts = 0  # launches that were called at least once: an op that sees it change can foresee others

    def __init__(
        self, kernel: Any, device: torch.device, constants: tuple[Any, ...], warps: int, changed: Sequence[int] = (),
        *, chained: bool = False,
    ) -> None:  # fmt: skip
        self.kernel, self.device, self.warps, self.is_chained = kernel, device, warps, chained
        self.constants = (*constants, False) if chained else constants
        self.changed = changed  # which of its tensors it reads and writes
        self.binary: Any = None
        self.is_new = True
        self.job: Job[None] | None = None  # that compiles it ahead of its first call
        self.name: str = kernel.fn.__name__

    def __call__(self, grid: tuple[int, int], tensors: Sequence[torch.Tensor | None], scalars: Sequence[Any]) -> None:
        if _rehearsing and threading.get_ident() in _rehearsing:
            return self.compile_ahead(dtypes(tensors), scalars)
        if self.device.type == "cuda" and self.device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                return self(grid, tensors, scalars)
        if work.watching is not None:
            with work.watching.launch(self.name, tensors, changed=self.changed):
                return self._start(grid, tensors, scalars)
        self._start(grid, tensors, scalars)

    def _start(self, grid: tuple[int, int], tensors: Sequence[torch.Tensor | None], scalars: Sequence[Any]) -> None:
        if self.is_chained and pdl.active() is not None:
            return self.in_chain._start(grid, tensors, scalars)
        if self.binary is None:
            return self._start_first(grid, tensors, scalars)
        self._run(self.binary.run, grid, tensors, scalars)

    def _run(
        self, run: Any, grid: tuple[int, int], tensors: Sequence[torch.Tensor | None], scalars: Sequence[Any]
    ) -> None:
        """Start the binary by one of its launchers."""
        # Addresses instead of tensors spare the launcher a driver query for each.
        addresses = [None if t is None else t.data_ptr() for t in tensors]
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        run(
            grid[0], grid[1], 1, stream, self.binary.function, self.binary.packed_metadata, None, None, None,
            *addresses, *scalars, *self.constants,
        )  # fmt: skip

    @functools.cached_property
    def in_chain(self) -> ChainedLaunch:
        """The same kernel as part of a chain."""
        return ChainedLaunch(self.kernel, self.device, (*self.constants[:-1], True), self.warps)

    def _start_first(
        self, grid: tuple[int, int], tensors: Sequence[torch.Tensor | None], scalars: Sequence[Any]
    ) -> None:
        start = time.perf_counter()
        if not INTERPRETED:
            triton_ready.result()
        if self.job is not None:
            try:
                self.job.result()
            except Exception as error:  # if it is one of the kernel, it comes again below
                log.debug("triton: %s failed ahead of its launch: %r", self.name, error)
        binary = self.kernel[grid](*tensors, *scalars, *self.constants, num_warps=self.warps)
        self.binary = None if INTERPRETED else binary
        if self.is_new:
            self.is_new = False
            Launch.firsts += 1
        log.debug("triton: first launch of %s after %.3f s", self.name, time.perf_counter() - start)

    def compile_ahead(self, types: Sequence[torch.dtype | None], scalars: Sequence[Any]) -> None:
        """Begins to compile in the background, for tensors of these dtypes."""
        if self.binary is None and self.job is None and not INTERPRETED:
            self.job = Job(functools.partial(self._compile, (*types, *scalars, *self.constants))).start()

    def _compile(self, arguments: tuple[Any, ...]) -> None:
        from triton.runtime import driver

        start = time.perf_counter()
        triton_ready.result()
        with torch.cuda.device(self.device):
            binary = self.kernel.warmup(*arguments, grid=(1, 1), num_warps=self.warps)
            # Before 3.7 Triton makes a C compiler build a launcher for each signature, and finds it in its own cache
            # later. The binary itself is loaded by its first call: a graph that is captured meanwhile forbids that.
            driver.active.launcher_cls(binary.src, binary.metadata)
        log.debug("triton: compiled %s ahead in %.3f s", self.name, time.perf_counter() - start)


class ChainedLaunch(Launch):
    """A kernel with code of PDL in it, which begins early where `pdl.launching` lets it."""

    def _start(self, grid: tuple[int, int], tensors: Sequence[torch.Tensor | None], scalars: Sequence[Any]) -> None:
        if INTERPRETED:
            return super()._start(grid, tensors, scalars)
        if self.binary is None:
            arguments = (*tensors, *scalars, *self.constants)
            self.binary = self.kernel.warmup(*arguments, grid=grid, num_warps=self.warps, launch_pdl=True)
            self.early = self.binary.run  # Triton's launcher, which has loaded the binary
            self.behind_others = copy.copy(self.early)
            self.behind_others.launch_pdl = False
        with pdl.launching(self.device) as is_early:
            self._run(self.early if is_early else self.behind_others, grid, tensors, scalars)
