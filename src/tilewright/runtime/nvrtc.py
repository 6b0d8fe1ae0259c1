"""Kernels in CUDA C++, where Triton does not reach the limit: compiled by NVRTC, started by the driver, both reached by
ctypes. What torch brings is all it takes: no toolkit, no headers, no build.

Compiling a kernel takes seconds. `compile_ahead` lets threads do it before the kernel is wanted, and the code is cached
on disk (`disk_cache`) under a key of the source, its headers, the options and the compiler's version.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import torch

from tilewright.runtime import disk_cache
from tilewright.runtime.background import Job
from tilewright.runtime.log import log

_KINDS = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
_SWIZZLES = {64: 2, 128: 3}  # CU_TENSOR_MAP_SWIZZLE_*B
_L2_256B = 3  # CU_TENSOR_MAP_L2_PROMOTION_*
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_*
_PROGRAMMATIC_STREAM_SERIALIZATION, _LAUNCH_COMPLETION_EVENT = 6, 12  # CU_LAUNCH_ATTRIBUTE_*
_DISABLE_TIMING = 2  # CU_EVENT_*
_INVALID_CONTEXT = 201  # CUDA_ERROR_*
_MAP_BYTES, _MAP_ALIGNMENT = 128, 128
_HEADERS = Path(__file__).with_name("cuda")  # that kernels share
# 1: a kernel for Hopper that waits for more than two seconds traps, where it would hang and take the GPU with it.
BOUNDED_WAITS = int(os.environ.get("TILEWRIGHT_BOUNDED_WAITS") == "1")

_NVRTC = {
    "nvrtcVersion": (c_void_p, c_void_p),
    "nvrtcCreateProgram": (c_void_p, c_char_p, c_char_p, c_int, c_void_p, c_void_p),
    "nvrtcCompileProgram": (c_void_p, c_int, c_void_p),
    "nvrtcGetProgramLogSize": (c_void_p, c_void_p),
    "nvrtcGetProgramLog": (c_void_p, c_void_p),
    "nvrtcGetCUBINSize": (c_void_p, c_void_p),
    "nvrtcGetCUBIN": (c_void_p, c_void_p),
    "nvrtcDestroyProgram": (c_void_p,),
}
_DRIVER = {
    "cuCtxGetCurrent": (c_void_p,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuModuleLoadData": (c_void_p, c_void_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernel": (c_void_p, *(c_uint32,) * 7, c_void_p, c_void_p, c_void_p),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuEventCreate": (c_void_p, c_uint32),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint32),
    "cuTensorMapEncodeTiled": (c_void_p, c_int, c_uint32, *(c_void_p,) * 5, c_int, c_int, c_int, c_int),
}


class _LaunchAttribute(ctypes.Structure):
    _fields_ = (("id", c_int), ("unused", c_int), ("value", c_uint64 * 8))


class _LaunchConfig(ctypes.Structure):
    _fields_ = (
        ("grid", c_uint32 * 3), ("block", c_uint32 * 3), ("shared_bytes", c_uint32), ("stream", c_void_p),
        ("attributes", c_void_p), ("count", c_uint32),
    )  # fmt: skip


_BEGINS_EARLY = _LaunchAttribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, (c_uint64 * 8)(1))


def _declared(library: Any, signatures: dict[str, tuple[Any, ...]]) -> Any:
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, c_int
    return library


@functools.cache
def _nvrtc() -> Any:
    """NVRTC as torch has it, or None."""
    if torch.version.cuda is None:
        return None
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    beside = Path(torch.__file__).parent.parent / "nvidia"
    toolkit = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    for path in (name, *beside.glob(f"*/lib/{name}"), f"{toolkit}/lib64/{name}"):
        try:
            return _declared(ctypes.CDLL(str(path)), _NVRTC)
        except (OSError, AttributeError):
            continue
    return None


@functools.cache
def _driver() -> Any:
    return _declared(ctypes.CDLL("libcuda.so.1"), _DRIVER)


class CompileError(RuntimeError):
    """A source that this compiler does not take, now or later."""


def _must(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"CUDA could not {what}: status {status}.")


_contexts: dict[int, c_void_p] = {}  # of devices, once something was loaded there


def _must_in_context(call: Callable[[], int], what: str) -> None:
    """Call what needs a CUDA context, which a thread of autograd's may not have yet."""
    status = call()
    context = _contexts.get(torch._C._cuda_getDevice()) if status == _INVALID_CONTEXT else None
    if context is not None:
        _must(_driver().cuCtxSetCurrent(context), "take its context")
        status = call()
    _must(status, what)


