"""What went wrong is an outcome and a sentence, whatever raised it."""

import torch

from tilewright.errors import UserError
from tilewright.tune.outcome import explain, outcome_of


def test_an_exception_is_one_sentence():
    assert outcome_of(MemoryError()) == ("out of memory", "MemoryError")
    assert outcome_of(ValueError()) == ("error", "ValueError: ValueError")
    assert outcome_of(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"))[0] == "out of memory"
    assert outcome_of(RuntimeError("out of resource: shared memory"))[0] == "error"
    sentence = UserError("The GPU's memory ran out; take less.")
    sentence.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert outcome_of(sentence) == ("out of memory", "CUDA out of memory.")
    assert explain(RuntimeError("InvalidCxxCompiler: none")).startswith("torch.compile found no C++ compiler")
    assert len(explain(RuntimeError("long " * 1000))) < 400
