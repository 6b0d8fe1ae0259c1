import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.contract import DEVICE
from tilewright.ops.linear.padding import pad, resize, resize_matrix

SIZES = st.integers(1, 70)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def resized(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    out = x.new_zeros((rows, columns))
    rows, columns = min(rows, len(x)), min(columns, x.shape[1])
    out[:rows, :columns] = x[:rows, :columns]
    return out


@settings(deadline=None, max_examples=40)
@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.booleans())
def test_a_matrix_is_cut_off_or_has_zeros_behind(rows_in, columns_in, rows, columns, source, target, transposed):
    x = torch.randn(rows_in, columns_in, device=DEVICE)
    x = (x.t().contiguous().t() if transposed else x).to(torch.bfloat16).to(source)  # exact in every dtype
    found = resize_matrix(x, rows, columns, target)
    assert found.is_contiguous() and found.dtype == target
    assert torch.equal(found, resized(x, rows, columns).to(target))


@pytest.mark.parametrize("shape", [(5, 9), (2, 3, 9), (1, 1, 2, 7), (0, 9)])
def test_the_gradient_of_padding_is_what_was_not_padded(shape):
    x = torch.randn(*shape, device=DEVICE, requires_grad=True)
    padded = pad(x, -1)
    assert padded.shape[-1] % 8 == 0 and padded.shape[:-1] == x.shape[:-1]
    upstream = torch.randn_like(padded)
    (gradient,) = torch.autograd.grad(padded, x, upstream)
    assert torch.equal(gradient, upstream[..., : shape[-1]])
    assert torch.equal(resize(padded, list(shape)), x)


def test_what_has_the_size_already_is_not_copied():
    x = torch.randn(3, 16, device=DEVICE)
    assert pad(x, 1) is x
    assert resize_matrix(x, 3, 16, torch.float32).data_ptr() == x.data_ptr()


@pytest.mark.skipif(DEVICE != "cuda", reason="needs 5 GB")
def test_more_than_two_to_the_31_elements():
    x = torch.randn(2**21 + 3, 1027, device=DEVICE, dtype=torch.bfloat16)
    found = resize_matrix(x, len(x), 1032, torch.bfloat16)
    assert torch.equal(found[:, :1027], x) and not found[:, 1027:].any()
