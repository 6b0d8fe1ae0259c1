"""Experts that ranks share give what all of them on one rank give, whatever rows each rank gets."""

import copy

import pytest
import torch
import torch.distributed as dist

from ranks import run_ranks
from tilewright.models.standard import StandardMixtureOfExperts
from tilewright.nn import MixtureOfExperts
from tilewright.parallel.experts import routers_of, share
from tilewright.parallel.layout import Layout
from tilewright.parallel.mesh import Mesh
from tilewright.parallel.tensor import local
from tilewright.runtime import dispatch

pytestmark = pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
# Of the first rank and of the second: how many rows each has.
ROWS = [(5, 5), (7, 2), (0, 4)]
# What the router adds for its choice: nothing, and what leaves the second rank no row.
BIASES = [(0.0, 0.0, 0.0, 0.0), (0.0, 0.0, -99.0, -99.0)]


def _compare(kind, rows, bias, mesh):
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = kind(8, 12, experts=4, per_token=2, activation="geglu", dtype=torch.float64)
    whole.bias.copy_(torch.tensor(bias))
    here = copy.deepcopy(whole)
    share(here, mesh, torch.device("cpu"))
    assert list(here.state_dict()) == list(whole.state_dict())
    x = torch.randn(sum(rows), 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(sum(rows), 8, dtype=torch.float64)
    expected = whole(x)
    (expected * weight).sum().backward()
    own = x.detach().split(rows)[rank].requires_grad_()
    found = here(own)
    torch.testing.assert_close(found, expected.split(rows)[rank])
    (found * weight.split(rows)[rank]).sum().backward()
    torch.testing.assert_close(own.grad, x.grad.split(rows)[rank])
    for name in ("up", "down"):
        gradient = local(getattr(here.experts, name).grad)
        torch.testing.assert_close(gradient, getattr(whole.experts, name).grad.chunk(2)[rank])
    for tensor in (here.router.weight.grad, here.counts):
        dist.all_reduce(tensor)
    torch.testing.assert_close(here.router.weight.grad, whole.router.weight.grad)
    assert torch.equal(here.counts, whole.counts)


def _compare_tensor(kind, mesh):
    """Ranks of tensor parallel have all tokens, and each routes a part of every sequence."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    whole = kind(8, 12, experts=4, per_token=2, activation="geglu", dtype=torch.float64)
    here = copy.deepcopy(whole)
    share(here, mesh, torch.device("cpu"))
    assert list(here.state_dict()) == list(whole.state_dict())
    assert list(routers_of(torch.nn.ModuleDict({"mlp": here}))) == ["mlp.router.weight"]
    x, weight = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    x.requires_grad_()
    own = x.detach().clone().requires_grad_()
    expected, found = whole(x), here(own)
    torch.testing.assert_close(found, expected)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    torch.testing.assert_close(own.grad, x.grad)
    for name in ("up", "down"):
        gradient = local(getattr(here.experts, name).grad)
        torch.testing.assert_close(gradient, getattr(whole.experts, name).grad.chunk(ranks)[rank])
    for tensor in (here.router.weight.grad, here.counts):
        dist.all_reduce(tensor)
    torch.testing.assert_close(here.router.weight.grad, whole.router.weight.grad)
    assert torch.equal(here.counts, whole.counts)


def _narrow(mesh):
    """Under autocast rows travel as the matmuls take them."""
    torch.manual_seed(0)
    whole = MixtureOfExperts(8, 12, experts=4, per_token=1)
    here = copy.deepcopy(whole)
    share(here, mesh, torch.device("cpu"))
    x, sent = torch.randn(6, 8), []
    op = dist._functional_collectives.all_to_all_single
    with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        patch.setattr(
            dist._functional_collectives, "all_to_all_single", lambda x, *rest: (sent.append(x.dtype), op(x, *rest))[1]
        )
        assert torch.equal(here(x), whole(x))
    assert sent == [torch.int32, torch.bfloat16, torch.bfloat16]


def _rank(rank):
    dispatch.INTERPRETED = False
    mesh = Mesh(Layout(dp=2, ep=2), "cpu")
    for kind in (MixtureOfExperts, StandardMixtureOfExperts):
        for rows in ROWS:
            for bias in BIASES:
                _compare(kind, rows, bias, mesh)
    _narrow(mesh)
    for kind in (MixtureOfExperts, StandardMixtureOfExperts):
        _compare_tensor(kind, Mesh(Layout(tp=2), "cpu"))


def test_ranks_that_share_experts_compute_what_one_rank_does():
    run_ranks(_rank, 2)
