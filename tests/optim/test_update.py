import itertools
import math

import pytest
import torch

from ops.contract import DEVICE, assert_equal, layouts, on_gpu
from tilewright.errors import UserError
from tilewright.optim.reference import reference
from tilewright.optim.states import BLOCK, MOMENTS, decode, encode, new_state, random_bits
from tilewright.optim.update import adafactor, cost, update
from tilewright.runtime import dispatch

RULES = ("adamw", "lion", "sgd")
STATES = (torch.float32, torch.bfloat16, torch.int8)
ROUNDINGS = ("float32", "nearest", "kahan", "stochastic")  # of a float32 parameter, or of a bfloat16 one
NUMBERS = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "epsilon": 1e-8, "weight_decay": 0.1}
ELEMENTS = 5000  # five tiles, a block that is not full, enough for 8-bit states


@pytest.fixture(params=["kernel", "reference"])
def path(request, monkeypatch):
    """Both ways in, whatever the machine."""
    if request.param == "reference":
        monkeypatch.setattr(dispatch, "runs_kernel", lambda x: False)
    return request.param


@pytest.fixture
def plain(monkeypatch):
    """The reference alone: for hundreds of steps, which the interpreter has not the time for."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda x: False)


def problem(rule, dtype, rounding, elements=ELEMENTS, gradient_dtype=None):
    """The same numbers on every device."""
    torch.manual_seed(elements)
    parameter = torch.randn(elements).to(DEVICE)
    parameter = parameter if rounding == "float32" else parameter.bfloat16()
    scale = torch.exp(torch.randn(elements))
    gradients = [(scale * torch.randn(elements)).to(DEVICE, gradient_dtype or parameter.dtype) for _ in range(3)]
    return parameter, gradients, new_state(parameter, rule, dtype, rounding)


def step(parameter, gradient, state, rule, rounding="nearest", **options):
    state["step"] += 1
    options = {**NUMBERS, "rule": rule, "stochastic": rounding == "stochastic", **options}
    update([parameter], [gradient], [state], **options)


def meant(state, name):
    """A moment in float64."""
    value = state[name]
    return (value if value.is_floating_point() else decode(value, state[f"{name}_scale"])).double()


def whole(parameter, state):
    """A parameter in float64, with what Kahan keeps of it."""
    return parameter.double() + state.get("compensation", torch.zeros((), device=DEVICE)).double()


def truth(rule, parameter, gradient, state):
    """One step in float64, on top of the moments as they are stored."""
    p, g, t = whole(parameter, state), gradient.double(), state["step"].double() + 1
    lr, b1, b2, eps, d = NUMBERS.values()
    if rule == "adamw":
        m, v = b1 * meant(state, "mean") + (1 - b1) * g, b2 * meant(state, "square") + (1 - b2) * g * g
        p = p * (1 - lr * d) - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
        return p, {"mean": m, "square": v}
    m = meant(state, "mean")
    if rule == "lion":
        return p * (1 - lr * d) - lr * (b1 * m + (1 - b1) * g).sign(), {"mean": b2 * m + (1 - b2) * g}
    m = b1 * m + g + d * p
    return p - lr * m, {"mean": m}


def distance(value, dtype, name):
    """To the neighbour that the format of a state has above a value."""
    if dtype.is_floating_point:
        return (2.0**-23 if dtype == torch.float32 else 2.0**-7) * value.abs()
    levels, power = (127, 2) if name == "mean" else (255, 4)
    blocks = torch.nn.functional.pad(value.abs(), (0, -value.numel() % BLOCK)).view(-1, BLOCK)
    scale = blocks.amax(1, keepdim=True)
    share = blocks / scale
    return (((share ** (1 / power) + 1 / levels) ** power - share) * scale).flatten()[: value.numel()]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", STATES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_every_combination_is_its_rule_in_float64(rule, dtype, rounding, path):
    parameter, gradients, state = problem(rule, dtype, rounding)
    assert state["mean"].dtype == dtype
    for gradient in gradients:
        before = whole(parameter, state)
        p, moments = truth(rule, parameter, gradient, state)
        step(parameter, gradient, state, rule, rounding)
        relative = {"float32": 0.0, "nearest": 2.0**-8, "kahan": 2.0**-17, "stochastic": 2.0**-7}[rounding]
        # And a few roundings of float32, of the parameter and of what is subtracted from it, itself rounded.
        # Lion jumps by 2 lr where a moment next to 0 has another sign in float32; none of these does.
        sizes = before.abs() + (before - p).abs()
        assert ((whole(parameter, state) - p).abs() <= relative * p.abs() + 4 * 2.0**-23 * sizes).all()
        for name, value in moments.items():
            few = 4 * 2.0**-23 * value.abs().max()  # roundings of float32, of sums that may cancel
            assert ((meant(state, name) - value).abs() <= distance(value, dtype, name) + few).all(), name


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", STATES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_the_kernel_is_the_reference_down_to_its_random_bits(rule, dtype, rounding):
    parameter, gradients, state = problem(rule, dtype, rounding, gradient_dtype=torch.float32)
    scale = torch.tensor(1.5, device=DEVICE)
    for gradient in gradients:
        state["step"] += 1
        options = dict(**NUMBERS, rule=rule, stochastic=rounding == "stochastic", grad_scale=scale)
        expected = reference(parameter, gradient, state, **options, seed=2**40 + 3)
        update([parameter], [gradient], [state], **options, seeds=[2**40 + 3])
        actual = {**state, "parameter": parameter}
        for name, value in expected.items():
            # The last bit of float32 may differ, and now and then takes a draw to the other side.
            if value.dtype == torch.float32:
                few = 4 * 2.0**-23 * float(value.abs().max())  # of a sum that may cancel
                torch.testing.assert_close(actual[name], value, rtol=2e-6, atol=few)
            elif name != "compensation":
                assert (actual[name] == value).double().mean() > 0.998, name
        torch.testing.assert_close(
            whole(parameter, state), whole(expected["parameter"], expected),
            rtol=2.0**-7 if rounding in ("nearest", "stochastic") else 2.0**-16, atol=1e-7,
        )  # fmt: skip


@pytest.mark.parametrize(("rule", "dtype"), [("adamw", torch.int8), ("lion", torch.bfloat16), ("sgd", torch.float32)])
def test_many_tensors_at_once_are_each_by_itself(rule, dtype, path):
    """Of all sizes and dtypes, with seeds of their own."""
    sizes = (5000, 3, 8, 0, 1024, 4999, 2048)
    kinds = ("float32", "kahan", "float32", "float32", "float32", "kahan", "float32")
    cases, alone = (
        [problem(rule, dtype, kind, size) for size, kind in zip(sizes, kinds, strict=True)] for _ in range(2)
    )
    numbers = {**NUMBERS, "rule": rule, "stochastic": False}
    for _, _, state in (*cases, *alone):
        state["step"] += 1
    update(
        [p for p, _, _ in cases], [g[0] for _, g, _ in cases], [s for _, _, s in cases], **numbers,
        seeds=range(len(sizes)),
    )  # fmt: skip
    for seed, (parameter, gradients, state) in enumerate(alone):
        update([parameter], gradients[:1], [state], **numbers, seeds=[seed])
    for (parameter, _, state), (own, _, own_state) in zip(cases, alone, strict=True):
        assert_equal([parameter, *state.values()], [own, *own_state.values()])


@pytest.mark.parametrize("elements", [1, 7, 255, 256, 257, 1024, 1025])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_size(elements, dtype):
    parameter, gradients, state = problem("adamw", torch.bfloat16, "stochastic", elements)
    other, copied = parameter.clone(), {name: value.clone() for name, value in state.items()}
    copied["step"] += 1
    step(parameter, gradients[0].to(dtype), state, "adamw", "stochastic")
    expected = reference(other, gradients[0].to(dtype), copied, rule="adamw", stochastic=True, **NUMBERS)
    torch.testing.assert_close(parameter, expected["parameter"], rtol=2.0**-7, atol=0)
    torch.testing.assert_close(state["square"], expected["square"], rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
def test_torchs_own_rules_in_float64(rule, path):
    """Ten steps; a float32 parameter stays within ten roundings and the update's own error."""
    torch.manual_seed(0)
    parameter = torch.randn(300, device=DEVICE)
    double = parameter.double().requires_grad_()
    state = new_state(parameter, rule)
    lr, b1, b2, eps, d = NUMBERS.values()
    if rule == "adamw":
        theirs = torch.optim.AdamW([double], lr=lr, betas=(b1, b2), eps=eps, weight_decay=d)
    else:
        theirs = torch.optim.SGD([double], lr=lr, momentum=b1, weight_decay=d)
    for _ in range(10):
        gradient = torch.randn(300, device=DEVICE)
        double.grad = gradient.double()
        theirs.step()
        step(parameter, gradient, state, rule)
    torch.testing.assert_close(parameter.double(), double.detach(), rtol=10 * 2.0**-23, atol=10 * 2.0**-23)