def can_compile() -> bool:
    """Whether there is a compiler to be had."""
    return _nvrtc() is not None


def compiler_version() -> tuple[int, int]:
    """NVRTC's release; (0, 0) where there is none."""
    if not can_compile():
        return 0, 0
    major, minor = c_int(), c_int()
    _must(_nvrtc().nvrtcVersion(byref(major), byref(minor)), "tell the compiler's version")
    return major.value, minor.value


Headers = tuple[tuple[str, str], ...]  # that are no files: the name in #include, and the text
_jobs: dict[tuple[Path, tuple[str, ...], Headers], Job[bytes]] = {}
_jobs_lock = threading.Lock()


def _job(source: Path, options: tuple[str, ...], headers: Headers = ()) -> Job[bytes]:
    """The one job that makes this code, for all devices of a kind and for when it could not be loaded."""
    key = source, options, headers
    with _jobs_lock:
        if key not in _jobs:
            _jobs[key] = Job(functools.partial(_load_or_compile, *key))
        return _jobs[key]


def _options(device: int, macros: dict[str, int]) -> tuple[str, ...]:
    major, minor = torch.cuda.get_device_capability(device)
    defined = (f"-D{name}={value}" for name, value in macros.items())
    return (f"--gpu-architecture=sm_{major}{minor}a", "--std=c++17", *defined)


def compile_ahead(source: Path, device: int, macros: dict[str, int]) -> None:
    """Begins to compile a source in the background, for a `Module` of the same arguments."""
    _job(source, _options(device, macros)).start()


def _load_or_compile(source: Path, options: tuple[str, ...], headers: Headers) -> bytes:
    start, key = time.perf_counter(), cache_key(source, options, headers)
    code = disk_cache.get(key)
    found = code is not None
    if code is None:
        code = _compile(source, options, headers)
        disk_cache.put(key, code)
    verb, seconds = "loaded from disk" if found else "compiled", time.perf_counter() - start
    log.debug("nvrtc: %s %s %s in %.3f s", verb, _label(source), " ".join(options), seconds)
    return code


def _label(source: Path) -> str:
    return f"{source.parent.name}/{source.name}"


def _folders(source: Path) -> tuple[Path, ...]:
    """Where headers lie, the source's own folder last: of two with one name the compiler takes the shared one."""
    return tuple(dict.fromkeys((_HEADERS, source.parent)))


def cache_key(source: Path, options: tuple[str, ...], more: Headers) -> str:
    """Hash all that a kernel depends on: its source, every header it may include, the options and the compiler."""
    headers = [(path.name, path.read_text()) for folder in _folders(source) for path in sorted(folder.glob("*.cuh"))]
    headers += more
    # nvrtcVersion leaves out the patch level, which the release of torch fixes.
    version = [*compiler_version(), torch.__version__]
    return disk_cache.make_key("cubin", source.name, source.read_text(), headers, options, version)


