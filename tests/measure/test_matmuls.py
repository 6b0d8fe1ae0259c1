import pytest
import torch

from ops.contract import on_gpu
from tilewright.errors import UserError
from tilewright.measure import clock
from tilewright.measure.clock import Timing
from tilewright.measure.matmuls import measure_matmuls
from tilewright.plan.flops import Matmul

ODD = Matmul("up", 64, 1000, 32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_without_a_gpu_it_is_one_sentence():
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        measure_matmuls([ODD])


def test_a_matmul_stands_beside_its_neighbours(monkeypatch):
    real, sizes = torch.randn, []

    def time_by_columns(functions):
        """Every matmul really runs; one whose width is no multiple of 64 counts as twice as slow."""
        found = {}
        for name, function in functions.items():
            columns = function().shape[-1]
            sizes.append(columns)
            seconds = columns * (1e-6 if columns % 64 == 0 else 2e-6)
            found[name] = Timing.summarise([seconds] * 3)
        return found, {}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "randn", lambda *shape, **options: real(*shape))
    monkeypatch.setattr(clock, "interleaved_event_time", time_by_columns)
    timed = measure_matmuls([ODD])
    assert sizes == [768, 896, 960, 1000, 1024]
    own = next(t for t in timed if t.name == "up")
    assert own.shape == "64 x 1000 x 32" and own.of_best == pytest.approx(0.5)
    assert own.flops == pytest.approx(2 * 64 * 32 / 2e-6)
    assert all(t.of_best == pytest.approx(1.0) for t in timed if t.name == "up, neighbour")


@on_gpu
def test_real_matmuls_have_real_speeds():
    timed = measure_matmuls([Matmul("up", 4096, 4096, 4096)])
    assert all(1e12 < t.flops < 5e15 for t in timed)