@pytest.mark.parametrize("shape", [(40, 30), (17,), (3, 8, 20), ()], ids=str)
def test_adafactor_is_torchs(shape, path):
    torch.manual_seed(0)
    parameter = torch.randn(shape, device=DEVICE)
    double = parameter.double().requires_grad_()
    state = new_state(parameter, "adafactor")
    eps = torch.finfo(torch.float32).eps
    theirs = torch.optim.Adafactor([double], lr=0.02, eps=(eps, 1e-3), weight_decay=0.1)
    for scale in (1.0, 0.1, 30.0, 1.0, 1.0):  # a large one is clipped
        gradient = scale * torch.randn(shape, device=DEVICE)
        double.grad = gradient.double()
        theirs.step()
        state["step"] += 1
        adafactor(parameter, gradient, state, lr=0.02, weight_decay=0.1)
    torch.testing.assert_close(parameter.double(), double.detach(), rtol=1e-5, atol=1e-6)
    assert all(value.dtype == torch.float32 for value in state.values())


@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_adafactor_rounds_bfloat16_parameters(rounding, path):
    torch.manual_seed(0)
    parameter = torch.randn(60, 50, device=DEVICE, dtype=torch.bfloat16)
    single, gradient = parameter.float(), torch.randn(60, 50, device=DEVICE)
    state, exact = new_state(parameter, "adafactor", rounding=rounding), new_state(single, "adafactor")
    for of, its in ((parameter, state), (single, exact)):
        its["step"] += 1
        adafactor(of, gradient, its, lr=0.01, stochastic=rounding == "stochastic")
    allowed = 2.0**-16 if rounding == "kahan" else 2.0**-7
    torch.testing.assert_close(whole(parameter, state), single.double(), rtol=allowed, atol=1e-6)
    assert not torch.equal(parameter.float(), single)


