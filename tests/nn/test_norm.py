import inspect

import pytest
import torch

from ops.contract import DEVICE, DTYPES, assert_compiles, assert_near_truth, assert_no_worse, doubles, gradients
from tilewright import ops
from tilewright.nn import LayerNorm, RMSNorm
from tilewright.runtime import dispatch

STOCK = {LayerNorm: torch.nn.LayerNorm, RMSNorm: torch.nn.RMSNorm}
CASES = [
    (LayerNorm, {}),
    (LayerNorm, {"bias": False}),
    (LayerNorm, {"elementwise_affine": False}),
    (LayerNorm, {"eps": 0.5}),
    (RMSNorm, {}),
    (RMSNorm, {"eps": 0.5}),
    (RMSNorm, {"elementwise_affine": False}),
]


def pair(kind, keywords, width=96, dtype=None):
    """Our module and torch's, with the same random parameters."""
    ours, stock = (each(width, **keywords, device=DEVICE, dtype=dtype) for each in (kind, STOCK[kind]))
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(stock.state_dict())
    stock.load_state_dict(ours.state_dict())
    return ours, stock


def results(module, x, upstream):
    leaf = x.detach().clone().requires_grad_()
    out = module(leaf)
    return [out, *gradients([out], [leaf, *module.parameters()], [upstream])]


@pytest.mark.parametrize(("kind", "keywords"), CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_replaces_torchs_module_and_is_no_worse(kind, keywords, dtype):
    ours, stock = pair(kind, keywords, dtype=dtype)
    x, upstream = (torch.randn(4, 40, 96, dtype=dtype, device=DEVICE) for _ in range(2))
    actual, peer = results(ours, x, upstream), results(stock, x, upstream)
    default = {"eps": torch.finfo(torch.float32).eps} if kind is RMSNorm and "eps" not in keywords else {}
    exact = STOCK[kind](96, **(keywords | default), device=DEVICE, dtype=torch.float64)
    exact.load_state_dict({name: t.double() for name, t in stock.state_dict().items()})
    truth = results(exact, doubles([x])[0], upstream.double())
    assert [t.dtype for t in actual] == [t.dtype for t in peer]
    assert_near_truth(actual, truth, reduced=1000)
    if DEVICE == "cuda" or dtype != torch.bfloat16:  # which Triton's interpreter cuts off and does not round
        assert_no_worse(actual, peer, truth)


@pytest.mark.parametrize("kind", STOCK)
def test_takes_the_arguments_of_torchs_module_and_says_what_it_is_in_its_words(kind):
    own, stock = (list(inspect.signature(each.__init__).parameters.values()) for each in (kind, STOCK[kind]))
    assert [(p.name, p.default) for p in own[: len(stock)]] == [(p.name, p.default) for p in stock]
    assert repr(kind([24])) == repr(STOCK[kind](24)) and isinstance(kind(24), STOCK[kind])
    assert list(kind(24).state_dict()) == list(STOCK[kind](24).state_dict())


@pytest.mark.parametrize("kind", STOCK)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_the_epsilon_left_out_is_that_of_torch(kind, dtype):
    ours, stock = pair(kind, {}, dtype=dtype)
    x = torch.randn(2, 96, dtype=dtype, device=DEVICE) * (1e-8 if dtype == torch.float64 else 1e-4)
    torch.testing.assert_close(ours(x), stock(x))


@pytest.mark.parametrize("kind", STOCK)
def test_autocast_gives_its_dtype_and_out_dtype_another(kind):
    x = torch.randn(3, 24, device=DEVICE, dtype=torch.bfloat16)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert kind(24, device=DEVICE)(x.float()).dtype == torch.bfloat16
        out = kind(24, device=DEVICE, out_dtype=torch.float32)(x)
    torch.testing.assert_close(out, STOCK[kind](24, device=DEVICE)(x.float()))


@pytest.mark.parametrize("kind", STOCK)
def test_runs_the_kernel_and_keeps_no_copy_of_its_input(kind):
    x, saved = torch.randn(6, 24, device=DEVICE, requires_grad=True), []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with dispatch.forcing_kernels(), ops.explain() as paths, hooks:
        kind(24, device=DEVICE)(x)
    assert [(path.op, path.ran) for path in paths] == [("dropout_add_norm", "kernel")]
    assert [t.data_ptr() for t in saved if t.numel() == x.numel()] == [x.data_ptr()]


@pytest.mark.parametrize("kind", STOCK)
def test_compiles_into_one_graph(kind):
    module = kind(40, device=DEVICE)
    with dispatch.forcing_kernels():
        assert_compiles(lambda x: [module(x)], [torch.randn(4, 40, device=DEVICE, requires_grad=True)])


@pytest.mark.parametrize("kind", STOCK)
@pytest.mark.parametrize("shape", [(2, 3), (), [4, 5]])
def test_several_dimensions_are_refused_in_one_sentence(kind, shape):
    with pytest.raises(ValueError, match=f"{kind.__name__}: normalized_shape is .*; give one dimension") as caught:
        kind(shape)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", STOCK)
def test_an_input_of_another_width_is_refused_also_without_a_weight(kind):
    for affine in (True, False):
        with pytest.raises(ValueError, match=r"the input has shape \(2, 23\), but normalized_shape is 24"):
            kind(24, elementwise_affine=affine, device=DEVICE)(torch.ones(2, 23, device=DEVICE))
    with pytest.raises(TypeError, match="must be a tensor, not list"):
        kind(24)([1.0])
