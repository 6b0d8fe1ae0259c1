import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ops.contract import (
    DEVICE,
    DTYPES,
    assert_compiles,
    assert_deterministic,
    assert_equal,
    assert_near_truth,
    assert_no_worse,
    on_gpu,
    on_hopper,
)
from tilewright.measure.numerics import tolerance
from tilewright.ops import cross_entropy, linear_cross_entropy
from tilewright.ops.cross_entropy import hopper as cross_entropy_hopper
from tilewright.ops.cross_entropy import launch as cross_entropy_launch
from tilewright.ops.cross_entropy.op import cost, reference

OP = sys.modules["tilewright.ops.cross_entropy.op"]
OPTIONS = {
    "plain": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "weighted": {"weight": True},
    "weighted and smoothed": {"weight": True, "label_smoothing": 0.2},
    "z-loss": {"z_loss": 1e-2},
    "capped": {"softcap": 5.0},
    "all": {"weight": True, "label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 3.0, "reduction": "none"},
}


def problem(rows, vocabulary, dtype, options, scale=3.0):
    torch.manual_seed(rows * 1000 + vocabulary)
    logits = (scale * torch.randn(rows, vocabulary, device=DEVICE)).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)
    if rows > 2:
        targets[1] = -100
    options = dict(options)
    if options.pop("weight", False):
        options["weight"] = torch.rand(vocabulary, device=DEVICE, dtype=torch.float64).to(dtype) + 0.5
    return logits, targets, options


def run(function, logits, targets, options, upstream=None):
    loss = function(logits, targets, **options)
    loss = loss[0] if isinstance(loss, tuple) else loss
    upstream = torch.ones_like(loss) if upstream is None else upstream
    (gradient,) = torch.autograd.grad(loss, logits, upstream.to(loss.dtype))
    return loss.detach(), gradient


