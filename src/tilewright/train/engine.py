"""A model under the levers of a configuration: what one micro batch and one optimizer step do.

Nothing here waits for the device. The gradient's norm, what it is clipped by, and whether a step counts at all are
tensors on the device; the optimizer reads them there. Losses of micro batches are not scaled down: their gradients are
sums, and the optimizer divides them, together with clipping, by one number in the pass that it makes anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tilewright.errors import UserError
from tilewright.measure.compile_cache import redirect_defaults
from tilewright.models import GPT
from tilewright.nn import MixtureOfExperts
from tilewright.nn.experts import why_no_grouped_matmul
from tilewright.ops.attention import hopper_forward
from tilewright.ops.attention.backends import why_not_model
from tilewright.parallel.experts import balance
from tilewright.parallel.own_time import OwnTime
from tilewright.parallel.replicas import Policy
from tilewright.parallel.spread import Spread
from tilewright.plan.gpt import OWN_ATTENTION, GPTConfig
from tilewright.runtime import dispatch, hopper
from tilewright.runtime.log import log
from tilewright.train import optimizers
from tilewright.train.schema import RECORDING, Train
from tilewright.train.world import World


class HasDevice(Protocol):
    """A configuration that says where it runs."""

    @property
    def device(self) -> str: ...


def device_of(config: HasDevice) -> torch.device:
    """The device a configuration means, or a refusal where the machine has no such thing."""
    if config.device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    kind, _, index = config.device.partition(":")
    if kind not in ("cuda", "cpu") or (index and not index.isdecimal()):
        raise UserError(f"device is {config.device!r}; choose auto, cuda or cpu.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, and PyTorch finds no GPU here; choose device=cpu, or see `tilewright doctor`.")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device is {config.device!r}, and there are {torch.cuda.device_count()} GPUs; choose a lower one."
        )
    return torch.device(config.device)


def precision_of(config: Train, device: torch.device) -> str:
    """`auto` in words."""
    if config.precision != "auto":
        return config.precision
    return "bf16" if device.type == "cuda" else "fp32"


def check_levers(config: Train, device: torch.device, accumulation: int) -> None:
    """Refuse levers that do not go together, or not on this kind of device."""
    records = config.compile in RECORDING
    if config.cuda_graphs and device.type != "cuda":
        raise UserError("cuda_graphs needs a GPU; leave it out on this machine.")
    if config.cuda_graphs and records:
        raise UserError(f"compile={config.compile} records CUDA graphs by itself; leave cuda_graphs out.")
    if config.model.residual == "bf16" and precision_of(config, device) in ("fp32", "tf32"):
        raise UserError("model.residual=bf16 needs matmuls in bfloat16; choose precision=bf16, or leave it out.")
    _check_attention(config, device)
    _check_mlp(config, device)
    _check_experts(config, device)
    if accumulation > 1 and records:
        raise UserError(
            f"compile={config.compile} would overwrite the gradients that {accumulation} micro batches add up; choose "
            "another mode, or cuda_graphs=true, or one micro batch a step."
        )


def _check_attention(config: Train, device: torch.device) -> None:
    """Refuse kernels of ours that do not take the model's attention on this kind of device."""
    model = config.model
    if model.attention not in OWN_ATTENTION:
        return
    dtype = torch.float32 if precision_of(config, device) in ("fp32", "tf32") else torch.bfloat16
    why = "" if device.type == "cuda" or dispatch.INTERPRETED else "it needs a GPU"
    why = why or why_not_model(model.attention, model.head_dim, dtype)
    if why:
        raise UserError(f"model.attention={model.attention}: {why}; choose model.attention=auto.")


