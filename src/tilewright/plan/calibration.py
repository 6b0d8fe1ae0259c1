"""What the step-time model takes from measurements: parameters fitted to published runs, and the rates of a GPU.

An H200's shares, in `plan.work`, are from our own runs. What other GPUs reach of them, and what no run on one GPU can
tell, is fitted by `tools/fit_step_time.py` to the 72 runs of llm-foundry in results/published; docs/plan.md has the
residuals, also those of 135 more runs that the fit has not seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilewright.hardware import COPY_SHARE, Accelerator

# As fitted; a test compares them with results/published/step_time.json.
FITTED = {
    "A100 matmul": 1.06,  # of an H200's share of its own best matmul
    "H100 matmul": 1.01,
    "A100 attention": 1.21,  # the same of FlashAttention-2
    "H100 attention": 0.718,
    "eager": 0.517,  # of an H200's share of its own copy bandwidth, in PyTorch's separate kernels of 2023
    "heads of 64": 1.17,  # FlashAttention-2 with these, over what cuDNN's ratio of 64 to 128 makes of it
    "attention ends": 107,  # tokens: what the diagonal and the ends of rows cost attention
    "contention": 0.73,  # of the shorter of computing and traffic side by side, by how much the longer one grows
    "round seconds": 8.98e-06,  # of a ring between nodes; within a node a third
}
LAUNCH_SECONDS = 13e-6  # of an eager op on the host, as on an H200's
KERNEL_SECONDS = 2e-6  # of the shortest kernel


@dataclass(frozen=True)
class Calibration:
    """What a kind of GPU reaches of an H200's shares, whose attention it runs, and where that is from."""

    reached: Mapping[str, float]
    attention: str
    source: str


def of(accelerator: Accelerator) -> Calibration:
    """The calibration of an accelerator, or of the nearest that there is one of.

    >>> from tilewright import hardware
    >>> of(hardware.find("H200-SXM")).source
    'our own runs on an H200'
    >>> of(hardware.find("B200")).source
    "assumed as on an H100, which is fitted to llm-foundry's published runs"
    """
    if accelerator.name.startswith("H200"):
        return Calibration({}, "auto", "our own runs on an H200")
    kind = "H100" if "fp8" in accelerator.peak_flops else "A100"
    attention = FITTED[f"{kind} attention"]
    reached = {
        "matmul": FITTED[f"{kind} matmul"], "eager": FITTED["eager"], "attention 128": attention,
        "attention 64": attention * FITTED["heads of 64"],
    }  # fmt: skip
    published = "fitted to llm-foundry's published runs"
    if accelerator.name.startswith(kind):
        return Calibration(reached, "flash", published)
    return Calibration(reached, "flash", f"assumed as on an {kind}, which is {published}")


def flops(accelerator: Accelerator, dtype: str) -> dict[str, float]:
    """The best matmul to expect in a dtype, and in those that a step in this dtype takes beside it."""
    beside = {"fp8": ("bf16",)}.get(dtype, ())
    return {each: accelerator.matmul(each).flops for each in dict.fromkeys(("fp32", dtype, *beside))}


def bytes_per_second(accelerator: Accelerator) -> float:
    """Of a copy."""
    return COPY_SHARE * accelerator.bytes_per_second
