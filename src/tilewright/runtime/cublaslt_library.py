"""cuBLASLt's functions and constants, by ctypes.

The constants are those of cublasLt.h, cublas_api.h and library_types.h, by their names there without the prefix.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint16, c_uint32, c_uint64, c_void_p
from typing import Any

import torch


class Description(enum.IntEnum):
    """CUBLASLT_MATMUL_DESC_*, attributes of a matmul."""

    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8


class Preference(enum.IntEnum):
    """CUBLASLT_MATMUL_PREF_*, what an algorithm must live with."""

    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


class Epilogue(enum.IntEnum):
    """CUBLASLT_EPILOGUE_*, what happens to a matmul before it is written."""

    DEFAULT = 1
    BIAS = 4


COMPUTE_32F = 68  # CUBLAS_COMPUTE_32F
R_32F = 0  # CUDA_R_32F
TYPES = {torch.bfloat16: 14, torch.float16: 2, torch.float32: R_32F}  # CUDA_R_16BF, CUDA_R_16F
HALVES = (torch.bfloat16, torch.float16)  # operands; whether float32 may be less is torch's to say
REDUCTION_SCHEME_NONE = 0  # CUBLASLT_REDUCTION_SCHEME_NONE


class Config(enum.IntEnum):
    """CUBLASLT_ALGO_CONFIG_*, attributes of an algorithm."""

    ID = 0
    SPLITK_NUM = 2
    REDUCTION_SCHEME = 3
    INNER_SHAPE_ID = 7


CONFIG_TYPES = {
    Config.ID: c_int32, Config.SPLITK_NUM: c_int32, Config.REDUCTION_SCHEME: c_uint32, Config.INNER_SHAPE_ID: c_uint16,
}  # fmt: skip


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
    "cublasLtMatmulAlgoCheck": (c_void_p,) * 8,
    "cublasLtMatmulAlgoConfigGetAttribute": (c_void_p, c_int, c_void_p, c_size_t, c_void_p),
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
    loaded.cublasLtGetVersion.argtypes, loaded.cublasLtGetVersion.restype = (), c_size_t
    return loaded


def must(status: int, what: str) -> None:
    """Raise where a call has failed."""
    if status:
        raise RuntimeError(f"cuBLASLt could not {what}: status {status}.")


def set_attribute(function: Any, described: c_void_p, attribute: enum.IntEnum, value: Any) -> None:
    """Describe something to the library."""
    status = function(described, attribute, byref(value), ctypes.sizeof(value))
    if status:  # before a name is made that nobody reads: a bias comes through here at every call
        must(status, f"set {attribute.name}")
