"""Write tables and pictures in README.md and docs/ from the JSON in results/; with --check, fail if they have drifted.

A table stands between `<!-- table: NAME results/PATH.json ... -->` and `<!-- end -->`; NAME is a function below, of one
result or of several. A picture stands between `<!-- plot: NAME ... -->` and `<!-- end -->`, and is docs/plots/NAME.svg.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tilewright.bench import NAMES
from tilewright.measure.line_plot import Line, Panel, Plot, Point, draw
from tilewright.tune.report.answer import Answer
from tilewright.tune.search.choose import confirmed, latest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"(?P<begin><!-- (?P<kind>table|plot): (?P<name>\w+) (?P<paths>\S+(?: \S+)*) -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table, its first column to the left and the others to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def machine(result: dict[str, Any]) -> str:
    """What it was measured on."""
    facts = result["machine"]
    gpu = facts["gpu"]
    return (
        f"{gpu['name']}, driver {gpu.get('driver', 'unknown')}, {gpu.get('power_limit_watts', 0):.0f} W; torch "
        f"{facts['torch']}, Triton {facts['triton']}; commit {facts['commit']}, {facts['date'][:10]}."
    )


def sites(result: dict[str, Any]) -> str:
    """How many sites each rule changes in each tiny model of the tests."""
    rules = list(dict.fromkeys(rule for counts in result.values() for rule in counts))
    rows = [[name, *(str(counts.get(rule, "")) for rule in rules)] for name, counts in result.items()]
    return markdown(["model", *(f"`{rule}`" for rule in rules)], rows)


def _share(cell: dict[str, Any]) -> str:
    return f"{cell['median'] * 1e6:.0f} µs, {cell['limit_share']:.0%}" if "median" in cell else "failed"


def _ratio(cell: dict[str, Any] | None, ours: dict[str, Any]) -> str:
    if cell is None:
        return ""
    return f"{cell['median'] / ours['median']:.2f}x" if "median" in cell else "failed"


def _op(result: dict[str, Any], label: str, peers: tuple[str, ...], name: Callable[[dict[str, Any]], str]) -> str:
    """Every case: our time and share of the limit, and how much longer each peer takes."""
    steps = [step for step in ("forward", "backward", "forward_backward", "step") if step in result["cases"][0]]
    header = [label]
    for step in steps:
        header += [step.replace("_", " + "), *peers]
    rows = []
    for case in result["cases"]:
        row = [name(case)]
        for step in steps:
            cells = case[step]["implementations"]
            row += [_share(cells["tilewright"]), *(_ratio(cells.get(peer), cells["tilewright"]) for peer in peers)]
        rows.append(row)
    ceilings = result["ceilings"]
    versions = ", ".join(f"{package} {version}" for package, version in result["peers"].items())
    return (
        f"{machine(result)} Measured ceilings: copy {ceilings['copy_bytes_per_second'] / 1e9:.0f} GB/s, bf16 matmul "
        f"{ceilings['bf16_flops'] / 1e12:.0f} TFLOPS. Device time, all taking turns; {versions}.\n\n"
        f"{markdown(header, rows)}{_compared(result['cases'], steps, name)}"
    )


def _compared(cases: list[dict[str, Any]], steps: list[str], name: Callable[[dict[str, Any]], str]) -> str:
    """In how many measurements ours is ahead of the quickest peer, or behind, by more than the same code differs.

    Nothing of results from before everybody took two seats.
    """
    differences, ratios = [], []
    for case in cases:
        for step in steps:
            cells = case[step]["implementations"]
            timed = {n: cell for n, cell in cells.items() if "median" in cell}
            seats = [cell["seats"] for cell in timed.values() if "seats" in cell]
            differences += [abs(second / first - 1) for first, second in seats]
            times = [cell["median"] for n, cell in timed.items() if not n.startswith("tilewright")]
            if "tilewright" in timed and times:
                ratios.append((min(times) / timed["tilewright"]["median"], f"{name(case)} {step.replace('_', ' + ')}"))
    if not differences or not ratios:
        return ""
    noise = sorted(differences)[math.ceil(0.95 * len(differences)) - 1]
    ahead = sum(ratio > 1 + noise for ratio, _ in ratios)
    behind = [f"{label} ({ratio:.3f})" for ratio, label in sorted(ratios) if ratio < 1 - noise]
    return (
        f"\nOf {len(differences)} pairs of turns of the same code 95% differ by no more than {noise:.1%}. By more than "
        f"that ours is ahead of the quickest peer in {ahead} of {len(ratios)} measurements, and behind in {len(behind)}"
        f"{': ' if behind else ''}{'; '.join(behind)}.\n"
    )


def dropout_add_norm(result: dict[str, Any]) -> str:
    """Every dtype, norm, p and width."""
    rows = result["cases"][0]["rows"]
    return _op(
        result, f"{rows} rows: dtype, norm, p, width", ("eager", "compile", "compile-max", "liger"),
        lambda case: f"{case['dtype']}, {case['norm']}, {case['p']}, {case['width']}",
    )  # fmt: skip


def activation(result: dict[str, Any]) -> str:
    """Every function, form and size."""

    def name(case: dict[str, Any]) -> str:
        how = {"tanh": ", tanh", "none": ", erf", None: ""}[case["approximate"]]
        form = "" if case["form"] == "plain" else f", {case['form']}"
        return f"{case['function']}{form}{how}, {case['rows']} x {case['width']}"

    return _op(result, "bf16", ("eager", "compile", "liger"), name)


def rope(result: dict[str, Any]) -> str:
    """Every layout."""

    def name(case: dict[str, Any]) -> str:
        pairs = "interleaved" if case["interleaved"] else "half-rotated"
        return f"{case['heads']} + {case['kv_heads']} heads of {case['head_dim']}, {pairs}"

    tokens = result["cases"][0]["batch"] * result["cases"][0]["sequence"]
    return _op(result, f"bf16, {tokens} tokens", ("tilewright-inplace", "eager", "compile", "liger"), name)


def lltm(result: dict[str, Any]) -> str:
    """The guide's cell by both clocks, and its pointwise part beside the limit."""
    names = ("eager", "compile", "tilewright", "cuda")
    rows = []
    for case in (case for case in result["cases"] if case["part"] == "cell"):
        size = f"{case['dtype']}, {case['batch']} x ({case['features']} + {case['state']})"
        for step in ("forward", "backward"):
            cells = case[step]["implementations"]
            clocks = {
                "device": {name: cell["median"] for name, cell in cells.items() if "median" in cell},
                "wall": {name: cell["wall"]["median"] for name, cell in cells.items() if "wall" in cell},
            }
            for clock, times in clocks.items():
                row = [f"{times[n] * 1e6:.1f} µs{_over(times, n)}" if n in times else _failed(cells, n) for n in names]
                rows.append([size, f"{step}, {clock}", *row])
            rows.append([size, f"{step}, launches", *(str(cells.get(n, {}).get("launches", "")) for n in names)])
    header = ["cell: batch x (features + state)", "", "eager", "compile", "Triton", "CUDA"]
    missing = f" Without the CUDA op: {result['without_cuda']}." if result["without_cuda"] else ""
    part = {**result, "cases": [case for case in result["cases"] if case["part"] == "pointwise"]}
    pointwise = _op(
        part, "pointwise part", ("eager", "compile", "cuda"),
        lambda case: f"{case['dtype']}, {case['batch']} x {case['state']}",
    )  # fmt: skip
    alone = f"The pointwise part alone; time and share of the limit are Triton's.{missing}"
    return f"{markdown(header, rows)}\n{alone}\n\n{pointwise}"


