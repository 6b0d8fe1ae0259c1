import sys

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ops.contract import (
    DEVICE,
    DTYPES,
    HOPPER,
    assert_compiles,
    assert_deterministic,
    assert_near_truth,
    assert_no_worse,
    on_gpu,
)
from ranks import run_ranks
from tilewright.ops import linear_cross_entropy
from tilewright.ops.cross_entropy import kernels as cross_entropy_kernels
from tilewright.ops.linear_cross_entropy import kernels, matmuls
from tilewright.ops.linear_cross_entropy.op import cost, reference
from tilewright.runtime import hopper

OP = sys.modules["tilewright.ops.linear_cross_entropy.op"]
PLAN = sys.modules["tilewright.plan.memory"]
MEMORY = sys.modules["tilewright.ops.linear_cross_entropy.memory"]
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed and weighted": {"class_weight": True, "label_smoothing": 0.2},
    "all": {"class_weight": True, "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0},
}
# Of whole tiles of the sum; few enough for the interpreter, and on a GPU so many that chance does not decide.
TOKENS, WIDTH, CLASSES = (1024, 256, 384) if DEVICE == "cuda" else (40, 32, 80)
FEW = 256 * 384 * 2 if DEVICE == "cuda" else 16 * 128 * 2  # bytes for a part of the tokens
# How the weight's gradient is added up: bytes of memory, and from how many tokens a chunk on.
WAYS = {"one chunk": (10**9, 512), "summed": (FEW, 16), "computed again": (FEW, 10**9)}


@pytest.fixture(params=WAYS)
def memory(request, monkeypatch):
    memory, summed_from = WAYS[request.param]
    monkeypatch.setattr(MEMORY, "_SUMMED_FROM", summed_from)
    return memory


def problem(dtype, options, tokens=TOKENS, width=WIDTH, classes=CLASSES, ignored=True):
    torch.manual_seed(tokens + width + classes)
    make = {"device": DEVICE, "dtype": torch.float32}
    shapes = ((tokens, width), (classes, width), (classes,))
    leaves = [(torch.randn(*shape, **make) * 24 / (24 + width)).to(dtype).requires_grad_() for shape in shapes]
    targets = torch.randint(classes, (tokens,), device=DEVICE)
    if ignored:
        targets[3:12] = -100
    options = dict(options)
    if options.pop("class_weight", False):
        options["class_weight"] = (torch.rand(classes, **make) + 0.5).to(dtype)
    return leaves, targets, options


def run(function, leaves, targets, options, upstream=None):
    x, weight, bias = leaves
    loss = function(x, weight, targets, bias, **options)
    loss = loss[0] if isinstance(loss, tuple) else loss
    upstream = torch.ones_like(loss) if upstream is None else upstream.to(loss)
    wanted = [t for t in leaves if t is not None and t.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, wanted, upstream)]


def truth(leaves, targets, options, upstream=None):
    double = [None if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in leaves]
    options = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return run(reference, double, targets, options, upstream)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_gradients_match_float64_and_are_no_worse_than_torch(dtype, name, memory):
    leaves, targets, options = problem(dtype, OPTIONS[name])
    expected = truth(leaves, targets, options)
    actual = run(linear_cross_entropy, leaves, targets, {**options, "memory": memory})
    peer = run(reference, leaves, targets, options)
    assert [a.dtype for a in actual] == [torch.float32, dtype, dtype, dtype]
    assert_near_truth(actual[:1], peer[:1], reduced=CLASSES)
    if DEVICE == "cuda" or dtype != torch.bfloat16:
        assert_no_worse(actual, peer, expected)
    else:  # Triton's interpreter cuts bfloat16 off instead of rounding it, at the logits' gradient and at the sum
        for a, p, e in zip(actual, peer, expected, strict=True):
            assert (a.double() - e).norm() <= 4.0 * (p.double() - e).norm() + 1e-5 * e.norm()


