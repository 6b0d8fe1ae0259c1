"""Logits sharded over a process group give the loss and the gradient of the unsharded ones."""

import os
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist

from ops.contract import DEVICE, assert_near_truth
from ranks import run_ranks
from tilewright.ops import cross_entropy
from tilewright.ops.cross_entropy.op import reference

CASES = [
    {},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "reduction": "none"},
    {"weight": True, "label_smoothing": 0.2, "softcap": 3.0},
    {"reduction": "sum", "inplace": True},
]


def _rank(rank: int, ranks: int, plain: bool) -> None:
    if plain:
        sys.modules["tilewright.ops.cross_entropy.op"].dispatch.runs_kernel = lambda x: False
    for number, case in enumerate(CASES):
        for dtype in (torch.float32, torch.float16):
            torch.manual_seed(number)
            options = dict(case)
            whole = (3 * torch.randn(6, ranks * 21)).to(dtype)
            targets = torch.randint(ranks * 21, (6,))
            targets[2] = -100
            if options.pop("weight", False):
                options["weight"] = torch.rand(ranks * 21).to(dtype) + 0.5
            upstream = torch.rand(6 if options.get("reduction") == "none" else ())
            leaf = whole.chunk(ranks, -1)[rank].clone().requires_grad_()
            loss, lse = cross_entropy(leaf * 1.0, targets, return_lse=True, group=dist.group.WORLD, **options)
            loss.backward(upstream)
            truth = whole.double().requires_grad_()
            options.pop("inplace", None)
            if "weight" in options:
                options["weight"] = options["weight"].double()
            expected, expected_lse = reference(truth, targets, **options)
            expected.backward(upstream.double())
            mine = truth.grad.chunk(ranks, -1)[rank]
            assert_near_truth([loss, lse, leaf.grad], [expected, expected_lse, mine], reduced=ranks * 21)


@pytest.mark.skipif(DEVICE != "cpu", reason="two processes over gloo, on the CPU")
@pytest.mark.parametrize("plain", [False, True], ids=["kernels", "reference"])
def test_sharded_over_three_ranks_equals_unsharded(plain):
    run_ranks(_rank, 3, 3, plain)


def _uneven(rank: int, ranks: int) -> None:
    logits = torch.randn(6, 25 - 10 * rank, requires_grad=True)
    targets = torch.tensor([3, 39, 0, 24, -100, 30])  # of which one rank alone would say that it is out of range
    assert cross_entropy(logits, targets, group=dist.group.WORLD).isnan()
    os.environ["TILEWRIGHT_DEBUG"] = "1"
    with pytest.raises(ValueError, match="ranks have 15 to 25 columns; give every rank as many."):
        cross_entropy(logits, targets, group=dist.group.WORLD)


@pytest.mark.skipif(DEVICE != "cpu", reason="two processes over gloo, on the CPU")
def test_shards_that_do_not_fit_together_are_loud_on_every_rank():
    run_ranks(_uneven, 2, 2)


def test_a_weight_of_one_shard_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            with pytest.raises(ValueError, match="weight has shape"):
                cross_entropy(
                    torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), weight=torch.ones(4), group=dist.group.WORLD
                )
        finally:
            dist.destroy_process_group()