MODEL_PEERS = ("eager", "compile", "liger", "liger, compile")


def models(result: dict[str, Any]) -> str:
    """The step of each model by each implementation, and our best over that of the best peer."""
    names = list(dict.fromkeys(name for case in result["cases"] for name in case["implementations"]))
    rows, liger = [], result["peers"]["liger_kernel"]
    for case in result["cases"]:
        cells = case["implementations"]
        times = {name: cell["median"] for name, cell in cells.items() if "median" in cell}
        peer = min(time for name, time in times.items() if name in MODEL_PEERS)
        ours = min(time for name, time in times.items() if name.startswith("tilewright"))
        commit = case.get("commit", result["machine"]["commit"])
        rows.append([case["label"], *(_step(cells.get(name)) for name in names), f"{peer / ours:.2f}x", commit])
    text = machine(result)[:-1] + f"; transformers {result['peers']['transformers']}, liger-kernel {liger}.\n\n"
    return text + markdown(["model, weights, batch", *names, "over the best peer", "commit"], rows)


def _step(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    return f"{cell['median'] * 1e3:.1f} ms, {cell['peak_allocated'] / 2**30:.1f} GiB" if "median" in cell else "failed"


def _failed(cells: dict[str, Any], name: str) -> str:
    """What stands where there is no figure."""
    return "failed" if name in cells else ""


def _over(times: dict[str, float], name: str) -> str:
    """Eager's time over this one's."""
    return f" ({times['eager'] / times[name]:.2f}x)" if "eager" in times and name != "eager" else ""


def attention(result: dict[str, Any]) -> str:
    """Every case."""

    def name(case: dict[str, Any]) -> str:
        kv_heads = case.get("kv_heads", case["heads"])
        heads = f"{case['heads']}" if kv_heads == case["heads"] else f"{case['heads']}/{kv_heads}"
        kind = "causal" if case.get("causal", True) else "full"
        if lengths := case.get("packed"):
            kind = f"{len(lengths)} packed of {min(lengths)} to {max(lengths)}"
        window = f", window {case['window']}" if case.get("window") else ""
        return f"{case['batch']} x {case['sequence']}, {heads} x {case['head_dim']}, {kind}{window}"

    peers = ("tilewright-triton", "cudnn", "flash", "flex", "fa3")
    known = tuple(peer for peer in peers if any(peer in case["forward"]["implementations"] for case in result["cases"]))
    return _op(result, "bf16: batch x sequence, heads x head_dim", known, name)


def decode_attention(result: dict[str, Any]) -> str:
    """Every batch and context."""

    def name(case: dict[str, Any]) -> str:
        heads = f"{case['heads']}/{case['kv_heads']} x {case['head_dim']}"
        return f"{case['batch']} x {case['context']}, {heads}" + (f", {case['cache']}" if "cache" in case else "")

    return _op(result, "bf16: batch x context, heads x head_dim", ("sdpa", "compile"), name)


def few_rows_linear(result: dict[str, Any]) -> str:
    """Every size and number of rows."""
    return _op(
        result, "bf16: rows, features in, out", ("tilewright-pdl", "eager", "compile"),
        lambda case: f"{case['rows']}, {case['width']}, {case['out']}",
    )  # fmt: skip


def gelu_mlp(result: dict[str, Any]) -> str:
    """Every size."""
    return _op(
        result, "bf16: tokens, width, inner width", ("tilewright-lean", "eager", "compile"),
        lambda case: f"{case['tokens']}, {case['width']}, {case['inner']}" + ", erf" * ("approximate" in case),
    )  # fmt: skip


def glu_mlp(result: dict[str, Any]) -> str:
    """Every size."""
    return _op(
        result, "bf16: tokens, width, inner width, activation", ("tilewright-parts", "eager", "compile"),
        lambda case: f"{case['tokens']}, {case['width']}, {case['inner']}, {case['activation']}",
    )  # fmt: skip


def linear(result: dict[str, Any]) -> str:
    """Every size."""
    return _op(
        result, "bf16: tokens, features in, out", ("eager", "compile", "compile-max"),
        lambda case: f"{case['tokens']}, {case['width']}, {case['out']}",
    )  # fmt: skip


def quantized_linear(result: dict[str, Any]) -> str:
    """Every format, size and number of rows."""
    peers = ("bf16", "compile", "compile-max", "int8pack", "tinygemm", "torchao")
    return _op(
        result, "x in bf16: format, out x in, rows", peers,
        lambda case: f"{case['format']}, {case['out']} x {case['width']}, {case['rows']}",
    )  # fmt: skip


def embedding(result: dict[str, Any]) -> str:
    """Every size and dtype of the table."""

    def name(case: dict[str, Any]) -> str:
        table = f"{case['table']}, {case['vocabulary']} x {case['width']}"
        return f"{table}, {case['batch']} x {case['sequence']}"

    return _op(result, "result in bf16: table, tokens", ("eager", "compile", "liger"), name)


def optimizer(result: dict[str, Any]) -> str:
    """Every model and kind of states."""
    return _op(
        result, "AdamW: GPT, parameters, states", ("eager", "fused", "compile", "torchao", "bitsandbytes"),
        lambda case: f"{case['size']}, {case['parameters']}, {case['states']}",
    )  # fmt: skip


def _with_memory(result: dict[str, Any], held: Callable[[dict[str, Any]], int], names: list[str]) -> str:
    """Peak memory of each implementation beyond `held` bytes of the case."""
    rows = []
    for case in result["cases"]:
        cells = case["forward_backward"]["implementations"]
        extra = [(cells[n]["peak_bytes"] - held(case)) / 2**20 if "peak_bytes" in cells[n] else None for n in names]
        rows.append([_loss_case(case), *("failed" if e is None else f"{e:,.1f}" for e in extra)])
    return markdown(["peak MiB", *names], rows)


def _loss_case(case: dict[str, Any]) -> str:
    width = f"H = {case['width']}, " if "width" in case else ""
    return f"{width}V = {case['vocabulary']}, {case['tokens']} tokens"


def cross_entropy(result: dict[str, Any]) -> str:
    """Time, and peak memory beyond the logits."""
    peers = ("tilewright-inplace", "eager", "compile", "liger")
    times = _op(result, "bf16", peers, _loss_case)
    return f"{times}\n{_with_memory(result, lambda case: 0, ['tilewright', *peers])}"


def linear_cross_entropy(result: dict[str, Any]) -> str:
    """Time, and peak memory beyond inputs and gradients."""
    ours = ("tilewright-quarter", "tilewright-64MB", "tilewright-float32")
    peers = (*ours, "eager", "compile", "liger", "cut")
    times = _op(result, "bf16", peers, _loss_case)

    def gradients(case: dict[str, Any]) -> int:
        return 2 * case["width"] * (case["tokens"] + case["vocabulary"])

    return f"{times}\n{_with_memory(result, gradients, ['tilewright', *peers])}"


def loss_curves(result: dict[str, Any]) -> str:
    """Where each loss leads, and how far from the plain one."""
    rows = [
        [name, f"{curve[0]:.3f}", f"{curve[-1]:.3f}", f"{result['largest_difference_from_plain'][name]:.3f}"]
        for name, curve in result["curves"].items()
    ]
    header = ["loss", "first step", f"step {result['steps']}", "largest difference from plain"]
    model = result["model"]
    return (
        f"GPT {model['width']} x {model['layers']}, {result['batch']} x {model['sequence']} bytes of Python's standard "
        f"library a step, bf16 autocast. {machine(result)}\n\n{markdown(header, rows)}"
    )


def dropout_add_norm_small(result: dict[str, Any]) -> str:
    """64 x 768: wall time and device time beside eager."""
    small = result["small"]
    rows = []
    for key in ("p=0.1", "p=0.0"):
        for what, timings in small[key].items():
            row = [f"{key}, {what.replace('_', ' ')}"]
            for name in ("tilewright", "eager"):
                if "error" in timings[name]:
                    row.append("failed")
                    continue
                median, low, high = (timings[name][part] * 1e6 for part in ("median", "low", "high"))
                row.append(f"{median:.0f} ({low:.0f} to {high:.0f})")
            rows.append(row)
    header = [f"{small['rows']} x {small['width']}, µs (quartiles)", "tilewright", "eager"]
    return markdown(header, rows)


def block(result: dict[str, Any]) -> str:
    """A GPT with each block."""
    trial = result["trial"]
    model = trial["model"]
    rows = []
    for row in result["rows"]:
        setting = f"{row['setting']['gpt_block']}, {'compile' if row['setting']['compile'] else 'eager'}"
        done = row["result"]
        if done["error"]:
            rows.append([setting, f"failed: {done['error']}", "", "", "", ""])
            continue
        rows.append(
            [
                setting,
                f"{done['tokens_per_second']:,.0f}",
                f"{row['speedup']:.2f}x" if row["speedup"] else "n/a",
                f"{done['peak_memory_bytes'] / 2**30:.1f} GiB",
                f"{row['mfu']:.1%}" if row["mfu"] else "n/a",
                f"{row['loss_difference']:.1e}" if row["loss_difference"] is not None else "n/a",
            ]
        )
    header = ["setting", "tokens/s", "ratio", "peak memory", "MFU", "loss difference"]
    drift = "" if result["drift"] is None else f"drift {result['drift']:+.1%}. "
    return (
        f"GPT {model['width']} x {model['layers']}, batch {trial['batch']} x {model['sequence']}, dropout "
        f"{model['dropout']}, {trial['precision']}; MFU by {result['flops_convention']}, peak {result['peak_source']}; "
        f"{drift}{machine(result)}\n\n{markdown(header, rows)}"
    )


def _asked(answer: Answer) -> str:
    start = answer.start
    return f"{start['model']['preset']}, {start['global_batch']} x {start['model']['sequence']}"


def tune(tree: dict[str, Any]) -> str:
    """Every run of a study: its speed, and what was predicted of it before it ran."""
    answer = Answer.from_dict(tree)
    baseline = {name: values[0] for name, values in answer.levers.items()}
    rows = []
    ranked = sorted(latest(answer.records).values(), key=lambda record: -(record.tokens_per_second or 0.0))
    for record in ranked:
        changes = [f"{name} {value}" for name, value in record.point.items() if value != baseline[name]]
        name = ", ".join(changes).replace("model.", "").replace(" True", "") or "baseline"
        found, expected = record.measurement, record.prediction
        if found is None or expected is None:
            rows.append([name, record.outcome, *[""] * 5])
            continue
        rows.append([
            f"**{name}**" if answer.best and record.point == answer.best.point else name,
            f"{record.tokens_per_second:,.0f}",
            f"{record.tokens_per_second / answer.reference.tokens_per_second:.3f}x",
            f"{found.seconds * 1e3:.1f} ms", f"{expected.seconds * 1e3:.1f}",
            f"{found.bytes / 1e9:.1f} GB", f"{expected.bytes / 1e9:.1f}",
        ])  # fmt: skip
    header = [f"GPT {_asked(answer)}", "tokens/s", "ratio", "step", "predicted", "peak memory", "predicted"]
    given = f"{len(answer.records)} trials in {answer.elapsed:.0f} s. "
    return markdown(header, rows) + f"\n{given}{' '.join(answer.sentences)}\n\n{machine(tree)}\n"


def tuned(*trees: dict[str, Any]) -> str:
    """Studies, a line each: the baseline, torch.compile in its quickest mode, and what the study chose, measured
    once or more."""
    rows = []
    for tree in trees:
        answer = Answer.from_dict(tree)
        best, given, compiled = answer.best, answer.reference, answer.compiled
        rows.append([
            _asked(answer), f"{given.tokens_per_second:,.0f}",
            f"{compiled.tokens_per_second:,.0f} ({compiled.point['compile']})" if compiled else "not measured",
            f"{best.tokens_per_second:,.0f}", f"{answer.ratio:.3f}x",
            f"{best.measurement.bytes / given.measurement.bytes:.2f}x", answer.proof.verdict,
            "confirmed" if confirmed(answer.records, best) else "once", tree["machine"]["commit"],
        ])  # fmt: skip
    header = ["GPT", "tokens/s of the baseline", "torch.compile", "tuned", "speed", "memory", "the same model?"]
    return markdown([*header, "measured", "commit"], rows) + f"\n{machine(trees[-1]).split('; commit')[0]}.\n"


def memory(result: dict[str, Any]) -> str:
    """What `plan train` predicts beside what an H200 took."""
    from tilewright.plan.decoder import from_gpt
    from tilewright.plan.gpt import GPTConfig
    from tilewright.plan.memory import train
    from tilewright.plan.training import Training

    rows = []
    for case in result["cases"]:
        config = GPTConfig(**case["model"])
        predicted = train(from_gpt(config), Training(micro_batch=case["batch"], recompute=config.recompute))
        row = [f"{case['preset']}, batch {case['batch']}, {config.gpt_block}, p = {config.dropout:g}, "
               f"recompute {config.recompute}"]  # fmt: skip
        for ours, theirs in ((predicted.allocated, case["peak_allocated"]), (predicted.total, case["device_used"])):
            row += [f"{ours / 2**30:.2f}", f"{theirs / 2**30:.2f}", f"{ours / theirs - 1:+.1%}"]
        rows.append(row)
    header = ["GPT, bf16 autocast, AdamW; GiB", "allocated, predicted", "measured", "", "driver, predicted", "measured"]
    return f"{machine(result)}\n\n{markdown([*header, ''], rows)}"


_CARDS = {"h100_80gb": "H100 80 GB", "a100_80gb": "A100 80 GB", "a100_40gb": "A100 40 GB"}


def _ratios(runs: list[dict[str, Any]]) -> str:
    """Median and ends of estimated over measured MFU, and of how many runs."""
    found = sorted(run["estimated"] / run["measured"] for run in runs)
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f}), {len(found)}" if found else ""