def truth(logits, targets, options, upstream=None):
    options = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return run(reference, logits.detach().double().requires_grad_(), targets, options, upstream)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_loss_and_gradient_match_float64_and_are_no_worse_than_torch(dtype, name):
    logits, targets, options = problem(7, 301, dtype, OPTIONS[name])
    actual, expected = run(cross_entropy, logits, targets, options), truth(logits, targets, options)
    assert actual[0].dtype == torch.float32 and actual[1].dtype == dtype
    assert_near_truth(actual, expected, reduced=301)
    if DEVICE == "cuda" or dtype != torch.bfloat16:  # Triton's interpreter cuts bfloat16 off, and most at just under 1
        assert_no_worse(actual, run(reference, logits, targets, options), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_comes_from_above_is_multiplied_in(dtype, reduction):
    logits, targets, options = problem(6, 90, dtype, {"reduction": reduction})
    upstream = torch.tensor(0.37) if reduction == "mean" else torch.linspace(-1.0, 2.0, 6)
    actual, expected = (f(logits, targets, options, upstream.to(DEVICE)) for f in (
        lambda *arguments: run(cross_entropy, *arguments), truth))  # fmt: skip
    assert_near_truth(actual, expected, reduced=90)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_factor_of_each_row_costs_no_second_rounding(dtype, inplace):
    leaf, targets, _ = problem(40, 90, dtype, {})
    factors = torch.linspace(0.3, 2.9, 40, device=DEVICE)
    loss = cross_entropy(leaf * 1.0, targets, reduction="none", inplace=inplace)
    (actual,) = torch.autograd.grad(loss, leaf, factors)
    _, expected = truth(leaf, targets, {"reduction": "none"}, factors)
    # Triton's interpreter cuts off: a whole step, where a GPU is half of one off; each time.
    step = torch.finfo(dtype).eps * 2.0 ** torch.floor(expected.abs().log2()) * (1.0 if DEVICE == "cpu" else 0.5)
    exact = 2.0**-20 * factors.double()[:, None]  # of a probability in float32
    assert ((actual.double() - expected).abs() <= 1.01 * step + exact).all()


def test_the_reference_is_torchs_own_loss():
    logits, targets, options = problem(6, 50, torch.float64, OPTIONS["weighted and smoothed"])
    for reduction in ("mean", "sum", "none"):
        ours, _ = reference(logits, targets, **options, reduction=reduction)
        torch.testing.assert_close(ours, F.cross_entropy(logits, targets, **options, reduction=reduction))


@pytest.mark.parametrize(
    ("rows", "vocabulary"), [(1, 2), (3, 3), (2, 127), (5, 128), (2, 4097), (3, 40000), (1, 262208), (0, 10)]
)
def test_any_shape(rows, vocabulary):
    logits, targets, _ = problem(rows, vocabulary, torch.float32, {})
    options = {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": "sum"}
    assert_near_truth(run(cross_entropy, logits, targets, options), truth(logits, targets, options), vocabulary)


@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocabulary", [2, 9, 1003, 33001, 65537])
def test_rows_that_begin_and_end_anywhere(vocabulary, dtype, name):
    """Rows of no whole number of vectors: one program's and several', contiguous and apart, targets at both ends."""
    logits, targets, options = problem(6, vocabulary, dtype, {**OPTIONS[name], "reduction": "sum"})
    for row, target in enumerate((0, 1, vocabulary - 1, vocabulary - 2)):
        targets[row] = target
    apart = torch.full((6, vocabulary + 11), float("nan"), device=DEVICE, dtype=dtype)
    apart[:, :vocabulary] = logits.detach()
    expected = truth(logits, targets, options)
    assert_near_truth(run(cross_entropy, logits, targets, options), expected, reduced=vocabulary)
    view = apart[:, :vocabulary].requires_grad_()
    assert_near_truth(run(cross_entropy, view, targets, options), expected, reduced=vocabulary)


def test_targets_of_four_bytes():
    logits, targets, _ = problem(5, 33, torch.bfloat16, {})
    expected = run(cross_entropy, logits, targets, {})
    assert_equal(run(cross_entropy, logits, targets.int(), {}), expected)
    loss, _ = reference(logits, targets.int())
    torch.testing.assert_close(loss, expected[0])


@given(
    rows=st.integers(1, 4), vocabulary=st.integers(2, 70), smoothing=st.sampled_from([0.0, 0.3]),
    z_loss=st.sampled_from([0.0, 0.1]), softcap=st.sampled_from([0.0, 2.0]), weighted=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_any_combination_of_options(rows, vocabulary, smoothing, z_loss, softcap, weighted, reduction):
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap, "weight": weighted}
    logits, targets, options = problem(rows, vocabulary, torch.float32, {**options, "reduction": reduction})
    actual, expected = run(cross_entropy, logits, targets, options), truth(logits, targets, options)
    assert_near_truth(actual[:1], expected[:1], vocabulary)
    # Where the model is right, the gradient is a small difference of probabilities: their rounding is what counts.
    allowed = tolerance(torch.float32, vocabulary)
    assert (actual[1] - expected[1]).norm() <= allowed * (expected[1].norm() + 2.0 * rows**0.5)


@pytest.mark.parametrize("name", ["plain", "all"])
def test_gradcheck_of_the_kernel_in_float64(name):
    logits, targets, options = problem(3, 11, torch.float64, OPTIONS[name])
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, targets, **options), (logits,))


def test_leading_dimensions_and_any_layout():
    base, _, _ = problem(6, 40, torch.float32, {})
    targets = torch.randint(40, (2, 3), device=DEVICE)
    expected = run(cross_entropy, base.detach().view(2, 3, 40).requires_grad_(), targets, {"reduction": "none"})
    strided = torch.stack([base.detach(), base.detach()], -1)[..., 0].view(2, 3, 40).requires_grad_()
    assert not strided.is_contiguous()
    for a, b in zip(run(cross_entropy, strided, targets, {"reduction": "none"}), expected, strict=True):
        assert torch.equal(a, b)


def test_one_sequence_with_the_tokens_first_is_read_where_it_is():
    base, _, options = problem(4, 50, torch.float32, {"reduction": "none"})
    targets = torch.randint(50, (4, 1), device=DEVICE)
    turned = base.detach().view(1, 4, 50).transpose(0, 1).requires_grad_()  # contiguous by torch's count
    plain = torch.empty(4, 1, 50, device=DEVICE).copy_(turned.detach()).requires_grad_()
    expected = run(cross_entropy, plain, targets, options)
    for a, b in zip(run(cross_entropy, turned, targets, options), expected, strict=True):
        assert torch.equal(a, b)


def test_the_log_sum_exp_comes_back_without_a_gradient():
    logits, targets, _ = problem(4, 60, torch.float32, {})
    loss, lse = cross_entropy(logits, targets, return_lse=True)
    torch.testing.assert_close(lse, torch.logsumexp(logits.detach(), -1))
    assert loss.requires_grad and not lse.requires_grad


