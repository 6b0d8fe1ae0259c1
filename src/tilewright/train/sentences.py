"""Errors of the machine as sentences: what a user can mend, and how."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tilewright.errors import UserError
from tilewright.tilesync import TilesyncError


def short(error: BaseException) -> str:
    """An error on one line."""
    text = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
    return text[:200]


@contextlib.contextmanager
def as_sentences() -> Iterator[None]:
    """Turn errors of the machine that a user can mend into one sentence."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            "The GPU's memory ran out; take a smaller micro_batch or model.recompute=selective, and see what needs how "
            "much with `tilewright plan train`."
        ) from error
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # nobody reads any more, which `shown` has to deal with
            raise
        where = f" at {error.filename}" if error.filename else ""
        raise UserError(
            f"{short(error)}{where}; put that right and run again: the run goes on from its newest checkpoint, if any."
        ) from error
    except TilesyncError as error:
        raise UserError(
            f"{str(error).partition('. ')[0]}. The step is not saved; run again: the run goes on from its newest "
            "checkpoint. If it comes back, choose model.mlp=auto."
        ) from error
    except RuntimeError as error:
        if not any(words in str(error) for words in ("No available kernel", "No viable backend")):
            raise
        raise UserError(
            "PyTorch has no such attention for this device, precision and head size; choose model.attention=auto."
        ) from error
