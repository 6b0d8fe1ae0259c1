import pytest
import torch

from ops.contract import on_gpu
from tilewright.measure.memory import MemoryWatch, against_plan
from tilewright.plan.decoder import load
from tilewright.plan.memory import train
from tilewright.plan.training import Training


def watched_step(model, optimizer, watch, x):
    watch.before_forward()
    loss = model(x).square().mean()
    watch.after_forward()
    loss.backward()
    watch.after_backward()
    optimizer.step()
    del loss
    watch.after_optimizer()
    optimizer.zero_grad()


def test_weights_gradients_and_states_are_counted_from_the_objects():
    model = torch.nn.Linear(10, 5).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    watch = MemoryWatch(model, optimizer)
    watched_step(model, optimizer, watch, torch.randn(3, 10, dtype=torch.bfloat16))
    steps = 2 * 4  # a counter a tensor
    assert watch.table() == {"weights": 110, "gradients": 110, "optimizer": 220 + steps}


def test_the_parts_on_a_gpu_add_up(monkeypatch):
    """With an allocator that is told what to say."""
    model = torch.nn.Linear(10, 5)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    watch = MemoryWatch(model, optimizer)
    watch._device = torch.device("cuda")
    allocated = iter([1000, 4000, 1000 + 3 * 220])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    for name, value in (("max_memory_allocated", 7000), ("max_memory_reserved", 9000), ("memory_reserved", 8500)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 20_000))
    watched_step(model, optimizer, watch, torch.randn(3, 10))
    assert watch.table() == {
        "weights": 220, "gradients": 220, "optimizer": 220, "kept for backward": 3000, "temporary buffers": 1000,
        "allocated": 7000, "fragmentation": 2000, "CUDA context": 1500, "total": 10_500,
    }  # fmt: skip


@pytest.mark.parametrize("training", [Training(micro_batch=16), Training(accumulation=4), Training(recompute="full")])
def test_a_run_as_planned_differs_nowhere(training):
    plan = train(load("125m"), training)
    names = ("weights", "optimizer", "temporary buffers", "fragmentation", "CUDA context")
    measured = {name: round(plan[name]) for name in names}
    gradients = round(plan["weights"])  # as large, at backward's end, wherever the plan has its peak
    measured |= {"gradients": gradients, "allocated": round(plan.allocated), "total": round(plan.total)}
    rows = against_plan(measured, plan)
    assert all(abs(difference) <= 4 for *_, difference in rows)  # rounded to bytes
    parts = ("weights", "gradients", "optimizer", "activations", "temporary buffers")
    for column in (1, 2):
        value = {row[0]: row[column] for row in rows}
        assert sum(value.get(name, 0) for name in parts) == pytest.approx(value["allocated"], abs=4)
        assert value["allocated"] + value["fragmentation"] + value["CUDA context"] == pytest.approx(
            value["total"], abs=4
        )
    assert ("gradients" in {row[0] for row in rows}) == (plan["gradients"] > 0)


def test_what_was_measured_beyond_the_plan_shows():
    plan = train(load("125m"), Training(micro_batch=16))
    measured = {"weights": round(plan["weights"]), "gradients": 0, "optimizer": 1000 + round(plan["optimizer"])}
    assert [(row[0], row[3]) for row in against_plan(measured, plan)] == [("weights", 0), ("optimizer", 1000)]


@on_gpu
def test_memory_of_a_real_step_adds_up():
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    watch = MemoryWatch(model, optimizer)
    x = torch.randn(512, 1024, device="cuda")
    for _ in range(2):
        watched_step(model, optimizer, watch, x)
    table = watch.table()
    assert table["weights"] == table["gradients"] == 4 * 1024 * 1025
    assert table["kept for backward"] >= 4 * 512 * 1024 and table["temporary buffers"] >= x.nbytes
    assert table["weights"] + table["optimizer"] + table["kept for backward"] <= table["allocated"]
    assert table["CUDA context"] > 0 and table["fragmentation"] >= 0