def changed_a_thousand_times(rounding):
    """A thousand times a thousandth: nothing of it reaches a bfloat16 that is rounded to nearest."""
    torch.manual_seed(0)
    parameter = (1 + torch.rand(4096, device=DEVICE)).bfloat16()
    before, state = parameter.double(), new_state(parameter, "adafactor", rounding=rounding)
    change = -1e-3 * parameter.float()
    for _ in range(1000):
        step(parameter, change, state, "given", rounding, weight_decay=0.0)
    return before, parameter.double(), before - 1000 * change.double()


def test_small_updates_are_lost_by_rounding_and_kept_by_kahan(plain):
    before, after, _ = changed_a_thousand_times("nearest")
    assert torch.equal(before, after)
    _, after, expected = changed_a_thousand_times("kahan")
    assert ((after - expected).abs() <= 2.0**-7 * expected).all()  # one ULP
    assert ((after - expected) / expected).mean().abs() < 2.0**-10


def test_stochastic_rounding_keeps_the_mean(plain):
    _, after, expected = changed_a_thousand_times("stochastic")
    off = after - expected
    # A step goes up by an ULP with a probability of update / ULP, so a thousand of them vary by at most this.
    deviation = math.sqrt(1000 * 1e-3 * 2 * 2.0**-6)
    assert off.std() < deviation
    assert off.mean().abs() < 5 * deviation / math.sqrt(off.numel())


