"""The formulas of `runtime/cuda/activations.cuh`, compiled for the CPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tilewright.runtime import hopper

HEADERS = Path(hopper.__file__).parent / "cuda"
EMULATOR = Path(__file__).parents[1] / "ops" / "hopper_emulator"
SOURCE = """
#include "activations.cuh"
#define LOOP(kind) for (int i = 0; i < count; i++) activate<kind>(z[i], 1.0f, value[i], slope[i]);
extern "C" void by_tanh(int count, const float* z, float* value, float* slope) { LOOP(BY_TANH) }
extern "C" void by_erf(int count, const float* z, float* value, float* slope) { LOOP(BY_ERF) }
extern "C" void by_sigmoid(int count, const float* z, float* value, float* slope) { LOOP(BY_SIGMOID) }
"""
TRUTH = {
    "by_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "by_erf": F.gelu,
    "by_sigmoid": F.silu,
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_formulas_are_nearer_than_a_fiftieth_of_a_rounding_to_bfloat16(tmp_path):
    shutil.copy(HEADERS / "activations.cuh", tmp_path)  # beside which there is no hopper.cuh but the emulator's
    (tmp_path / "formulas.cpp").write_text(SOURCE)
    library = tmp_path / "formulas.so"
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{EMULATOR}"]
    command = ["g++", *options, "-o", library, tmp_path / "formulas.cpp"]
    subprocess.run(command, check=True)
    formulas = ctypes.CDLL(str(library))
    edges = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 40.0, -40.0, 1e4, -1e4, 1e18, -1e18, float("nan")])
    z = torch.cat([torch.linspace(-9, 9, 20_001), torch.randn(10_000) * 3, edges])
    for name, truth in TRUTH.items():
        value, slope = torch.empty_like(z), torch.empty_like(z)
        getattr(formulas, name)(len(z), *(ctypes.c_void_p(each.data_ptr()) for each in (z, value, slope)))
        exact = z.double().requires_grad_()
        out = truth(exact)
        (expected,) = torch.autograd.grad(out.sum(), exact)
        torch.testing.assert_close(value.double(), out.detach(), rtol=2**-9 / 50, atol=1e-7, equal_nan=True)
        torch.testing.assert_close(slope.double(), expected, rtol=2**-9 / 50, atol=4e-5, equal_nan=True)
