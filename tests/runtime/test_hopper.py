"""Kernels for Hopper without their ops: that a compiler takes them, when they are loaded, and the sum in 16 bits."""

from __future__ import annotations

import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
import triton

import tilewright.ops  # noqa: F401  which add their kernels
from ops.contract import DEVICE, assert_equal, on_hopper
from tilewright.measure.work import Observation
from tilewright.ops.attention import hopper_backward, hopper_forward
from tilewright.ops.cross_entropy import hopper as cross_entropy_hopper
from tilewright.ops.cross_entropy.hopper import launch_config
from tilewright.ops.linear_cross_entropy import kernels
from tilewright.runtime import hopper, nvrtc

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here to compile them with")
GEMMS = hopper.gemms()
BY_SOURCE = {source: [name for name in GEMMS if GEMMS[name] == source] for source in GEMMS.values()}


ATTENTION = (
    (64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float16), (64, torch.float16, True),
    (128, torch.bfloat16, True),
)  # fmt: skip


def compile_kernels(source, macros, names, most, to):
    """Registers that spill by the tile, or matmuls that run one after the other, would be a warning or a number."""
    included = [f"-I{folder}" for folder in nvrtc._folders(source)]
    defined = [f"-D{name}={value}" for name, value in macros.items()]
    command = ["nvcc", "-arch=sm_90a", *included, *defined, "-cubin", "-Xptxas", "-v", "-o", str(to)]
    done = subprocess.run([*command, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in ("warning", "serialized", "(c75"):  # of which the latter two are the assembler's, and no warning
        assert word not in done.stderr.lower(), done.stderr
    spilled = [int(size) for size in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert len(spilled) == len(names) and max(spilled) <= most, done.stderr
    assert set(re.findall(r"entry function '(\w+)'", done.stderr)) == set(names)


@needs_nvcc
@pytest.mark.parametrize(
    ("source", "macros", "names", "most"),
    [
        *[(source, hopper.MACROS, names, 64) for source, names in BY_SOURCE.items()],
        (cross_entropy_hopper.SOURCE, launch_config(50304, 50304), (cross_entropy_hopper.NAME,), 0),
        (cross_entropy_hopper.SOURCE, launch_config(65536, 65536), (cross_entropy_hopper.NAME,), 0),
        *[
            (hopper_backward.SOURCE, hopper_backward.launch_config(*config).macros, (hopper_backward.NAME,), 0)
            for config in ATTENTION
        ],
        *[
            (hopper_forward.SOURCE, hopper_forward.launch_config(*config).macros, (hopper_forward.NAME,), 0)
            for config in ((64, True, torch.bfloat16, True), (128, False, torch.bfloat16, True))
        ],
    ],
    ids=[
        *[source.parent.name for source in BY_SOURCE],
        "rows",
        "longest rows",
        "narrow",
        "wide",
        "wide, float16",
        "narrow, packed",
        "wide, packed",
        "forward, narrow, packed",
        "forward, wide, packed",
    ],
)
def test_a_compiler_takes_the_kernels_and_the_tensor_cores_need_not_wait(source, macros, names, most, tmp_path):
    compile_kernels(source, macros, names, most, tmp_path / "kernels")


@needs_nvcc
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", hopper_forward.HEADS)
def test_exponentials_of_attention_run_beside_its_second_matmul(head_dim, causal, tmp_path):
    """Left to itself the assembler waits for that matmul as soon as scores are there, before it uses them."""
    config = hopper_forward.launch_config(head_dim, causal, torch.float16 if causal else torch.bfloat16)
    code = tmp_path / "kernels"
    compile_kernels(hopper_forward.SOURCE, config.macros, (hopper_forward.NAME,), 0, code)
    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not disassembler.exists():
        pytest.skip("Triton has brought no cuobjdump")
    text = subprocess.run([disassembler, "-sass", code], capture_output=True, text=True, check=True).stdout
    beside = re.findall(r"DEPBAR\.LE gsb0, 0x1 ;(.*?)DEPBAR\.LE gsb0, 0x0 ;", text, re.DOTALL)
    assert len(beside) == 1 and beside[0].count("MUFU.EX2") >= config.keys // 2


def test_where_the_kernels_do_not_compile_it_is_said_once_and_done_without_them(monkeypatch):
    def fails(*_):
        raise nvrtc.CompileError("hopper.cu does not compile: no such instruction")

    began = []

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(nvrtc, "can_compile", lambda: True)
    monkeypatch.setattr(nvrtc, "Module", fails)
    monkeypatch.setattr(nvrtc, "compile_ahead", lambda source, device, macros: began.append(list(macros)[-1]))
    monkeypatch.setattr(hopper, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    capturing = True
    device = torch.device("cuda", 0)
    assert (
        not hopper.ready(device, "tilewright_linear_matmul_biased") and not hopper._loaded
    )  # nothing is loaded, and nothing decided
    capturing = False
    with pytest.warns(UserWarning, match="slower ones do their work.*no such instruction"):
        assert not hopper.ready(device, "tilewright_linear_matmul_biased")
    began.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hopper.ready(device, "tilewright_linear_matmul_biased")
    assert not began


def test_who_wants_one_kernel_starts_the_others_and_waits_for_one(monkeypatch):
    began, loaded = [], []

    class Module:
        def __init__(self, source, device, macros):
            loaded.append(list(macros)[-1])

        def kernel(self, name, threads, shared_bytes):
            return name

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(nvrtc, "can_compile", lambda: True)
    monkeypatch.setattr(nvrtc, "Module", Module)
    monkeypatch.setattr(nvrtc, "compile_ahead", lambda source, device, macros: began.append(list(macros)[-1]))
    monkeypatch.setattr(hopper, "_loaded", {})
    device = torch.device("cuda", 0)
    assert hopper.ready(device, "tilewright_linear_matmul_parts_gradient")
    assert began[0] == "ONLY_TILEWRIGHT_LINEAR_MATMUL_PARTS_GRADIENT" and set(began) == {
        f"ONLY_{name.upper()}" for name in GEMMS if not any(word in name for word in ("lean", "erf", "glu_mlp"))
    }
    assert loaded == ["ONLY_TILEWRIGHT_LINEAR_MATMUL_PARTS_GRADIENT"]
    began.clear()
    assert hopper.ready(device, "tilewright_linear_matmul_parts_gradient") and not began and len(loaded) == 1
    assert hopper.ready(device) and len(loaded) == len(GEMMS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_nothing_is_compiled_ahead_for_another_device(device, monkeypatch):
    monkeypatch.setattr(nvrtc, "compile_ahead", lambda *_: pytest.fail("there is no Hopper"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    hopper.compile_ahead(torch.device("cpu") if device == "cpu" else torch.device("cuda", 0))


@needs_nvcc
@pytest.mark.parametrize("name", GEMMS)
def test_a_macro_leaves_one_kernel(name):
    source, macros = hopper.gemm(name)
    defined = [f"-D{macro}={value}" for macro, value in macros.items()]
    included = [f"-I{folder}" for folder in nvrtc._folders(source)]
    command = ["nvcc", "-arch=sm_90a", *included, *defined, "-E", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"cluster_dims\(2, 1, 1\)\)\) (\w+)\(", done.stdout) == [name]


# Classes by width are tiles of 192 x 256, tokens come in stages of 64: whole, cut short, less than one, several turns.
SUMS = [(192, 256, 64), (384, 512, 128), (200, 264, 80), (9, 8, 1), (1000, 136, 72), (9999, 2048, 256)]


def added(left, right, parts):
    total = torch.full((left.shape[1], right.shape[1]), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    shape, dtype = kernels.scales(total)
    scales = torch.full(shape, float("nan"), device=DEVICE, dtype=dtype)
    inner = len(left) // parts
    for number in range(parts):
        part = slice(number * inner, (number + 1) * inner)
        kernels.launch(left[part], right[part], total, scales, number == 0, number == parts - 1)
    return total


def operands(classes, width, tokens, parts):
    torch.manual_seed(classes)
    padded = torch.randn(parts * tokens, -(-classes // 64) * 64, device=DEVICE).bfloat16()
    return padded[:, :classes], torch.randn(parts * tokens, width, device=DEVICE).bfloat16()


@on_hopper
@pytest.mark.parametrize("parts", [2, 3, 8])
@pytest.mark.parametrize("shape", SUMS, ids=str)
def test_a_sum_of_parts_is_the_whole_matmul(shape, parts):
    left, right = operands(*shape, parts)
    truth = left.double().t() @ right.double()
    error = (added(left, right, parts).double() - truth).norm()
    once = (truth.bfloat16().double() - truth).norm()
    assert error <= 1.06 * once  # each part rounds three bits finer than the last rounding does


@on_hopper
@pytest.mark.parametrize("processors", [2, 4, 10])
def test_a_sum_does_not_depend_on_who_computes_which_tile(processors, monkeypatch):
    left, right = operands(5056, 768, 256, 3)
    expected = added(left, right, 3)
    assert_equal([added(left, right, 3)], [expected])
    monkeypatch.setattr(hopper.dispatch, "multiprocessors", lambda device: processors)
    assert_equal([added(left, right, 3)], [expected])


@on_hopper
@pytest.mark.parametrize("by", [1e-38, 1e-20, 1e20, 1e36])
def test_a_sum_of_very_large_or_small_numbers(by):
    left, right = operands(384, 256, 64, 3)
    left = (left.float() * by).bfloat16()
    truth = left.double().t() @ right.double()
    difference = (added(left, right, 3).double() - truth).norm()
    assert difference <= (2e-3 if by > 1e-30 else 0.02) * truth.norm()


@on_hopper
def test_what_is_not_a_number_stays_in_its_column():
    left, right = operands(384, 256, 64, 3)
    left[70, 9], right[5, 17] = float("nan"), float("inf")
    total = added(left, right, 3)
    assert total[9].isnan().all() and not total[:, 17].isfinite().any()
    total[9], total[:, 17] = 0.0, 0.0
    assert total.isfinite().all()


@on_hopper
def test_an_observer_sees_the_sum():
    left, right = operands(5056, 768, 256, 2)
    observation = Observation(compiled=False)
    observation.begin()
    added(left, right, 2)
    torch.cuda.synchronize()
    seen = [work for work in observation.end() if work.op.endswith("matmul_add")]
    assert sum(work.flops for work in seen) == 2 * 2 * 5056 * 768 * 256 and all(work.seconds > 0 for work in seen)


def test_elsewhere_a_sum_is_of_whole_tiles_or_not_at_all(monkeypatch):
    monkeypatch.setattr(hopper, "ready", lambda device, *names: False)
    rows, columns, *_ = kernels._shape(torch.device(DEVICE))
    assert kernels.scales(torch.empty(2 * rows, 3 * columns, device=DEVICE)) == ((3, 2 * rows), torch.float32)
    assert kernels.scales(torch.empty(2 * rows + 1, columns, device=DEVICE)) is None