def _check_mlp(config: Train, device: torch.device) -> None:
    """Refuse an MLP of tiles for a model that it cannot compute, or in what its kernels do not take."""
    model = config.model
    if model.mlp != "tilesync":
        return
    why = ""
    if model.experts:
        why = "its tiles are of one MLP, and model.experts is set;"
    elif model.gated and model.bias:
        why = "a gated MLP of tiles has no bias; choose model.bias=false, or"
    elif config.parallel.tp > 1:
        why = "its tiles read whole weights, and parallel.tp cuts them; leave tp at 1, or"
    elif device.type == "cuda" and precision_of(config, device) in ("fp32", "tf32"):
        why = "its kernels take 16 bits; choose precision=bf16, or"
    elif device.type == "cuda" and (model.width % 8 or model.ffn_width % 8):
        why = f"its kernels take widths in steps of 8, not {model.width} and {model.ffn_width};"
    if why:
        raise UserError(f"model.mlp=tilesync: {why} choose model.mlp=auto.")


def _check_experts(config: Train, device: torch.device) -> None:
    """Refuse what a mixture of experts does not go together with."""
    model = config.model
    if not model.experts:
        return
    for name in ("compile", "rules"):
        if getattr(config, name) != "none":
            raise UserError(f"{name}={getattr(config, name)} does not know model.experts yet; leave {name} out.")
    if config.cuda_graphs:
        dtype = torch.float32 if precision_of(config, device) in ("fp32", "tf32") else torch.bfloat16
        fused = model.gpt_block == "optimized" if model.mlp == "auto" else model.mlp != "standard"
        why = "" if fused else "the standard loop waits"
        if torch.cuda.is_available():  # a rehearsal asks for a GPU that is not there
            why = why or why_no_grouped_matmul(device, dtype, model.width, model.ffn_width)
        if why:
            raise UserError(
                f"cuda_graphs needs model.experts that do not wait for the host ({why}); leave cuda_graphs out."
            )


