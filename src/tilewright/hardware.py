"""What an accelerator can do: the table of datasheet figures, and which row this machine is."""

from __future__ import annotations

import csv
import difflib
import functools
from dataclasses import dataclass
from importlib import resources

from tilewright.errors import UserError


@dataclass(frozen=True)
class Accelerator:
    """One row of gpus.csv. Peaks are dense (no sparsity), in FLOP/s; a dtype the chip lacks is absent."""

    name: str
    driver_names: tuple[str, ...]
    multiprocessors: int | None
    peak_flops: dict[str, float]
    best_flops: float | None  # the best bf16 product anybody measured; None where nobody has said
    memory_bytes: tuple[float, ...]
    bytes_per_second: float
    l2_bytes: float
    link_bytes_per_second: float | None  # to its neighbours in a node, one direction
    note: str

    @property
    def usable_bytes(self) -> float:
        """Of the largest variant, what a driver leaves: an H200 of "141 GB", which are GiB, reports 150.1e9 bytes."""
        return 0.98 * max(self.memory_bytes)


@functools.cache
def table() -> dict[str, Accelerator]:
    """Every accelerator known, by name.

    >>> table()["H100-SXM5"].peak_flops["bf16"]
    989500000000000.0
    """
    text = resources.files("tilewright").joinpath("gpus.csv").read_text(encoding="utf-8")
    return {row["name"]: _parse(row) for row in csv.DictReader(text.splitlines())}


def _parse(row: dict[str, str]) -> Accelerator:
    peaks = {}
    for dtype in ("bf16", "fp16", "fp8", "tf32", "fp32"):
        if row[f"{dtype}_tflops"]:
            peaks[dtype] = float(row[f"{dtype}_tflops"]) * 1e12
    if row["int8_tops"]:
        peaks["int8"] = float(row["int8_tops"]) * 1e12
    return Accelerator(
        name=row["name"],
        driver_names=tuple(row["driver_names"].split(";")),
        multiprocessors=int(row["sms"]) if row["sms"] else None,
        peak_flops=peaks,
        best_flops=float(row["best_bf16_tflops"]) * 1e12 if row["best_bf16_tflops"] else None,
        memory_bytes=tuple(float(size) * 2**30 for size in row["memory_gb"].split(";")),
        bytes_per_second=float(row["bandwidth_gbs"]) * 1e9,
        l2_bytes=float(row["l2_mb"]) * 1e6,
        link_bytes_per_second=float(row["link_gbs"]) * 1e9 if row["link_gbs"] else None,
        note=row["note"] or "",
    )


def find(name: str) -> Accelerator:
    """The accelerator of this name, or an error that names the nearest ones.

    >>> find("H200-SXM").bytes_per_second
    4800000000000.0
    """
    known = {key.lower(): accelerator for key, accelerator in table().items()}
    if name.lower() in known:
        return known[name.lower()]
    near = difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(known[n].name for n in near)}?" if near else f"known: {', '.join(table())}."
    raise UserError(f"Accelerator {name!r} is not in the table; {hint}")


def by_driver_name(driver_name: str) -> Accelerator | None:
    """The row for the name a driver reports. Only an exact name counts: an unknown card is never taken for another.

    >>> by_driver_name("NVIDIA H200").name
    'H200-SXM'
    >>> by_driver_name("NVIDIA H200 NVL") is None
    True
    """
    return next((a for a in table().values() if driver_name in a.driver_names), None)


def peak(driver_name: str | None, dtype: str, given: float | None, option: str) -> tuple[float | None, str]:
    """The dense peak that MFU is measured against, and where it is from; `driver_name` is None on a CPU.

    >>> peak("NVIDIA H200", "bf16", None, "--peak-tflops")
    (989500000000000.0, '989.5 TFLOPS, H200-SXM, dense bf16')
    """
    if given is not None:
        if given <= 0:
            raise UserError(f"{option} is {given:g}; give the accelerator's dense peak in TFLOPS.")
        return given * 1e12, f"{given:g} TFLOPS, given by {option}"
    if driver_name is None:
        return None, f"n/a on a CPU; give {option} for one"
    accelerator = by_driver_name(driver_name)
    if accelerator is None or dtype not in accelerator.peak_flops:
        return None, f"n/a: the table has no {dtype} peak for {driver_name!r}; give it with {option}"
    found = accelerator.peak_flops[dtype]
    return found, f"{found / 1e12:g} TFLOPS, {accelerator.name}, dense {dtype}"
