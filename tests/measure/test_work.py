"""The work of a step by hand, and what an observation of it says."""

import pytest
import torch

from ops.contract import DEVICE
from tilewright import ops
from tilewright.measure import work
from tilewright.measure.work import Asked, Observation, read_work
from tilewright.models import GPT
from tilewright.optim import states, update
from tilewright.plan.decoder import from_gpt
from tilewright.plan.flops import matmuls
from tilewright.plan.gpt import GPTConfig
from tilewright.runtime import dispatch

SMALL = GPTConfig(width=64, layers=2, heads=2, vocabulary=512, sequence=32)


def observed(step, compiled=False):
    observation = Observation(compiled)
    observation.begin()
    try:
        step()
    finally:
        found = observation.end()
    return found


def by_op(found):
    return {(each.op, each.shapes): each for each in found}


def test_an_op_reads_what_goes_in_and_writes_what_comes_out():
    x, y = torch.ones(6, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    found = by_op(observed(lambda: (x + y, x.add_(y), x.copy_(y), x.sum(0), x.t().contiguous(), y.expand(6, 8) * 2)))
    assert {key: each.bytes / 4 for key, each in found.items()} == {
        ("aten::add", "6x8, 8"): 48 + 8 + 48,
        ("aten::add_", "6x8, 8"): 48 + 8 + 48,
        ("aten::copy_", "8"): 8 + 48,  # what was there before is not read
        ("aten::sum", "6x8"): 48 + 8,
        ("aten::clone", "8x6"): 48 + 48,  # and its transpose is a view, which moves nothing
        ("aten::mul", "6x8"): 8 + 48,  # of what is expanded there is one row
    }


def test_a_matmul_that_is_added_up_in_another_dtype_has_its_flops():
    left, right = torch.ones(8, 4, dtype=torch.bfloat16), torch.ones(4, 2, dtype=torch.bfloat16)
    total = torch.ones(8, 2)
    for op, args, read in (
        (torch.ops.aten.addmm.dtype_out, (total, left, right, torch.float32), 16),
        (torch.ops.aten.mm.dtype_out, (left, right, torch.float32), 0),
    ):  # which a CPU cannot run
        found = work._asked(op, args, {"out": total}, total)
        assert found.op in ("aten::addmm", "aten::mm") and found.flops == 2 * 8 * 4 * 2
        assert found.bytes == 2 * (8 * 4 + 4 * 2) + 4 * (read + 16)


def test_a_gather_reads_the_rows_it_takes():
    table, rows = torch.ones(1000, 8, device=DEVICE), torch.tensor([3, 5], device=DEVICE)
    (found,) = observed(lambda: torch.nn.functional.embedding(rows, table))
    assert found.bytes == 2 * 8 * 4 * 2 + 2 * 8


def test_what_is_only_a_shape_or_hardly_touched_does_not_count():
    big, rows, few = (
        torch.ones(1000, 8, device=DEVICE),
        torch.tensor([3, 5], device=DEVICE),
        torch.ones(2, 8, device=DEVICE),
    )
    found = by_op(observed(lambda: (torch.zeros_like(big), big.new_zeros(3), big.index_put_((rows,), few))))
    moved = {op.removeprefix("aten::"): each.bytes for (op, _), each in found.items()}
    assert moved["zeros_like"] == big.nbytes and moved["new_zeros"] == 12
    assert moved["index_put_"] == 3 * few.nbytes + rows.nbytes  # the rows as they were, what comes, and both written


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_every_head_of_the_queries(heads, causal):
    q, k, v = (torch.ones(2, count, 16, 32, device=DEVICE, requires_grad=True) for count in (4, heads, heads))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    found = observed(lambda: sdpa(q, k, v, is_causal=causal, enable_gqa=heads < 4).sum().backward())
    matmuls = sum(each.flops for each in found if each.dtype)
    exact = 14 * 2 * 4 * 16 * 16 * 32  # two matmuls, and five; who computes no scores anew has four of them
    assert matmuls in (exact / (1 + causal), exact * 12 / 14)


def test_an_op_that_nobody_knows_does_not_stop_the_step():
    q = torch.ones(1, 1, 128, 16, device=DEVICE)
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged, device=DEVICE)
    found = observed(lambda: (nested * 2, q @ q.transpose(-1, -2)))
    assert any(each.flops >= 2 * 128 * 128 * 16 for each in found)


