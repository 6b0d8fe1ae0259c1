"""The CUDA kernel of few rows against float64: on a GPU, or its source on the CPU in an emulator."""

import ctypes
import shutil
import subprocess
from ctypes import c_char_p
from pathlib import Path

import pytest
import torch

from ops.contract import DEVICE, on_hopper
from ops.test_quantized_linear import layer
from tilewright.ops.quantized_linear import few_rows
from tilewright.ops.quantized_linear.launch import group_of
from tilewright.ops.quantized_linear.reference import dequantize
from tilewright.runtime import nvrtc

BF16, FP16 = torch.bfloat16, torch.float16
EMULATOR = Path(__file__).with_name("hopper_emulator")
WRAPPER = """
#include "kernel.cu"
static const void* of[7];
static Sizes asked;
static void start() {
  tilewright_quantized_linear_few_rows((const char*)of[0], of[1], (const u8*)of[2], (const u16*)of[3], of[4],
                                       (const u16*)of[5], (u16*)of[6], asked);
}
extern "C" const char* run(int clusters, const void** tensors, const Sizes* sizes, int seed) {
  std::copy(tensors, tensors + 7, of);
  asked = *sizes;
  dice.seed(seed);
  return run_clusters(clusters, CLUSTER, THREADS, start);
}
"""
# (kind, outputs, inputs, group, zero points, rows, dtype of x, blocks of a cluster, steps on their way)
CASES = (
    ("int8", 130, 336, 0, False, 1, BF16, 2, 2), ("int8", 40, 1024, 0, False, 19, FP16, 4, 3),
    ("fp8", 129, 272, 0, False, 9, BF16, 1, 4), ("int4", 131, 512, 128, False, 1, BF16, 2, 2),
    ("int4", 30, 768, 128, True, 17, FP16, 2, 2), ("int4", 24, 448, 32, True, 12, BF16, 4, 2),
    ("wide", 137, 176, 0, False, 2, BF16, 2, 3),
)  # fmt: skip


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Run the kernel's source on the CPU."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++, which compiles the kernel's source for the CPU")
    built = {}

    def run(config, arguments, clusters):
        if config not in built:
            folder = tmp_path_factory.mktemp("few_rows")
            shutil.copy(few_rows._SOURCE, folder / "kernel.cu")
            (folder / "run.cpp").write_text(WRAPPER)
            macros = [f"-D{name}={value}" for name, value in config.macros.items()]
            command = [
                "g++",
                "-std=c++17",
                "-O1",
                "-w",
                "-shared",
                "-fPIC",
                f"-I{EMULATOR}",
                f"-I{nvrtc._HEADERS}",
                *macros,
            ]
            subprocess.run([*command, "-o", folder / "run.so", folder / "run.cpp"], check=True)
            built[config] = ctypes.CDLL(str(folder / "run.so"))
            built[config].run.restype = c_char_p
        *tensors, sizes = arguments
        failure = built[config].run(clusters, (ctypes.c_void_p * 7)(*tensors), ctypes.byref(sizes), 5)
        assert failure is None, failure

    return run


def multiply(config, emulated, *tensors):
    """By the GPU's kernel, or the emulated one."""
    if DEVICE == "cuda":
        module = few_rows.load(torch.device("cuda", 0), config)
        few_rows.multiply(module, config, *tensors)
    else:
        clusters = -(-len(tensors[1]) // few_rows.OUTPUTS)
        emulated(config, few_rows.arguments(*tensors), clusters)
    return tensors[-1]


def problem(kind, outputs, inputs, group, zeros, rows, dtype):
    torch.manual_seed(outputs + inputs)
    if kind == "wide":
        weight, scale, zero = torch.randn(outputs, inputs, device=DEVICE).to(dtype), None, None
    else:
        weight, scale, zero = layer(kind, outputs, inputs, group, zeros)
    x = torch.randn(rows, inputs + 8, device=DEVICE).to(dtype)[:, :inputs]
    bias = torch.randn(outputs, device=DEVICE)
    return x, weight, scale, zero, bias, torch.randn(rows, outputs + 3, device=DEVICE).to(dtype)[:, :outputs]


def check(x, weight, scale, zero, bias, residual, y):
    """Within the rounding of the result and of float32 sums."""
    matrix = weight.double() if scale is None else dequantize(weight, scale, zero, torch.float64)
    truth = x.double() @ matrix.t()
    for added in (bias, residual):
        truth = truth if added is None else truth + added.double()
    unit = torch.finfo(x.dtype).eps / 2
    sizes = x.double().abs() @ matrix.abs().t()
    error = (y.double() - truth).abs()
    assert torch.isfinite(y).all() and bool((error <= 1.1 * unit * truth.abs() + 1e-6 * sizes).all())


@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_the_matmul_with_what_the_weight_stands_for(case, emulated):
    kind, outputs, inputs, group, zeros, rows, dtype, cluster, depth = case
    x, weight, scale, zero, bias, residual = problem(kind, outputs, inputs, group, zeros, rows, dtype)
    config = few_rows.choose(rows, outputs, inputs, weight.dtype, dtype, group or None, zeros, 132)
    config = config._replace(cluster=cluster, depth=depth, blocks=2)
    for added in ((bias, residual), (None, None)):
        y = torch.full((rows, outputs), torch.nan, dtype=dtype, device=DEVICE)
        check(x, weight, scale, zero, *added, multiply(config, emulated, x, weight, scale, zero, *added, y))


@pytest.mark.parametrize("columns", [128, 4096, 28672, 57344])
@pytest.mark.parametrize("inner", [2048, 8192, 14336, 28672])
@pytest.mark.parametrize("rows", [1, 9, 32])
def test_every_config_fits_in_shared_memory_or_is_refused(rows, columns, inner):
    for weight, group in ((torch.int8, None), (torch.uint8, 128), (torch.uint8, 32), (BF16, None)):
        config = few_rows.choose(rows, columns, inner, weight, BF16, group, False, 132)
        assert config.cluster in (1, 2, 4, 8) and 8 * config.tiles >= rows
        if rows * inner <= few_rows._MOST_NUMBERS:
            assert config.shared_bytes(rows, inner) <= few_rows._SHARED_BYTES


@on_hopper
@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_large_layers_on_a_gpu(kind, rows):
    problem_of = problem(kind, 8192, 8192, 128 if kind == "int4" else 0, False, rows, BF16)
    x, weight, scale = problem_of[:3]
    config = few_rows.choose(rows, 8192, 8192, weight.dtype, BF16, group_of(weight, scale), False, 132)
    ys = [multiply(config, None, *problem_of, x.new_empty(rows, 8192)) for _ in range(3)]
    check(*problem_of, ys[0])
    assert torch.equal(ys[0], ys[1]) and torch.equal(ys[0], ys[2])