def test_a_mean_of_squares_in_bfloat16_moves_only_by_stochastic_rounding(plain):
    parameter = torch.zeros(2048, device=DEVICE)
    state = new_state(parameter, "adamw", torch.bfloat16)
    state["square"].fill_(1.0)
    gradient, nearest = torch.full_like(parameter, 2.0), torch.ones(1, dtype=torch.bfloat16)
    for _ in range(1000):
        step(parameter, gradient, state, "adamw", beta2=0.999)
        nearest = (0.999 * nearest.float() + 0.001 * 4.0).bfloat16()
    assert nearest.item() == 1.0
    expected = 4 - 3 * 0.999**1000
    # A step's variance is at most change x ULP, and decays with the mean: 0.003 * 2**-6 / (1 - 0.999**2), rooted.
    deviation = math.sqrt(0.003 * 2.0**-6 / (1 - 0.999**2))
    assert abs(meant(state, "square").mean().item() - expected) < 5 * deviation / math.sqrt(2048)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_codes_are_right_in_the_mean(dtype):
    torch.manual_seed(0)
    x = torch.randn(700) * torch.exp(2 * torch.randn(700))
    x = x if dtype == torch.int8 else x * x
    decoded = []
    for seed in range(400):
        bits = random_bits(seed, torch.tensor(3.0), 1, x.numel())
        decoded.append(decode(*encode(x, dtype, bits)).double())
    error = torch.stack(decoded).mean(0) - x.double()
    gap = distance(x.double(), dtype, "mean" if dtype == torch.int8 else "square")
    # Below the smallest code a square is never rounded down.
    smallest = 0.0 if dtype == torch.int8 else 255.0**-4
    above = x.abs() > smallest * encode(x, dtype, torch.zeros(700))[1].repeat_interleave(BLOCK)[:700]
    assert above.double().mean() > 0.9
    off, deviation = (
        (error / gap)[above],
        0.5 / math.sqrt(400),
    )  # a draw between two codes varies by half their distance
    assert off.abs().max() < 5 * deviation
    assert off.mean().abs() < 5 * deviation / math.sqrt(off.numel())


def test_a_square_above_zero_is_never_stored_as_zero_and_zero_is():
    x = torch.tensor([0.0, 1e-30, 1e-12, 1.0] * 128)
    codes, scale = encode(x, torch.uint8, torch.full((512,), 65535.0))
    assert codes.view(-1, 4)[:, 0].eq(0).all() and codes.view(-1, 4)[:, 1:].ge(1).all()
    assert scale.tolist() == [1.0, 1.0]
    codes, scale = encode(torch.zeros(300), torch.uint8, torch.zeros(300))
    assert not codes.any() and not scale.any() and not decode(codes, scale).any()


def test_a_square_that_underflows_its_block_does_not_blow_the_update_up(path):
    """One huge gradient in a block: the others' squares and means are below the smallest code. Now and then a mean is
    rounded up to its own, and is then at most (255 / 127)^2 times the root of the smallest square."""
    parameter = torch.zeros(4096, device=DEVICE)
    state = new_state(parameter, "adamw", torch.int8)
    gradient = torch.full_like(parameter, 1e-3)
    gradient[::BLOCK] = 1e4
    for _ in range(3):
        step(parameter, gradient, state, "adamw", lr=1e-3, weight_decay=0.0)
    assert (parameter.abs() <= 3 * (255 / 127) ** 2 * 1e-3).all()


