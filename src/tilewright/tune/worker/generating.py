"""The jobs of a study of generating: what machine and model can do, how fast a run is, whether it is good enough."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.errors import UserError
from tilewright.tune.outcome import outcome_of
from tilewright.tune.proof.generating import Floor, build, compare, prove, text_tokens
from tilewright.tune.search.generating import SAVED, Generating, saved_weights, tokens_of_step
from tilewright.tune.worker import meter, trial

if TYPE_CHECKING:
    from tilewright.generate import Generator
    from tilewright.train.metrics import Metrics


def probe(job: meter.Job, say: meter.Say) -> tuple[str, dict[str, Any]]:
    """What the machine can do, what the model has, and what each format of weights and of the cache costs."""
    from tilewright.generate.tiles import why_not
    from tilewright.runtime import pdl
    from tilewright.tune.worker.probe import probe as measure_machine

    say({"event": "alive", "what": "starting"})
    meter.begin_phase(say, "measure")
    run = Generating(**job["configuration"])
    found = measure_machine(job, say)
    say({"event": "alive", "what": f"loading {run.model}"})
    plain = build(run)
    found["model"] = _model(plain)
    found["no_tilesync"] = why_not(plain.model, 1, plain.cache_dtype)
    found["no_pdl"] = pdl.why_not(plain.model.device)
    found["quality"] = {"weights": {}, "kv_cache": {}}
    for lever, values in job["formats"].items():
        for value in values:
            say({"event": "alive", "what": f"comparing {lever} {value}"})
            found["quality"][lever][value] = _quality(run, plain, lever, value, Floor(**job["floor"]))
    return "done", found


def _quality(run: Generating, plain: Generator, lever: str, value: str, floor: Floor) -> dict[str, Any]:
    try:
        changes: dict[str, Any] = {lever: value}
        other = build(dataclasses.replace(run, **changes), graph=False)
        quality = compare(plain, other, run.device, run.seed)
    except UserError as error:
        return {"refused": str(error).rstrip(".")}
    except Exception as error:  # as where both models do not fit
        return {"refused": outcome_of(error)[1].rstrip(".")}
    why = floor.refuse(quality)
    return {**quality, **({"refused": why} if why else {})}


def _model(generator: Generator) -> dict[str, Any]:
    """What a prediction counts of a model."""
    import torch

    from tilewright.generate.metrics import weight_bytes
    from tilewright.nn.quantized_linear import QuantizedLinear

    model, shape = generator.model, generator.model.config.shape
    quantized = any(isinstance(module, QuantizedLinear) for module in model.modules())
    matmuls = sum(
        module.in_features * module.out_features
        for module in model.modules() if isinstance(module, torch.nn.Linear | QuantizedLinear)
    )  # fmt: skip
    whole = weight_bytes(model)
    held = sum(each.nbytes for each in {id(e): e for e in (*model.parameters(), *model.buffers())}.values())
    return {
        "matmuls": float(matmuls), "element": model.dtype.itemsize, "other_bytes": float(max(0, held - whole)),
        "layers": shape.layers, "heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "parameters": shape.parameters, "quantized_bytes": whole if quantized else 0, "dtype": str(model.dtype)[6:],
    }  # fmt: skip


def measure(job: meter.Job, say: meter.Say) -> tuple[str, dict[str, Any]]:
    """Generate until the speed is known; the outcome, and a `Measurement`."""
    say({"event": "alive", "what": "starting"})
    run = Generating(**job["configuration"])
    meter.begin_phase(say, "device")
    trial.open_device(run, job["memory_cap"])
    meter.begin_phase(say, "build")
    generator = build(run)
    prompt = text_tokens(generator, run.prompt, run.seed)
    meter.begin_phase(say, "first step")
    watch = meter.Meter({**job, "profile": False}, 0, say)
    count = 1 if run.aim == "prefill" else run.tokens + 1
    try:
        for number in itertools.count(1):
            began = time.perf_counter()
            for _ in generator.steps([prompt] * run.batch, max_tokens=count, speculate=run.speculate):
                pass
            watch.step(_metrics(generator, run, number, time.perf_counter() - began), 0)
    except meter.Enough as enough:
        return str(enough), dataclasses.asdict(dataclasses.replace(watch.measurement(), losses=[]))
    raise AssertionError


def _metrics(generator: Generator, run: Generating, number: int, whole: float) -> Metrics:
    """A timed step as the meter of training takes it; the first one is all that it took."""
    import torch

    from tilewright.train.metrics import Metrics

    assert generator.metrics is not None
    found = generator.metrics
    seconds = whole if number == 1 else found.first_seconds if run.aim == "prefill" else found.decode_seconds
    memory = torch.cuda.max_memory_allocated() if run.device == "cuda" else None
    return Metrics(
        step=number, loss=0.0, gradient_norm=0.0, skipped=False, learning_rate=0.0, samples=run.batch, seconds=seconds,
        tokens_per_second=tokens_of_step(run) / seconds, tflops=0.0, mfu=None, hfu=None, convention="",
        memory_allocated=memory, memory_reserved=None, memory_device=None, data_wait=0.0,
    )  # fmt: skip


def check(job: meter.Job, say: meter.Say) -> tuple[str, dict[str, Any]]:
    """The proof of a run, and a folder of its quantized weights."""
    say({"event": "alive", "what": "starting"})
    run = Generating(**job["configuration"])
    meter.begin_phase(say, "device")
    trial.open_device(run)
    meter.begin_phase(say, "proof: best")
    found = prove(job)
    if found.verdict == "different by design" and run.weights != SAVED:
        say({"event": "alive", "what": "writing the quantized folder"})
        try:
            save(run, saved_weights(run, Path(job["save"])))
        except UserError as error:  # the run is what was proved
            found = dataclasses.replace(found, why=f"{found.why.rstrip('.')}; its folder was not written: {error}")
    return "done", dataclasses.asdict(found)


def save(run: Generating, folder: Path) -> None:
    """Write the quantized folder of a run, unless it is there."""
    from tilewright.generate.config import of_huggingface
    from tilewright.generate.quantizing import Plan, quantize_folder
    from tilewright.generate.weights import formats
    from tilewright.plan.huggingface.config import read_json
    from tilewright.train.export import export_huggingface, load_model, tokenizer_of

    if folder.exists():
        return
    with tempfile.TemporaryDirectory() as made:
        source = Path(run.model)
        if not (source / "config.json").exists():
            export_huggingface(load_model(source), Path(made) / "model", tokenizer_of(source)[0])
            source = Path(made) / "model"
        shape = of_huggingface(read_json(source / "config.json")).shape
        body, head = formats(run.weights, {shape.width, shape.ffn, shape.heads * shape.head_dim})
        quantize_folder(source, folder, Plan(body, head), device=run.device)