@pytest.mark.parametrize("is_hopper", [True, False] if HOPPER else [False])
def test_a_sum_over_many_chunks_stays_as_exact_as_one_matmul(is_hopper, monkeypatch):
    monkeypatch.setattr(hopper, "ready", lambda device, *names: is_hopper)
    large = int(is_hopper)  # a scale is a class's over columns or, on a Hopper, a column's over classes
    torch.manual_seed(0)
    left, right = (torch.randn(320, n, device=DEVICE).bfloat16() for n in (CLASSES, WIDTH))
    (left, right)[large][:, 7] *= 2.0**34  # which would take all of a range that it shared with others
    truth = left.double().t() @ right.double()
    errors = []
    for step in (320, 16):
        total = torch.empty(CLASSES, WIDTH, device=DEVICE, dtype=torch.bfloat16)
        shape, dtype = kernels.scales(total)
        scales = torch.empty(shape, device=DEVICE, dtype=dtype)
        for first in range(0, 320, step):
            part = slice(first, first + step)
            kernels.launch(left[part], right[part], total, scales, first == 0, first + step == 320)
        errors.append((total.double() - truth).norm(dim=1 - large) / truth.norm(dim=1 - large))
    # 19 more roundings, three bits finer than the last, of sums that grow: sqrt(1 + 9.5 / 64) times the error. To
    # bfloat16 they would make it three times as large. What one row or column gets is chance, of few elements.
    assert (errors[1] <= 2.0 * errors[0]).all() and errors[1].mean() <= 1.1 * errors[0].mean(), errors


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_comes_from_above_is_multiplied_in(dtype, reduction, memory):
    leaves, targets, options = problem(dtype, {"reduction": reduction})
    upstream = torch.tensor(0.37) if reduction == "mean" else torch.linspace(-1.0, 2.0, TOKENS)
    actual = run(linear_cross_entropy, leaves, targets, {**options, "memory": memory}, upstream)
    expected = truth(leaves, targets, options, upstream)
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).norm() <= 0.03 * e.norm()


