"""What `tilewright.optimize` gives whole models: training steps of Hugging Face models and a plain GPT, beside peers.

Every implementation of a case runs in a process of its own, with the same weights and batch. Eager PyTorch is timed
first, and leaves. The others compile side by side, as far as memory allows, and are then timed in turns.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilewright.bench.protocol import Ask, head, sentence
from tilewright.measure.ceilings import measure_ceilings
from tilewright.measure.machine import package_version

EAGER, OURS = "eager", "tilewright"
PLAIN, _VOCABULARY = "plain GPT 125M", 50304
PEERS = ("compile", "liger", "liger, compile")
_ROUNDS, _SECONDS = 3, 1.5  # of turns, and about how long an implementation runs in each
_PREPARE_SECONDS = 420.0  # Gemma3 compiles alone, for want of memory, among the slowest
_LLAMA = dict(
    vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rope_theta=500000.0, tie_word_embeddings=True,
)  # fmt: skip
_QWEN3 = dict(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip
_GEMMA3 = dict(
    vocab_size=262144, hidden_size=1152, intermediate_size=6912, num_hidden_layers=26, num_attention_heads=4,
    num_key_value_heads=1, head_dim=256, sliding_window=512,
)  # fmt: skip
_GPT2: dict[str, Any] = dict(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0)
COMPILED, OPTIMIZER = f"{OURS}, compile", f"{OURS}, FusedOptimizer"
_WITHOUT = "without "  # before the rule that an implementation of ours leaves out
_OURS = (OURS, COMPILED)
_LLAMAS = (EAGER, *PEERS, *_OURS)
_NO_LINEAR, _NO_MLP = (f"{OURS}, {_WITHOUT}{rule}" for rule in ("linear", "gelu_mlp"))

# `peak` is about what eager takes, in GiB: how many implementations may compile at the same time follows from it.
CASES: tuple[dict[str, Any], ...] = (
    {"model": "Llama-3.2-1B", "weights": "bf16", "batch": 8, "sequence": 2048, "peak": 62,
     "implementations": (*_LLAMAS, OPTIMIZER, _NO_LINEAR)},
    {"model": "Llama-3.2-1B", "weights": "fp32", "batch": 8, "sequence": 2048, "peak": 78,
     "implementations": _LLAMAS},
    {"model": "GPT-2", "weights": "fp32", "batch": 32, "sequence": 1024, "peak": 48,
     "implementations": (EAGER, "compile", *_OURS, _NO_LINEAR, _NO_MLP)},
    {"model": "Qwen3-0.6B", "weights": "bf16", "batch": 8, "sequence": 2048, "peak": 62,
     "implementations": (*_LLAMAS, _NO_LINEAR)},
    {"model": "Gemma3-1B", "weights": "bf16", "batch": 8, "sequence": 2048, "peak": 100,
     "implementations": _LLAMAS},
    {"model": PLAIN, "weights": "fp32", "batch": 32, "sequence": 2048, "peak": 64,
     "implementations": (EAGER, "compile", *_OURS, _NO_LINEAR, _NO_MLP, "models.GPT")},
)  # fmt: skip


class PlainGPT(nn.Module):
    """A GPT as its user writes it, in plain PyTorch."""

    def __init__(self, vocabulary: int = _VOCABULARY, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(2048, width)
        self.blocks = nn.ModuleList(_PlainBlock(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of predicting each next token."""
        x = self.tokens(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


class _PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, sequence, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class _OwnGPT(nn.Module):
    """`models.GPT` with the optimized block, called as the plain one is."""

    def __init__(self) -> None:
        from tilewright.models import GPT
        from tilewright.plan.gpt import preset

        super().__init__()
        self.gpt = GPT(preset("125m", gpt_block="optimized", loss="fused"))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.gpt(input_ids, F.pad(labels[:, 1:], (0, 1), value=-100))}