def step_time(result: dict[str, Any]) -> str:
    """Estimated over measured MFU of published runs, by GPU and by model."""
    runs, rows = result["runs"], []
    kinds = {"fitted": False, "not seen by the fit": True}

    def row(name: str, chosen: list[dict[str, Any]]) -> list[str]:
        return [name, *(_ratios([run for run in chosen if run["held_out"] is held]) for held in kinds.values())]

    for gpu, name in _CARDS.items():
        for fp8 in (False, True):
            chosen = [run for run in runs if run["gpu"] == gpu and ("fp8" in run["precision"]) is fp8]
            if chosen:
                rows.append(row(f"{name}{', fp8' if fp8 else ''}", chosen))
    for model in dict.fromkeys(run["model"] for run in runs):
        rows.append(row(model, [run for run in runs if run["model"] == model]))
    checked, (right, total), (later, of) = result["cross_validation"], *result["ranked"].values()
    text = markdown(["estimated / measured MFU: median (least to most), runs", *kinds], rows)
    return (
        f"{text}\nRanked rightly, of pairs of one model on one kind of GPU more than 3 points apart: {right} of "
        f"{total}, and {later} of {of} not seen. With each model size left out of the fit: median "
        f"{checked['median']:.2f}, {checked['least']:.2f} to {checked['most']:.2f}, "
        f"{checked['within a tenth']:.0%} within a tenth.\n"
    )