@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_large_logits_and_minus_infinity(scale):
    logits = torch.tensor(
        [[scale, 0.0, -scale], [-scale, -scale, -scale + 1], [float("-inf"), 1.0, 2.0]], device=DEVICE
    )
    targets = torch.tensor([0, 2, 1], device=DEVICE)
    logits.requires_grad_()
    actual, expected = (run(f, logits, targets, {"reduction": "none"}) for f in (cross_entropy, reference))
    for a, e in zip(actual, (expected[0], expected[1]), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, e)


def test_all_targets_ignored_is_zero_and_so_is_the_gradient():
    logits, targets, _ = problem(4, 9, torch.float32, {})
    loss, gradient = run(cross_entropy, logits, torch.full_like(targets, -100), {})
    assert loss == 0 and not gradient.any()
    loss, gradient = run(cross_entropy, logits, torch.full_like(targets, 3), {"ignore_index": 3})
    assert loss == 0 and not gradient.any()


def test_a_target_out_of_range_is_loud_and_reads_nothing(monkeypatch):
    logits, targets, _ = problem(4, 9, torch.float32, {})
    targets[2] = 9
    loss, gradient = run(cross_entropy, logits, targets, {"reduction": "none"})
    assert loss.isnan().tolist() == [False, False, True, False]
    assert gradient[2].isnan().all() and gradient[[0, 1, 3]].isfinite().all()
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    for bad in (9, -1):
        targets[2] = bad
        with pytest.raises(ValueError, match=f"target {bad} is not ignore_index"):
            cross_entropy(logits, targets)


