"""Libraries of C++: compiled once, never stale, never somebody else's, and one sentence without a compiler."""

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from tilewright.runtime import disk_cache, extension
from tilewright.runtime.extension import Extension, ExtensionError

ROOT = Path(__file__).parents[2]
ENVIRONMENT = dict(os.environ)  # with the cache that other tests use
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++ to compile with")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(disk_cache, "_refused", set())
    monkeypatch.setattr(extension, "PREBUILT", tmp_path / "prebuilt")
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def source(tmp_path):
    """A library that leaves its answer in the environment when it is loaded."""
    folder = tmp_path / "op"
    folder.mkdir()
    (folder / "answer.h").write_text("#define ANSWER 41\n")
    code = """
        #include <cstdlib>
        #include <string>
        #include "answer.h"
        __attribute__((constructor)) static void tell() {
          setenv("TILEWRIGHT_TEST_ANSWER", std::to_string(ANSWER + 1).c_str(), 1);
        }
    """
    (folder / "answer.cpp").write_text(code)
    return folder / "answer.cpp"


def answer():
    get = ctypes.CDLL(None).getenv
    get.restype = ctypes.c_char_p
    return int(get(b"TILEWRIGHT_TEST_ANSWER"))


def load(source, *options):
    Extension("answer", {source: options}).load()
    return answer()


def test_it_is_compiled_once_with_a_line_that_says_so(source, cache, capfd, monkeypatch):
    assert load(source) == 42
    said = capfd.readouterr().err
    assert said.startswith("tilewright: compiling answer (C++), once for this version of torch ... done in ")
    assert said.count("\n") == 1 and len(list(cache.iterdir())) == 1
    monkeypatch.setenv("PATH", "")  # no compiler any more, and none needed
    assert load(source) == 42
    assert not capfd.readouterr().err


@pytest.mark.parametrize("what", ["source", "header", "option", "torch", "CPU"])
def test_a_change_of_anything_it_depends_on_compiles_it_anew(what, source, cache, monkeypatch):
    load(source)
    options = ()
    if what == "source":
        source.write_text(source.read_text().replace("ANSWER + 1", "ANSWER + 2"))
    elif what == "header":
        (source.parent / "answer.h").write_text("#define ANSWER 42\n")
    elif what == "option":
        options = ("-include", "cstdio")
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "0.0")
    else:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
        assert "-mavx2" not in extension.vector_options()
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
        options = tuple(each for each in extension.vector_options() if each.startswith("-D"))
    assert load(source, *options) == (43 if what in ("source", "header") else 42)
    assert len(list(cache.iterdir())) == 2


def test_a_damaged_library_is_never_loaded(source, cache):
    load(source)
    (entry,) = cache.iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    assert load(source) == 42


def test_a_cache_of_another_user_is_refused(source, cache, monkeypatch, caplog, capfd):
    load(source)
    (entry,) = cache.iterdir()
    planted = entry.read_bytes()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    capfd.readouterr()
    assert load(source) == 42
    assert "compiling answer" in capfd.readouterr().err  # what lies there was not taken
    assert "belongs to another user" in caplog.text and entry.read_bytes() == planted


def test_without_a_compiler_there_is_one_sentence(source, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ExtensionError, match=r"^No C\+\+ compiler was found: install g\+\+, or set CXX to one\.$"):
        load(source)
    library = Extension("answer", {source: ()})
    for _ in range(2):
        assert library.why_missing().startswith("No C++ compiler was found")
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # said once


def test_without_a_compiler_the_op_runs_by_pytorch(monkeypatch, caplog):
    from tilewright import ops
    from tilewright.ops.self_attention import op

    monkeypatch.setenv("PATH", "")
    missing = Extension("self_attention", op.CPU.sources)
    monkeypatch.setitem(op.EXTENSIONS, "cpu", (missing,))
    x, qkv, out = torch.randn(1, 3, 8), torch.randn(24, 8), torch.randn(8, 8)
    with ops.explain() as paths:
        result = ops.self_attention(x, qkv, None, out, None, 2)
    assert [(path.ran, path.why) for path in paths] == [("PyTorch", missing.why_missing())]
    assert torch.equal(result, op.reference(x, qkv, None, out, None, 2))


