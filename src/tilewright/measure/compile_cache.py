"""A cache folder of our own for what torch.compile and Triton compile.

Inductor takes the folder `torchinductor_USER` under the temporary directory as it finds it, and loads pickles, shared
libraries and headers from there: the first to make that folder decides what code runs. So a run that may compile gets
the folder `compiled` of Tilewright's cache (`measure.folder`), which is the user's alone. It has a part for each
combination of versions and GPUs:

    compiled/KEY/lock        held, shared, by every process that uses the part
    compiled/KEY/users/      a file for each of them; it is left behind by one that is killed
    compiled/KEY/seal.json   size and SHA-256 of every file that was there when the last of them ended in good order
    compiled/KEY/inductor, compiled/KEY/triton

The first process to open a part compares its files with the seal. A folder with a file that differs, or that appeared
while somebody was killed and may be half of one, is deleted: the compiler makes it again. TORCHINDUCTOR_CACHE_DIR and
TRITON_CACHE_DIR are respected where they name a folder that nobody else can write to.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tilewright.measure.folder import ADVICE, RefusedError, cache_root, check_owner, open_folder, private_folder
from tilewright.measure.machine import package_version

VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
LARGEST = 8 << 30  # bytes; a part that has more is begun anew
_log = logging.getLogger("tilewright")
_warned: set[str] = set()
_Seal = dict[str, tuple[int, str]]  # size and digest, by the path in the part


@contextlib.contextmanager
def own_compile_cache() -> Iterator[None]:
    """Let Inductor and Triton use cache folders that nobody else can write to, until the end of the block."""
    needed = {name: part for name, part in VARIABLES.items() if not _is_safe(name)}
    if not needed:  # also inside of another such block
        yield
        return
    before = {name: os.environ.get(name) for name in needed}
    if "torch._inductor" in sys.modules:
        redirect_defaults()
    with _opened_part() as folder:
        os.environ.update({name: str(folder / part) for name, part in needed.items()})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def redirect_defaults() -> None:
    """Let Inductor keep all its files in TORCHINDUCTOR_CACHE_DIR; to be called before something is compiled.

    It has precompiled headers and more in its usual folder, whatever the variable says.
    """
    from torch._inductor.runtime import cache_dir_utils

    usual = cache_dir_utils.default_cache_dir
    if usual.__module__ == __name__:
        return

    def default_cache_dir() -> str:
        return os.environ.get("TORCHINDUCTOR_CACHE_DIR") or usual()

    for name, module in list(sys.modules.items()):
        if name.startswith("torch._inductor") and getattr(module, "default_cache_dir", None) is usual:
            module.default_cache_dir = default_cache_dir  # type: ignore[attr-defined]
        if name == "torch._inductor.codecache" and hasattr(module, "_HEADER_DIR"):  # made of it when it was imported
            headers = os.path.join(default_cache_dir(), "precompiled_headers")
            vars(module).update(_HEADER_DIR=headers, _HEADER_LOCK_DIR=os.path.join(headers, "locks"))


def _is_safe(name: str) -> bool:
    """Whether the user has set a variable, to a folder that nobody else can write to."""
    path = os.environ.get(name)
    if not path:
        return False
    try:
        Path(path).mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_parent(Path(path))
        os.close(open_folder(path, None, path, create=True))
    except OSError as error:
        _warn(f"{name} is not used: {error}. Name a folder that is yours alone (chown, chmod go-w).")
        return False
    return True


@contextlib.contextmanager
def _opened_part() -> Iterator[Path]:
    """The part for these versions and GPUs; where there can be none, a temporary folder."""
    with contextlib.ExitStack() as stack:
        try:
            root = cache_root()
            part = stack.enter_context(_Part(root)) if root is not None else None
        except (OSError, RuntimeError) as error:
            _warn(f"What is compiled is not cached: {error}. {ADVICE}")
            part = None
        if part is not None:
            yield part.folder
        else:
            yield Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tilewright-compiled-",
                                                                       ignore_cleanup_errors=True)))  # fmt: skip


class _Part:
    """A part of the cache, for as long as this process uses it."""

    def __init__(self, root: Path) -> None:
        private_folder(root)
        _check_parent(root)
        self.folder = private_folder(root, "compiled", _key())
        self.users = private_folder(root, "compiled", _key(), "users")
        self._user = self.users / f"{os.getpid()}-{secrets.token_hex(8)}"
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._known: dict[str, tuple[int, int, str]] = {}  # size, time of the last change and digest, by path
        try:
            check_owner(os.fstat(self._lock), str(self.folder / "lock"))
            if self._is_alone():
                self._repair()
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            self._user.touch(0o600)
        except OSError:
            os.close(self._lock)
            raise

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Seal the part, unless something went wrong: what was being written is then not to be trusted."""
        try:
            if kind is None:
                self._user.unlink(missing_ok=True)
                if self._is_alone() and not any(self.users.iterdir()):
                    self._seal()
        except OSError as error:  # what is not sealed is made again
            _log.debug("compile cache: could not seal %s: %s", self.folder, error)
        finally:
            os.close(self._lock)

    def _is_alone(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _repair(self) -> None:
        """Delete what is damaged, not the user's, or may be half of a file."""
        killed = list(self.users.iterdir())
        for user in killed:
            user.unlink()
        sealed, total, spoilt = self._read_seal(), 0, set[Path]()
        for path, status in _walk(self.folder):
            name, total = str(path.relative_to(self.folder)), total + status.st_size
            whole = stat.S_ISREG(status.st_mode) and _is_own(status)
            if whole and name in sealed:
                whole = status.st_size == sealed[name][0] and _digest(path) == sealed[name][1]
            elif killed:
                whole = False
            if not whole:
                spoilt.add(path.parent)
            elif name in sealed:
                self._known[name] = (status.st_size, status.st_mtime_ns, sealed[name][1])
        missing = {(self.folder / name).parent for name in sealed if not (self.folder / name).is_file()}
        if total > LARGEST:
            spoilt = {self.folder / part for part in VARIABLES.values()}
        for folder in spoilt | missing:
            if folder.exists():
                _log.debug("compile cache: %s is made again", folder)
                shutil.rmtree(folder)

    def _read_seal(self) -> _Seal:
        try:
            found = json.loads((self.folder / "seal.json").read_bytes())
            return {str(name): (int(size), str(digest)) for name, (size, digest) in found.items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def _seal(self) -> None:
        files: _Seal = {}
        for path, status in _walk(self.folder):
            name, seen = str(path.relative_to(self.folder)), (status.st_size, status.st_mtime_ns)
            known = self._known.get(name)
            files[name] = (status.st_size, known[2] if known and known[:2] == seen else _digest(path))
        temporary = self.folder / f".seal.{secrets.token_hex(8)}"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump(files, file)
            os.replace(temporary, self.folder / "seal.json")
        finally:
            temporary.unlink(missing_ok=True)


def _walk(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every file of both compilers, and every folder that is not the user's, which is not entered."""
    for part in VARIABLES.values():
        for where, folders, files in os.walk(folder / part):
            for name in list(folders):
                path = Path(where, name)
                if not stat.S_ISDIR((status := path.lstat()).st_mode) or not _is_own(status):
                    folders.remove(name)
                    yield path, status
            for name in files:
                yield Path(where, name), Path(where, name).lstat()


def _is_own(status: os.stat_result) -> bool:
    try:
        check_owner(status, "")
    except RefusedError:
        return False
    return True


def _check_parent(folder: Path) -> None:
    """Who can rename the folder could put another in its place."""
    status = folder.absolute().parent.stat()
    if status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX:
        raise RefusedError(f"other users can replace {folder}, because they can write to the folder that it is in")


def _key() -> str:
    """A name for the versions and GPUs that compiled code depends on."""
    versions = [package_version(name) for name in ("torch", "triton")]
    what = json.dumps([*versions, platform.python_version(), platform.machine(), _gpus()])
    return hashlib.sha256(what.encode()).hexdigest()[:16]


def _gpus() -> list[str]:
    """The names of the GPUs; asked of the driver's library, which does not initialise CUDA."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        driver = str(pynvml.nvmlSystemGetDriverVersion())
        return [driver, *sorted({str(pynvml.nvmlDeviceGetName(handle)) for handle in handles})]
    except pynvml.NVMLError:
        return []


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        _log.warning(text)
