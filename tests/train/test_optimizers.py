import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from ops.contract import DEVICE, assert_equal
from tilewright.errors import UserError
from tilewright.optim import AdamW, FusedOptimizer, update
from tilewright.optim import optimizers as stepping
from tilewright.runtime import dispatch
from tilewright.train.optimizers import KINDS, PRECISIONS, build
from tilewright.train.schema import OPTIMIZERS, Optimizer
from tilewright.train.schema import PRECISIONS as CONFIGURED

ALL = [(name, precision) for name in OPTIMIZERS for precision in ("fp32", "bf16_kahan", "bf16_stochastic")]


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The reference: that the kernel is the same is shown in tests/ops, and its interpreter is slow."""
    if DEVICE == "cpu":
        monkeypatch.setattr(dispatch, "runs_kernel", lambda x: False)


def model(precision="fp32", seed=0):
    """A matrix with 8-bit states, one too small for them, and vectors."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(64, 80), nn.GELU(), nn.LayerNorm(80), nn.Linear(80, 10))
    return layers.to(device=DEVICE, dtype=PRECISIONS[precision][0])


def fill_gradients(network, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(device=parameter.device, dtype=parameter.dtype)


def run(network, optimizer, seeds):
    for seed in seeds:
        fill_gradients(network, seed)
        optimizer.step()


def tensors(network, optimizer):
    """Every bit of both."""
    state = optimizer.state_dict()["state"]
    return [*network.parameters(), *[state[key][name] for key in sorted(state) for name in sorted(state[key])]]


def made(name, precision, seed=0, **fields):
    network = model(precision)
    return network, build(network, Optimizer(name=name, **fields), precision=precision, seed=seed)


def test_the_configuration_has_these_names():
    assert set(KINDS) == set(OPTIMIZERS)
    assert {*PRECISIONS, "auto"} == set(CONFIGURED)


@pytest.mark.parametrize(("name", "precision"), ALL)
def test_matrices_decay_and_vectors_do_not(name, precision):
    """Without a gradient, and with SGD's coupled decay too, only the decay moves a parameter."""
    network, optimizer = made(name, precision, learning_rate=0.5, weight_decay=0.5)
    before = [p.detach().clone() for p in network.parameters()]
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for old, new in zip(before, network.parameters(), strict=True):
        torch.testing.assert_close(new.data, old * (0.75 if old.dim() > 1 else 1.0), rtol=2.0**-7, atol=1e-7)


def test_states_and_arguments_are_torchs_where_it_has_the_rule():
    for name, precision in ALL:
        built = build(model(precision), Optimizer(name=name), precision=precision)
        expected = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}.get(name) if precision == "fp32" else None
        assert isinstance(built, expected or FusedOptimizer), (name, precision)
    for precision in ("tf32", "bf16"):
        assert isinstance(build(model(), Optimizer(), precision=precision), torch.optim.AdamW)


@pytest.mark.parametrize("skipped", [0.0, 1.0])
def test_one_launch_for_all_tensors_is_torchs_adamw(skipped, monkeypatch):
    """In all that a checkpoint holds, with a scale of the gradients, and a step to be taken back."""
    ours, theirs = (made("adamw", "fp32", learning_rate=0.01) for _ in range(2))
    monkeypatch.setattr(AdamW, "_device", DEVICE)
    launches = []
    step = update.update
    monkeypatch.setattr(update, "update", lambda *a, **o: (launches.append(len(a[0])), step(*a, **o)))
    run(*ours, range(3))
    given = {name: torch.tensor(x, device=DEVICE) for name, x in (("grad_scale", 3.0), ("found_inf", skipped))}
    for name, value in given.items():
        setattr(ours[1], name, value)
    run(*ours, range(3, 5))
    assert launches == [2, 4] * 5  # matrices and vectors
    monkeypatch.setattr(AdamW, "_device", "another")  # than there is: torch's own
    run(*theirs, range(3))
    for name, value in given.items():
        setattr(theirs[1], name, value)
    run(*theirs, range(3, 5))
    assert len(launches) == 10
    for one, other in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        for name, value in theirs[1].state[other].items():
            torch.testing.assert_close(ours[1].state[one][name], value, rtol=1e-5, atol=1e-7)