def test_a_source_that_does_not_compile_is_one_sentence(source, capfd):
    source.write_text("int broken( {")
    with pytest.raises(ExtensionError, match=r"answer does not compile \(.*error: .*\); TILEWRIGHT_LOG=debug"):
        load(source)
    assert capfd.readouterr().err.endswith("... failed\n")


def test_nvcc_must_be_of_torchs_cuda(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\necho Cuda compilation tools, release 13.0\n")
    fake.chmod(0o755)
    with pytest.raises(ExtensionError, match="torch is of CUDA 99, and .*nvcc is not: set CUDA_HOME"):
        extension._nvcc()
    assert not extension.has_cuda()


def test_two_processes_compile_it_once(source, tmp_path):
    """A compiler that leaves a line each time it runs, and takes its time."""
    slow, log = tmp_path / "slow", tmp_path / "log"
    slow.write_text(f'#!/bin/sh\necho run >> {log}\nsleep 0.5\nexec g++ "$@"\n')
    slow.chmod(0o755)
    code = f"from tests.runtime.test_extension import *; assert load(Path({str(source)!r})) == 42"
    environment = {**os.environ, "CXX": str(slow), "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{ROOT / 'tests'}"}
    running = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert log.read_text().count("run") == 2  # a source and the link


def test_ahead_of_time_it_is_in_the_wheel_and_needs_no_compiler(tmp_path):
    """Two builds: without the variable nothing is compiled, with it the library is used as it lies in the package."""
    pytest.importorskip("hatchling")
    plain, ahead = tmp_path / "plain", tmp_path / "ahead"
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d"]
    environment = {**ENVIRONMENT, "TORCH_CUDA_ARCH_LIST": ""}
    environment.pop("TILEWRIGHT_BUILD_EXT", None)
    subprocess.run([*build, plain], cwd=ROOT, env={**environment, "PATH": ""}, check=True, capture_output=True)
    (wheel,) = plain.iterdir()
    assert wheel.name.endswith("-py3-none-any.whl") and not [n for n in zipfile.ZipFile(wheel).namelist() if ".so" in n]
    environment["TILEWRIGHT_BUILD_EXT"] = "1"
    subprocess.run([*build, ahead], cwd=ROOT, env=environment, check=True, capture_output=True)
    (wheel,) = ahead.iterdir()
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    assert "-py3-none-linux_" in wheel.name
    code = (
        "import torch; from tilewright import nn, ops\n"
        "layer, x = nn.SelfAttention(8, 2), torch.randn(1, 3, 8)\n"
        "with ops.explain() as paths: layer(x).sum().backward()\n"
        "print([path.ran for path in paths], layer.qkv.weight.grad.shape)"
    )
    environment.update(PYTHONPATH=str(tmp_path / "installed"), PATH="", TILEWRIGHT_CACHE="off")
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "['kernel'] torch.Size([24, 8])\n", done.stderr
    assert "compiling" not in done.stderr


def test_an_editable_install_says_that_nothing_is_compiled_ahead(tmp_path):
    pytest.importorskip("hatchling")
    environment = {**ENVIRONMENT, "TILEWRIGHT_BUILD_EXT": "1"}
    code = f"import hatchling.build; hatchling.build.build_editable({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.endswith("leave out -e, or leave it unset.\n"), done.stderr


def test_cuda_is_compiled_for_the_gpus_that_are_here_and_for_those_that_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for named, expected in (("", ["90"]), ("8.0+PTX", ["80", "90"]), ("9.0;10.0a", ["100a", "90"])):
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
        assert extension.architectures() == expected
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    with pytest.raises(extension.ExtensionError, match="'Hopper'; write numbers"):
        extension.architectures()
