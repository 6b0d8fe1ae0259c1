"""Products by cuBLASLt, with what it can do to them on their way to memory, reached by ctypes.

torch has loaded the library, but offers few of its epilogues. `product` takes matrices as torch has them, by rows:

    out = left @ right              rows x columns = (rows x inner) @ (inner x columns)

The library thinks by columns. A matrix by rows is, read by columns, its transpose, so it is asked for
out^T = right^T @ left^T: its A is our right, its B our left, its D our out, its m our columns, its n our rows.

    right by rows          memory by columns is right^T, columns x inner     A as it is      (dx = dy @ weight)
    right = weight.t()     memory by columns is right,   inner x columns     A transposed    (y = x @ weight^T)
    left by rows           memory by columns is left^T,  inner x rows        B as it is
    left = dy.t()          memory by columns is left,    rows x inner        B transposed    (dweight = dy^T @ x)

What an epilogue knows as rows of D are our columns. A bias, as long as D has rows, is added to each of our rows. The
bias gradient of DGELU_BGRAD is as long and sums D over our rows. BGRADB sums B over the inner dimension, which is our
left over its columns: for left = dy^T, dy over its tokens. `aux`, the input of the GELU (by tanh), lies as out does.
The elements of bias, bias gradient and aux are of out's dtype, to which the library defaults.

Outputs are written and never read (beta is 0), so a product may run twice with the same result.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")

_CANDIDATES = 8
_ROUNDS = 3  # of timings, in turns
_WORTH = 0.98  # of the first way's time: what another way must beat
_MOST_TIMED = 512  # choices; a program that sees new shapes all the time spends its own time on its work
_WORKSPACE = 32 * 2**20  # bytes at most, which is what NVIDIA recommends for Hopper


# The constants of cublasLt.h, cublas_api.h and library_types.h, by their names there without the prefix.


class Description(enum.IntEnum):
    """CUBLASLT_MATMUL_DESC_*, attributes of a product."""

    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8
    EPILOGUE_AUX_POINTER = 11
    EPILOGUE_AUX_LD = 12


class Preference(enum.IntEnum):
    """CUBLASLT_MATMUL_PREF_*, what an algorithm must live with."""

    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


class Epilogue(enum.IntEnum):
    """CUBLASLT_EPILOGUE_*, what happens to a product before it is written."""

    DEFAULT = 1
    BIAS = 4
    GELU_AUX = 160
    GELU_AUX_BIAS = 164
    DGELU = 192
    DGELU_BGRAD = 208
    BGRADB = 512


COMPUTE_32F = 68  # CUBLAS_COMPUTE_32F
R_32F = 0  # CUDA_R_32F
TYPES = {torch.bfloat16: 14, torch.float16: 2, torch.float32: R_32F}  # CUDA_R_16BF, CUDA_R_16F
# CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: where the inner dimension is split, the parts meet in float32, in the
# workspace and in a fixed order. The other schemes round each part to the dtype of the output.
REDUCTION_SCHEME_COMPUTE_TYPE = 2


class Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t; the algorithm itself is its first member."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (c_void_p,),
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceCreate": (c_void_p,),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, c_void_p, c_void_p),
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}


@functools.cache
def library(device: torch.device) -> Any:
    """cuBLASLt as torch has it, or None: the loader finds what is loaded already by its bare name."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        return declare(ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"))
    except OSError:
        return None


def declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Tells ctypes the arguments: untold, it would cut 64-bit integers in half."""
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, c_int
    return loaded


def _must(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt could not {what}: status {status}.")


@functools.cache
def _handle(device: torch.device) -> c_void_p:
    """One a device, for good; it belongs to the device that is current."""
    handle = c_void_p()
    _must(library(device).cublasLtCreate(byref(handle)), f"start on {device}")
    return handle


# Choosing among ways to the same result.


def _may_time() -> bool:
    return torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()


def _milliseconds(way: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    way()  # keeps the device busy until the host has queued what is timed
    start.record()
    way()
    way()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _exists(way: Callable[[], Any]) -> bool:
    try:
        return way() is not None
    except torch.OutOfMemoryError:  # another way may need less
        return False


def _quickest(ways: Sequence[Callable[[], Any]]) -> int:
    able = [index for index, way in enumerate(ways) if _exists(way)]
    if len(able) < 2:
        return able[0] if able else 0
    least = dict.fromkeys(able, float("inf"))
    for _ in range(_ROUNDS):
        for index in able:
            least[index] = min(least[index], _milliseconds(ways[index]))
    best = min(able, key=lambda index: least[index])
    return best if least[best] < _WORTH * least[able[0]] else able[0]


class Choice:
    """Which of several ways is the quickest, found out by trying them when they are first called.

    A way returns None where it does not exist. The choice holds for the life of the process, and may differ in the next
    one. While a graph is captured nothing can be timed, and under `torch.use_deterministic_algorithms` nothing may
    depend on time: then it is the first that exists.
    """

    timed = 0

    def __init__(self) -> None:
        self.index: int | None = None

    def __call__(self, ways: Sequence[Callable[[], T | None]]) -> T | None:
        if not torch.are_deterministic_algorithms_enabled():
            if self.index is None and len(ways) > 1 and Choice.timed < _MOST_TIMED and _may_time():
                Choice.timed += 1
                self.index = _quickest(ways)
            if self.index is not None:
                return ways[self.index]()
        return next((result for way in ways if (result := way()) is not None), None)


# Products.


class Problem(NamedTuple):
    """All that a plan depends on. Alignments, in bytes, are those of right, left, out, bias and aux; 0: not there."""

    device: torch.device
    rows: int
    columns: int
    inner: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    left_transposed: bool
    left_stride: int
    right_transposed: bool
    right_stride: int
    epilogue: Epilogue
    alignments: tuple[int, ...]


def _set(function: Any, described: c_void_p, attribute: enum.IntEnum, value: Any) -> None:
    _must(function(described, attribute, byref(value), ctypes.sizeof(value)), f"set {attribute.name}")


class Plan:
    """A product described to the library, and the algorithms that can do it. From call to call only addresses change.

    They are attributes of the description, hence the lock: a second thread, as autograd has, must not set them between.
    """

    def __init__(self, loaded: Any, problem: Problem) -> None:
        self.loaded, self.problem = loaded, problem
        self.lock, self.choice = threading.Lock(), Choice()
        self.description, self.right, self.left, self.out = (c_void_p() for _ in range(4))
        self.candidates: list[Heuristic] = []
        _must(
            loaded.cublasLtMatmulDescCreate(byref(self.description), COMPUTE_32F, R_32F),
            "describe a product",
        )
        p = problem
        self._describe(Description.TRANSA, c_int32(p.right_transposed))  # CUBLAS_OP_N is 0, CUBLAS_OP_T is 1
        self._describe(Description.TRANSB, c_int32(p.left_transposed))
        self._describe(Description.EPILOGUE, c_uint32(p.epilogue))
        if p.alignments[4]:
            self._describe(Description.EPILOGUE_AUX_LD, c_int64(p.columns))
        # An address that nobody reads tells the library how far it may trust those to come.
        self._point(p.alignments[3], p.alignments[4])
        right = (p.inner, p.columns) if p.right_transposed else (p.columns, p.inner)
        left = (p.rows, p.inner) if p.left_transposed else (p.inner, p.rows)
        self._lay_out(self.right, p.dtype, *right, p.right_stride)
        self._lay_out(self.left, p.dtype, *left, p.left_stride)
        self._lay_out(self.out, p.out_dtype, p.columns, p.rows, p.columns)

    def _describe(self, attribute: Description, value: Any) -> None:
        _set(self.loaded.cublasLtMatmulDescSetAttribute, self.description, attribute, value)

    def _point(self, bias: int, aux: int) -> None:
        if bias:
            self._describe(Description.BIAS_POINTER, c_void_p(bias))
        if aux:
            self._describe(Description.EPILOGUE_AUX_POINTER, c_void_p(aux))

    def _lay_out(self, layout: c_void_p, dtype: torch.dtype, rows: int, columns: int, stride: int) -> None:
        status = self.loaded.cublasLtMatrixLayoutCreate(byref(layout), TYPES[dtype], rows, columns, stride)
        _must(status, "lay out a matrix")

    def search(self) -> None:
        """Asks for algorithms; there are none where the library has no such product on this device."""
        preference = c_void_p()
        _must(self.loaded.cublasLtMatmulPreferenceCreate(byref(preference)), "take a preference")
        prefer = functools.partial(_set, self.loaded.cublasLtMatmulPreferenceSetAttribute, preference)
        prefer(Preference.MAX_WORKSPACE_BYTES, c_uint64(_WORKSPACE))
        prefer(Preference.REDUCTION_SCHEME_MASK, c_uint32(REDUCTION_SCHEME_COMPUTE_TYPE))
        right, left, out = self.problem.alignments[:3]
        prefer(Preference.MIN_ALIGNMENT_A_BYTES, c_uint32(right))
        prefer(Preference.MIN_ALIGNMENT_B_BYTES, c_uint32(left))
        prefer(Preference.MIN_ALIGNMENT_C_BYTES, c_uint32(out))
        prefer(Preference.MIN_ALIGNMENT_D_BYTES, c_uint32(out))
        found, count = (Heuristic * _CANDIDATES)(), c_int(0)
        status = self.loaded.cublasLtMatmulAlgoGetHeuristic(
            _handle(self.problem.device), self.description, self.right, self.left, self.out, self.out, preference,
            _CANDIDATES, byref(found), byref(count),
        )  # fmt: skip
        self.loaded.cublasLtMatmulPreferenceDestroy(preference)
        if status == 0:
            self.candidates = [one for one in found[: count.value] if one.state == 0]

    def __call__(
        self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None,
        aux: torch.Tensor | None,
    ) -> bool:  # fmt: skip
        addresses = [0 if t is None else t.data_ptr() for t in (right, left, out, bias, aux)]
        with self.lock:
            self._point(*addresses[3:])
            ways = [functools.partial(self._launch, one, out.device, *addresses[:3]) for one in self.candidates]
            return self.choice(ways) is not None

    def _launch(self, candidate: Heuristic, device: torch.device, right: int, left: int, out: int) -> bool | None:
        # From torch's allocator: in the order of the stream, inside of a graph that is captured, and no longer than
        # needed.
        size = candidate.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        status = self.loaded.cublasLtMatmul(
            _handle(device), self.description, byref(_ONE), right, self.right, left, self.left, byref(_ZERO),
            out, self.out, out, self.out, byref(candidate), None if workspace is None else workspace.data_ptr(), size,
            _stream(device),
        )  # fmt: skip
        return True if status == 0 else None

    def __del__(self) -> None:
        self.loaded.cublasLtMatmulDescDestroy(self.description)
        for layout in (self.right, self.left, self.out):
            self.loaded.cublasLtMatrixLayoutDestroy(layout)


_ONE, _ZERO = c_float(1.0), c_float(0.0)  # alpha and beta, which the library reads on the host, in float32


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


@functools.lru_cache(4096)
def _plan(problem: Problem) -> Plan:
    plan = Plan(library(problem.device), problem)
    plan.search()
    return plan


def _side(matrix: torch.Tensor) -> tuple[bool, int]:
    """Whether a matrix is the transpose of one by rows, and how far apart the rows of that are."""
    (rows, columns), (across, along) = matrix.shape, matrix.stride()
    if along == 1 and (across >= columns or rows == 1):
        return False, across if rows > 1 else columns  # the stride of a single row means nothing
    return True, along if columns > 1 else rows


def _alignment(tensor: torch.Tensor | None) -> int:
    """The largest power of two, up to 256, that divides the address."""
    if tensor is None:
        return 0
    address = tensor.data_ptr() | 256
    return address & -address


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    epilogue: Epilogue = Epilogue.DEFAULT,
    bias: torch.Tensor | None = None,
    aux: torch.Tensor | None = None,
) -> bool:
    """Writes left @ right to `out`, through the epilogue; False, and nothing written, where the library cannot.

    Args:
        left, right: matrices in bfloat16 or float16, by rows or the transpose of one by rows.
        out: by rows, without gaps, in their dtype or float32.
        bias: read by BIAS and GELU_AUX_BIAS, written by DGELU_BGRAD and BGRADB, in out's dtype.
        aux: written by GELU_AUX and GELU_AUX_BIAS, read by DGELU and DGELU_BGRAD, of out's shape and dtype.
    """
    device = out.device
    if library(device) is None or left.dtype not in TYPES or not out.numel() or not left.shape[1]:
        return False
    elsewhere = device.type == "cuda" and device.index != torch._C._cuda_getDevice()
    with torch.cuda.device(device) if elsewhere else contextlib.nullcontext():
        (rows, columns), inner = out.shape, left.shape[1]
        alignments = tuple([_alignment(tensor) for tensor in (right, left, out, bias, aux)])
        sides = (*_side(left), *_side(right))
        plan = _plan(Problem(device, rows, columns, inner, left.dtype, out.dtype, *sides, epilogue, alignments))
        return plan(left, right, out, bias, aux)