def test_random_bits_are_uniform_and_differ_by_seed_step_and_stream():
    step_ = torch.tensor(5.0)
    bits = random_bits(1, step_, 0, 100_003)
    assert bits.shape == (100_003,) and bits.min() >= 0 and bits.max() < 65536
    assert abs(bits.double().mean() / 65535 - 0.5) < 5 * math.sqrt(1 / 12 / 1e5)
    counts = torch.bincount(bits >> 8, minlength=256).double()
    assert ((counts - 390.6).pow(2) / 390.6).sum() < 255 + 5 * math.sqrt(2 * 255)
    for other in (random_bits(2, step_, 0, 100_003), random_bits(1, step_ + 1, 0, 100_003),
                  random_bits(1, step_, 1, 100_003), random_bits(1 + 2**32, step_, 0, 100_003)):  # fmt: skip
        assert (bits == other).double().mean() < 1e-3


@pytest.mark.parametrize(("rule", "dtype"), list(itertools.product(("adamw", "lion"), STATES)), ids=str)
@pytest.mark.parametrize("rounding", ["kahan", "stochastic"])
def test_found_inf_changes_nothing_and_the_same_call_gives_the_same_bits(rule, dtype, rounding, path):
    parameter, gradients, state = problem(rule, dtype, rounding)
    step(parameter, gradients[0], state, rule, rounding)
    before = [parameter.clone(), *[value.clone() for value in state.values()]]
    skip = torch.tensor(1.0, device=DEVICE)
    state["step"] -= 1
    step(parameter, torch.full_like(gradients[0], float("nan")), state, rule, rounding, found_inf=skip)
    assert_equal([parameter, *state.values()], before)

    again, _, fresh = problem(rule, dtype, rounding)
    step(again, gradients[0], fresh, rule, rounding, found_inf=torch.zeros((), device=DEVICE))
    assert_equal([again, *fresh.values()], before)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_divided_by_their_scale(rule, path):
    parameter, gradients, state = problem(rule, torch.float32, "float32", 300)
    other, _, fresh = problem(rule, torch.float32, "float32", 300)
    step(parameter, gradients[0], state, rule)
    step(other, 4 * gradients[0], fresh, rule, grad_scale=torch.tensor(4.0, device=DEVICE))
    assert_equal([parameter, *state.values()], [other, *fresh.values()])


@pytest.mark.parametrize("rounding", ["float32", "kahan", "stochastic"])
@pytest.mark.parametrize("dtype", STATES, ids=str)
def test_no_gradient_and_no_rate_leave_every_bit(dtype, rounding, path):
    parameter, gradients, state = problem("adamw", dtype, rounding)
    before = parameter.clone()
    step(parameter, torch.zeros_like(gradients[0]), state, "adamw", rounding, lr=0.0)
    assert torch.equal(parameter, before)
    assert not any(value.any() for name, value in state.items() if name != "step")


@pytest.mark.parametrize("which", ["transposed", "every other column", "misaligned"])
def test_parameters_and_gradients_in_any_layout(which, path):
    strided = dict(layouts(6, 20, torch.bfloat16))[which]
    plain_, gradient = strided.clone(memory_format=torch.contiguous_format), dict(layouts(6, 20, torch.float32))[which]
    first, second = new_state(strided, "adamw", rounding="kahan"), new_state(plain_, "adamw", rounding="kahan")
    step(strided, gradient, first, "adamw", "kahan")
    step(plain_, gradient.contiguous(), second, "adamw", "kahan")
    assert_equal([strided, *first.values()], [plain_, *second.values()])


def test_not_a_number_stays_and_infinity_too(path):
    for rounding in ("nearest", "stochastic"):
        parameter = torch.ones(4, device=DEVICE, dtype=torch.bfloat16)
        change = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0], device=DEVICE)
        step(parameter, change, new_state(parameter, "adafactor"), "given", rounding, weight_decay=0.0)
        assert parameter[0].isnan() and parameter[1:].tolist() == [-math.inf, math.inf, 1.0]