def test_a_kernel_that_works_in_place_reads_and_writes():
    weight = torch.ones(5000, device=DEVICE)
    state = states.new_state(weight, "adamw")

    def step():
        update.update([weight], [weight], [state], rule="adamw", lr=0.1)

    step()  # which makes the table of addresses
    (found,) = observed(step)
    assert found.bytes == pytest.approx(
        7 * weight.nbytes, rel=0.01
    )  # parameter and two moments there and back, gradient


@pytest.mark.parametrize("block", ["standard", "optimized"])
def test_the_matmuls_of_a_step_are_those_of_the_plan(block, monkeypatch):
    monkeypatch.setattr(dispatch, "INTERPRETED", False)
    model = GPT(GPTConfig(**{**vars(SMALL), "gpt_block": block})).to(DEVICE)
    tokens = torch.randint(512, (3, 32), device=DEVICE)
    model(tokens, tokens).backward()
    found = observed(lambda: model(tokens, tokens).backward())
    expected = sum(3 * 2 * each.m * each.n * each.k * each.count for each in matmuls(from_gpt(SMALL), 3 * 32, 1))
    assert sum(each.flops for each in found if each.category == "matmul" and each.dtype) == expected
    attention = [each for each in found if each.category == "attention"]
    pairs = 2 * 3 * 2 * 32 * 32 / 2  # layers, batch, heads, tokens by tokens under a causal mask
    assert sum(each.flops for each in attention) == pytest.approx((4 + 10) * pairs * 32)


def test_a_kernel_past_the_dispatcher_is_seen_with_what_it_reads_and_writes(monkeypatch):
    """And takes the same way as ever: a mode that looks on must not change what it looks at."""
    x, residual, weight = (torch.randn(shape, device=DEVICE) for shape in ((256, 512), (256, 512), (512,)))
    taken = []
    start = dispatch.Launch._start
    monkeypatch.setattr(dispatch.Launch, "_start", lambda self, *args: (taken.append(self.name), start(self, *args)))
    with dispatch.forcing_kernels():  # a call this small is left to PyTorch on a GPU
        found = observed(lambda: ops.dropout_add_norm(x, residual, weight))
    (norm,) = (each for each in found if each.op == "tilewright_dropout_add_norm_forward")
    assert taken == ["tilewright_dropout_add_norm_forward"]
    assert 4 * x.nbytes <= norm.bytes <= 1.05 * 4 * x.nbytes
    assert work.watching is None


@pytest.mark.parametrize("loss", ["fused", "linear_fused"])
def test_a_step_that_is_observed_runs_the_kernels_that_it_ever_runs(loss, monkeypatch):
    model = GPT(GPTConfig(**{**vars(SMALL), "gpt_block": "optimized", "layers": 1, "loss": loss})).to(DEVICE)
    tokens = torch.randint(512, (3, 32), device=DEVICE)
    started = []
    start = dispatch.Launch._start
    monkeypatch.setattr(dispatch.Launch, "_start", lambda self, *args: (started.append(self.name), start(self, *args)))
    model(tokens, tokens).backward()
    alone = started.copy()
    started.clear()
    found = observed(lambda: model(tokens, tokens).backward())
    assert started == alone and len(set(alone)) > 3
    assert set(alone) <= {each.op for each in found}


def test_an_observation_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError):
        observed(lambda: 1 / 0)
    x = torch.ones(2, device=DEVICE)
    assert not dispatch.is_traced(x)


# The trace of a device, written by hand


def window(index, start, end):
    return {"cat": "cpu_op", "name": f"tilewright.work.{index}", "ts": start, "dur": end - start, "tid": 1}


def kernel(name, correlation, launched, start, end):
    tied = {"args": {"correlation": correlation}}
    return [
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 1, **tied},
        {"cat": "kernel", "name": name, "ts": start, "dur": end - start, **tied},
    ]


