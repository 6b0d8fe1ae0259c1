import time

import pytest

from slowness import soon
from tilewright.tune.worker import probe


class Matrix:
    """Its matmuls take as long as a processor of this many FLOPs a second would."""

    def __init__(self, size, rate):
        self.size, self.rate = size, rate

    def __matmul__(self, other):
        time.sleep(2 * self.size**3 / self.rate)
        self.sizes.append(self.size)


@pytest.mark.parametrize(("rate", "largest"), [(5e7, 128), (1e11, 1024)])
def test_a_slow_matmul_is_measured_at_a_size_that_there_is_time_for(rate, largest, monkeypatch):
    monkeypatch.setattr(Matrix, "sizes", [], raising=False)
    began = time.monotonic()
    found = probe._matmul_rate(lambda size: Matrix(size, rate), 0.2)
    assert max(Matrix.sizes) == largest and soon(5.0, began)
    assert found <= rate * 1.001 and (found > 0.2 * rate or rate > 1e10)
