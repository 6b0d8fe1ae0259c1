import pytest
import torch

from ops.contract import (
    DEVICE,
    DTYPES,
    assert_deterministic,
    assert_equal,
    assert_near_truth,
    assert_no_worse,
    doubles,
    gradients,
    on_gpu,
    randn,
)
from tilewright.ops.embedding import kernels
from tilewright.ops.embedding.op import embedding, reference, tied_embedding


def draw(classes, *shape):
    """Few of the classes, some of them often."""
    return torch.randint(classes, shape, device=DEVICE) ** 2 % max(1, classes)


def run(function, tokens, leaves, dtype, upstream):
    out = function(tokens, *leaves, dtype=dtype)
    return [out, *gradients([out], leaves, [upstream])]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("has_position", [False, True])
def test_result_and_gradients_match_float64_and_are_no_worse_than_torch(has_position, stored, dtype):
    tokens = draw(50, 3, 23)
    leaves = [randn(50, 96, dtype=stored), randn(30, 96, dtype=stored) if has_position else None]
    upstream = randn(3, 23, 96, grad=False)
    actual = run(embedding, tokens, leaves, dtype, upstream)
    # The truth takes in what arrives there: the gradient in the dtype of the result.
    truth = run(reference, tokens, doubles(leaves), None, upstream.to(dtype or stored).double())
    assert_near_truth(actual, truth, reduced=69)
    assert_no_worse(actual, run(reference, tokens, leaves, dtype, upstream), truth)


@pytest.mark.parametrize(
    ("classes", "shape", "width"),
    [
        (1, (1,), 1),
        (7, (5,), 3),
        (3, (2, 40), 17),
        (40, (2, 2, 3), 129),
        (5, (0,), 8),
        (5, (2, 0), 8),
        (300, (3,), 700),
        (1, (16,), 8),  # a class fills a program of backward to its last token
        (1, (32,), 8),
        (1, (600,), 256),  # and more programs than are joined at a time
    ],
)
@pytest.mark.parametrize("has_position", [False, True])
def test_odd_shapes(classes, shape, width, has_position):
    tokens = draw(classes, *shape)
    leaves = [randn(classes, width), randn(shape[-1] + 2, width) if has_position else None]
    upstream = randn(*shape, width, grad=False)
    actual = run(embedding, tokens, leaves, None, upstream)
    assert_near_truth(actual, run(reference, tokens, doubles(leaves), None, upstream.double()), reduced=1000)


def tied(function, tokens, weight, position, upstream):
    """The gradients of a table that is the output layer's weight too, and of the position's."""
    x, head = function(tokens, weight, position)
    return gradients([torch.nn.functional.linear(x, head)], [weight, position], [upstream])


@pytest.mark.parametrize(
    ("classes", "shape", "width"), [(50, (3, 23), 96), (1, (600,), 256), (40, (2, 2, 3), 129), (5, (2, 0), 8)]
)
def test_a_table_that_is_the_output_layer_too_gets_both_gradients(classes, shape, width):
    tokens = draw(classes, *shape)
    leaves = [randn(classes, width), randn(shape[-1], width)]
    upstream = randn(*shape, classes, grad=False)
    actual = tied(tied_embedding, tokens, *leaves, upstream)
    truth = tied(lambda t, w, p: (reference(t, w, p), w), tokens, *doubles(leaves), upstream.double())
    assert_near_truth(actual, truth, reduced=1000)
    assert_equal(actual, tied(lambda t, w, p: (embedding(t, w, p), w), tokens, *leaves, upstream))


def test_tied_in_float64():
    tokens, leaves = draw(6, 2, 5), [randn(6, 8, dtype=torch.float64), randn(7, 8, dtype=torch.float64)]

    def logits(*tables):
        return torch.nn.functional.linear(*tied_embedding(tokens, *tables))

    assert torch.autograd.gradcheck(logits, leaves, fast_mode=True)


@pytest.mark.parametrize("used", ["only the embedding", "only the head", "the head without gaps between its columns"])
def test_a_tied_table_of_which_half_is_used(used):
    tokens, weight = draw(9, 3, 7), randn(9, 16)
    x, head = tied_embedding(tokens, weight)
    plain = reference(tokens, weight)
    if used == "only the embedding":
        assert_equal(gradients([x], [weight], [torch.ones_like(x)]), gradients([plain], [weight], [torch.ones_like(x)]))
    elif used == "only the head":
        assert_equal(gradients([2 * head], [weight], [torch.ones_like(head)]), [torch.full_like(weight, 2.0)])
    else:  # a gradient that is expanded from one number
        found = gradients([x.sum() + head.sum()], [weight], [torch.ones((), device=DEVICE)])
        torch.testing.assert_close(
            found, gradients([plain.sum() + weight.sum()], [weight], [torch.ones((), device=DEVICE)])
        )


def test_a_tied_table_that_is_frozen_stays_so():
    x, head = tied_embedding(draw(9, 3, 7), randn(9, 16).detach(), randn(7, 16))
    assert x.requires_grad and not head.requires_grad