def step_time_farthest(result: dict[str, Any]) -> str:
    """The runs whose estimates are farthest off."""
    runs = sorted(result["runs"], key=lambda run: -abs(math.log(run["estimated"] / run["measured"])))[:12]
    rows = [
        [f"{run['model']}, {run['gpus']} {_CARDS[run['gpu']]}, {run['sequence']:,} tokens, micro batch "
         f"{run['micro_batch']}",
         f"{run['measured']:.1f}", f"{run['estimated']:.1f}", f"{run['estimated'] / run['measured']:.2f}",
         "no" if run["held_out"] else "yes"]
        for run in runs
    ]  # fmt: skip
    return markdown(["farthest off", "measured MFU", "estimated", "ratio", "fitted"], rows)


def shapes(result: dict[str, Any]) -> str:
    """Drawn cases of every op: how many are behind, by which clock, and the worst."""

    def judged(part: dict[str, Any], wrong: str) -> list[str]:
        worst = f"{part['worst']['ratio']:.2f}" if part["worst"] else ""
        return [f"{len(part[wrong])} of {part['cases']}", worst]

    rows = [
        [name, *judged(op["device"], "behind"), *judged(op["wall"], "behind"), *judged(op["neighbour"], "below"),
         ", ".join(op.get("commits") or [result["machine"]["commit"]])]
        for name, op in result["summary"].items()
    ]  # fmt: skip
    header = [
        "op",
        "device: behind",
        "worst",
        "wall: behind",
        "worst",
        "below 85 % of the round shape",
        "worst",
        "commit",
    ]
    count = sum(op["cases"] for op in result["summary"].values())
    return f"{count} cases, seed {result['seed']}. {machine(result)}\n\n{markdown(header, rows)}"


