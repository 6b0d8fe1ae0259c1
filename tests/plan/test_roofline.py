import json
from pathlib import Path

import pytest

from tilewright import hardware
from tilewright.errors import UserError
from tilewright.ops.dropout_add_norm.op import cost as op_cost
from tilewright.plan import cost
from tilewright.plan.decoder import from_gpt, load
from tilewright.plan.flops import forward_flops
from tilewright.plan.gpt import GPTConfig
from tilewright.plan.roofline import rates, roofline, step_ops
from tilewright.plan.training import Training

H200 = hardware.find("H200-SXM")
RESULTS = Path(__file__).parents[2] / "results" / "h200"


def ops(model, **options):
    return {op.name: op for op in step_ops(model, Training(**options))}


def test_the_op_and_the_roofline_share_one_formula():
    assert op_cost is cost.dropout_add_norm
    found = ops(load("1b", ["gpt_block=optimized"]), micro_batch=2)["fused dropout + add + norm, forward"]
    assert found.cost == op_cost(4096, 2048, x_bytes=2, residual_bytes=4, dropout=False)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_matmuls_add_up_to_the_models_flops(recompute):
    model = load("350m")
    found = step_ops(model, Training(micro_batch=2, recompute=recompute))
    total = sum(op.cost.flops * op.calls for op in found if op.tensor_cores)
    layers = forward_flops(model, causal=True) - 2 * model.width * model.vocabulary
    again = layers if recompute == "full" else 0
    # Attention's backward has five matmuls where its forward has two, one more than twice as many.
    extra = model.layers * 2 * model.heads * model.head_dim * model.sequence * 0.5
    assert total == pytest.approx(2 * 2048 * (3 * forward_flops(model, causal=True) + again + extra), rel=1e-6)


def test_attention_moves_its_tensors_once():
    q, kv = 2 * 128 * 8 * 64 * 2, 2 * 128 * 2 * 64 * 2  # bytes of queries, and of keys or values
    forward, backward = (cost.attention(2, 128, 8, 2, 64, backward=b) for b in (False, True))
    assert (forward.bytes_read, forward.bytes_written) == (q + 2 * kv, q)
    assert (backward.bytes_read, backward.bytes_written) == (3 * q + 2 * kv, q + 2 * kv)
    assert forward.flops == 4 * 2 * 8 * 128 * 64 * 64 and backward.flops == 2.5 * forward.flops


def test_every_op_has_a_bound_and_the_shares_are_the_whole():
    floors = roofline(load("1b"), Training(micro_batch=16), H200)
    assert sum(floor.share for floor in floors) == pytest.approx(1.0)
    bounds = {floor.op.name: floor.bound for floor in floors}
    assert bounds["up matmul, forward"] == "arithmetic" and bounds["optimizer"] == "memory"
    tiny = roofline(load("125m", ["sequence=16", "vocabulary=64", "layers=2"]), Training(), H200)
    assert {floor.bound for floor in tiny if "add + norm" in floor.op.name} == {"launch"}


def test_fusing_and_the_datasheet_lower_the_floor():
    def total(model, **options):
        return sum(floor.seconds for floor in roofline(model, Training(micro_batch=8), H200, **options))

    assert total(load("1b", ["gpt_block=optimized"])) < total(load("1b")) < total(load("1b"), achievable=True)


def test_a_measured_step_is_not_below_its_floor():
    study = json.loads((RESULTS / "block_1b.json").read_text(encoding="utf-8"))
    trial = study["trial"]
    assert len(study["rows"]) == 2
    for row in study["rows"]:
        config = GPTConfig(**{**trial["model"], "gpt_block": row["setting"]["gpt_block"]})
        floors = roofline(from_gpt(config), Training(micro_batch=trial["batch"]), H200)
        most = trial["batch"] * config.sequence / sum(floor.seconds for floor in floors)
        assert 0.3 * most < row["result"]["tokens_per_second"] < most


def test_the_best_rates_are_those_of_the_committed_run():
    ceilings = json.loads((RESULTS / "dropout_add_norm.json").read_text(encoding="utf-8"))["ceilings"]
    rate, bandwidth = rates(H200, Training(), achievable=True)
    assert rate.measured and rate.flops == pytest.approx(ceilings["bf16_flops"], rel=0.02)
    assert bandwidth == pytest.approx(ceilings["copy_bytes_per_second"], rel=0.01)


def test_an_accelerator_without_the_dtype_is_one_sentence():
    with pytest.raises(UserError, match="no bf16 rate"):
        roofline(load("1b"), Training(), hardware.find("V100-SXM2"))
