"""Matmuls by cuBLASLt, by the quickest of the algorithms it offers, reached by ctypes.

torch takes the algorithm that the library puts first; for wide matmuls a later one is up to a fifth quicker. `matmul`
takes matrices as torch has them, by rows:

    out = left @ right + bias       rows x columns = (rows x inner) @ (inner x columns)

The library thinks by columns. A matrix by rows is, read by columns, its transpose, so it is asked for
out^T = right^T @ left^T: its A is our right, its B our left, its D our out, its m our columns, its n our rows.

    right by rows          memory by columns is right^T, columns x inner     A as it is      (dx = dy @ weight)
    right = weight.t()     memory by columns is right,   inner x columns     A transposed    (y = x @ weight^T)
    left by rows           memory by columns is left^T,  inner x rows        B as it is
    left = dy.t()          memory by columns is left,    rows x inner        B transposed

Its bias is as long as D has rows, which are our columns.

The choice is made by the clock, and the bits must not depend on it. Every candidate sums each element in one piece,
over the inner dimension from front to back, in float32, whatever its tile: the inner dimension is not split between
blocks (no reduction scheme, one split), and the workspace is too small for the partial sums of a tile that blocks
share. That leaves how many terms one instruction adds at once, which differs between generations of them; so a
candidate must also repeat the first one's bits on the numbers that it is timed with.

Outputs are written and never read (beta is 0), so a matmul may run twice with the same result.

A choice is made once for a range of row counts (`_bucket`), so that batches of varying length do not start a search
each. It is cached on disk (`disk_cache`) under a key of the GPU, the versions and the problem. A matmul takes over a
cached choice only if the library confirms that the algorithm can do it (`cublasLtMatmulAlgoCheck`), the algorithm sums
in one piece, and the library's own first candidate is of the family (algorithm and instruction shape) with whose bits
the choice was compared. Otherwise it takes the library's first candidate.
"""

from __future__ import annotations

import ctypes
import functools
import json
import threading
import time
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch

from tilewright.measure import work
from tilewright.runtime import disk_cache
from tilewright.runtime.cublaslt_library import (
    COMPUTE_32F,
    CONFIG_TYPES,
    HALVES,
    R_32F,
    REDUCTION_SCHEME_NONE,
    TYPES,
    Config,
    Description,
    Epilogue,
    Heuristic,
    Preference,
    library,
    must,
    set_attribute,
)
from tilewright.runtime.log import log

WORTH_CHOOSING = 2e10  # FLOPs from which a choice can pay; some 30 microseconds of an H200

_CANDIDATES = 12
_LEADERS = 3  # of the first round of timings, for longer ones
# Milliseconds of those: two launches of an algorithm differ from time to time by more than two algorithms do.
_ROUNDS = (4.0, 12.0, 12.0)
_CLOSE = 1.04  # times the shortest: who has taken longer up to then has lost
_USES = 3  # of a bucket of shapes before its algorithms are timed
_WORTH = 0.99  # of the first candidate's time: what another must beat
_MOST_CHOICES = 64  # a program that sees new shapes all the time spends its own time on its work
_PLANS = 4096
_WORKSPACE = 64 * 2**10  # bytes: enough for counters, not for partial sums
_ROWS = 64  # of an output whose bits are compared, spread over all of it


_handles: dict[torch.device, c_void_p] = {}  # one a device, for good; it belongs to the device that is current


def _has_handle(device: torch.device) -> bool:
    """Makes one where there is none; not while a graph is captured, and not where memory is lacking."""
    if device not in _handles and not _captured(device):
        handle = c_void_p()
        if library(device).cublasLtCreate(byref(handle)) == 0:
            _handles[device] = handle
    return device in _handles


def _captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)


def _may_time() -> bool:
    return torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing()


def _milliseconds(launch: Callable[[Heuristic], bool], candidate: Heuristic, times: int = 2) -> float:
    """Return the time of a launch, as the mean of several."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if not launch(candidate):  # keeps the device busy until the host has queued what is timed
        return float("inf")
    start.record()
    for _ in range(times):
        launch(candidate)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def _side(matrix: torch.Tensor) -> tuple[bool, int] | None:
    """Whether a matrix is the transpose of one by rows, and how far apart the rows of that are; None: it is neither."""
    (rows, columns), (across, along) = matrix.shape, matrix.stride()
    # The stride of a single row, or of a single column, means nothing.
    if (along == 1 or columns == 1) and (across >= columns or rows == 1):
        return False, across if rows > 1 else columns
    if (across == 1 or rows == 1) and (along >= rows or columns == 1):
        return True, along if columns > 1 else rows
    return None


class Choice(NamedTuple):
    """What a search found: an algorithm, None for the library's first; and the family of that first one."""

    algorithm: bytes | None
    family: tuple[int, int]

    def to_json(self) -> bytes:
        algorithm = None if self.algorithm is None else self.algorithm.hex()
        return json.dumps({"algorithm": algorithm, "family": self.family}).encode()

    @staticmethod
    def from_json(text: bytes) -> Choice | None:
        """The choice, or None where the text is not one."""
        try:
            found = json.loads(text)
            algorithm, family = found["algorithm"], found["family"]
            algorithm = None if algorithm is None else bytes.fromhex(algorithm)
            first, second = (int(number) for number in family)
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        if algorithm is not None and len(algorithm) != Heuristic.algorithm.size:
            return None
        return Choice(algorithm, (first, second))


