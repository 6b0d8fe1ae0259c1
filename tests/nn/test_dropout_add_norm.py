import pytest
import torch

from ops.contract import DEVICE
from tilewright.nn import DropoutAddNorm


@pytest.mark.parametrize(("norm", "stock"), [("layer", torch.nn.LayerNorm), ("rms", torch.nn.RMSNorm)])
def test_loads_the_checkpoint_of_the_module_it_replaces(norm, stock):
    plain = stock(24, eps=1e-5).to(DEVICE)
    torch.nn.init.normal_(plain.weight)
    fused = DropoutAddNorm(24, norm=norm, prenorm=False).to(DEVICE)
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(3, 24, device=DEVICE)
    torch.testing.assert_close(fused(x), plain(x))


def test_drops_in_training_and_not_in_evaluation():
    module = DropoutAddNorm(64, p=0.5).to(DEVICE)
    x = torch.ones(4, 64, device=DEVICE)
    assert (module(x)[1] == 0).any()
    assert torch.equal(module.eval()(x)[1], x)


def test_zero_centered_weight_starts_as_the_identity():
    module = DropoutAddNorm(16, norm="rms", zero_centered=True, prenorm=False).to(DEVICE)
    x = torch.randn(2, 16, device=DEVICE)
    torch.testing.assert_close(module(x), torch.nn.functional.rms_norm(x, (16,), eps=1e-5))


def test_layerscale_is_a_parameter_with_a_gradient():
    module = DropoutAddNorm(16, layerscale=0.1).to(DEVICE)
    x = torch.randn(4, 16, device=DEVICE)
    _, residual = module(x, x)
    torch.testing.assert_close(residual, 1.1 * x)
    residual.sum().backward()
    torch.testing.assert_close(module.layerscale.grad, x.sum(0))


def test_a_module_made_on_meta_is_whole_after_reset_parameters():
    module = DropoutAddNorm(16, layerscale=0.1, device="meta").to_empty(device=DEVICE)
    module.reset_parameters()
    fresh = DropoutAddNorm(16, layerscale=0.1).to(DEVICE)
    for (name, a), b in zip(module.named_parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b), name
