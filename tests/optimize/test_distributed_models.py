"""Sharded, replicated and tensor-parallel models learn what they learned without optimize."""

import pytest
import torch
import torch.distributed as dist

from optimize.zoo import MODELS, _ids
from ranks import run_ranks
from tilewright.optimize import optimize
from tilewright.runtime import dispatch

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]


@pytest.mark.parametrize("ranks", [1, 2])
def test_fsdp(ranks):
    run_ranks(_sharded, ranks)


def test_ddp():
    run_ranks(_replicated, 2)


def test_tensor_parallel():
    run_ranks(_parallel, 1)


def _build():
    dispatch.INTERPRETED = False  # in a process of its own
    return MODELS["Llama"][0]().train()


def _step(model, parameters):
    """Output, loss and whole gradients of a step on tokens that every rank has its own of."""
    ids = _ids(seed=1 + dist.get_rank())
    labels = ids.clone()
    labels[0, :3] = -100
    model.zero_grad()
    output = model(input_ids=ids, labels=labels)
    shown = output.logits.detach().clone() if isinstance(output.logits, torch.Tensor) else None
    output.loss.backward()
    gradients = {name: each.grad for name, each in parameters.named_parameters() if each.grad is not None}
    return output, shown, {name: _whole(each).clone() for name, each in gradients.items()}


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _compare(one, other):
    torch.testing.assert_close(other[0].loss, one[0].loss)
    torch.testing.assert_close(other[1], one[1], rtol=0, atol=1e-5)
    assert one[2].keys() == other[2].keys() and len(one[2]) > 10
    for name, each in one[2].items():
        torch.testing.assert_close(other[2][name], each, rtol=0, atol=1e-6, msg=name)


def _sharded(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    found, mesh = [], init_device_mesh("cpu", (dist.get_world_size(),))  # else a GPU's, where there is one
    for fast in (False, True):
        model = _build()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if fast:
            report = optimize(model)
        for _ in range(2):
            step = _step(model, model)
        found.append(step)
    _compare(*found)
    rules = {site.rule for site in report.changed}
    assert {"norm", "add_norm", "glu", "linear_cross_entropy"} <= rules and not report.captured.failures

    # What the logits are made from is gone behind the backward of two ranks: an error, and no wrong number.
    if dist.get_world_size() > 1:
        ids = _ids()
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        try:
            shown = output.logits.sum()
        except RuntimeError as error:
            assert "read them before" in str(error)
        else:
            report.undo()
            torch.testing.assert_close(shown, model(input_ids=ids, labels=ids).logits.sum())


def _replicated(rank):
    from torch.nn.parallel import DistributedDataParallel

    from tilewright.errors import UserError

    for checkpoints in (False, True):
        found = []
        for fast in (False, True):
            model = _build()
            if checkpoints:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            wrapped = DistributedDataParallel(model, bucket_cap_mb=0.01)  # many buckets, which Dynamo would cut at
            if fast:
                with pytest.raises(UserError, match=r"optimize model\.module"):
                    optimize(wrapped)
                report = optimize(wrapped.module)
            for _ in range(2):
                step = _step(wrapped, model)
            found.append(step)
        _compare(*found)
        rules = {site.rule for site in report.changed}
        assert {"norm", "add_norm", "glu", "linear_cross_entropy"} <= rules and not report.captured.failures
        assert len(report.captured.graphs) == 1


def _parallel(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )  # fmt: skip

    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), []
    plan = {
        "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel(),
        "input_layernorm": SequenceParallel(use_local_output=True),
    }  # fmt: skip
    for fast in (False, True):
        model = _build()
        for layer in model.model.layers:
            parallelize_module(layer, mesh, plan)
        parallelize_module(model, mesh, {"lm_head": ColwiseParallel(output_layouts=Replicate())})
        if fast:
            report = optimize(model)
        found.append(_step(model, model))
    _compare(*found)
    assert not report.captured.failures
    reasons = {site.declined for site in report.declined}
    assert any(why.endswith("to_local, not from a linear layer") for why in reasons), (
        reasons
    )  # torch 2.11: prim_to_local
    assert "its weights are DTensors" in reasons, reasons