@pytest.mark.parametrize(("tokens", "width", "classes"), [(1, 1, 2), (17, 3, 5), (33, 8, 130), (20, 30, 64), (0, 4, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_shape(tokens, width, classes, dtype, memory):
    leaves, targets, options = problem(dtype, {"reduction": "sum"}, tokens, width, classes, ignored=False)
    actual = run(linear_cross_entropy, leaves, targets, {**options, "memory": memory})
    for a, e in zip(actual, truth(leaves, targets, options), strict=True):
        assert (a.double() - e).norm() <= (0.03 if dtype == torch.bfloat16 else 1e-5) * (e.norm() + 1e-6)


@pytest.mark.parametrize("classes", [80, 77])
def test_a_last_chunk_of_one_token(classes, monkeypatch):
    monkeypatch.setattr(MEMORY, "_SUMMED_FROM", 16)
    leaves, targets, _ = problem(torch.bfloat16, {}, 33, 32, classes, ignored=False)
    actual = run(linear_cross_entropy, leaves, targets, {"memory": 16 * 128 * 2 + 33 * 64})
    for a, e in zip(actual, truth(leaves, targets, {}), strict=True):
        assert (a.double() - e).norm() <= 0.03 * e.norm()


def test_gradcheck_in_float64():
    leaves, targets, options = problem(torch.float64, {"z_loss": 1e-2}, tokens=27, width=4, classes=9)
    check = lambda x, w, b: linear_cross_entropy(x, w, targets, b, memory=16 * 64 * 8, **options)  # noqa: E731
    assert torch.autograd.gradcheck(check, leaves, fast_mode=True)


def test_logits_are_never_held_beyond_the_memory(monkeypatch):
    leaves, targets, _ = problem(torch.float32, {}, 40, 24, 77)
    seen = []
    compute = matmuls.logits
    monkeypatch.setattr(matmuls, "logits", lambda x, w, b, out: (seen.append(out.shape), compute(x, w, b, out))[1])
    run(linear_cross_entropy, leaves, targets, {"memory": 16 * 128 * 4})
    assert seen == [(16, 77), (16, 77), (8, 77)]
    seen.clear()
    run(linear_cross_entropy, leaves, targets, {})
    assert seen == [(40, 77)]  # so few bytes go at once
    seen.clear()
    monkeypatch.setattr(PLAN, "_ALL_LOGITS", 0)
    monkeypatch.setattr(PLAN, "_LEAST_TOKENS", 20)
    run(linear_cross_entropy, leaves, targets, {})
    assert seen == [(40, 77)]  # and so do no more than twice the least tokens
    seen.clear()
    monkeypatch.setattr(PLAN, "_LEAST_TOKENS", 1)
    run(linear_cross_entropy, leaves, targets, {})
    assert seen == [(16, 77), (16, 77), (8, 77)]  # 16 tokens are the least


def test_a_call_that_names_no_memory_has_384_mb_of_logits_at_most_or_all_of_few_tokens():
    assert MEMORY.default_memory(16384, 128256, 2) == 384 * 10**6
    assert MEMORY.default_memory(8192, 50304, 2) == 1024 * 50304 * 2
    for tokens, classes in ((2048, 100352), (16000, 4096), (1, 300_000)):  # room for all of them, in whole tiles
        assert MEMORY.default_memory(tokens, classes, 2) >= (tokens + 256) * classes * 2


@pytest.mark.parametrize("memory", [16 * 64 * 4, 10**9])
def test_the_host_never_asks_the_device(memory):
    """Whatever is ignored: to read a value, or a shape that depends on one, is to wait."""
    leaves, targets, _ = problem(torch.float32, {}, 40, 24, 50)

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            waits = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "index.Tensor")
            assert not any(word in str(function) for word in waits), f"{function} waits for the device"
            return function(*arguments, **(options or {}))

    for ignored in (0, 7, 40):
        targets[:ignored] = -100
        options = (-100, 0.0, 0.0, 0.0, "mean", memory, False, False, True, True, True, None)
        with torch.no_grad(), Reads():
            loss, *_ = OP._launch(OP.Inputs(*leaves, targets, None, *options))
        assert loss.isfinite()


@on_gpu
@pytest.mark.parametrize("classes", [50257, 50304])
def test_the_host_never_waits_for_the_device(classes):
    x = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(classes, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(classes, (4096,), device="cuda")
    linear_cross_entropy(x, weight, targets).backward()
    targets[:100] = -100
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear_cross_entropy(x, weight, targets).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_few_kernels_serve_any_number_of_tokens(monkeypatch):
    """By two passes too: the columns of a slice do not follow the number of tokens."""
    monkeypatch.setattr(MEMORY, "_SUMMED_FROM", 10**9)
    made = []
    real = cross_entropy_kernels.tiles_launch

    def count(*those):
        made.append(those[:3])
        return (*real(*those)[:2], lambda *arguments, **how: None)  # launches none of them

    monkeypatch.setattr(cross_entropy_kernels, "tiles_launch", count)
    for tokens in range(33, 130, 7):
        leaves, targets, _ = problem(torch.bfloat16, {}, tokens, 16, 333)
        run(linear_cross_entropy, leaves, targets, {"memory": 3000})
    assert len(made) > 14 and len(set(made)) <= 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("classes", [9, 77, 130, 1001])
def test_matmuls_are_over_whole_vectors_of_classes(classes, dtype, monkeypatch):
    """A matmul over another number of classes is many times slower, but for the few that are left behind them."""
    leaves, targets, options = problem(dtype, {"reduction": "sum"}, 40, 24, classes, ignored=False)
    seen, real = [], matmuls._matmul
    monkeypatch.setattr(
        matmuls, "_matmul",
        lambda left, right, out, **how: (seen.append((*left.shape, right.shape[1])), real(left, right, out, **how))[1],
    )  # fmt: skip
    actual = run(linear_cross_entropy, (leaves[0], leaves[1], None), targets, options)
    sizes = {size for shape in seen for size in shape} - {40, 24}
    assert sizes <= {classes // 8 * 8, classes % 8}
    for a, e in zip(actual, truth((leaves[0], leaves[1], None), targets, options), strict=True):
        assert (a.double() - e).norm() <= (0.03 if dtype == torch.bfloat16 else 1e-5) * (e.norm() + 1e-6)


@pytest.mark.parametrize(
    ("dtype", "options", "tokens", "width", "classes"),
    [
        (torch.bfloat16, {}, 48, 512, 80),
        (torch.bfloat16, {"reduction": "none"}, 48, 512, 80),
        (torch.float32, {"label_smoothing": 0.2}, 48, 512, 77),
        (torch.float32, {"label_smoothing": 0.2, "reduction": "sum"}, 48, 512, 200),  # rows in several tiles
        (torch.float64, {}, 48, 512, 80),
    ],
    ids=str,
)
def test_what_is_not_logits_lies_in_the_gradient_of_x_until_that_is_there(
    dtype, options, tokens, width, classes, monkeypatch, request
):
    monkeypatch.setattr(MEMORY, "_SUMMED_FROM", 16)
    if classes == 200:
        in_tiles = lambda columns, size, given: cross_entropy_kernels.Tiling(-(-columns // 32), 32, 32, 1)  # noqa: E731
        monkeypatch.setattr(cross_entropy_kernels, "_tiling", in_tiles)
        cross_entropy_kernels.tiles_launch.cache_clear()
        request.addfinalizer(cross_entropy_kernels.tiles_launch.cache_clear)
    leaves, targets, options = problem(dtype, options, tokens, width, classes, ignored=False)
    places, launch = [], OP.launch

    def watched(*inputs, **others):
        found = launch(*inputs, **others)
        if others["gradient"] is not None:
            places.extend(t.data_ptr() for t in (others["loss"], others["arrived"], *found) if t is not None)
        return found

    monkeypatch.setattr(OP, "launch", watched)
    upstream = torch.linspace(-1.0, 2.0, tokens) if options.get("reduction") == "none" else None
    memory = 16 * -(-classes // 64) * 64 * dtype.itemsize
    actual = run(linear_cross_entropy, leaves, targets, {**options, "memory": memory}, upstream)
    dx = actual[1]
    each = 4 if classes == 200 else 2  # of a chunk: losses, counts, and where others need them statistics
    assert len(places) == each * tokens // 16 and all(0 <= at - dx.data_ptr() < dx.nbytes for at in places)
    for a, e in zip(actual, truth(leaves, targets, options, upstream), strict=True):
        assert (a.double() - e).norm() <= (0.03 if dtype == torch.bfloat16 else 1e-5) * e.norm()


@pytest.mark.parametrize(
    ("options", "ignored", "dtype"),
    [("plain", True, torch.bfloat16), ("none", False, torch.float16), ("all", False, torch.bfloat16)],
)
def test_a_sum_in_float32_where_half_of_the_memory_has_room_for_it(options, ignored, dtype):
    tokens, width, classes = 80, 16, 80
    leaves, targets, options = problem(dtype, OPTIONS[options], tokens, width, classes, ignored)
    upstream = torch.linspace(-1.0, 2.0, tokens, device=DEVICE) if options.get("reduction") == "none" else None
    others = tokens * 8  # losses and counts
    memory = 2 * (4 * classes * width + others)
    x, dweight = leaves[0].detach(), torch.empty_like(leaves[1])
    for needs_x in (True, False):
        plan = MEMORY.plan_chunks(x, classes, memory, False, False, needs_x, dweight)
        assert plan.total is not None and not plan.again and plan.chunk <= tokens // 2
        assert plan.total.nbytes + plan.buffer.nbytes + others <= memory
    assert MEMORY.plan_chunks(x, classes, memory - 2, False, False, True, dweight).total is None
    # All at once: nothing to add.
    assert MEMORY.plan_chunks(x, classes, 10**9, False, False, True, dweight).total is None
    actual = run(linear_cross_entropy, leaves, targets, {**options, "memory": memory}, upstream)
    again = run(linear_cross_entropy, leaves, targets, {**options, "memory": 10**9}, upstream)
    # One chunk is rounded once, and so is a sum in float32: they differ where they lie between two numbers.
    for a, e in zip(actual, again, strict=True):
        assert (a != e).double().mean() <= 0.01
        assert (a.double() - e.double()).norm() <= 1e-3 * e.double().norm()


@pytest.mark.parametrize("ignored", [False, True])
def test_who_asks_for_sums_in_float32_gets_no_other(ignored, monkeypatch):
    monkeypatch.setattr(MEMORY, "_SUMMED_FROM", 16)
    leaves, targets, _ = problem(torch.bfloat16, {}, ignored=ignored)
    once, summed, exact = (
        run(linear_cross_entropy, leaves, targets, options)[2].double()
        for options in ({"memory": 10**9}, {"memory": FEW}, {"memory": FEW, "sum_dtype": torch.float32})
    )
    # Rounded once, it is the gradient of one chunk but for what lies between two numbers; rounded at each, it is not.
    assert (exact != once).double().mean() <= 0.02 and (summed != once).double().mean() >= 0.03


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize("classes", [130, 256, 1000, 32000])
def test_a_vocabulary_is_never_so_small_that_chunks_are(classes, needs_x):
    tokens = torch.empty(4096, 512, dtype=torch.bfloat16)
    memory = tokens.shape[0] * classes * 2 // 8
    plan = MEMORY.plan_chunks(tokens, classes, memory, False, False, needs_x, None)
    assert plan.chunk >= 4096 / 8 / 4 and plan.buffer.nbytes <= memory  # half of the bytes for half as much each


def test_a_first_pass_has_its_logits_in_the_memory_of_the_gradient(monkeypatch):
    monkeypatch.setattr(MEMORY, "_SUMMED_FROM", 10**9)
    leaves, targets, _ = problem(torch.bfloat16, {}, ignored=False)
    places = []
    compute = matmuls.logits
    monkeypatch.setattr(
        matmuls, "logits", lambda x, w, b, out: (places.append((out.shape, out.data_ptr())), compute(x, w, b, out))[1]
    )
    _, _, dweight, _ = run(linear_cross_entropy, leaves, targets, {"memory": 1})
    first = [(shape, at) for shape, at in places if shape[1] == CLASSES]
    assert first and all(0 <= at - dweight.data_ptr() < dweight.nbytes for _, at in first)
    assert sum(shape[0] for shape, _ in first) == TOKENS
    assert not any(0 <= at - dweight.data_ptr() < dweight.nbytes for shape, at in places if shape[1] < CLASSES)


def test_what_ignored_tokens_hold_reaches_nothing_however_the_sum_is_made(memory):
    leaves, targets, _ = problem(torch.bfloat16, {})
    clean = run(linear_cross_entropy, leaves, targets, {"memory": memory})
    with torch.no_grad():
        leaves[0][targets == -100] = 1e3  # of what is no number, 0 times that is none, as in PyTorch
    for a, b in zip(run(linear_cross_entropy, leaves, targets, {"memory": memory}), clean, strict=True):
        assert torch.equal(a, b)


def test_large_logits_lose_nothing_in_a_second_pass():
    weight = torch.tensor([[1.0], [1.0], [0.0]] * 6, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    x = torch.full((20, 1), 2.0**20, device=DEVICE, dtype=torch.bfloat16)
    targets = torch.zeros(20, dtype=torch.int64, device=DEVICE)
    gradients = [
        torch.autograd.grad(linear_cross_entropy(x, weight, targets, memory=memory), weight)[0].double()
        for memory in (10**9, 1)
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.02, atol=0.0)


def test_a_new_number_of_tokens_is_no_new_graph():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    compiled = torch.compile(linear_cross_entropy, backend=counter)
    weight = torch.randn(9, 4, device=DEVICE, requires_grad=True)
    for tokens in (5, 6, 7, 8):
        compiled(torch.randn(tokens, 4, device=DEVICE), weight, torch.randint(9, (tokens,), device=DEVICE))
    assert counter.frame_count <= 2


def test_leading_dimensions_a_log_sum_exp_and_a_frozen_weight():
    (x, weight, bias), targets, _ = problem(torch.float32, {}, 40, 24, 77)
    x3, targets3 = x.detach().view(4, 10, 24).requires_grad_(), targets.view(4, 10)
    loss, lse = linear_cross_entropy(x3, weight.detach(), targets3, bias.detach(), return_lse=True)
    loss.backward()
    torch.testing.assert_close(lse, torch.logsumexp(F.linear(x3, weight, bias).detach(), -1))
    torch.testing.assert_close(x3.grad.view(40, 24), truth((x, weight, bias), targets, {})[1].float())
    assert not lse.requires_grad


def test_a_weight_tied_to_the_embedding_gets_both_gradients():
    torch.manual_seed(0)
    weight = torch.randn(50, 8, device=DEVICE).requires_grad_()
    tokens = torch.randint(50, (40,), device=DEVICE)
    gradients = []
    for loss_of in (linear_cross_entropy, lambda *a: reference(*a)[0]):
        hidden = F.embedding(tokens, weight).tanh()
        gradients += torch.autograd.grad(loss_of(hidden, weight, tokens.roll(1)), weight)
    torch.testing.assert_close(*gradients)


def test_gradients_accumulate_over_micro_batches():
    leaves, targets, _ = problem(torch.float32, {"reduction": "sum"}, 40, 24, 77, ignored=False)
    x, weight, bias = leaves
    for part in (slice(0, 30), slice(30, 40)):
        linear_cross_entropy(x[part], weight, targets[part], bias, reduction="sum").backward()
    for leaf, expected in zip(leaves, truth(leaves, targets, {"reduction": "sum"})[1:], strict=True):
        torch.testing.assert_close(leaf.grad, expected.float())


def test_under_autocast_the_matmuls_are_low_and_the_weights_gradient_is_float32(memory):
    leaves, targets, _ = problem(torch.float32, {})
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        actual = run(linear_cross_entropy, leaves, targets, {"memory": memory})
        peer = run(reference, leaves, targets, {})
    assert [a.dtype for a in actual] == [torch.float32] * 4
    expected = truth(leaves, targets, {})
    # Two of Triton's interpreter's cuts instead of roundings are in it.
    for a, p, e in zip(actual, peer, expected, strict=True):
        assert (a.double() - e).norm() <= (1.05 if DEVICE == "cuda" else 2.5) * (
            p.double() - e
        ).norm() + 1e-4 * e.norm()


def test_a_weight_of_the_other_sixteen_bits_is_refused_under_autocast():
    leaves, targets, _ = problem(torch.float16, {})
    with torch.autocast(DEVICE, dtype=torch.bfloat16), pytest.raises(TypeError, match="convert weight"):
        linear_cross_entropy(*leaves[:2], targets)


def test_float16_survives_a_loss_scale():
    leaves, targets, _ = problem(torch.float16, {})
    upstream = torch.tensor(4096.0)
    actual = run(linear_cross_entropy, leaves, targets, {"memory": FEW}, upstream)
    for a, e in zip(actual[1:], truth(leaves, targets, {}, upstream)[1:], strict=True):
        assert (a.double() - e).norm() <= 4e-3 * e.norm()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_float16_keeps_the_logits_of_one_chunk_for_backward(reduction, monkeypatch):
    leaves, targets, options = problem(torch.float16, {"reduction": reduction, "label_smoothing": 0.1})
    seen, compute = [], matmuls.logits
    monkeypatch.setattr(matmuls, "logits", lambda x, w, b, out: (seen.append(out.shape), compute(x, w, b, out))[1])
    loss = linear_cross_entropy(*leaves[:2], targets, leaves[2], **options)
    upstream = torch.ones_like(loss)
    first = torch.autograd.grad(loss, leaves, upstream, retain_graph=True)
    assert seen == [(TOKENS, CLASSES)]
    second = torch.autograd.grad(loss, leaves, upstream)  # their gradient has taken their place: once more
    assert len(seen) == 2 and all(map(torch.equal, first, second))
    for a, e in zip(first, truth(leaves, targets, options)[1:], strict=True):
        assert (a.double() - e).norm() <= 4e-3 * e.norm()
    seen.clear()
    with torch.no_grad():
        linear_cross_entropy(*leaves[:2], targets, leaves[2], **options)
    run(linear_cross_entropy, leaves, targets, {**options, "memory": FEW})
    assert len(seen) > 3


def test_all_targets_ignored_is_zero_and_so_are_the_gradients(memory):
    leaves, targets, _ = problem(torch.bfloat16, {})
    loss, *gradients = run(linear_cross_entropy, leaves, torch.full_like(targets, -100), {"memory": memory})
    assert loss == 0 and not any(g.any() for g in gradients)


def test_a_target_out_of_range_is_loud(monkeypatch):
    leaves, targets, _ = problem(torch.float32, {}, 40, 24, 77)
    targets[0] = 77
    assert linear_cross_entropy(*leaves[:2], targets, leaves[2]).isnan()
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with pytest.raises(ValueError, match="target 77 is not ignore_index"):
        linear_cross_entropy(*leaves[:2], targets, leaves[2])


def test_one_backward_alone_and_no_second_derivative():
    leaves, targets, _ = problem(torch.float32, {})
    loss = linear_cross_entropy(*leaves[:2], targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(linear_cross_entropy(*leaves[:2], targets), leaves[0], create_graph=True)


def test_without_a_gradient_only_the_loss_is_computed():
    leaves, targets, _ = problem(torch.float32, {})
    with torch.no_grad():
        loss = linear_cross_entropy(*leaves[:2], targets)
    torch.testing.assert_close(loss, F.cross_entropy(leaves[0] @ leaves[1].t(), targets))
    assert not loss.requires_grad


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False)], ids=str)
def test_opcheck(needs):
    (x, weight, bias), targets, _ = problem(torch.float32, {}, tokens=6, width=4, classes=9, ignored=False)
    x, weight, bias = (t.detach().requires_grad_(n) for t, n in zip((x, weight, bias), needs, strict=True))
    first, rest = (x, weight, bias, targets, None, -100, 0.1, 0.0, 0.0), (10**6, False, True)
    for reduction, computed in (("mean", needs), ("none", (False, False, False))):
        arguments = (*first, reduction, *rest, *computed, None)
        torch.library.opcheck(torch.ops.tilewright.linear_cross_entropy.default, arguments)


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [(torch.float32, "mean"), (torch.float32, "none"), (torch.bfloat16, "none"), (torch.float16, "sum")],
    ids=str,
)
def test_compiles_into_one_graph_with_the_same_result(dtype, reduction):
    leaves, targets, _ = problem(dtype, {})
    options = {"z_loss": 1e-3, "reduction": reduction, "memory": FEW}
    assert_compiles(lambda x, w, b: (linear_cross_entropy(x, w, targets, b, **options),), leaves)
    leaves[1].requires_grad_(False)
    assert_compiles(lambda x, w: (linear_cross_entropy(x, w, targets, **options),), leaves[:2])


def test_same_bits_on_every_run_even_in_poisoned_memory(memory):
    leaves, targets, options = problem(torch.bfloat16, OPTIONS["all"])
    assert_deterministic(lambda: run(linear_cross_entropy, leaves, targets, {**options, "memory": memory}))


def test_the_plain_path_agrees_with_the_kernel(monkeypatch):
    leaves, targets, options = problem(torch.float32, OPTIONS["all"])
    kernel = run(linear_cross_entropy, leaves, targets, options)
    monkeypatch.setattr(OP.dispatch, "runs_kernel", lambda x: False)
    for a, b in zip(run(linear_cross_entropy, leaves, targets, options), kernel, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def _sharded(rank, ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    head = torch.nn.Linear(24, 78)
    x, targets = torch.randn(ranks, 30, 24), torch.randint(78, (ranks, 30))
    whole = [p.detach().clone().requires_grad_() for p in (head.weight, head.bias)]
    losses = [reference(x[r], whole[0], targets[r], whole[1])[0] for r in range(ranks)]
    expected = torch.autograd.grad(sum(losses) / ranks, whole)
    fully_shard(head, mesh=mesh)
    loss = linear_cross_entropy(x[rank], head.weight, targets[rank], head.bias)
    loss.backward()
    torch.testing.assert_close(loss, losses[rank])
    for parameter, gradient in zip((head.weight, head.bias), expected, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient)


@pytest.mark.skipif(DEVICE != "cpu", reason="two processes over gloo, on the CPU")
def test_a_weight_sharded_by_fsdp2_gets_the_mean_of_the_ranks_gradients():
    run_ranks(_sharded, 2, 2)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"x": 3}, TypeError, "tensor"),
        ({"x": torch.zeros(3, 5)}, ValueError, "must agree"),
        ({"weight": torch.zeros(8)}, ValueError, "matrix"),
        ({"weight": torch.zeros(8, 4, dtype=torch.bfloat16)}, TypeError, "autocast"),
        ({"bias": torch.zeros(7)}, ValueError, "bias has shape"),
        ({"targets": torch.zeros(3)}, TypeError, "int64"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, ValueError, "targets have shape"),
        ({"weight": torch.zeros(1, 4)}, ValueError, "vocabulary"),
        ({"class_weight": torch.ones(7)}, ValueError, "class_weight has shape"),
        ({"memory": 0}, ValueError, "memory"),
        ({"sum_dtype": torch.bfloat16}, ValueError, "give torch.float32, or nothing"),
        ({"x": torch.zeros(3, 0), "weight": torch.zeros(8, 0)}, ValueError, "must agree"),
        ({"reduction": "avg"}, ValueError, "mean, sum, none"),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence(change, kind, message):
    arguments = {"x": torch.zeros(3, 4), "weight": torch.zeros(8, 4), "targets": torch.zeros(3, dtype=torch.int64)}
    arguments = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in {**arguments, **change}.items()}
    with pytest.raises(kind, match=message) as caught:
        linear_cross_entropy(arguments.pop("x"), arguments.pop("weight"), arguments.pop("targets"), **arguments)
    assert "\n" not in str(caught.value)


def test_cost_is_three_matmuls():
    assert cost(10, 100, 20).flops == 3 * 2 * 10 * 100 * 20


@on_gpu
@pytest.mark.parametrize(("memory", "ignored"), [(None, 0), (64 * 10**6, 0), (32 * 10**6, 0), (32 * 10**6, 2048)])
def test_peak_memory_is_what_was_allowed(memory, ignored):
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(50304, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(50304, (8192,), device="cuda")
    targets[:ignored] = -100
    limit = memory or 8192 * 50304 * 2 // 8
    linear_cross_entropy(x, weight, targets, memory=memory).backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = linear_cross_entropy(x, weight, targets, memory=memory)
    results = (x.numel() + weight.numel()) * 2 + 512  # gradients, and the least that the allocator gives for the loss
    assert torch.cuda.max_memory_allocated() - before - results <= (1.05 if ignored else 1.0) * limit
    assert loss.isfinite()


@on_gpu
def test_more_than_two_to_the_31_logits_and_an_odd_vocabulary():
    x = torch.randn(16500, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(131073, 64, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(131073, (16500,), device="cuda")
    results = [
        run(linear_cross_entropy, (x, weight, None), targets, {"memory": memory, "reduction": "sum"})
        for memory in (2**40, 2**28)
    ]
    for one, chunked in zip(*results, strict=True):
        assert (one.double() - chunked.double()).norm() <= 4e-3 * one.double().norm()