_choices: dict[tuple[Any, ...], Choice | None] = {}  # by bucket; None: looked for on disk, not found
_uses: dict[tuple[Any, ...], int] = {}  # of a bucket that has no choice


def _bucket(rows: int) -> int:
    """The row count that stands for `rows` in a search: a multiple of a power of two, four to an octave.

    >>> [_bucket(rows) for rows in (1, 7, 9, 100, 1000, 1024, 1025, 1280, 1281)]
    [1, 7, 10, 112, 1024, 1024, 1280, 1280, 1536]
    """
    step = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // step) * step


@functools.cache
def _machine(device: torch.device, loaded: Any) -> tuple[Any, ...]:
    """What a choice depends on beside the problem: the GPU, its driver and the library."""
    gpu: tuple[Any, ...] = ()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: None)()
        gpu = properties.name, properties.multi_processor_count, properties.total_memory, driver
    return *gpu, loaded.cublasLtGetVersion(), torch.__version__


class Plan:
    """A matmul described to the library, and the algorithms that can do it. From call to call only addresses change.

    That of a bias is an attribute of the description, hence the lock: a second thread, as autograd has, must not set
    its own between. The choice holds for the life of the process. While a graph is captured nothing can be timed, and
    under `torch.use_deterministic_algorithms` nothing may depend on time: then it is the first candidate.
    """

    choices = 0

    def __init__(
        self, loaded: Any, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, has_bias: bool, alignment: int
    ) -> None:
        self.loaded, self.matmul, self.device = loaded, loaded.cublasLtMatmul, out.device
        self.description, self.right, self.left, self.out = (c_void_p() for _ in range(4))
        self.handle, self.lock = _handles[out.device], threading.Lock()
        status = loaded.cublasLtMatmulDescCreate(byref(self.description), COMPUTE_32F, R_32F)
        must(status, "describe a matmul")
        (rows, columns), inner = out.shape, left.shape[1]
        left_side, right_side = _side(left), _side(right)
        assert left_side is not None and right_side is not None
        (left_transposed, left_stride), (right_transposed, right_stride) = left_side, right_side
        self._describe(Description.TRANSA, c_int32(right_transposed))  # CUBLAS_OP_N is 0, CUBLAS_OP_T is 1
        self._describe(Description.TRANSB, c_int32(left_transposed))
        self._describe(Description.EPILOGUE, c_uint32(Epilogue.BIAS if has_bias else Epilogue.DEFAULT))
        if has_bias:  # an address that nobody reads tells the library how far it may trust those to come
            self._describe(Description.BIAS_POINTER, c_void_p(alignment))
        self._lay_out(self.right, right, *((inner, columns) if right_transposed else (columns, inner)), right_stride)
        self._lay_out(self.left, left, *((rows, inner) if left_transposed else (inner, rows)), left_stride)
        self._lay_out(self.out, out, columns, rows, columns)
        self.candidates = self.order = self._search(alignment)
        self.undecided = len(self.candidates) > 1 and 2 * rows * columns * inner >= WORTH_CHOOSING
        contiguous = [side[1] == matrix.shape[not side[0]] for side, matrix in ((left_side, left), (right_side, right))]
        problem = (_bucket(rows), columns, inner, left_transposed, right_transposed, *contiguous)
        types = str(left.dtype), str(out.dtype), has_bias, alignment
        self.bucket = (*_machine(out.device, loaded), *problem, *types)
        self.what = f"{rows} x {inner} x {columns}"

    def _describe(self, attribute: Description, value: Any) -> None:
        set_attribute(self.loaded.cublasLtMatmulDescSetAttribute, self.description, attribute, value)

    def _lay_out(self, layout: c_void_p, matrix: torch.Tensor, rows: int, columns: int, stride: int) -> None:
        status = self.loaded.cublasLtMatrixLayoutCreate(byref(layout), TYPES[matrix.dtype], rows, columns, stride)
        must(status, "lay out a matrix")

    def _search(self, alignment: int) -> list[Heuristic]:
        """The algorithms that sum in one piece; none where the library has no such matmul on this device."""
        preference = c_void_p()
        must(self.loaded.cublasLtMatmulPreferenceCreate(byref(preference)), "take a preference")
        prefer = functools.partial(set_attribute, self.loaded.cublasLtMatmulPreferenceSetAttribute, preference)
        prefer(Preference.MAX_WORKSPACE_BYTES, c_uint64(_WORKSPACE))
        prefer(Preference.REDUCTION_SCHEME_MASK, c_uint32(REDUCTION_SCHEME_NONE))
        for matrix in "ABCD":
            prefer(Preference[f"MIN_ALIGNMENT_{matrix}_BYTES"], c_uint32(alignment))
        found, count = (Heuristic * _CANDIDATES)(), c_int(0)
        status = self.loaded.cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.description, self.right, self.left, self.out, self.out, preference,
            _CANDIDATES, byref(found), byref(count),
        )  # fmt: skip
        self.loaded.cublasLtMatmulPreferenceDestroy(preference)
        return [one for one in found[: count.value] if status == 0 == one.state and self._sums_in_one_piece(one)]

    def _config(self, candidate: Heuristic, attribute: Config) -> int:
        value, written = CONFIG_TYPES[attribute](), c_size_t()
        status = self.loaded.cublasLtMatmulAlgoConfigGetAttribute(
            byref(candidate), attribute, byref(value), ctypes.sizeof(value), byref(written)
        )
        must(status, f"tell {attribute.name} of an algorithm")
        return int(value.value)

    def _sums_in_one_piece(self, candidate: Heuristic) -> bool:
        scheme = self._config(candidate, Config.REDUCTION_SCHEME)
        return self._config(candidate, Config.SPLITK_NUM) == 1 and scheme == REDUCTION_SCHEME_NONE

    def _family(self) -> tuple[int, int]:
        first = self.candidates[0]
        return self._config(first, Config.ID), self._config(first, Config.INNER_SHAPE_ID)

    def _decide(self, launch: Callable[[Heuristic], bool], out: torch.Tensor) -> None:
        """Takes over the choice of this bucket, or makes it when the bucket has been used often enough."""
        if self.bucket not in _choices:
            text = disk_cache.get(disk_cache.make_key("cublaslt", *self.bucket))
            _choices[self.bucket] = None if text is None else Choice.from_json(text)
            if _choices[self.bucket] is not None:
                log.debug("cublaslt: choice for %s loaded from disk", self.what)
        choice = _choices[self.bucket]
        if choice is not None:
            self._adopt(choice)
            return
        # A shape that comes once, as the rest of a batch may, is not worth the time.
        _uses[self.bucket] = uses = _uses.get(self.bucket, 0) + 1
        if uses >= _USES and Plan.choices < _MOST_CHOICES and _may_time():
            self._choose(launch, out)

    def _adopt(self, choice: Choice) -> None:
        """Puts an algorithm in front that was chosen for a matmul like this, if it can do this one."""
        self.undecided = False
        if choice.algorithm is None:
            return
        candidate, result = Heuristic(), Heuristic()
        ctypes.memmove(byref(candidate), choice.algorithm, len(choice.algorithm))
        status = self.loaded.cublasLtMatmulAlgoCheck(
            self.handle, self.description, self.right, self.left, self.out, self.out, byref(candidate), byref(result)
        )
        candidate.workspace_bytes = result.workspace_bytes
        fits = status == 0 == result.state and result.workspace_bytes <= _WORKSPACE
        if fits and self._sums_in_one_piece(candidate) and self._family() == choice.family:
            self.order = [candidate, *self.candidates]
        else:
            log.debug("cublaslt: the choice for shapes like %s does not fit it, the first candidate does", self.what)

    def run(self, right: int, left: int, address: int, bias: int, out: torch.Tensor) -> bool:
        if not bias:
            return self._run(right, left, address, out)
        with self.lock:
            self._describe(Description.BIAS_POINTER, c_void_p(bias))
            return self._run(right, left, address, out)

    def _run(self, right: int, left: int, address: int, out: torch.Tensor) -> bool:
        deterministic = torch.are_deterministic_algorithms_enabled()
        if self.undecided and not deterministic:
            self._decide(lambda candidate: self._launch(candidate, right, left, address), out)
        for candidate in self.candidates if deterministic else self.order:
            if self._launch(candidate, right, left, address):
                return True
        return False

    def _launch(self, candidate: Heuristic, right: int, left: int, out: int) -> bool:
        size, workspace, address = candidate.workspace_bytes, None, None
        if size:  # from torch's allocator: in the order of the stream, and inside of a graph that is captured
            workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
            address = workspace.data_ptr()
        status: int = self.matmul(
            self.handle, self.description, _ONE, right, self.right, left, self.left, _ZERO, out, self.out,
            out, self.out, byref(candidate), address, size, _stream(self.device),
        )  # fmt: skip
        return status == 0

    def _choose(self, launch: Callable[[Heuristic], bool], out: torch.Tensor) -> None:
        """Puts the quickest candidate in front, of those with the bits of the first."""
        began = time.perf_counter()
        Plan.choices += 1
        self.undecided = False
        bits = out.view(torch.int16)[:: 1 + out.shape[0] // _ROWS]  # of NaN too, which equals nothing as a number
        expected, least = None, {}
        for index, candidate in enumerate(self.candidates):
            milliseconds = _milliseconds(launch, candidate)
            if milliseconds < float("inf"):
                if expected is None:
                    expected, some = bits.clone(), out[:: 1 + out.shape[0] // _ROWS]
                    if not (some.isfinite() & (some != 0)).any():  # all algorithms agree on nothing: another time
                        Plan.choices -= 1
                        self.undecided = True
                        return
                if torch.equal(bits, expected):
                    least[index] = milliseconds
        if not least:
            return
        first = min(least)
        leaders = {first, *sorted(least, key=least.__getitem__)[:_LEADERS]}
        spent = dict.fromkeys(leaders, 0.0)
        for length in _ROUNDS:  # in turn: a GPU that gets warm, or to its limit, gets so for all of them
            for index in spent:
                spent[index] += _milliseconds(launch, self.candidates[index], int(length / least[first]) + 2)
            shortest = min(spent.values())
            spent = {index: time for index, time in spent.items() if time <= _CLOSE * shortest}
            if len(spent) == 1:
                break
        best = min(spent, key=spent.__getitem__)
        algorithm = None
        if first not in spent or spent[best] < _WORTH * spent[first]:
            self.order = [self.candidates[best], *self.candidates]
            algorithm = bytes(self.candidates[best].algorithm)
        _choices[self.bucket] = choice = Choice(algorithm, self._family())
        disk_cache.put(disk_cache.make_key("cublaslt", *self.bucket), choice.to_json())
        seconds, count = time.perf_counter() - began, len(self.candidates)
        log.debug("cublaslt: chose #%d of %d for %s in %.3f s", best, count, self.what, seconds)

    def __del__(self) -> None:
        self.loaded.cublasLtMatmulDescDestroy(self.description)
        for layout in (self.right, self.left, self.out):
            self.loaded.cublasLtMatrixLayoutDestroy(layout)


_ONE, _ZERO = byref(c_float(1.0)), byref(c_float(0.0))  # alpha and beta, which the library reads on the host
_plans: dict[tuple[Any, ...], Plan | None] = {}


def _plan(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, has_bias: bool, alignment: int) -> Plan | None:
    if len(_plans) >= _PLANS:
        _plans.clear()
    loaded = library(out.device)
    if loaded is None or left.dtype not in HALVES or left.dtype != right.dtype or out.dtype not in TYPES:
        return None
    if not out.numel() or not left.shape[1] or _side(left) is None or _side(right) is None:
        return None
    if not _has_handle(out.device):
        return None
    return Plan(loaded, left, right, out, has_bias, alignment)


def matmul(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> bool:
    """Writes left @ right + bias to `out`; False, and nothing written, where the library cannot.

    Args:
        left, right: matrices in bfloat16 or float16, by rows or the transpose of one by rows.
        out: by rows, without gaps, in their dtype or float32.
        bias: one element a column, without gaps, in out's dtype.
    """
    device = out.get_device()
    if device >= 0 and device != torch._C._cuda_getDevice():
        with torch.cuda.device(device):
            return matmul(left, right, out, bias)
    a, b, d = right.data_ptr(), left.data_ptr(), out.data_ptr()
    vector = 0 if bias is None else bias.data_ptr()
    low = a | b | d | vector | 256
    alignment = low & -low  # the largest power of two, up to 256, that divides all addresses
    key = (
        left.shape, left.stride(), right.shape, right.stride(), left.dtype, right.dtype, out.dtype, device, alignment,
        bias is None,
    )  # fmt: skip
    try:
        plan = _plans[key]
    except KeyError:
        plan = _plan(left, right, out, bias is not None, alignment)
        if plan is not None or not _captured(out.device):
            _plans[key] = plan
    if plan is None:
        return False
    with work.launching("tilewright_linear_matmul", (left, right, out, bias), 2.0 * left.numel() * right.shape[1]):
        return plan.run(a, b, d, vector, out)