def train(*results: dict[str, Any]) -> str:
    """Every lever of `tilewright train`, beside what its group is compared with."""
    text, groups = "\n\n".join(dict.fromkeys(map(machine, results))) + "\n", {}
    for number, result in enumerate(results):  # what is compared was measured in one run
        for case in result["cases"]:
            groups.setdefault((number, case["group"]), []).append(case)
    for (_, name), cases in groups.items():
        rows = []
        against = cases[0].get("against", cases[0]["case"])
        first = next((case for case in cases if case["case"] == against), None)
        if first is None or "error" in first:
            raise ValueError(f"{name}: the results have no {against!r} to compare with; measure it in the same run")
        for case in cases:
            if "error" in case:
                rows.append([case["case"], f"failed: {case['error']}", *[""] * 5])
                continue
            alike = case.get("steps") == first.get("steps")  # else as many as the shorter run has
            both = zip(case["losses"], first["losses"], strict=alike)
            difference = max(abs(a - b) for a, b in both)
            rows.append(
                [
                    case["case"], f"{case['tokens_per_second']:,.0f}",
                    f"{case['tokens_per_second'] / first['tokens_per_second']:.3f}x", f"{case['mfu']:.1%}",
                    f"{case['peak_allocated'] / 2**30:.1f} GiB",
                    f"{case['peak_allocated'] / first['peak_allocated']:.2f}x", f"{difference:.1e}",
                ]
            )  # fmt: skip
        header = [f"GPT {name}", "tokens/s", "ratio", "MFU", "peak memory", "ratio", "loss difference"]
        text += "\n" + markdown(header, rows)
    return text