def _compile(source: Path, options: tuple[str, ...], headers: Headers) -> bytes:
    nvrtc, program, size = _nvrtc(), c_void_p(), c_size_t()
    text = source.read_bytes()
    options = (*options, *(f"--include-path={folder}" for folder in _folders(source)))
    names, texts = ((c_char_p * len(headers))(*(header[i].encode() for header in headers)) for i in (0, 1))
    label = _label(source).encode()
    status = nvrtc.nvrtcCreateProgram(byref(program), text, label, len(headers), texts, names)
    _must(status, "take a kernel's source")
    try:
        given = (c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), given):
            nvrtc.nvrtcGetProgramLogSize(program, byref(size))
            said = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, said)
            raise CompileError(f"{_label(source)} does not compile: {said.value.decode(errors='replace')}")
        _must(nvrtc.nvrtcGetCUBINSize(program, byref(size)), "tell the size of a kernel")
        code = ctypes.create_string_buffer(size.value)
        _must(nvrtc.nvrtcGetCUBIN(program, code), "give a kernel")
    finally:
        nvrtc.nvrtcDestroyProgram(byref(program))
    return code.raw


class Module:
    """The kernels of a source file, compiled for one device, which stays theirs."""

    def __init__(self, source: Path, device: int, macros: dict[str, int], headers: Headers = ()) -> None:
        self.name, self.device, self.handle, context = _label(source), device, c_void_p(), c_void_p()
        self._shared_bytes: dict[str, int] = {}  # that each kernel may take at most
        code = _job(source, _options(device, macros), headers).result()
        with torch.cuda.device(device):
            torch.empty(1, device="cuda")  # what the runtime does first makes the context that the driver wants
            _must(_driver().cuCtxGetCurrent(byref(context)), "tell its context")
            _contexts[device] = context
            _must(_driver().cuModuleLoadData(byref(self.handle), code), f"load {self.name}")

    def kernel(self, name: str, threads: int, shared_bytes: int) -> Kernel:
        """The one of that name, for blocks of so many threads and bytes of shared memory."""
        driver, function = _driver(), c_void_p()
        # What one is given is the function's, and so that of all that were made of it before.
        most = self._shared_bytes[name] = max(shared_bytes, self._shared_bytes.get(name, 0))
        with torch.cuda.device(self.device):
            status = driver.cuModuleGetFunction(byref(function), self.handle, name.encode())
            _must(status, f"find {name} in {self.name}")
            status = driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, most)
            _must(status, f"give {name} its shared memory")
        return Kernel(self, function, threads, shared_bytes)


def tells_starts() -> bool:
    """Whether the driver records an event when a kernel has begun, as it does since CUDA 12.3."""
    return bool(getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)() >= 12030)