# What is not as torch makes it, or asks for more than the kernel knows.
ODD = {
    "maximize": lambda weight: AdamW([weight], lr=0.1, maximize=True, fused=True),
    "amsgrad": lambda weight: AdamW([weight], lr=0.1, amsgrad=True, fused=True),
    "no states yet": lambda weight: AdamW([weight], lr=0.1, fused=True),
    "a rate that is a tensor": lambda weight: AdamW([weight], lr=torch.tensor(0.1, device=DEVICE), fused=True),
    "not fused": lambda weight: AdamW([weight], lr=0.1),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_the_kernel_does_not_know_is_torchs_to_do(odd, monkeypatch):
    monkeypatch.setattr(AdamW, "_device", DEVICE)
    start = torch.randn(6, 10, device=DEVICE)
    ours, theirs = (nn.Parameter(start.clone()) for _ in range(2))
    mine = ODD[odd](ours)
    kind = {name: value for name, value in mine.defaults.items() if name not in ("decoupled_weight_decay",)}
    reference = torch.optim.AdamW([theirs], **kind)
    for seed in range(3):
        torch.manual_seed(seed)
        gradient = torch.randn_like(start)
        mine.step(lambda gradient=gradient: setattr(ours, "grad", gradient))  # there is none before
        theirs.grad = gradient.clone()
        reference.step()
        ours.grad = None
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("how", ["transposed", "added later"])
def test_a_parameter_that_is_not_packed_or_came_later_has_torchs_moments(how, monkeypatch):
    monkeypatch.setattr(AdamW, "_device", DEVICE)
    start = torch.randn(10, 6, device=DEVICE)
    ours, theirs = (nn.Parameter(start.clone().t() if how == "transposed" else start.clone()) for _ in range(2))
    first = nn.Parameter(torch.ones(2, 2, device=DEVICE))
    mine = build([first, ours] if how == "transposed" else [first], Optimizer(), precision="fp32")
    if how == "added later":
        mine.add_param_group({"params": [ours], "weight_decay": 0.1})
    reference = torch.optim.AdamW([theirs], lr=Optimizer().learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    for seed in range(3):
        torch.manual_seed(seed)
        first.grad, ours.grad = torch.ones_like(first), torch.randn_like(ours)
        theirs.grad = ours.grad.clone()
        mine.step()
        reference.step()
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(mine.state[ours]["exp_avg"], reference.state[theirs]["exp_avg"])


def test_hooks_are_called_once_and_a_parameter_without_a_gradient_was_not_written_to():
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # which makes torch put hooks around its own step
    for name in ("adamw", "sgd"):
        weight, idle = (nn.Parameter(torch.ones(3, device=DEVICE)) for _ in range(2))
        optimizer, called = build([weight, idle], Optimizer(name=name), precision="fp32"), []
        optimizer.register_step_pre_hook(lambda *_, called=called: called.append("before"))
        optimizer.register_step_post_hook(lambda *_, called=called: called.append("after"))
        weight.grad, versions = torch.ones_like(weight), (weight._version, idle._version)
        optimizer.step()
        assert called == ["before", "after"]
        assert weight._version > versions[0] and idle._version == versions[1]


def test_counting_steps_does_not_wait_for_the_device():
    """torch takes a tensor that stands for a number by its value, which only the device knows."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            assert function != torch.ops.aten._local_scalar_dense.default
            return function(*arguments, **(options or {}))

    steps = [torch.zeros((), device=DEVICE) for _ in range(3)]
    for skipped in (0.0, 1.0, 0.0):
        found_inf = torch.tensor(skipped, device=DEVICE)
        with Watch():
            stepping._count(steps, found_inf)
    assert [step.item() for step in steps] == [2.0] * 3


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_backward_behind_a_step_is_refused_where_it_would_read_the_new_weight(name, monkeypatch):
    monkeypatch.setattr(AdamW, "_device", DEVICE)
    weight = nn.Parameter(torch.randn(4, 4, device=DEVICE))
    optimizer = build([weight], Optimizer(name=name), precision="bf16")
    x = torch.randn(2, 4, device=DEVICE, requires_grad=True)
    y = x @ weight.t()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_ours_on_float32_is_torchs(name):
    network, theirs = made(name, "fp32", learning_rate=0.01)
    other = model()
    matrices, vectors = ([p for p in other.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    ours = FusedOptimizer(groups, rule=name, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for optimizer, of in ((theirs, network), (ours, other)):
        run(of, optimizer, range(5))
        optimizer.grad_scale, optimizer.found_inf = (torch.tensor(x, device=DEVICE) for x in (3.0, 0.0))
        run(of, optimizer, range(5, 7))
    for a, b in zip(network.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "precision"), ALL)
def test_a_step_that_found_inf_leaves_no_trace(name, precision):
    """Not as the first one, and not later: everything then is as if it had not been."""
    runs = []
    for skipped in (False, True):
        network, optimizer = made(name, precision)
        optimizer.grad_scale = torch.tensor(2.0, device=DEVICE)
        for seed in range(3):
            if skipped:
                optimizer.found_inf = torch.tensor(1.0, device=DEVICE)
                for parameter in network.parameters():
                    parameter.grad = torch.full_like(parameter, float("nan"))
                optimizer.step()
            optimizer.found_inf = torch.tensor(0.0, device=DEVICE)
            run(network, optimizer, [seed])
        runs.append(tensors(network, optimizer))
    assert_equal(*runs)


def test_grad_scaler_drives_it():
    """torch.amp's own scaler, of which `_step_supports_amp_scaling` makes it a customer."""
    network, optimizer = made("lion", "fp32")
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
    before = [p.detach().clone() for p in network.parameters()]
    scaler.scale(network(torch.randn(4, 64, device=DEVICE)).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_equal(list(network.parameters()), before)
    assert scaler.get_scale() == 4.0
    optimizer.zero_grad()
    scaler.scale(network(torch.randn(4, 64, device=DEVICE)).sum()).backward()
    scaler.step(optimizer)
    assert not torch.equal(network[0].weight, before[0])
    assert optimizer.state[network[0].weight]["step"].item() == 1


@pytest.mark.parametrize(("name", "precision"), ALL)
def test_states_survive_saving_bit_for_bit_and_the_run_goes_on_as_if_uninterrupted(name, precision, tmp_path):
    network, optimizer = made(name, precision, seed=5)
    run(network, optimizer, range(3))
    torch.save((network.state_dict(), optimizer.state_dict()), tmp_path / "saved")
    weights, state = torch.load(tmp_path / "saved", weights_only=True)
    other, resumed = made(name, precision)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert_equal(tensors(network, optimizer), tensors(other, resumed))
    run(network, optimizer, range(3, 6))
    run(other, resumed, range(3, 6))
    assert_equal(tensors(network, optimizer), tensors(other, resumed))


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(("name", "precision"), ALL)
def test_distributed_checkpoints_hold_it(name, precision, flatten):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    network, optimizer = made(name, precision, seed=5)
    run(network, optimizer, range(2))
    saved = copy.deepcopy(get_optimizer_state_dict(network, optimizer, options=options))
    if flatten and isinstance(optimizer, FusedOptimizer):
        assert all(isinstance(value, (torch.Tensor, int, float)) for value in saved.values())
        assert any(key.startswith("state.0.weight.") for key in saved)
    other, resumed = made(name, precision)
    other.load_state_dict(network.state_dict())
    set_optimizer_state_dict(other, resumed, saved, options=options)
    for of, its in ((network, optimizer), (other, resumed)):
        run(of, its, [2])
    assert_equal(tensors(network, optimizer), tensors(other, resumed))


@pytest.mark.parametrize(("name", "precision"), ALL)
def test_a_step_without_gradient_or_rate_leaves_the_weights(name, precision):
    """What torch.distributed.checkpoint does to an optimizer whose states are not there yet."""
    network, optimizer = made(name, precision)
    before = [p.detach().clone() for p in network.parameters()]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert_equal(list(network.parameters()), before)


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bf16"])
def test_the_seed_decides_and_no_two_parameters_share_their_draws(name):
    runs = {}
    for key, seed in (("first", 1), ("again", 1), ("other", 2)):
        torch.manual_seed(0)
        one = nn.Parameter(torch.randn(64, 80, device=DEVICE))
        two = nn.Parameter(one.detach().clone())
        optimizer = build([one, two], Optimizer(name=name), precision="fp32", seed=seed)
        for _ in range(3):
            one.grad = two.grad = torch.randn(64, 80, device=DEVICE)
            optimizer.step()
        runs[key] = [optimizer.state[p]["square"] for p in (one, two)]
    assert_equal(runs["first"], runs["again"])
    assert not torch.equal(runs["first"][0], runs["other"][0])
    assert not torch.equal(*runs["first"])


def trained(name, precision):
    """The loss of a small network that has learned to imitate another, from its inputs in random order."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    inputs = torch.randn(512, 32)
    targets = teacher(inputs).detach()
    student = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 8))
    student = student.to(PRECISIONS[precision][0])
    rate = {"lion": 3e-4, "sgd": 0.1, "adafactor": 3e-2}.get(name, 3e-3)
    decay = 0.0 if name == "sgd" else 0.1  # SGD's is not divided by the size of the gradients
    config = Optimizer(name=name, learning_rate=rate, weight_decay=decay)
    optimizer = build(student, config, precision=precision)
    for step in range(150):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - step / 150)
        rows = torch.randint(512, (128,))
        # In float32 of weights that have fewer bits: CPUs without matmuls in bfloat16 take minutes for those.
        weights = {name: parameter.float() for name, parameter in student.named_parameters()}
        loss = (functional_call(student, weights, (inputs[rows],)) - targets[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return (student.float()(inputs) - targets).square().mean().item(), targets.var().item()


@pytest.mark.skipif(DEVICE != "cpu", reason="as much as the CPU shows")
def test_every_optimizer_trains_and_fewer_bits_cost_little():
    baseline, variance = trained("adamw", "fp32")
    assert baseline < 0.02 * variance
    for name, precision in (("adamw_8bit", "fp32"), ("adamw_bf16", "fp32")):
        assert trained(name, precision)[0] < 1.2 * baseline, name
    for precision in ("bf16_kahan", "bf16_stochastic"):  # weights and gradients are in bfloat16 here
        assert trained("adamw_8bit", precision)[0] < 0.03 * variance, precision
    for name in ("lion", "adafactor", "sgd"):
        assert trained(name, "bf16_kahan")[0] < 0.2 * variance, name


def test_frozen_empty_and_mixed_parameters_pass():
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    empty, norm = nn.Parameter(torch.ones(0, 4).bfloat16()), nn.Parameter(torch.ones(4))
    late = nn.Parameter(torch.ones(4, 4).bfloat16())
    for name in OPTIMIZERS:
        optimizer = build([frozen, empty, norm, late], Optimizer(name=name, learning_rate=0.1), precision="bf16_kahan")
        for parameter in (empty, norm):  # and none for `late`
            parameter.grad = torch.ones_like(parameter)
        before = late.detach().clone()
        optimizer.step()
        assert torch.equal(late, before)
        assert "compensation" not in optimizer.state[norm]
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 3
        late.grad = torch.ones_like(late)
        optimizer.step()
        assert not torch.equal(late, before)
        assert [optimizer.state[p]["step"].item() for p in (norm, late)] == [2, 1]
        late.grad = None


def test_the_learning_rate_may_be_a_tensor():
    results = []
    for rate in (0.02, torch.tensor(0.02, device=DEVICE)):
        for rule in ("adamw", "lion", "sgd", "adafactor"):
            network = model("bf16_kahan")
            optimizer = FusedOptimizer(network.parameters(), rule=rule, rounding="kahan", lr=rate, weight_decay=0.1)
            run(network, optimizer, range(2))
            results.append(tensors(network, optimizer))
    for first, second in zip(results[:4], results[4:], strict=True):
        for a, b in zip(first, second, strict=True):
            torch.testing.assert_close(a, b, rtol=2.0**-7, atol=2.0**-12)


def test_autograd_sees_that_a_parameter_changed():
    weight = nn.Parameter(torch.ones(3, device=DEVICE))
    optimizer = FusedOptimizer([weight], rule="lion")
    loss = (weight * weight).sum()
    weight.grad = torch.ones(3, device=DEVICE)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_cannot_be_trained_is_refused_in_one_sentence():
    for precision, network, why in (
        ("fp32", model().half(), "precision fp32 needs float32 parameters and one is torch.float16"),
        ("bf16_kahan", model().half(), "needs bfloat16 parameters and one is torch.float16"),
        ("bf16", model("bf16_kahan"), "precision bf16 needs float32 parameters and one is torch.bfloat16"),
        ("auto", model(), "precision is 'auto'; choose fp32"),
        ("fp32", nn.GELU(), "no parameter to train"),
    ):
        with pytest.raises(UserError, match=why):
            build(network, Optimizer(), precision=precision)
    with pytest.raises(UserError, match="rule is 'adam'; choose adamw, lion, sgd, adafactor"):
        FusedOptimizer(model().parameters(), rule="adam")
    table = nn.Embedding(10, 4, sparse=True, device=DEVICE)
    table(torch.tensor([1], device=DEVICE)).sum().backward()
    with pytest.raises(UserError, match="sparse=False"):
        FusedOptimizer(table.parameters(), rule="lion").step()


@pytest.mark.parametrize(("saved", "loaded"), [("adamw_8bit", "adamw_bf16"), ("lion", "adamw_bf16")])
def test_a_state_of_another_kind_is_refused(saved, loaded):
    state = made(saved, "fp32")[1].state_dict()
    with pytest.raises(UserError, match="resume with the optimizer.name, precision and model"):
        made(loaded, "fp32")[1].load_state_dict(state)