def test_a_kernel_is_the_work_of_the_window_it_was_launched_in():
    """However late it runs; of two kernels of one op the longer gives its name, the time is both's."""
    mm, norm = Asked("aten::mm", "2x2", "bf16", 16.0, 24.0), Asked("norm", "4", "", 4.0, 16.0)
    events = [
        window(0, 0, 10), window(1, 20, 30), window(2, 40, 50),
        *kernel("gemm", 7, 2, 100, 160), *kernel("reduce", 8, 5, 160, 170), *kernel("norm", 9, 21, 170, 175),
        *kernel("gemm", 10, 44, 175, 235), *kernel("stray", 11, 33, 235, 236),
    ]  # fmt: skip
    found = by_op(read_work(events, [mm, norm, mm], compiled=False))
    matmul = found["aten::mm", "2x2"]
    assert (matmul.kernel, matmul.calls, matmul.category) == ("gemm", 2, "matmul")
    assert matmul.seconds == pytest.approx(130e-6) and (matmul.flops, matmul.bytes) == (32.0, 48.0)
    assert found["norm", "4"].seconds == pytest.approx(5e-6)
    assert found["stray", ""].flops == 0 and found["stray", ""].seconds == pytest.approx(1e-6)


def test_a_compiled_kernel_has_the_tensors_of_its_arguments():
    shapes = {"Input Dims": [[32, 8], [8], [32, 8], []], "Input type": ["c10::BFloat16", "float", "float", "Scalar"]}
    mm = {"Input Dims": [[4, 8], [8, 2], [4, 2]], "Input type": ["float"] * 3}
    add = {
        "Input Dims": [[2], [4, 8], [8, 2], [], [], [4, 2]],
        "Input type": ["float"] * 3 + ["Scalar"] * 2 + ["float"],
    }
    events = [
        {"cat": "cpu_op", "name": name, "ts": 10 * index, "dur": 5, "tid": 1, "args": arguments}
        for index, (name, arguments) in enumerate([
            ("triton_poi_fused_add_0", shapes), ("aten::mm", mm), ("aten::addmm", add), ("aten::add", shapes)
        ])
    ]  # fmt: skip
    found = {each.op: each for each in read_work(events, [], compiled=True)}
    assert set(found) == {"triton_poi_fused_add_0", "aten::mm", "aten::addmm"}
    assert found["triton_poi_fused_add_0"].bytes == 32 * 8 * 2 + 8 * 4 + 32 * 8 * 4
    assert found["aten::mm"].flops == found["aten::addmm"].flops == 2 * 4 * 8 * 2
    assert found["aten::addmm"].bytes == (2 + 32 + 16 + 8) * 4


def test_a_matmul_or_attention_that_was_compiled_has_its_flops():
    def event(name, shapes, kind="float", values=()):
        arguments = {"Input Dims": shapes, "Input type": [kind if shape else "Scalar" for shape in shapes]}
        return {
            "cat": "cpu_op",
            "name": name,
            "ts": 0,
            "dur": 5,
            "tid": 1,
            "args": {**arguments, "Concrete Inputs": values},
        }

    def flops(*given, **more):
        return [each.flops for each in read_work([event(*given, **more)], [], compiled=True)]

    assert flops("triton_tem_fused_addmm_3", [[8], [4, 16], [16, 8], [4, 8]]) == [2 * 4 * 16 * 8]
    assert flops("triton_tem_fused_attention_3", [[4, 16], [4, 16], [4, 16]]) == []  # better nothing than wrong
    shapes = [[2, 4, 16, 32], [2, 1, 16, 32], [2, 1, 16, 32], [], []]
    name = "aten::_scaled_dot_product_flash_attention"
    for causal in ("True", "False"):
        found = flops(name, shapes, values=["", "", "", "0.", causal])
        assert found == [4 * 2 * 4 * 16 * 16 * 32 / (2 if causal == "True" else 1)]


def test_a_compiled_step_has_the_matmuls_of_an_eager_one():
    model = GPT(SMALL)
    tokens = torch.randint(512, (3, 32))
    totals = []
    for compiled in (False, True):
        forward = torch.compile(model) if compiled else model
        for _ in range(2):
            forward(tokens, tokens).backward()
        found = observed(lambda forward=forward: forward(tokens, tokens).backward(), compiled)
        totals.append([sum(each.flops for each in found if each.category == kind) for kind in ("matmul", "attention")])
    assert totals[0] == totals[1] and min(totals[0]) > 0