def test_in_place_the_gradient_is_the_logits_memory():
    leaf, targets, _ = problem(5, 33, torch.float32, {})
    expected = run(cross_entropy, leaf, targets, {})
    logits = leaf * 1.0
    loss = cross_entropy(logits, targets, inplace=True)
    (gradient,) = torch.autograd.grad(loss, logits, torch.tensor(0.5, device=DEVICE), retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    assert torch.equal(loss.detach(), expected[0])
    torch.testing.assert_close(gradient, 0.5 * expected[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "shifted rows", "part of the vocabulary", "transposed"])
def test_in_place_is_right_for_every_layout_and_factor(dtype, layout):
    arrange = {
        "contiguous": lambda made: made,
        "shifted rows": lambda made: made.view(1, 7, 32)[:, :-1][0],
        "part of the vocabulary": lambda made: made[:, :24],
        "transposed": lambda made: made.t(),
    }[layout]
    leaf = torch.randn(7, 32, device=DEVICE).to(dtype).requires_grad_()
    double = leaf.detach().double().requires_grad_()
    logits = arrange(leaf * 1.0)
    targets = torch.randint(logits.shape[1], logits.shape[:1], device=DEVICE)
    (0.5 * cross_entropy(logits, targets, inplace=True)).backward()
    (0.5 * reference(arrange(double * 1.0), targets)[0]).backward()
    assert_near_truth([leaf.grad], [double.grad], reduced=32)


def test_in_place_is_refused_where_autograd_still_needs_the_logits():
    leaf, targets, _ = problem(5, 33, torch.float32, {})
    for logits in (leaf, leaf.view(5, 33), torch.tanh(leaf), torch.tanh(leaf).view(5, 33), torch.tanh(leaf).t().t()):
        with pytest.raises(ValueError, match="leave out inplace"):
            cross_entropy(logits, targets, inplace=True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_who_saved_logits_that_were_overwritten_is_told(dtype):
    leaf, targets, _ = problem(5, 33, dtype, {})
    logits = leaf * 1.0
    other = logits.square().sum()  # keeps the logits for its own backward
    loss = cross_entropy(logits, targets, inplace=True)
    with pytest.raises(RuntimeError, match="inplace"):
        (loss.to(dtype) + other).backward()


def test_in_place_compiles_into_one_graph():
    leaf, targets, _ = problem(4, 30, torch.float32, {})

    def function(x):
        loss, lse = cross_entropy(x * 2.0, targets, inplace=True, return_lse=True)
        return loss, lse + 0.0 * loss

    assert_compiles(function, [leaf])


def test_traced_by_a_dispatch_mode_there_is_no_second_derivative_either():
    logits, targets, _ = problem(3, 8, torch.float32, {})
    with FlopCounterMode(display=False):
        loss, lse = cross_entropy(logits, targets, return_lse=True)
        assert not lse.requires_grad
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(loss, logits, create_graph=True)


def test_a_row_of_the_lowest_numbers_and_a_target_of_minus_infinity():
    lowest = torch.finfo(torch.float32).min
    logits = torch.tensor([[lowest] * 3, [float("-inf"), 1.0, 2.0]], device=DEVICE).requires_grad_()
    targets = torch.tensor([1, 0], device=DEVICE)
    for smoothing in (0.0, 0.1):
        options = {"reduction": "none", "label_smoothing": smoothing}
        actual, expected = (run(f, logits, targets, options) for f in (cross_entropy, reference))
        torch.testing.assert_close(actual[0], expected[0])
        torch.testing.assert_close(actual[1][0], expected[1][0])


def test_a_cap_in_float64_is_exact_to_float64():
    logits, targets, _ = problem(8, 40, torch.float64, {}, scale=1.0)
    actual, expected = (run(f, logits, targets, {"softcap": 5.0}) for f in (cross_entropy, reference))
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


def test_float16_gradients_survive_a_small_mean_and_a_loss_scale():
    rows = 4096 if DEVICE == "cuda" else 64
    logits, targets, _ = problem(rows, 50, torch.float16, {}, scale=8.0)
    upstream = torch.tensor(65536.0)
    actual, expected = (f(logits, targets, {}, upstream.to(DEVICE)) for f in (lambda *a: run(cross_entropy, *a), truth))
    assert_near_truth(actual[1:], expected[1:], reduced=50)


def test_one_backward_alone_and_no_second_derivative():
    logits, targets, _ = problem(3, 8, torch.float32, {})
    loss = cross_entropy(logits, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run forward again"):
        loss.backward()
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(cross_entropy(logits, targets), logits, create_graph=True)


@on_gpu
@pytest.mark.parametrize("vocabulary", [32000, 50304, 128256])
def test_in_place_takes_the_memory_of_a_few_numbers_a_row(vocabulary):
    logits = torch.randn(8192, vocabulary, device="cuda", dtype=torch.bfloat16).requires_grad_() * 1.0
    targets = torch.randint(vocabulary, (8192,), device="cuda")
    cross_entropy(logits.detach(), targets)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = cross_entropy(logits, targets, inplace=True)
    peak = torch.cuda.max_memory_allocated() - before
    assert loss.requires_grad
    assert peak <= 0.001 * logits.nbytes


@pytest.mark.parametrize(("dtype", "reduction"), [(torch.float32, "none"), (torch.float16, "mean")], ids=str)
def test_a_block_that_is_computed_again_may_have_it(dtype, reduction):
    logits, targets, options = problem(5, 33, dtype, {"reduction": reduction})
    _, expected = run(cross_entropy, logits, targets, options)

    def again(logits, targets, **options):
        return checkpoint(lambda x: cross_entropy(x * 1.0, targets, **options), logits, use_reentrant=False)

    assert torch.equal(run(again, logits, targets, options)[1], expected)


def test_without_a_gradient_none_is_computed():
    logits, targets, _ = problem(3, 8, torch.float32, {})
    with torch.no_grad():
        loss = cross_entropy(logits, targets, inplace=True)
    torch.testing.assert_close(loss, F.cross_entropy(logits, targets))


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 2.0}], ids=str)
def test_opcheck(options):
    logits, targets, _ = problem(4, 30, torch.float32, {})
    smoothing, z_loss, softcap = (options.get(k, 0.0) for k in ("label_smoothing", "z_loss", "softcap"))
    arguments = (logits, targets, None, -100, smoothing, z_loss, softcap)
    for wants_lse, ahead in itertools.product((True, False), repeat=2):
        for reduction in ("mean",) if ahead else ("mean", "none"):
            inputs = (*arguments, reduction, wants_lse, ahead, None)
            torch.library.opcheck(torch.ops.tilewright.cross_entropy.default, inputs)


@pytest.mark.parametrize(("dtype", "reduction"), [(torch.float32, "none"), (torch.float16, "mean")], ids=str)
def test_compiles_into_one_graph_with_the_same_result(dtype, reduction):
    logits, targets, _ = problem(4, 30, dtype, {})
    assert_compiles(lambda x: (cross_entropy(x, targets, label_smoothing=0.1, reduction=reduction),), [logits])


def test_same_bits_on_every_run_even_in_poisoned_memory():
    logits, targets, options = problem(5, 200, torch.bfloat16, OPTIONS["all"])
    assert_deterministic(lambda: run(cross_entropy, logits, targets, options))


