"""Batch arithmetic: global batch = micro batch x data ranks x accumulation; GPUs = data x tensor x pipeline ranks."""

from __future__ import annotations

from dataclasses import dataclass

from tilewright.errors import UserError


@dataclass(frozen=True)
class Batches:
    """All of them, consistent."""

    micro: int
    global_: int
    accumulation: int
    data: int
    tensor: int
    pipeline: int

    @property
    def gpus(self) -> int:
        return self.data * self.tensor * self.pipeline

    def as_dict(self) -> dict[str, int]:
        return {
            "micro_batch": self.micro, "global_batch": self.global_, "accumulation": self.accumulation,
            "data": self.data, "tensor": self.tensor, "pipeline": self.pipeline, "gpus": self.gpus,
        }  # fmt: skip


def solve(
    *,
    micro: int | None = None,
    global_: int | None = None,
    accumulation: int | None = None,
    data: int | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
    gpus: int | None = None,
) -> Batches:
    """The rest of the numbers from any of them; what nothing determines is 1.

    >>> solve(global_=1024, micro=4, gpus=64, tensor=8)
    Batches(micro=4, global_=1024, accumulation=32, data=8, tensor=8, pipeline=1)
    """
    given = {
        "micro batch": micro, "global batch": global_, "accumulation": accumulation, "data": data, "tensor": tensor,
        "pipeline": pipeline, "gpus": gpus,
    }  # fmt: skip
    for name, value in given.items():
        if value is not None and value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1.")
    if gpus is not None and data is not None and tensor is not None and pipeline is None:
        pipeline = _divide(gpus, data * tensor, f"{gpus} GPUs do not divide by data {data} x tensor {tensor}")
    elif gpus is not None and data is not None and pipeline is not None and tensor is None:
        tensor = _divide(gpus, data * pipeline, f"{gpus} GPUs do not divide by data {data} x pipeline {pipeline}")
    tensor, pipeline = tensor or 1, pipeline or 1
    if gpus is not None:
        whole = f"{gpus} GPUs do not divide by tensor {tensor} x pipeline {pipeline}"
        ranks = _divide(gpus, tensor * pipeline, whole)
        if data is not None and data != ranks:
            raise UserError(
                f"{gpus} GPUs over tensor {tensor} x pipeline {pipeline} are {ranks} data ranks, not {data}."
            )
        data = ranks
    elif data is None:
        data = 1
        if global_ is not None and micro is not None and accumulation is not None:
            why = f"global batch {global_} is not micro batch {micro} x accumulation {accumulation} x data ranks"
            data = _divide(global_, micro * accumulation, why)
    if global_ is None:
        micro, accumulation = micro or 1, accumulation or 1
        return Batches(micro, micro * data * accumulation, accumulation, data, tensor, pipeline)
    share = _divide(global_, data, f"global batch {global_} does not divide by {data} data ranks")
    if micro is None and accumulation is None:
        accumulation = 1
    if micro is None:
        assert accumulation is not None
        micro = _divide(share, accumulation, f"{share} sequences a rank do not divide by accumulation {accumulation}")
    steps = _divide(
        share, micro, f"global batch {global_} is not micro batch {micro} x {data} data ranks x a whole number"
    )
    if accumulation is not None and accumulation != steps:
        raise UserError(
            f"micro batch {micro} x {data} data ranks x accumulation {accumulation} are {micro * data * accumulation}, "
            f"not the global batch {global_}."
        )
    return Batches(micro, global_, steps, data, tensor, pipeline)


def batch_sizes(*, micro_batch: int = 0, global_batch: int = 0, accumulation: int = 0, ranks: int = 1) -> Batches:
    """Micro batch, global batch and accumulation of a run on data ranks alone, each given or, where it is 0, derived.

    The micro batch is at most 8 where none is given.

    >>> batch_sizes(global_batch=20).micro, batch_sizes(micro_batch=2, accumulation=3, ranks=4).global_
    (5, 24)
    """
    given = {"micro": micro_batch, "global_": global_batch, "accumulation": accumulation}
    if not micro_batch and not (global_batch and accumulation):
        share = global_batch // (ranks * (accumulation or 1))
        given["micro"] = min(8, share) if global_batch else 8
        if global_batch and given["micro"]:
            while share % given["micro"]:
                given["micro"] -= 1
    return solve(data=ranks, tensor=1, pipeline=1, **{name: value or None for name, value in given.items()})


def _divide(whole: int, part: int, why: str) -> int:
    if whole % part:
        raise UserError(f"{why}; choose numbers that divide.")
    return whole // part
