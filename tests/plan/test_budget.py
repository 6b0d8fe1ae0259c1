import pytest

from tilewright import hardware
from tilewright.errors import UserError
from tilewright.plan.budget import budget, checkpoint
from tilewright.plan.decoder import Decoder, load
from tilewright.plan.parallel import Cluster, search
from tilewright.plan.training import Training

LLAMA_405B = Decoder(16384, 126, 128, 8, 128, 53248, 128256, 8192, gated=True, tied=False, norm="rms", positions="rope")


def test_llama_405b_took_the_gpu_hours_that_its_makers_say():
    """30.84 million hours of H100 for 15.6T tokens, from the model card of Llama 3.1; all told, failures too."""
    theirs = Training(precision="fsdp", loss="fused", releases=True)  # an engine of their own
    plan = search(LLAMA_405B, Cluster(hardware.find("H100-SXM5"), 16384), 2048, 1, theirs)[0]
    found = budget(15.6e12, plan.tokens_per_second, 16384, 700, goodput=0.9)
    assert 0.75 < found.gpu_hours / 30.84e6 < 1.33
    assert found.days == pytest.approx(found.gpu_hours / 24 / 16384)


def test_energy_is_power_by_time_and_dollars_are_price_by_hours():
    one, more = (budget(1e9, 1e4, 8, 700, price=2.0, goodput=goodput, power_overhead=1.2) for goodput in (1.0, 0.5))
    assert one.gpu_hours == pytest.approx(8 * 1e5 / 3600) and one.dollars == pytest.approx(2 * one.gpu_hours)
    assert one.megawatt_hours == pytest.approx(one.gpu_hours * 700 * 1.2 / 1e6)
    assert more.days == pytest.approx(2 * one.days)
    assert budget(1e9, 1e4, 8, 700).dollars is None


@pytest.mark.parametrize("bad", [{"tokens": 0}, {"goodput": 1.5}, {"price": -1.0}, {"power_overhead": 0.5}])
def test_bad_input_is_one_sentence(bad):
    with pytest.raises(UserError):
        budget(**{"tokens": 1e9, "tokens_per_second": 1e4, "gpus": 8, "watts": 700, **bad})


def test_a_checkpoint_has_weights_and_states_and_no_gradients():
    model = load("1b")
    found = checkpoint(model, Training(precision="mixed"))
    assert found.weights == 2 * model.parameters and found.whole == 14 * model.parameters
    assert found.seconds(1e9) == found.whole / 1e9


def test_every_accelerator_has_a_power_limit_and_the_newest_are_there():
    table = hardware.table()
    assert all(50 < chip.watts < 2000 for chip in table.values())
    assert {"H20", "B300", "GB300", "MI325X", "MI355X"} <= set(table)
    # Bytes a FLOP have changed little in ten years: a figure with sparsity, or of another unit, would stand out.
    for chip in table.values():
        sixteen = chip.peak_flops.get("bf16", chip.peak_flops.get("fp16"))
        assert 80 < sixteen / chip.bytes_per_second < 460 or chip.name in ("H20", "RTX-3090"), chip.name