class Started:
    """An event that a launch records when all of its blocks have begun; at its end, where the driver cannot tell.

    In a CUDA graph it is an edge from the launch, so no schedule has what waits for it before the launch.
    """

    def __init__(self, device: int) -> None:
        self.handle, self.device = c_void_p(), device
        with torch.cuda.device(device):
            torch.empty(1, device="cuda")  # what the runtime does first makes the context that the driver wants
            _must(_driver().cuEventCreate(byref(self.handle), _DISABLE_TIMING), "make an event")
        value = (c_uint64 * 8)(self.handle.value or 0)
        self.attribute = _LaunchAttribute(_LAUNCH_COMPLETION_EVENT, 0, value) if tells_starts() else None

    def record(self) -> None:
        """Record it behind what the current stream has so far."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        _must_in_context(lambda: _driver().cuEventRecord(self.handle, stream), "record an event")

    def wait(self) -> None:
        """Have the current stream wait for it."""
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        _must_in_context(lambda: _driver().cuStreamWaitEvent(stream, self.handle, 0), "wait for an event")


class Kernel:
    """One kernel of a module."""

    def __init__(self, module: Module, function: c_void_p, threads: int, shared_bytes: int) -> None:
        self.module, self.function, self.threads, self.shared_bytes = module, function, threads, shared_bytes
        self.start = _driver().cuLaunchKernel

    def __call__(
        self, programs: int, arguments: Sequence[Any], *, begins_early: bool = False, started: Started | None = None
    ) -> None:
        """Launch on the current stream; `arguments` are ctypes values and tensor maps, in the kernel's order.

        A kernel that begins early does so when the one before it on the stream lets it (programmatic dependent launch),
        and must wait for its end (`griddepcontrol.wait`) before it touches what that one reads or writes.
        """
        device = self.module.device
        if device != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(programs, arguments, begins_early=begins_early, started=started)
        addresses = (c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        stream = torch._C._cuda_getCurrentRawStream(device)
        attribute = _BEGINS_EARLY if begins_early else started.attribute if started else None
        if attribute is not None:
            config = _LaunchConfig(
                (programs, 1, 1), (self.threads, 1, 1), self.shared_bytes, stream, ctypes.addressof(attribute), 1
            )
            launch = _driver().cuLaunchKernelEx
            return _must_in_context(lambda: launch(byref(config), self.function, addresses, None), "start a kernel")
        sizes = programs, 1, 1, self.threads, 1, 1, self.shared_bytes
        _must_in_context(lambda: self.start(self.function, *sizes, stream, addresses, None), "start a kernel")
        if started:
            started.record()


def tensor_map(matrix: torch.Tensor, columns: int, rows: int) -> Any:
    """How TMA finds boxes of so many columns and rows in a bfloat16 matrix whose rows are contiguous.

    A row of a box, of 64 or 128 bytes, is swizzled. What a box has beyond the matrix is read as 0 and not written.
    """
    height, width = matrix.shape
    # Of a row alone the distance to the next means nothing, but is looked at: it must be a multiple of 16 bytes.
    stride = matrix.stride(0) if height > 1 else -(-width // 8) * 8
    return _tensor_map(matrix.data_ptr(), torch.bfloat16, (width, height), (stride,), (columns, rows))


def head_map(heads: torch.Tensor, rows: int) -> Any:
    """How TMA finds so many rows of 64 columns of one head in a tensor of 16 bits: (batch, sequence, heads, head_dim).

    Coordinates are column, head, row and batch. What a box has beyond its sequence is read as 0. Columns are
    contiguous, and other strides a multiple of 8.
    """
    batch, sequence, count, width = heads.shape
    sizes = width, count, sequence, batch
    # As of a row alone: where there is one, the distance to the next is any that TMA takes.
    strides = tuple(heads.stride(i) if heads.shape[i] > 1 else width for i in (2, 1, 0))
    return _tensor_map(heads.data_ptr(), heads.dtype, sizes, strides, (64, 1, rows, 1))


def packed_head_map(heads: torch.Tensor, rows: int) -> Any:
    """Make a tensor map of packed sequences (1, tokens, heads, head_dim): row r of batch b is token r + b - tokens.

    So a sequence of n tokens that ends before token b is the last n rows of batch b, and what a box has beyond it is
    read as 0 and not written. The address given is not one of the tensor; those that TMA computes from it are.
    """
    _, tokens, count, width = heads.shape
    step = heads.stride(1) if tokens > 1 else count * width
    head = heads.stride(2) if count > 1 else width
    address = heads.data_ptr() - tokens * step * heads.element_size()
    return _tensor_map(address, heads.dtype, (width, count, tokens, tokens + 1), (head, step, step), (64, 1, rows, 1))


@functools.lru_cache(4096)  # a step asks for the same again, and asking takes the driver as long as a launch
def _tensor_map(
    address: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Any:
    """Sizes, strides and box are in elements, the contiguous dimension first, which has no stride."""
    whole = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    encoded = (ctypes.c_char * _MAP_BYTES).from_buffer(whole, -ctypes.addressof(whole) % _MAP_ALIGNMENT)
    rank = len(sizes)
    arguments = (
        byref(encoded), _KINDS[dtype], rank, address, (c_uint64 * rank)(*sizes),
        (c_uint64 * (rank - 1))(*(2 * stride for stride in strides)), (c_uint32 * rank)(*box),
        (c_uint32 * rank)(*[1] * rank), 0, _SWIZZLES[box[0] * 2], _L2_256B, 0,
    )  # fmt: skip
    _must_in_context(lambda: _driver().cuTensorMapEncodeTiled(*arguments), "describe a tensor to TMA")
    return encoded
