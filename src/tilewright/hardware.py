"""What an accelerator can do: the table of datasheet figures, and which row this machine is."""

from __future__ import annotations

import csv
import difflib
import functools
from dataclasses import dataclass
from importlib import resources

from tilewright.errors import UserError

ASSUMED_MATMUL_SHARE = 0.75  # of the datasheet, where nobody has measured a matmul: H100 0.80, B200 0.78, MI300X 0.51
COPY_SHARE = 0.885  # of the datasheet's bandwidth, what a 2 GiB copy reaches on an H200
_COPY_MEASURED_ON = "H200-SXM"


@dataclass(frozen=True)
class Rate:
    """FLOP/s of matmuls in one dtype, and where the figure is from."""

    flops: float
    dtype: str
    measured: bool
    source: str


@dataclass(frozen=True)
class Accelerator:
    """One row of gpus.csv. Peaks are dense (no sparsity), in FLOP/s; a dtype the chip lacks is absent."""

    name: str
    driver_names: tuple[str, ...]
    multiprocessors: int | None
    peak_flops: dict[str, float]
    best_flops: float | None  # the best bf16 matmul anybody measured; None where nobody has said
    memory_bytes: tuple[float, ...]
    bytes_per_second: float
    l2_bytes: float
    ecc_in_memory: bool  # GDDR6 that keeps its error correction, a sixteenth, in the memory itself
    link_bytes_per_second: float | None  # to its neighbours in a node, one direction
    watts: float  # its power limit as delivered
    note: str

    @property
    def usable_bytes(self) -> float:
        """The bytes that the driver leaves of the largest variant: an H200 of "141 GB" (GiB) reports 150.1e9."""
        return 0.98 * max(self.memory_bytes) * (15 / 16 if self.ecc_in_memory else 1.0)

    def first_on_record(self, dtypes: tuple[str, ...]) -> str:
        """The first of these dtypes that the table has a rate for, or an error that names those it has."""
        found = next((dtype for dtype in dtypes if dtype in self.peak_flops), None)
        if found is None:
            wanted = " or ".join(dtypes)
            raise UserError(f"The table has no {wanted} rate for {self.name}; it has {', '.join(self.peak_flops)}.")
        return found

    def matmul(self, dtype: str) -> Rate:
        """The best rate to expect of a matmul: measured where somebody has, else an assumed share of the datasheet's.

        >>> find("H100-SXM5").matmul("bf16").source
        'the best bf16 matmul measured, 795 TFLOPS'
        >>> find("L40S").matmul("bf16").source
        'assumed 75 % of the datasheet (362 TFLOPS, dense bf16); no measured matmul on record'
        """
        peak = self.peak_flops[self.first_on_record((dtype,))]
        if dtype == "bf16" and self.best_flops is not None:
            source = f"the best bf16 matmul measured, {self.best_flops / 1e12:g} TFLOPS"
            return Rate(self.best_flops, dtype, True, source)
        source = (
            f"assumed {100 * ASSUMED_MATMUL_SHARE:.0f} % of the datasheet ({peak / 1e12:g} TFLOPS, dense {dtype}); no "
            "measured matmul on record"
        )
        return Rate(ASSUMED_MATMUL_SHARE * peak, dtype, False, source)

    @property
    def copy_source(self) -> str:
        """Where the bandwidth of a copy, COPY_SHARE of the datasheet's, is from."""
        if self.name == _COPY_MEASURED_ON:
            return f"a 2 GiB copy measured, {100 * COPY_SHARE:g} % of the datasheet"
        return f"assumed {100 * COPY_SHARE:g} % of the datasheet, as a copy reaches on an H200"

    @property
    def notes(self) -> list[str]:
        """What a plan for this accelerator has to say: its row's note, and which of several memory sizes is planned."""
        found = [f"{self.name}: {self.note}."] if self.note else []
        if len(self.memory_bytes) > 1:
            sizes = " or ".join(f"{size / 1e9:.0f}" for size in self.memory_bytes)
            found.append(f"{self.name} has {sizes} GB; {max(self.memory_bytes) / 1e9:.0f} GB are planned.")
        return found


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
        ecc_in_memory=row["ecc_in_memory"] == "yes",
        link_bytes_per_second=float(row["link_gbs"]) * 1e9 if row["link_gbs"] else None,
        watts=float(row["watts"]),
        note=row["note"] or "",
    )


def find(name: str) -> Accelerator:
    """The accelerator of this name, or the only one whose name begins so; else an error that names the nearest ones.

    >>> find("H200-SXM").bytes_per_second, find("h200").name
    (4800000000000.0, 'H200-SXM')
    """
    known = {key.lower(): accelerator for key, accelerator in table().items()}
    if name.lower() in known:
        return known[name.lower()]
    begun = [accelerator for key, accelerator in known.items() if key.startswith(f"{name.lower()}-")]
    if len(begun) == 1:
        return begun[0]
    if begun:
        raise UserError(f"Accelerator {name!r} is one of several; choose {' or '.join(one.name for one in begun)}.")
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