TABLES: dict[str, Callable[..., str]] = {
    f.__name__: f
    for f in (
        activation,
        attention,
        block,
        cross_entropy,
        decode_attention,
        dropout_add_norm,
        dropout_add_norm_small,
        embedding,
        few_rows_linear,
        gelu_mlp,
        glu_mlp,
        linear,
        linear_cross_entropy,
        lltm,
        loss_curves,
        memory,
        models,
        optimizer,
        quantized_linear,
        rope,
        shapes,
        sites,
        step_time,
        step_time_farthest,
        train,
        tune,
        tuned,
    )
}


def lines(
    cases: list[dict[str, Any]],
    x: str,
    step: str,
    names: dict[str, str],
    value: Callable[[dict[str, Any], float], float],
) -> list[Line]:
    """A line for each implementation that was measured, `names` being its label: `value(step, seconds)` by case[x]."""
    found = []
    for name, label in names.items():
        points = []
        for case in cases:
            cell = case[step]["implementations"].get(name, {})
            if "median" in cell:
                middle, *ends = (value(case[step], cell[part]) for part in ("median", "low", "high"))
                points.append(Point(case[x], middle, min(ends), max(ends)))
        found += [Line(label, points)] if points else []
    return found


def dropout_add_norm_by_width(result: dict[str, Any]) -> Plot:
    """Bytes a second by width, where dropout, residual add and LayerNorm are all there."""
    kind = {"dtype": "bf16", "norm": "layer", "p": 0.1}
    cases = [case for case in result["cases"] if kind.items() <= case.items() and case["width"] <= 16384]
    copy = result["ceilings"]["copy_bytes_per_second"] / 1e9
    ceiling = Line("a copy", [Point(case["width"], copy) for case in cases])
    names = {"tilewright": "Tilewright", "eager": "PyTorch", "compile": "torch.compile", "liger": "Liger"}
    panels = [
        Panel(step, [*lines(cases, "width", step, names, lambda of, seconds: of["bytes"] / seconds / 1e9), ceiling])
        for step in ("forward", "backward")
    ]
    note = f"{cases[0]['rows']:,} rows, bf16, LayerNorm, p = 0.1. Bars: quartiles. {_measured_on(result)}"
    title = "dropout_add_norm: the fewest possible bytes over the time"
    return Plot(title, "width", "GB/s", panels, note, log_y=False)