class Engine:
    """Model and optimizer on a device. `policies` says what each block computes again in backward.

    Another model than the configuration's may be given, on the device already. Where its batches are not tokens, it
    takes an engine whose `_loss` knows what they are; they need `clone` and `copy_`, as tensors have them.
    """

    def __init__(
        self,
        config: Train,
        device: torch.device,
        world: World,
        policies: list[str],
        model: nn.Module | None = None,
    ) -> None:
        self.config, self.device, self.world = config, device, world
        layout = world.mesh.layout
        self.precision = precision_of(config, device)
        if config.model.attention == "hopper" and not hopper_forward.is_there(device):
            raise UserError("model.attention=hopper is for a Hopper, and needs NVRTC 13; choose model.attention=auto.")
        if config.model.mlp == "tilesync" and device.type == "cuda" and not hopper.is_hopper(device):
            raise UserError("model.mlp=tilesync is for a Hopper, and needs NVRTC; choose model.mlp=auto.")
        if config.model.mlp == "tilesync" and device.type == "cpu" and world.is_rank_zero:
            log.warning("model.mlp=tilesync: no tile waits on a CPU; its MLPs run stage by stage in plain PyTorch")
        _set_global_modes(config, self.precision)
        torch.manual_seed(config.seed)
        # What is cut is made on the host: a rank's GPU need not hold all of it.
        is_cut = layout.is_sharded or layout.tp > 1 or layout.pp > 1 or layout.ep > 1
        where = torch.device("cpu") if is_cut else device
        self.model = _gpt(config, where, policies) if model is None else model
        dtype, _ = optimizers.PRECISIONS[self.precision]
        for parameter in self.model.parameters():  # and not buffers: a table of angles needs its bits
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        settings = config.parallel
        by_position = settings.dropout == "position" or (settings.dropout == "auto" and layout.ranks > 1)
        policy = Policy(
            settings.parameters, settings.gradients, settings.reshard, settings.prefetch,
            overlap=settings.overlap and not config.cuda_graphs,
        )  # fmt: skip
        self.spread = Spread(self.model, world.mesh, policy, device, by_position=by_position)
        parameters = [part.local for part in self.spread.shards.parts]
        self.optimizer = optimizers.build(parameters, config.optimizer, precision=self.precision, seed=config.seed)
        if config.compile != "none":
            redirect_defaults()
        if config.rules != "none":
            from tilewright.optimize import optimize

            self.report = optimize(self.model, rules=config.rules, compile=config.compile)
        stream = torch.bfloat16 if config.model.residual == "bf16" else dtype
        self.spread.replicate((torch.bfloat16 if self.precision == "bf16" else dtype, stream))
        self.forward: Any = self.spread.forward
        if config.rules == "none" and config.compile != "none":
            self.forward = self.spread.compiled(_inductor(config.compile))
        self.own = OwnTime(device)
        if world.ranks > 1 and not self.spread.watch(self.own):
            whole = "_replay" if config.cuda_graphs else "_loss"
            setattr(self, whole, self.own.timed(getattr(self, whole)))
        self.mixtures = [module for module in self.model.modules() if isinstance(module, MixtureOfExperts)]
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor, list[int]]] = {}
        self._step = 0
        self._static: Any = None  # the batch that the graphs read

    def tensors(self) -> dict[str, Any]:
        """Everything that a checkpoint must hold, in place."""
        return self.spread.tensors(self.optimizer)

    def seed(self, step: int) -> None:
        """Seed a step by (seed, step, replica), so that no random state has to be saved.

        Not torch.manual_seed, which takes a stack trace where CUDA was never used.
        """
        self._step, mesh = step, self.world.mesh
        number = _number(self.config.seed, step, mesh.place("dp") * mesh.layout.cp + mesh.place("cp"))
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(number)

    def accumulate(self, tokens: Any, first: bool, last: bool = True, number: int = 0) -> Tensor:
        """Add the gradients of a micro batch to those there are, or set them; its mean loss.

        `number` is its place among those of this rank in the step; by that its dropout is drawn, if by position.
        """
        number = number * self.world.mesh.layout.dp + self.world.mesh.place("dp")
        with self.spread.micro_batch(_number(self.config.seed, self._step, "micro batch", number) >> 1, last=last):
            return self._accumulate(tokens, first)

    def pipeline_step(self, batches: list[Tensor]) -> list[Tensor]:
        """Forward and backward of all micro batches through the pipeline; their losses where this is the last stage."""
        assert self.spread.pipeline is not None
        ranks, place = self.world.mesh.layout.dp, self.world.mesh.place("dp")
        numbers = (number * ranks + place for number in range(len(batches)))
        seeds = [_number(self.config.seed, self._step, "micro batch", number) >> 1 for number in numbers]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.spread.pipeline.step(batches, seeds)

    def _accumulate(self, tokens: Any, first: bool) -> Tensor:
        if self.config.cuda_graphs:
            return self._replay(tokens, first)
        if self.config.compile in RECORDING:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.profiler.record_function("tilewright.forward"):
            loss = self._loss(tokens)
        with torch.profiler.record_function("tilewright.backward"):
            loss.backward()
        return loss.detach().clone()

    @torch.no_grad()
    def evaluate(self, tokens: Tensor) -> Tensor:
        """The mean loss of a batch as the model stands, without dropout; eager, whatever the levers are."""
        self.model.eval()
        try:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
                if self.spread.pipeline is not None:
                    return self.spread.pipeline.evaluate(tokens)
                return self.model(tokens[:, :-1], tokens[:, 1:])
        finally:
            self.model.train()
            self.spread.settle()

    def _loss(self, tokens: Any) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            return self.forward(tokens[:, :-1], tokens[:, 1:])

    def _replay(self, tokens: Any, first: bool) -> Tensor:
        """Replay one of two CUDA graphs: the first sets the gradients, the second adds to them.

        A recording reads and writes the addresses it has seen. Where a parameter, a buffer or a gradient lies elsewhere
        by now (`parameter.data = other`), it is made anew.
        """
        if self._static is None:
            self._static = tokens.clone()
            self._warm_up()
        one, other = (tuple(getattr(batch, "shape", ())) for batch in (self._static, tokens))
        if one != other:
            raise UserError(
                f"cuda_graphs: the first batch has shape {one} and this one {other}; give all batches one shape, or "
                "leave cuda_graphs out."
            )
        if first not in self._graphs or self._graphs[first][2] != self._addresses():
            self._graphs.pop(first, None)
            graph = torch.cuda.CUDAGraph()
            if first:
                self.optimizer.zero_grad(set_to_none=True)
            # Both in one pool: they never run at once. Other threads, the data's say, may go on using the device.
            pool = next((other.pool() for other, *_ in self._graphs.values()), None)
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                loss = self._loss(self._static)
                loss.backward()
            self._graphs[first] = (graph, loss.detach(), self._addresses())
        self._static.copy_(tokens)
        graph, recorded, _ = self._graphs[first]
        graph.replay()
        return recorded.clone()

    def _addresses(self) -> list[int]:
        """Return the addresses of everything that a step of the model reads or writes."""
        parameters = list(self.model.parameters())
        tensors = [*parameters, *self.model.buffers(), *[p.grad for p in parameters if p.grad is not None]]
        return [tensor.data_ptr() for tensor in tensors]

    def _warm_up(self) -> None:
        """Run off the record, on another stream as recording asks for, and leave no trace of it. Three times: an op
        that chooses its algorithm by the clock, which a recording does not allow, does so at the third call."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.random.fork_rng([torch.cuda.current_device()]), torch.cuda.stream(stream):
            for _ in range(3):
                self._loss(self._static).backward()
                self.optimizer.zero_grad(set_to_none=True)  # at once: the next has room of its own for them
            for mixture in self.mixtures:
                mixture.counts.zero_()
        torch.cuda.current_stream().wait_stream(stream)

    def update(self, loss: Tensor, limit: Tensor, learning_rate: float, accumulation: int) -> Tensor:
        """One optimizer step of the gradients there are: (norm of the mean gradient, whether the step was skipped).

        And of a mixture of experts the largest share of a layer's tokens that one of them got.

        Skipped, on the device, is a step whose loss or norm is not finite, or whose loss is above `limit`.
        """
        with torch.profiler.record_function("tilewright.optimizer"):
            self.spread.reduce_gradients()
            summed = accumulation * self.spread.divisor
            norm = self.spread.shards.norm() / summed
            skipped = 1.0 - (norm.isfinite() & loss.isfinite() & (loss <= limit)).float()
            clip = self.config.optimizer.clip
            scale = summed * (norm / clip).clamp_min(1.0) if clip > 0 else torch.full_like(norm, summed)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate
            self.optimizer.grad_scale = torch.where(skipped > 0, torch.ones_like(scale), scale)  # type: ignore[attr-defined]
            self.optimizer.found_inf = skipped  # type: ignore[attr-defined]
            self.optimizer.step()
            if not self._graphs:  # a recording writes to the gradients it has found
                self.spread.shards.drop_gradients()
            found = [norm, skipped]
            if self.mixtures:
                rate = self.config.model.balance_rate * (1.0 - skipped)
                found.append(balance(self.mixtures, self.world.mesh, rate))
        return torch.stack(found)


def _number(*key: Any) -> int:
    """Hash a key to 63 bits."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") >> 1


def _gpt(config: Train, device: torch.device, policies: list[str]) -> GPT:
    with device:
        model = GPT(GPTConfig(**{k: v for k, v in vars(config.model).items() if k != "preset"}))
    model.set_recompute(policies)
    return model


def _set_global_modes(config: Train, precision: str) -> None:
    if precision in ("fp32", "tf32"):
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _inductor(mode: str) -> dict[str, Any]:
    """Return torch.compile's options for a mode; max-autotune tries its candidates in a process of its own.

    In the run's own, one that reads where it may not would end the run. On an H200 and with torch 2.11 there is such a
    one for 50368 x 65536 by 768: all that its process tries afterwards fails.
    """
    from torch._inductor import list_mode_options

    options = dict(list_mode_options(mode))
    return {**options, "autotune_in_subproc": True} if options.get("max_autotune") else options


@contextlib.contextmanager
def restored_modes() -> Iterator[None]:
    """Restore torch's global modes when a run ends, because the process may have other uses."""
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(deterministic)