def test_the_plain_path_agrees_with_the_kernel(monkeypatch):
    logits, targets, options = problem(5, 77, torch.float32, OPTIONS["all"])
    kernel = run(cross_entropy, logits, targets, options)
    monkeypatch.setattr(OP.dispatch, "runs_kernel", lambda x: False)
    for a, b in zip(run(cross_entropy, logits, targets, options), kernel, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"targets": torch.zeros(3)}, TypeError, "int64"),
        ({"targets": [1, 2, 3]}, TypeError, "int64"),
        ({"targets": torch.zeros(4, dtype=torch.int64)}, ValueError, "shape"),
        ({"logits": torch.zeros(3, 1)}, ValueError, "vocabulary"),
        ({"logits": torch.zeros(3, 8, dtype=torch.int32)}, TypeError, "dtype"),
        ({"logits": 3}, TypeError, "tensor"),
        ({"logits": None}, TypeError, "must be a tensor, not NoneType"),
        ({"weight": torch.ones(7)}, ValueError, "shape"),
        ({"weight": torch.ones(8).requires_grad_()}, ValueError, "detach"),
        ({"label_smoothing": 1.0}, ValueError, "label_smoothing"),
        ({"z_loss": -1.0}, ValueError, "z_loss"),
        ({"softcap": float("nan")}, ValueError, "softcap"),
        ({"reduction": "avg"}, ValueError, "mean, sum, none"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index"),
    ],
    ids=str,
)
def test_bad_input_is_one_sentence(change, kind, message):
    arguments = {"logits": torch.zeros(3, 8), "targets": torch.zeros(3, dtype=torch.int64), **change}
    arguments = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) and k != "weight" else v for k, v in arguments.items()}
    if "weight" in change:
        arguments["weight"] = change["weight"].detach().to(DEVICE).requires_grad_(change["weight"].requires_grad)
    with pytest.raises(kind, match=message) as caught:
        cross_entropy(arguments.pop("logits"), arguments.pop("targets"), **arguments)
    assert "\n" not in str(caught.value)


def test_cost_is_one_read_and_one_write():
    assert cost(10, 100).bytes == 10 * 100 * 4


