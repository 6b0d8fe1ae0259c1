import pytest

from tilewright import hardware
from tilewright.errors import UserError


def test_every_driver_name_leads_to_its_own_row_only():
    names = [name for a in hardware.table().values() for name in a.driver_names]
    assert len(names) == len(set(names))
    for accelerator in hardware.table().values():
        for name in accelerator.driver_names:
            assert hardware.by_driver_name(name) is accelerator


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA H100 NVL", "NVIDIA H30", "nvidia h200", "", "A100"])
def test_a_card_the_table_does_not_know_is_never_taken_for_another(name):
    assert hardware.by_driver_name(name) is None


def test_an_unknown_name_gets_the_nearest_ones():
    with pytest.raises(UserError, match="did you mean H100-SXM5"):
        hardware.find("H100-SXM")


def test_figures_are_plausible():
    for accelerator in hardware.table().values():
        assert 1e11 < accelerator.bytes_per_second < 2e13, accelerator.name
        assert all(1e12 < peak < 1e16 for peak in accelerator.peak_flops.values()), accelerator.name