def _plain_attention(result: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    """Causal cases of one length, by head_dim: of each those with most lengths at the same tokens and heads in all."""
    groups = dict[tuple[int, int, int], list[dict[str, Any]]]()
    for case in result["cases"]:
        is_shared = case.get("kv_heads", case["heads"]) != case["heads"]
        if case.get("causal", True) and not (case.get("window") or case.get("packed") or is_shared):
            groups.setdefault((case["head_dim"], case["batch"] * case["sequence"], case["heads"]), []).append(case)
    return {key[0]: cases for key, cases in sorted(groups.items(), key=lambda group: len(group[1]))}


def _attention_plot(result: dict[str, Any], unit: str, value: Callable[[dict[str, Any], float], float]) -> Plot:
    found = sorted(_plain_attention(result).items())
    names = {"tilewright": "Tilewright", "cudnn": "cuDNN", "flash": "FlashAttention in PyTorch"}
    names |= {"fa3": "FlashAttention 3", "flex": "FlexAttention"}
    panels = [
        Panel(step if len(found) == 1 else f"{step}, {width}", lines(cases, "sequence", step, names, value))
        for width, cases in found
        for step in ("forward", "backward")
    ]
    sizes = [
        f"{case['heads']} heads of {width}, {case['batch'] * case['sequence']:,} tokens"
        for width, (case, *_) in found
    ]  # fmt: skip
    note = f"bf16, {'; '.join(sizes)}. Bars: quartiles. {_measured_on(result)}"
    return Plot("attention, causal", "sequence length", unit, panels, note, log_y=unit != "TFLOPS")


def attention_by_length(result: dict[str, Any]) -> Plot:
    """FLOP/s by sequence length, as many tokens in all."""
    return _attention_plot(result, "TFLOPS", lambda of, seconds: of["flops"] / seconds / 1e12)


def attention_time_by_length(result: dict[str, Any]) -> Plot:
    """Time by sequence length, as many tokens in all."""
    return _attention_plot(result, "ms", lambda of, seconds: seconds * 1e3)


def _self_attention_plot(result: dict[str, Any], x: str, **fixed: int) -> Plot:
    cases = [case for case in result["cases"] if fixed.items() <= case.items()]
    names = {"tilewright": "Tilewright", "capture": "Tilewright, captured", "eager": "PyTorch"}
    names |= {"sdpa": "fused attention", "compile": "torch.compile"}
    panels = [
        Panel(title, lines(cases, x, step, names, lambda of, seconds: seconds * 1e6))
        for step, title in (("forward", "forward"), ("forward_backward", "forward and backward"))
    ]
    size = f"float32, batch {cases[0]['batch']}, {cases[0]['heads']} heads"
    what = ", ".join(f"{name} {value}" for name, value in fixed.items())
    note = f"{size}, {what}. Bars: quartiles. {_measured_on(result)}"
    return Plot("self_attention, what a caller waits", x, "us", panels, note)


def self_attention_by_width(result: dict[str, Any]) -> Plot:
    """Wall time by width, at 20 tokens."""
    return _self_attention_plot(result, "width", sequence=20)


def self_attention_by_sequence(result: dict[str, Any]) -> Plot:
    """Wall time by tokens, at a width of 512."""
    return _self_attention_plot(result, "sequence", width=512)


def _measured_on(result: dict[str, Any]) -> str:
    facts = result["machine"]
    name = facts["gpu"]["name"] if facts.get("gpu") else facts["cpu"]
    return f"{name}, torch {facts['torch'].split('+')[0]}, {facts['date'][:10]}."


PLOTS: dict[str, Callable[..., Plot]] = {
    f.__name__: f
    for f in (
        attention_by_length,
        attention_time_by_length,
        dropout_add_norm_by_width,
        self_attention_by_sequence,
        self_attention_by_width,
    )
}


def _read(match: re.Match[str]) -> list[dict[str, Any]] | None:
    """The results of a table or plot; None if one is a benchmark's that was not measured yet."""
    paths = [ROOT / path for path in match["paths"].split()]
    if any(path.stem in NAMES and not path.exists() for path in paths):
        return None
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def render(text: str, plots: str = "plots") -> str:
    """The text with every table made anew, and links to its pictures, whose folder it calls `plots`."""

    def block(match: re.Match[str]) -> str:
        name, results = match["name"], _read(match)
        if results is None:
            path = Path(match["paths"].split()[0])
            content = f"Not measured yet: `tilewright bench {path.stem} --out {path}`.\n"
        elif match["kind"] == "table":
            content = TABLES[name](*results)
        else:
            plot = PLOTS[name](*results)
            content = f"![{plot.title}: {plot.y_label} by {plot.x_label}]({plots}/{name}.svg)\n"
        return match["begin"] + content + match["end"]

    rendered, blocks = BLOCK.subn(block, text)
    if blocks != text.count("<!-- table: ") + text.count("<!-- plot: "):
        raise ValueError("a table or plot has no `<!-- end -->`, or two begin before one")
    return rendered


def pictures(text: str) -> dict[str, str]:
    """The pictures of a text as SVG, by name."""
    blocks = [(match["name"], _read(match)) for match in BLOCK.finditer(text) if match["kind"] == "plot"]
    return {name: draw(PLOTS[name](*results)) for name, results in blocks if results is not None}


def fresh_files() -> dict[Path, str | None]:
    """What every document and picture should be; None of a picture that no document shows."""
    folder = ROOT / "docs" / "plots"
    files: dict[Path, str | None] = dict.fromkeys(folder.glob("*"))
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        files[path] = render(text, "plots" if path.parent == folder.parent else "docs/plots")
        files |= {folder / f"{name}.svg": svg for name, svg in pictures(text).items()}
    return files


def main() -> int:
    """Write what has drifted, or only say so."""
    drifted = []
    for path, fresh in fresh_files().items():
        if fresh == (path.read_text(encoding="utf-8") if path.exists() else None):
            continue
        drifted.append(path.name)
        if "--check" in sys.argv:
            continue
        if fresh is None:
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(fresh, encoding="utf-8")
    if drifted and "--check" in sys.argv:
        print(f"out of date: {', '.join(drifted)}; run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
