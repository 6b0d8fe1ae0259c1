"""An attention block over a cache, against PyTorch's attention over all tokens at once."""

import pytest
import torch
import torch.nn.functional as F

from tilewright.nn import FusedAttentionBlock
from tilewright.tilesync import GraphError, chains


def whole(block, x):
    """Of all tokens at once, in the weights' dtype."""
    heads, size = block.heads, block.head_dim
    q, k, v = F.linear(x, block.qkv.weight).split([n * size for n in (heads, block.kv_heads, block.kv_heads)], 1)
    q, k, v = (each.unflatten(1, (-1, size)).transpose(0, 1)[None] for each in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0]
    return x + F.linear(y.transpose(0, 1).flatten(1), block.out.weight), k[0], v[0]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "context", "compiled"),
    [(4, 2, None, 12, False), (4, 2, None, 12, True), (6, 1, 8, 9, False), (2, 2, 8, 200, False)],
)
def test_steps_over_a_cache_are_attention_over_all_tokens(heads, kv_heads, head_dim, context, compiled):
    block = FusedAttentionBlock(24, heads, kv_heads=kv_heads, head_dim=head_dim)
    torch.compiler.reset()
    run = torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block
    keys, values = torch.full((2, kv_heads, context, block.head_dim), torch.nan)  # where nothing was written yet
    x, length = torch.randn(9, 24), torch.zeros(1, dtype=torch.int32)
    truth, k, v = whole(block, x)
    for rows in (3, 1, 1) if compiled else (3, 1, 1, 4):
        first = int(length)
        y = run(x[first : first + rows], keys, values, length)
        torch.testing.assert_close(y, truth[first : first + rows], rtol=1e-4, atol=1e-5)
        length += rows
        torch.testing.assert_close(keys[:, : first + rows], k[:, : first + rows])
        torch.testing.assert_close(values[:, : first + rows], v[:, : first + rows])
        assert keys[:, first + rows :].isnan().all()
    assert block(x[:0], keys, values, length).shape == (0, 24)
    assert not y.requires_grad and sorted(block.state_dict()) == ["out.weight", "qkv.weight"]


def test_wrong_arguments_are_a_sentence():
    with pytest.raises(ValueError, match="choose plain"):
        FusedAttentionBlock(8, 2, mode="fast")
    with pytest.raises(ValueError, match="3 heads do not divide a width of 8; give head_dim"):
        FusedAttentionBlock(8, 3)
    with pytest.raises(ValueError, match="2 key heads do not divide 3 heads"):
        FusedAttentionBlock(9, 3, kv_heads=2)
    block, length = FusedAttentionBlock(8, 2), torch.zeros(1, dtype=torch.int32)
    keys, values = torch.zeros(2, 2, 5, 4)
    with pytest.raises(ValueError, match=r"x is \(33, 8\), but \(rows, 8\) is needed, up to 32 rows"):
        block(torch.zeros(33, 8), keys, values, length)
    with pytest.raises(ValueError, match=r"keys are \(5, 2, 4\), but \(2, context, 4\) is needed"):
        block(torch.zeros(1, 8), keys.transpose(0, 1), values, length)
    with pytest.raises(ValueError, match=r"values are \(2, 4, 4\)"):
        block(torch.zeros(1, 8), keys, values[:, 1:], length)
    with pytest.raises(ValueError, match="values are torch.float64, but torch.float32 is needed"):
        block(torch.zeros(1, 8), keys, values.double(), length)
    with pytest.raises(ValueError, match="length is one number of int32"):
        block(torch.zeros(1, 8), keys, values, length.long())
    with pytest.raises(GraphError, match="up to 32 new tokens, not 33"):
        chains.attention_step(33, 64, 2, 32, 128)
