"""Dependent tile kernels that wait for each other tile by tile: declared in Python, checked before they run."""

from tilewright.tilesync.check import Program, check, edges
from tilewright.tilesync.compiled import MODES, Compiled, compile, find
from tilewright.tilesync.graph import Graph, GraphError, Region, Spec, Stage, Work
from tilewright.tilesync.launch import TilesyncError, raise_if_failed
from tilewright.tilesync.policies import (
    Conv2DSync,
    DerivedSync,
    Edge,
    GroupSync,
    NoSync,
    Policy,
    RowSync,
    SplitKSync,
    StageSync,
    StridedSync,
    TileSync,
    derive_policy,
)
from tilewright.tilesync.residency import blocks_of_streams, check_queues, check_residency
from tilewright.tilesync.stages import (
    Attention,
    Combined,
    Conv2d,
    Custom,
    Elementwise,
    Gemm,
    Norm,
    Normed,
    Packing,
    QuantizedGemm,
    Reduction,
    Rope,
    Rotation,
)

__all__ = [
    "MODES", "Attention", "Combined", "Compiled", "Conv2DSync", "Conv2d", "Custom", "DerivedSync", "Edge",
    "Elementwise", "Gemm", "Graph", "GraphError", "GroupSync", "NoSync", "Norm", "Normed", "Packing", "Policy",
    "Program", "QuantizedGemm", "Reduction", "Region", "Rope", "Rotation", "RowSync", "Spec", "SplitKSync", "Stage",
    "StageSync", "StridedSync", "TileSync", "TilesyncError", "Work", "blocks_of_streams", "check", "check_queues",
    "check_residency", "compile", "derive_policy", "edges", "find", "raise_if_failed",
]  # fmt: skip