def test_autograd_is_told(path):
    for parameter in (torch.ones(8, 4, device=DEVICE), torch.ones(4, 8, device=DEVICE).t()):
        version = parameter._version
        step(parameter, torch.ones_like(parameter), new_state(parameter, "lion"), "lion")
        assert parameter._version > version


def test_small_tensors_keep_float32_states_and_empty_ones_pass(path):
    assert new_state(torch.zeros(4095), "adamw", torch.int8)["square"].dtype == torch.float32
    assert new_state(torch.zeros(4096), "adamw", torch.int8)["square"].dtype == torch.uint8
    empty = torch.zeros(0, 8, device=DEVICE)
    for rule in RULES:
        step(empty, empty, new_state(empty, rule, torch.bfloat16), rule)
    adafactor(empty, empty, new_state(empty, "adafactor"), lr=0.1)


def test_other_parameters_are_refused_in_one_sentence():
    with pytest.raises(UserError, match="float16; convert the model to float32 or bfloat16"):
        new_state(torch.zeros(3, dtype=torch.float16), "adamw")
    with pytest.raises(UserError, match="float64; convert"):
        new_state(torch.zeros(3, dtype=torch.float64), "adamw")
    with pytest.raises(UserError, match="Buffer; give plain tensors"):
        new_state(torch.zeros(3).as_subclass(type("Buffer", (torch.Tensor,), {})), "adamw")


@pytest.mark.parametrize(("rule", "dtype"), list(itertools.product(RULES, STATES)), ids=str)
@pytest.mark.parametrize("rounding", ["float32", "kahan", "stochastic"])
def test_the_cost_is_the_size_of_the_tensors(rule, dtype, rounding):
    parameter, gradients, state = problem(rule, dtype, rounding)
    kept = [parameter, *[value for name, value in state.items() if name != "step"]]
    size = sum(t.numel() * t.itemsize for t in kept)
    found = cost(
        ELEMENTS, rule, parameter_bytes=parameter.itemsize, state_bytes=dtype.itemsize, kahan=rounding == "kahan"
    )  # fmt: skip
    assert (found.bytes_read, found.bytes_written) == (size + gradients[0].numel() * gradients[0].itemsize, size)
    assert len(MOMENTS[rule]) == sum(name in ("mean", "square") for name in state)


@on_gpu
def test_a_captured_graph_counts_steps_and_reads_rate_and_flag_anew():
    parameter, gradients, state = problem("adamw", torch.int8, "stochastic")
    other, _, fresh = problem("adamw", torch.int8, "stochastic")
    lr, skip, gradient = torch.tensor(0.01, device=DEVICE), torch.zeros((), device=DEVICE), gradients[0].clone()
    step(
        other.clone(), gradient, {k: v.clone() for k, v in fresh.items()}, "adamw", "stochastic", lr=lr, found_inf=skip
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(parameter, gradient, state, "adamw", "stochastic", lr=lr, found_inf=skip)
    for rate, given in zip((0.01, 0.02, 0.005), gradients, strict=True):
        lr.fill_(rate)
        gradient.copy_(given)
        graph.replay()
        step(other, given, fresh, "adamw", "stochastic", lr=rate)
    assert_equal([parameter, *state.values()], [other, *fresh.values()])


@on_gpu
def test_more_than_2_to_the_31_elements():
    elements = 2**31 + 1000
    parameter = torch.zeros(elements, device=DEVICE, dtype=torch.bfloat16)
    gradient = torch.ones_like(parameter)
    state = new_state(parameter, "lion", torch.int8)
    step(parameter, gradient, state, "lion", lr=0.5)
    assert (parameter[-5000:] == -0.5).all() and (state["mean"][-5000:] == 127).all()
    assert (state["mean_scale"][-5:] > 0).all()
