"""C++ and CUDA sources of ops, compiled into a library that registers ops by `TORCH_LIBRARY`.

A library is made in one of two ways, and found under the same name:

- just in time, by the first call that wants it, with a line on stderr that says so. It goes to the cache on disk
  (`disk_cache`), which is for its owner alone and checks what it reads.
- ahead of time, by `TILEWRIGHT_BUILD_EXT=1 pip install --no-build-isolation .`, into `prebuilt` of the package.

The name has the SHA-256 of all that the library depends on: sources, headers, options, the CPU's instructions, the
GPUs' architectures and the version of torch. So neither a stale library nor one of another torch is ever loaded. No
part of Python's ABI is used: one library serves all versions of Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from tilewright.measure.folder import cache_root, private_folder
from tilewright.runtime import disk_cache
from tilewright.runtime.log import log

PREBUILT = Path(__file__).parents[1] / "prebuilt"
_TORCH = Path(torch.__file__).parent
_INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
    "AVX512": ("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
}


class ExtensionError(RuntimeError):
    """Why there is no library: one sentence that says what to do."""


def vector_options() -> tuple[str, ...]:
    """Options for a source that uses `at::vec` with the vectors that torch uses on this CPU, and all of its threads."""
    capability = torch.backends.cpu.get_cpu_capability()
    options = _INSTRUCTIONS.get(capability, ())
    macros = (f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}") if options else ()
    return ("-O3", "-fopenmp", *options, *macros)


class Extension:
    """A library of some sources.

    Args:
        name: of the op.
        sources: each file with the compiler's options for it. Headers beside them belong to the library, too.
        cuda: whether nvcc compiles and links it.
    """

    def __init__(self, name: str, sources: Mapping[Path, Sequence[str]], cuda: bool = False) -> None:
        self.name, self.sources, self.cuda = name, sources, cuda
        self._lock = threading.Lock()
        self._outcome: str | None = None  # empty once it is loaded, else why it cannot be

    def why_missing(self) -> str:
        """Load the library, and compile it where nobody has; return why it cannot be had, or nothing.

        A failure is not tried again, and is logged once as a warning.
        """
        if self._outcome is None:
            with self._lock:
                if self._outcome is None:
                    self._outcome = self._try_load()
        return self._outcome

    def _try_load(self) -> str:
        try:
            self.load()
        except (ExtensionError, OSError) as error:
            log.warning("%s runs by PyTorch's own ops: %s", self.name, error)
            return str(error)
        return ""

    def load(self) -> None:
        """Load the library into this process; raises ExtensionError where it cannot be compiled."""
        file = self.file_name()
        if (PREBUILT / file).is_file():
            ctypes.CDLL(str(PREBUILT / file))
            log.debug("extension: loaded %s, which was built ahead", file)
            return
        code = self.code()
        # What was read and checked is what is loaded: from a folder of our own that nobody else can write to.
        with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
            path = Path(folder, file)
            path.write_bytes(code)
            ctypes.CDLL(str(path))

    def file_name(self) -> str:
        """The library's name, which depends on all that the library does."""
        folders = sorted({path.parent for path in self.sources})
        headers = [path for folder in folders for path in sorted([*folder.glob("*.h"), *folder.glob("*.cuh")])]
        texts = [(path.name, path.read_text(), [*self.sources.get(path, ())]) for path in (*self.sources, *headers)]
        kind = architectures() if self.cuda else None
        parts = texts, kind, torch.__version__, platform.machine()
        return f"{self.name}-{disk_cache.make_key('extension', *parts)[:32]}.so"

    def code(self) -> bytes:
        """The library's bytes, from the cache or compiled."""
        file = self.file_name()
        code = disk_cache.get(file)
        if code is None:
            with _only_builder(file):
                code = disk_cache.get(file)  # another process may have been first
                if code is None:
                    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
                        self.build(Path(folder, file))
                        code = Path(folder, file).read_bytes()
                    disk_cache.put(file, code)
        return code

    def build(self, target: Path) -> None:
        """Compile the library into a file."""
        compiler = _nvcc() if self.cuda else _cxx()
        began = time.perf_counter()
        kind = "CUDA" if self.cuda else "C++"
        what = f"tilewright: compiling {self.name} ({kind}), once for this version of torch ..."
        print(what, end=" ", file=sys.stderr, flush=True)
        try:
            self._compile(compiler, target)
        except ExtensionError:
            print("failed", file=sys.stderr, flush=True)
            raise
        print(f"done in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)

    def _compile(self, compiler: str, target: Path) -> None:
        """Compile the sources side by side and link them. What nvcc gets, it compiles for the host, too."""
        common = ["-std=c++20", "-O3", "-Xcompiler=-fPIC", *_targets()] if self.cuda else ["-std=c++20", "-fPIC"]
        includes = [f"-I{_TORCH / 'include'}", f"-I{_TORCH / 'include/torch/csrc/api/include'}"]
        libraries = [f"-L{_TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        if self.cuda:
            libraries += ["-ltorch_cuda", "-lc10_cuda", "--cudart=shared"]
        with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
            objects, running = [], []
            for source, options in self.sources.items():
                objects.append(str(Path(folder, f"{source.name}.o")))
                command = [compiler, *common, *includes, *options, "-c", str(source), "-o", objects[-1]]
                running.append(_start(command))
            said = [self._wait(process) for process in running]  # all have ended before the folder goes
            for text in said:
                self._must_be_empty(text)
            self._must_be_empty(self._wait(_start([compiler, "-shared", *objects, *libraries, "-o", str(target)])))

    @staticmethod
    def _wait(process: subprocess.Popen[str]) -> str:
        """What a compiler says that failed."""
        said, _ = process.communicate()
        if not process.returncode:
            return ""
        log.debug("extension: %s\n%s", process.args, said)
        return said or "no message"

    def _must_be_empty(self, said: str) -> None:
        if said:
            line = next((line for line in said.splitlines() if "error" in line), said.splitlines()[0]).strip()
            raise ExtensionError(
                f"{self.name} does not compile ({line[:200]}); TILEWRIGHT_LOG=debug prints all that the compiler says."
            )


def architectures() -> list[str]:
    """The architectures that CUDA sources are compiled for: those of the GPUs here, and of TORCH_CUDA_ARCH_LIST."""
    named = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    strange = [each for each in named if not re.fullmatch(r"\d+\.\d[af]?(\+PTX)?", each)]
    if strange:
        raise ExtensionError(f"TORCH_CUDA_ARCH_LIST has {strange[0]!r}; write numbers, such as 9.0.")
    devices = range(torch.cuda.device_count())
    present = {"{}{}".format(*torch.cuda.get_device_capability(device)) for device in devices}
    return sorted(present | {each.split("+")[0].replace(".", "") for each in named})


def _targets() -> list[str]:
    found = architectures()
    if not found:
        raise ExtensionError("No GPU is here to compile for: set TORCH_CUDA_ARCH_LIST, such as to 9.0.")
    return [f"-gencode=arch=compute_{each},code=sm_{each}" for each in found]


def _start(command: list[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise ExtensionError(f"{command[0]} cannot be started ({error}); set CXX to a C++ compiler.") from error


def has_cuda() -> bool:
    """Whether there is a compiler for CUDA, of the version that torch has."""
    try:
        return bool(torch.version.cuda and _nvcc())
    except ExtensionError:
        return False


def _cxx() -> str:
    named = os.environ.get("CXX")
    found = shutil.which(named) if named else shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if found is None:
        raise ExtensionError("No C++ compiler was found: install g++, or set CXX to one.")
    return found


def _nvcc() -> str:
    homes = [Path(home, "bin") for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    folders = [*map(str, homes), os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    if found is None:
        raise ExtensionError("No nvcc was found: install the CUDA toolkit, or set CUDA_HOME to it.")
    wanted = (torch.version.cuda or "").split(".")[0]
    said = subprocess.run([found, "--version"], capture_output=True, text=True).stdout
    if f"release {wanted}." not in said:
        raise ExtensionError(f"torch is of CUDA {wanted}, and {found} is not: set CUDA_HOME to one of CUDA {wanted}.")
    return found


@contextlib.contextmanager
def _only_builder(file: str) -> Iterator[None]:
    """Wait until no other process compiles this library; where there is no cache, each compiles its own."""
    root = cache_root()
    try:
        folder = private_folder(root, "locks") if root is not None else None
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        lock = None if folder is None else os.open(folder / file, flags, 0o600)
    except OSError:  # what is wrong with the folder, the cache says
        lock = None
    try:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        if lock is not None:
            os.close(lock)