@on_gpu
def test_more_than_two_to_the_31_logits():
    rows, vocabulary = 17000, 131072
    logits = torch.randn(rows, vocabulary, device="cuda", dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(vocabulary, (rows,), device="cuda")
    loss, gradient = run(cross_entropy, logits, targets, {"reduction": "none"}, torch.ones(rows, device="cuda"))
    tail = slice(rows - 8, rows)
    expected = truth(logits[tail], targets[tail], {"reduction": "none"}, torch.ones(8, device="cuda"))
    assert_near_truth((loss[tail], gradient[tail]), expected, reduced=vocabulary)


@pytest.fixture
def in_registers(monkeypatch):
    """Whether a row was one block's and stayed in its registers, call by call."""
    taken, real = [], cross_entropy_hopper.start
    monkeypatch.setattr(cross_entropy_launch, "start_rows", lambda *those: taken.append(real(*those)) or taken[-1])
    return taken


# Rows of whole vectors for every thread and not, or that begin within one; one for a block, several, fewer than blocks.
ROWS = [
    (1, 20480), (301, 50304), (700, 32000), (64, 65536), (40, 22008), (301, 50257), (700, 32003), (64, 65529),
    (9, 20481),
]  # fmt: skip


@on_hopper
@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-3}, {"reduction": "sum"}], ids=str)
@pytest.mark.parametrize(("rows", "classes"), ROWS)
def test_rows_in_registers(rows, classes, options, in_registers):
    logits, targets, _ = problem(rows, classes, torch.bfloat16, {})
    with torch.no_grad():
        if rows > 4:
            logits[0] = float("-inf")
            logits[0, 7], targets[0] = 1.0, 7
            logits[2, : classes // 2], targets[2] = float("-inf"), classes - 1
            logits[3, classes - 1], targets[3] = 6e4, classes - 1
            logits[4] += 3e4
    expected = truth(logits, targets, options)
    assert_near_truth(run(cross_entropy, logits, targets, options), expected, reduced=classes)
    assert_no_worse(run(cross_entropy, logits, targets, options), run(reference, logits, targets, options), expected)
    assert_deterministic(lambda: run(cross_entropy, logits, targets, options))
    assert in_registers and all(in_registers)


@on_hopper
def test_rows_in_registers_give_their_log_sum_exp_and_take_the_place_of_the_logits(in_registers):
    logits, targets, _ = problem(300, 50368, torch.bfloat16, {})
    expected = torch.logsumexp(logits.double(), -1)
    _, wanted = truth(logits, targets, {})
    kept = logits.detach() * 1
    loss, lse = cross_entropy(kept.requires_grad_() * 1, targets, return_lse=True, inplace=True)
    (found,) = torch.autograd.grad(loss, kept)
    assert_near_truth([lse, found], [expected, wanted], reduced=50368)
    assert in_registers == [True]


@on_hopper
def test_what_is_not_a_number_or_no_class_stays_in_its_row():
    logits, targets, _ = problem(300, 32000, torch.bfloat16, {})
    with torch.no_grad():
        logits[7, 9] = logits[1, 3] = float("nan")  # the target of row 1 is ignored
        targets[11] = 32000
    loss, gradient = torch.zeros(300, device=DEVICE), logits.detach().clone()
    assert cross_entropy_hopper.start(gradient, targets, None, loss, None, gradient, -100, 0.0)
    wrong = torch.zeros(300, dtype=torch.bool, device=DEVICE)
    wrong[[7, 11]] = True
    assert torch.equal(loss.isnan(), wrong) and torch.equal(gradient.isnan(), wrong[:, None].expand_as(gradient))
    assert loss[1] == 0 and not gradient[1].any()


@on_hopper
def test_rows_that_are_apart_and_those_that_another_kernel_takes():
    """The first row begins at a multiple of 16 bytes; what lies between rows stays as it is."""
    targets = torch.randint(50304, (300,), device=DEVICE)

    def started(logits):
        loss = torch.zeros(300, device=DEVICE)
        took = cross_entropy_hopper.start(logits, targets, None, loss, None, logits, -100, 0.0)
        return loss if took else None

    whole = torch.randn(300, 50400, device=DEVICE, dtype=torch.bfloat16)
    apart, kept = whole[:, 8:50312], whole.clone()
    expected, gradient = truth(apart, targets, {"reduction": "none"})
    assert_near_truth([started(apart), apart], [expected, gradient], reduced=50304)
    assert torch.equal(whole[:, :8], kept[:, :8]) and torch.equal(whole[:, 50312:], kept[:, 50312:])
    odd = whole[:, 8:50265]
    kept = whole.clone()
    expected, gradient = truth(odd, targets.clamp(max=50256), {"reduction": "none"})
    targets.clamp_(max=50256)
    assert_near_truth([started(odd), odd], [expected, gradient], reduced=50257)
    assert torch.equal(whole[:, :8], kept[:, :8]) and torch.equal(whole[:, 50265:], kept[:, 50265:])
    for others in (
        whole[:, 4:50308],
        whole[:, :20472],
        whole.half()[:, :50304],
        whole[:, :50304].float(),
    ):
        assert started(others) is None
    assert started(torch.empty(300, 65544, device=DEVICE, dtype=torch.bfloat16)) is None
    assert started(torch.empty(300, 65535, device=DEVICE, dtype=torch.bfloat16)) is None


@on_hopper
def test_a_classifiers_rows_stay_in_registers_too(in_registers):
    x, weight = (torch.randn(size, 768, device=DEVICE, requires_grad=True) for size in (4096, 50312))
    targets = torch.randint(50312, (4096,), device=DEVICE)
    with torch.autocast("cuda", torch.bfloat16):
        loss = linear_cross_entropy(x, weight, targets)
    loss.backward()
    assert in_registers and all(in_registers)
    logits = x.detach().bfloat16().double() @ weight.detach().bfloat16().double().t()
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item(), rel=2e-3)


def test_launch_configs_hold_a_row_wherever_it_begins():
    for classes in range(cross_entropy_hopper._LEAST, cross_entropy_hopper._MOST + 1, 7):
        for stride in (classes, -(-classes // 64) * 64):
            found = cross_entropy_hopper.launch_config(classes, stride)
            starts = {row * stride % 8 for row in range(8)}
            vectors = {-(-(start + classes) // 8) for start in starts}
            if found is None:
                assert max(vectors) >= 8192
                continue
            # The kernel asks only of the last vector, or of the last two where rows begin anywhere, whether it exists.
            assert (found["EACH"] - 1 - found["RAGGED"]) * found["THREADS"] < min(vectors)
            assert max(vectors) <= found["EACH"] * found["THREADS"]
            assert found["RAGGED"] == (starts != {0} or classes % 8 > 0)
            assert found["THREADS"] % 32 == 0 and found["SLOTS"] > found["EACH"]