def build_model(case: dict[str, Any]) -> Any:
    """The model of a case, with random weights."""
    name, layers = case["model"], case.get("layers")
    if name == PLAIN:
        return PlainGPT(**({"layers": layers} if layers else {}))
    import transformers

    transformers.logging.set_verbosity_error()
    fewer = {"num_hidden_layers": layers} if layers else {}
    config = {
        "Llama-3.2-1B": lambda: transformers.LlamaConfig(**{**_LLAMA, **fewer}),
        "Qwen3-0.6B": lambda: transformers.Qwen3Config(**{**_QWEN3, **fewer}),
        "Gemma3-1B": lambda: transformers.Gemma3TextConfig(**{**_GEMMA3, **fewer}),
        "GPT-2": lambda: transformers.GPT2Config(**_GPT2, **({"n_layer": layers} if layers else {})),
    }[name]()
    config.use_cache = False
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def apply_liger(model: nn.Module) -> None:
    """Put Liger's kernels into a model, as its users do."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model)


def rules_of(implementation: str) -> list[str]:
    """The rules that an implementation of ours applies: all but one that it is named without.

    >>> len(rules_of("tilewright")) - len(rules_of("tilewright, without linear"))
    1
    """
    from tilewright.optimize.rules import ALL

    left_out = implementation.partition(_WITHOUT)[2]
    return [name for name in ALL if name != left_out]


def _make_optimizer(model: nn.Module, implementation: str) -> torch.optim.Optimizer:
    """AdamW with torch's numbers and states of the parameters' dtype: torch's fused one, or ours where it is named."""
    if implementation != OPTIMIZER:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    from tilewright.optim import FusedOptimizer

    rule: dict[str, Any] = dict(rule="adamw", dtype=None, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
    return FusedOptimizer(model.parameters(), lr=1e-4, **rule)


class _Training:
    """Training steps of one implementation of a case."""

    def __init__(self, case: dict[str, Any], implementation: str) -> None:
        torch.manual_seed(0)
        dtype = torch.bfloat16 if case["weights"] == "bf16" else torch.float32
        with torch.device("cuda"):
            model: Any = _OwnGPT() if implementation == "models.GPT" else build_model(case)
        self.model: Any = model.to("cuda", dtype).train()
        kind = implementation.split(",")[0]
        if kind == "liger":
            apply_liger(self.model)
        self.report: Any = None
        if kind == OURS:
            from tilewright.optimize import optimize

            mode = "default" if implementation == COMPILED else "none"
            self.report = optimize(self.model, rules=rules_of(implementation), compile=mode)
        elif implementation.endswith("compile"):
            self.model.compile()
        self.optimizer = _make_optimizer(self.model, implementation)
        vocabulary: int = _VOCABULARY if case["model"] == PLAIN else self.model.config.vocab_size  # type: ignore
        generator = torch.Generator("cuda").manual_seed(1)
        shape = case["batch"], case["sequence"]
        tokens = torch.randint(0, vocabulary, shape, device="cuda", generator=generator)
        self.batch = {"input_ids": tokens, "labels": tokens}
        self.cast = functools.partial(torch.autocast, "cuda", torch.bfloat16, enabled=case["weights"] == "fp32")

    def step(self) -> torch.Tensor:
        with self.cast():
            loss: torch.Tensor = self.model(**self.batch)["loss"]
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def prepare(self) -> dict[str, Any]:
        began = time.perf_counter()
        losses = [float(self.step()) for _ in range(3)]
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        torch.cuda.reset_peak_memory_stats()
        self.step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        report = str(self.report) if self.report is not None else None
        return {"losses": losses, "prepare_seconds": seconds, "peak_allocated": peak, "report": report}

    def time(self, seconds: float) -> list[float]:
        """The duration of each of several steps, behind two that take the memory again."""
        for _ in range(2):
            self.step()
        found: list[float] = []
        ends = time.perf_counter() + seconds
        while len(found) < 5 or time.perf_counter() < ends:
            found.append(self._timed())
        torch.cuda.empty_cache()
        return found

    def _timed(self) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3


def _work(pipe: Connection, case: dict[str, Any], implementation: str) -> None:
    """Prepare, then time whenever asked, in a process of its own."""
    try:
        training = _Training(case, implementation)
        pipe.send(training.prepare())
        while (seconds := pipe.recv()) is not None:
            pipe.send(training.time(seconds))
    except EOFError:
        return
    except Exception as error:
        pipe.send({"error": sentence(error)})


class _Worker:
    def __init__(self, case: dict[str, Any], name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.times: list[float] = []
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, case, name), daemon=True)
        self.process.start()
        theirs.close()
        self.found: dict[str, Any] = {}

    def receive(self, seconds: float = _PREPARE_SECONDS) -> Any:
        if not self.pipe.poll(seconds):
            return {"error": f"It took more than {seconds:.0f} s."}
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            return {"error": f"The process ended with exit code {self.process.exitcode}."}

    def prepare(self) -> bool:
        self.found = self.receive()
        return "error" not in self.found

    def time(self) -> None:
        self.pipe.send(_SECONDS)
        times = self.receive()
        if isinstance(times, dict):
            self.found |= times
        else:
            self.times += times

    def close(self) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join(10)
        self.process.kill()
        if self.times:
            ordered = sorted(self.times)
            quarter = len(ordered) // 4
            self.found["median"] = statistics.median(ordered)
            self.found["quartiles"] = [ordered[quarter], ordered[-quarter - 1]]
            self.found["steps"] = len(ordered)
        return self.found