def test_gradcheck_in_float64():
    tokens, leaves = draw(6, 2, 5), [randn(6, 8, dtype=torch.float64), randn(7, 8, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *tables: embedding(tokens, *tables), leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_table_in_float64_is_summed_in_float64(dtype):
    tokens, weight = draw(1, 64), randn(1, 8, dtype=torch.float64)
    upstream = randn(64, 8, dtype=dtype, grad=False)
    _, gradient = run(embedding, tokens, [weight], dtype, upstream)
    assert torch.allclose(gradient, upstream.double().sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_any_layout_of_tokens_and_tables(index):
    tokens = draw(20, 3, 9).to(index)[:, :-1]
    weight = randn(24, 20, grad=False).t().requires_grad_()
    upstream = randn(3, 8, 24, grad=False).transpose(0, 1).contiguous().transpose(0, 1)
    actual = run(embedding, tokens, [weight], None, upstream)
    assert_near_truth(actual, run(reference, tokens, doubles([weight]), None, upstream.double()), reduced=24)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_table_gets_no_gradient(frozen):
    tables = [randn(10, 16), randn(8, 16)]
    tables[frozen].requires_grad_(False)
    embedding(draw(10, 2, 8), *tables).sum().backward()
    assert tables[frozen].grad is None and tables[1 - frozen].grad is not None


def test_same_bits_on_every_run_even_in_poisoned_memory():
    tokens, leaves, upstream = draw(10, 4, 33), [randn(10, 40), randn(40, 40)], randn(4, 33, 40, grad=False)
    assert_deterministic(lambda: run(embedding, tokens, leaves, torch.bfloat16, upstream))


def test_a_token_outside_of_the_table_is_not_a_number_and_touches_no_gradient():
    tokens = torch.tensor([[0, -1, 2, 9], [-(2**40), 2**32, 0, 8]] + [[-1, -1, 9, 9]] * 10, device=DEVICE)
    weight = randn(9, 16)
    out = embedding(tokens, weight)
    assert torch.equal(out.isnan().any(-1), (tokens < 0) | (tokens > 8))
    (gradient,) = torch.autograd.grad(out, weight, torch.ones_like(out))
    expected = torch.zeros(9, 16, device=DEVICE)
    expected[0], expected[[2, 8]] = 2.0, 1.0
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("classes", [5, 65534, 65535])
def test_tokens_are_sorted_by_counting_and_by_keys_of_16_and_32_bits(classes, dtype, monkeypatch):
    tokens = draw(classes, 300).to(dtype)
    tokens[[3, 40, 41, 299]] = torch.tensor([-(2**31), classes, 2**31 - 1, classes - 1], device=DEVICE, dtype=dtype)
    expected, order = tokens.clamp(-1, classes).sort(stable=True)
    for counted in (300, 299):
        monkeypatch.setattr(kernels, "_COUNTED", counted)
        ordered, found = kernels.sort(tokens, classes)
        is_short = counted < 300 and classes <= 65534
        assert ordered.dtype == (torch.int16 if is_short else torch.int32) and torch.equal(found, order)
        assert torch.equal(ordered.long() + is_short * kernels._SHORT_BIAS, expected)


@pytest.mark.parametrize("has_position", [False, True])
@pytest.mark.parametrize("classes", [9, 40, 70000])
def test_longer_lists_of_tokens_give_the_same_bits(classes, has_position, monkeypatch):
    tokens, upstream = draw(classes, 1, 70), randn(1, 70, 24, grad=False)
    tokens[0, 5] = classes + 3
    leaves = [randn(classes, 24), randn(75, 24) if has_position else None]
    counted = run(embedding, tokens, leaves, torch.bfloat16, upstream)
    monkeypatch.setattr(kernels, "_COUNTED", 0)
    by_keys = run(embedding, tokens, leaves, torch.bfloat16, upstream)
    assert all(torch.equal(a, b) for a, b in zip(counted[1:], by_keys[1:], strict=True))


def test_no_second_derivative():
    weight = randn(9, 16)
    (gradient,) = torch.autograd.grad(embedding(draw(9, 3), weight).sum(), weight, create_graph=False)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(embedding(draw(9, 3), weight).sum(), weight, create_graph=True)
    assert gradient.shape == weight.shape


def test_a_compiler_sees_plain_pytorch():
    tokens, leaves = draw(20, 2, 8), [randn(20, 16), randn(8, 16)]
    compiled = torch.compile(lambda *tables: embedding(tokens, *tables, dtype=torch.bfloat16), backend="aot_eager")
    upstream = randn(2, 8, 16, grad=False)
    expected = run(reference, tokens, leaves, torch.bfloat16, upstream)
    out = compiled(*leaves)
    assert_equal([out, *gradients([out], leaves, [upstream])], expected)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(4, 8)), TypeError, "tokens must be an int64"),
        ((torch.zeros(2, dtype=torch.int64), torch.zeros(8)), ValueError, "weight must be a matrix"),
        ((torch.zeros(2, dtype=torch.int64), torch.zeros(4, 8).int()), TypeError, "weight has dtype"),
        ((torch.zeros(2, dtype=torch.int64), torch.zeros(4, 8), torch.zeros(4, 7)), ValueError, "position has shape"),
        ((torch.zeros(5, dtype=torch.int64), torch.zeros(4, 8), torch.zeros(4, 8)), ValueError, "more than the 4"),
        ((torch.zeros(2, dtype=torch.int64), torch.zeros(4, 8), torch.zeros(4, 8).half()), TypeError, "convert"),
    ],
)
def test_bad_input_is_one_sentence(arguments, kind, message):
    with pytest.raises(kind, match=message):
        embedding(*arguments)


@on_gpu
def test_a_captured_graph_replays_forward_and_backward():
    tokens, leaves = draw(5000, 4, 512), [randn(5000, 768), randn(512, 768)]
    upstream = randn(4, 512, 768, grad=False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(embedding, tokens, leaves, torch.bfloat16, upstream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = run(embedding, tokens, leaves, torch.bfloat16, upstream)
    tokens.copy_(draw(5000, 4, 512))
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(found, run(embedding, tokens, leaves, torch.bfloat16, upstream))
