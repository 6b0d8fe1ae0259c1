"""What an exception makes of a trial: an outcome, and one sentence that says what went wrong."""

from __future__ import annotations

from tilewright.errors import UserError

_MEMORY_RAN_OUT = ("out of memory", "allocate memory", "not enough memory", "alloc_failed")  # CUDA, hosts, cuBLAS


class NotFinite(Exception):
    """A loss or a gradient is no number."""


def outcome_of(error: BaseException) -> tuple[str, str]:
    """What an exception makes of a trial, and the sentence for it.

    >>> outcome_of(UserError("threads is -1; it must be at least 0."))
    ('refused', 'threads is -1; it must be at least 0.')
    >>> outcome_of(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    ('out of memory', 'CUDA out of memory. Tried to allocate 2.00 GiB.')
    >>> outcome_of(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."))[0]
    'out of memory'
    """
    reason: BaseException | None = error
    while reason is not None:  # a sentence for the user has the error itself behind it
        if isinstance(reason, OSError):  # of the machine, not of what was tried
            return "error", f"{type(reason).__name__}: {_first_line(reason)}"
        if isinstance(reason, MemoryError) or any(words in str(reason).lower() for words in _MEMORY_RAN_OUT):
            return "out of memory", _first_line(reason)
        reason = reason.__cause__
    if isinstance(error, NotFinite):
        return "not finite", str(error)
    return ("refused", str(error)) if isinstance(error, UserError) else ("error", explain(error))


def explain(error: BaseException) -> str:
    """One sentence for what went wrong, and what to do where that is known.

    >>> explain(RuntimeError("backend='inductor' raised:\\nValueError: 3 is odd\\n\\nSet TORCHDYNAMO_VERBOSE=1"))
    "RuntimeError: backend='inductor' raised: ValueError: 3 is odd"
    """
    kind = type(error).__name__
    if "InvalidCxxCompiler" in kind + str(error) or "No working C++ compiler" in str(error):
        return "torch.compile found no C++ compiler: install g++ or set CXX."
    if "Cannot find a working triton" in str(error) or "TritonMissing" in kind:
        return "torch.compile found no Triton: pip install 'triton>=3.6'."
    return f"{kind}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, and the second where the first only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2] if lines[0].endswith(":") else lines[:1])[:300]