def _measure(case: dict[str, Any], progress: Callable[[str], None]) -> dict[str, Any]:
    """The figures of each implementation of a case."""
    found: dict[str, Any] = {}
    names = list(case["implementations"])
    if EAGER in names:
        names.remove(EAGER)
        worker = _Worker(case, EAGER)
        if worker.prepare():
            worker.time()
        found[EAGER] = worker.close()
        progress(f"{_label(case)}, {EAGER}: {_line(found[EAGER])}")
    ready = list(_prepared(case, names))
    for turn in range(_ROUNDS):
        for worker in ready if turn % 2 == 0 else ready[::-1]:
            if "error" not in worker.found:
                worker.time()
    for worker in ready:
        found[worker.name] = worker.close()
        progress(f"{_label(case)}, {worker.name}: {_line(found[worker.name])}")
    return found


def _prepared(case: dict[str, Any], names: list[str]) -> Iterator[_Worker]:
    """Workers that are ready, as many of which compile together as there is memory for."""
    free = torch.cuda.mem_get_info()[0] / 2**30
    together = max(1, int(free // case["peak"]))
    waiting = list(names)
    running: list[_Worker] = []
    while waiting or running:
        while waiting and len(running) < together:
            running.append(_Worker(case, waiting.pop(0)))
        worker = running.pop(0)
        worker.prepare()
        yield worker


def _label(case: dict[str, Any]) -> str:
    weights = "bf16 weights" if case["weights"] == "bf16" else "fp32 weights, autocast"
    return f"{case['model']}, {weights}, {case['batch']} x {case['sequence']}"


def _line(row: dict[str, Any]) -> str:
    if "median" not in row:
        return row.get("error", "not timed")
    loss = ", ".join(f"{each:.4f}" for each in row["losses"])
    return (
        f"{row['median'] * 1e3:.1f} ms, {row['peak_allocated'] / 2**30:.1f} GiB, "
        f"{row['prepare_seconds']:.0f} s to prepare, losses {loss}"
    )


def run(ask: Ask) -> dict[str, Any]:
    """Measure each case; `results/<gpu>/models.json` holds the whole."""
    cases = ask.chosen(CASES[:1] if ask.quick else CASES, _label)
    result = head("models", ask)
    ceilings = measure_ceilings()
    torch.cuda.empty_cache()
    result["ceilings"] = {"copy_bytes_per_second": ceilings.copy_bytes_per_second, "bf16_flops": ceilings.bf16_flops}
    result["peers"] = {each: package_version(each) or "missing" for each in ("torch", "transformers", "liger_kernel")}
    result["cases"] = []
    for case in cases:
        began = time.perf_counter()
        rows = _measure(case, ask.progress)
        ask.progress(f"{_label(case)}: {time.perf_counter() - began:.0f} s")
        listed = {name: value for name, value in case.items() if name not in ("implementations", "peak")}
        result["cases"].append({**listed, "label": _label(case), "implementations": rows})
        ask.save(result)
    return result
