"""Stages that exist: what their tiles read and write, and their definition in plain PyTorch.

Matrices lie as PyTorch has them: x is ``(rows, inner)`` and a weight ``(columns, inner)``. A stage computes in float32
(float64 for float64) and rounds once.
"""

from tilewright.tilesync.stages.attention import Attention
from tilewright.tilesync.stages.common import ACTIVATIONS
from tilewright.tilesync.stages.fused import Combined, Normed, Rotation
from tilewright.tilesync.stages.matmul import Conv2d, Gemm, Reduction
from tilewright.tilesync.stages.pointwise import Custom, Elementwise, Norm, Rope
from tilewright.tilesync.stages.quantized import Packing, QuantizedGemm

__all__ = [
    "ACTIVATIONS", "Attention", "Combined", "Conv2d", "Custom", "Elementwise", "Gemm", "Norm", "Normed",
    "Packing", "QuantizedGemm", "Reduction", "Rope", "Rotation",
]  # fmt: skip
