import pytest
import torch

from ops.contract import DEVICE
from tilewright.nn.rope import RoPE
from tilewright.ops.rope.op import reference, rope_tables


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_is_the_op_with_its_own_tables(interleaved, heads_first):
    module = RoPE(16, 32, base=500.0, rotary_dim=12, interleaved=interleaved).to(DEVICE)
    q, k = (torch.randn(2, heads, 6, 16, device=DEVICE) for heads in (4, 2))
    if not heads_first:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    ids = torch.randint(32, (2, 6), device=DEVICE)
    tables = rope_tables(32, 12, base=500.0, device=DEVICE)
    options = {"interleaved": interleaved, "heads_first": heads_first}
    expected = reference(q, k, *tables, position_ids=ids, **options)
    for a, b in zip(module(q, k, ids, heads_first), expected, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(module(q, heads_first=heads_first), reference(q, None, *tables, **options))


def test_has_no_parameters_and_no_keys():
    module = torch.nn.Sequential(RoPE(8, 4))
    assert not list(module.parameters()) and not module.state_dict()
    module.load_state_dict({})


@pytest.mark.parametrize("change", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.double()])
def test_tables_keep_their_float32_bits_when_the_model_changes_dtype(change):
    expected = rope_tables(1000, 8, device=DEVICE)
    model = change(torch.nn.Sequential(torch.nn.Linear(2, 2), RoPE(8, 1000)).to(DEVICE))
    assert model[0].weight.dtype != torch.float32
    assert torch.equal(model[1].cos, expected[0]) and torch.equal(model[1].sin, expected[1])
    q = torch.randn(1, 3, 2, 8, device=DEVICE, dtype=model[0].weight.dtype)
    assert model[1](q).dtype == q.dtype


def test_a_module_made_on_meta_is_whole_after_to_empty():
    module = RoPE(8, 10, device="meta")
    assert module.cos.is_meta
    module.to_empty(device=DEVICE)
    assert torch.equal(module.cos, RoPE(8, 10, device=DEVICE).cos)


def test_tables_that_need_no_change_are_not_made_anew():
    module = RoPE(8, 10)
    address = module.cos.data_ptr()
    module.float().to("cpu")
    assert module.cos.data_ptr() == address


def test_rotating_more_than_a_head_is_refused():
    with pytest.raises(ValueError, match="a head has 8 elements"):
        RoPE(8, 10, rotary_dim=10)


def test_tables_that_somebody_has_set_survive_a_change_of_dtype():
    """As those of a longer context, whose wavelengths are stretched."""
    module = RoPE(8, positions=16).to(DEVICE)
    module.cos, module.sin = module.cos * 0.5, module.sin * 0.5
    tables = module.cos.clone(), module.sin.clone()
    module.to(torch.bfloat16)
    assert torch.equal(module.cos, tables[0]) and torch.equal(module.sin, tables[1])
