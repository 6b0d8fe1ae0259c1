import json
import re
import resource
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from tilewright.cli.main import app
from tilewright.errors import UserError


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def data(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_train_says_what_fits_and_what_would_help():
    found = data("train", "1b", "--gpu", "H200-SXM", "--micro-batch", "16")
    assert found["fits"] and found["largest_micro_batch"] == 24
    assert sum(part["bytes"] for part in found["parts"]) == pytest.approx(found["total"])
    text = run("train", "7b", "--gpu", "H100-SXM5", "--explain").stdout
    assert "Not even one sequence fits" in text and "4 B x 6,658,859,008" in text and "adamw_8bit" in text


def test_no_column_of_a_plan_is_lost_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = run("parallel", "70b", "--gpus", "512", "--gpu", "H100-SXM5", "--global-batch", "2048").stdout
    for word in ("tensor", "stages", "data", "recompute", "micro", "links", "MFU┃", "selective"):
        assert word in text, text


def test_levers_sizes_and_stages_explain_themselves():
    text = run("train", "1b", "--micro-batch", "16", "--explain").stdout
    assert "the total with it" in " ".join(text.replace("│", " ").split())
    assert "wave = tiles / (waves x multiprocessors)" in run("lint", "1b", "--gpu", "H100-SXM5", "--explain").stdout
    pieces = ("train", "1b", "--pipeline", "4", "--accumulation", "8", "--micro-batch", "4")
    assert data(*pieces, "--interleave", "2")["total"] > data(*pieces)["total"]  # more micro batches are in flight
    assert "24 layers do not fill 4 pipeline stages of 7 pieces" in str(run(*pieces, "--interleave", "7").exception)
    groups = ("7b", "--data", "64", "--zero", "3", "--replicate", "8")
    assert data("train", *groups)["total"] == data("train", "7b", "--data", "8", "--zero", "3")["total"]
    assert data("step", *groups, "--gpu", "H100-SXM5")["training"]["replicate"] == 8


def test_serve_counts_the_cache(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = data("serve", str(tmp_path), "--tokens", "8k", "--batch", "4", "--gpu", "H100-SXM5")
    assert found["model"]["parameters"] == 8_030_261_248 and found["kv_bytes_per_token"] == 131072
    assert found["fits"] and found["decode_floor_seconds"] > 16e9 / 3.35e12


def test_serve_tells_the_time_to_the_first_token():
    on = ("serve", "7b", "--gpu", "H100-SXM5", "--batch", "8", "--prompt", "1k", "--tokens", "2k")
    found = data(*on)["prefill"]
    flops = 8 * 1000 * 2 * 6.4e9  # about, without embeddings
    assert found["bound"] == "arithmetic" and found["floor"] == pytest.approx(flops / 989.5e12, rel=0.1)
    assert found["floor"] < found["seconds"] < 2 * found["floor"]
    assert data(*on, "--tensor", "8")["prefill"]["seconds"] > found["seconds"] / 8  # traffic
    assert data(*on, "--weights", "fp8")["prefill"]["seconds"] < found["seconds"]
    one = data("serve", "7b", "--gpu", "H100-SXM5", "--prompt", "8")["prefill"]
    assert one["bound"] == "memory"
    assert "first token of 8 prompts of 1,000 tokens" in " ".join(run(*on).stdout.split())
    assert "give the accelerator with --gpu" in str(run("serve", "7b", "--prompt", "8").exception)


def test_mfu_reproduces_a_published_run_and_refuses_an_impossible_one():
    speed = ("--tokens-per-second", "515636", "--gpus", "512", "--gpu", "H100-SXM5", "--recompute", "full")
    found = data("mfu", "70b", *speed)["conventions"]["6N + attention"]
    assert (round(100 * found["mfu"], 2), round(100 * found["hfu"], 2)) == (41.25, 55.0)
    assert "(default)" in run("mfu", "70b", *speed).stdout
    steps = ("--seconds", "2", "--global-batch", "64", "--peak-tflops", "989.5")
    assert data("mfu", "1b", *steps)["tokens_per_second"] == 64 * 2048 / 2


def test_flops_batch_lint_roofline_parallel_answer():
    assert data("flops", "7b")["conventions"]["6N"]["model"] == 6 * 6_658_859_008
    assert (
        data("batch", "--gpus", "64", "--tensor", "8", "--global-batch", "1k", "--micro-batch", "5")["accumulation"]
        == 25
    )
    findings = data("lint", "1b", "vocabulary=50257", "--gpu", "H100-SXM5", "--micro-batch", "4")["findings"]
    assert findings[0]["what"] == "logits matmul" and not findings[0]["good"]
    assert data("roofline", "1b", "--gpu", "H200-SXM")["step_floor_seconds"] > 0
    plans = data("parallel", "70b", "--gpu", "H100-SXM5", "--gpus", "512", "--global-batch", "2048")["plans"]
    assert plans[0]["seconds"] <= plans[-1]["seconds"]


def test_one_model_times_a_step_whichever_command_asks():
    run_of = ("1b", "--gpu", "H200-SXM", "--micro-batch", "16", "--precision", "fsdp")
    step = data("step", *run_of, "--loss", "plain")
    roofline = data("roofline", *run_of)
    assert roofline["step_seconds"] == step["seconds"] > roofline["step_floor_seconds"]
    given = ("--gpus", "1", "--global-batch", "16", "--micro-batch", "16", "--recompute", "none")
    plan = data("parallel", "1b", "--gpu", "H200-SXM", *given)["plans"][0]
    assert plan["seconds"] == data("step", *run_of, "--loss", "fused")["seconds"] < step["seconds"]
    assert sum(step["parts"].values()) == pytest.approx(step["compute"]) == pytest.approx(step["seconds"])
    assert data("step", *run_of, "--compiled")["seconds"] < step["seconds"]


def test_fsdp_users_get_its_own_precision_and_a_given_layout_is_kept(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    sharded = ("train", "7b", "--gpu", "H100-SXM5", "--data", "8", "--zero", "3", "--micro-batch", "4")
    assert data(*sharded)["training"]["precision"] == "fsdp" and data(*sharded)["fits"]
    assert "--precision fsdp" in run(*sharded, "--precision", "bf16").stdout
    layout = ("parallel", "70b", "--gpu", "H100-SXM5", "--gpus", "64", "--global-batch", "64", "--tp", "8", "--pp", "4")
    for plan in data(*layout)["plans"]:
        assert (plan["training"]["tensor"], plan["training"]["pipeline"], plan["training"]["data"]) == (8, 4, 2)
    text = run("parallel", "70b", "--gpu", "H100-SXM5", "--gpus", "8", "--global-batch", "8", "--tp", "8").stdout
    assert "more than the 84.18 GB that a GPU has" in " ".join(text.split())


RUN = """
model: {preset: 350m, gpt_block: optimized, loss: fused}
precision: PRECISION
global_batch: 32
micro_batch: 8
"""


@pytest.mark.parametrize("precision", ["bf16", "bf16_kahan", "bf16_stochastic", "tf32", "fp32", "auto"])
def test_a_run_is_planned_as_train_would_run_it(tmp_path, precision):
    (tmp_path / "run.yaml").write_text(RUN.replace("PRECISION", precision))
    run_yaml = str(tmp_path / "run.yaml")
    word = "bf16" if precision == "auto" else precision
    options = ("--micro-batch", "8", "--loss", "fused", "--accumulation", "4", "--precision", word)
    found, same = data("train", run_yaml), data("train", "350m", "gpt_block=optimized", *options)
    assert found["total"] == same["total"] and found["training"]["precision"] == word
    assert data("train", run_yaml, "micro_batch=4")["total"] < found["total"]
    assert data("roofline", run_yaml, "--gpu", "H200")["training"]["micro_batch"] == 8
    assert data("flops", run_yaml)["conventions"] == data("flops", "350m")["conventions"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("train", "RUN", "--precision", "fp32"), "leave --precision out, and write FIELD=VALUE"),
        (("roofline", "RUN", "--gpu", "H200", "--micro-batch", "2"), "leave --micro-batch out"),
        (("train", "RUN", "lr=1"), "did you mean optimizer.learning_rate?"),
        (("train", "nowhere.yaml"), "nowhere.yaml"),
        (("train", "1b", "--precision", "amp"), "it is called bf16, as in `tilewright train`"),
    ],
)
def test_a_run_that_cannot_be_planned_is_one_sentence(tmp_path, arguments, sentence):
    (tmp_path / "run.yaml").write_text(RUN.replace("PRECISION", "bf16"))
    failed = run(*(str(tmp_path / "run.yaml") if each == "RUN" else each for each in arguments)).exception
    assert isinstance(failed, UserError) and sentence in str(failed) and "\n" not in str(failed)


@pytest.mark.parametrize("command", ["train", "roofline"])
def test_a_page_needs_nothing_else(tmp_path, command):
    page = tmp_path / "page.html"
    result = run(command, "125m", "--gpu", "H200-SXM", "--html", str(page))
    assert result.exit_code == 0 and str(page) in result.stdout.replace("\n", "")
    text = page.read_text(encoding="utf-8")
    assert not re.search(r'<(script|link|img)[^>]*(src|href)="?http', text)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "2b"), "did you mean"),
        (("train", "1b", "layer=3"), "did you mean layers"),
        (("train", "1b", "--gpu", "H100"), "H100-SXM5"),
        (("train", "1b", "--tensor", "3"), "tensor parallel 3"),
        (("train", "1b", "--pipeline", "25"), "pipeline stages"),
        (("train", "none.json"), "Cannot read 'none.json'"),
        (("batch", "--global-batch", "100", "--data", "3"), "does not divide"),
        (("batch", "--global-batch", "many"), "not a number"),
        (("mfu", "1b", "--tokens-per-second", "1e7", "--gpu", "H100-SXM5"), "--gpus"),
        (("mfu", "1b", "--tokens-per-second", "1e4"), "--peak-tflops"),
        (("mfu", "1b", "--gpu", "H100-SXM5"), "--global-batch"),
        (("mfu", "1b", "--tokens-per-second", "9", "--gpu", "V100-SXM2"), "no bf16 rate"),
        (("lint", "1b"), "--gpu"),
        (("lint", "1b", "--gpu", "H200-SXM", "--measure"), "CUDA GPU"),
        (("parallel", "70b", "--gpu", "H100-SXM5", "--gpus", "8", "--global-batch", "8"), "Nothing fits"),
        (("train", "1b", "--html", "/proc/none/x.html"), "Cannot write"),
        (("train", "1b", "--memory-gb", "inf"), "--memory-gb"),
        (("serve", "1b", "--kv-bytes", "nan"), "cached number"),
        (("serve", "1b", "--tensor", "100000"), "tensor parallel"),
        (("mfu", "1b", "--tokens-per-second", "9", "--peak-tflops", "nan"), "--peak-tflops"),
        (
            ("parallel", "7b", "--gpu", "H100-SXM5", "--gpus", "8", "--global-batch", "8", "--network", "nan"),
            "--network",
        ),
        (("lint", "1b", "ffn=4", "--tensor", "8", "--gpu", "H100-SXM5"), "do not divide"),
        (("roofline", "1b", "vocabulary=4", "--tensor", "8", "--gpu", "H100-SXM5"), "vocabulary of 4"),
        (("batch", "--gpus", "1e18"), "below 1e15"),
    ],
)
def test_bad_input_is_one_sentence(arguments, message):
    import torch

    if "--measure" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU to measure on")
    result = run(*arguments)
    assert isinstance(result.exception, UserError), result.output
    assert message in str(result.exception) and "\n" not in str(result.exception)


def test_planning_starts_without_torch_and_at_once():
    code = (
        "import sys; sys.argv = ['tilewright', 'plan', '--help']\n"
        "from tilewright.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'plotly' not in sys.modules and 'numpy' not in sys.modules"
    )

    def cpu_seconds(code):
        """Its own time, whatever else the machine does; a core that two share is slower for either."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # 0.3 s on an idle machine. On a busy one, beside what the libraries of any such command line take there.
    times, libraries = [cpu_seconds(code)], []
    while min(times) >= max(0.6, 3.5 * min(libraries, default=0.0)) and len(times) < 10:
        libraries.append(cpu_seconds("import typer, rich.console, omegaconf, yaml"))
        times.append(cpu_seconds(code))
    assert min(times) < max(0.6, 3.5 * min(libraries, default=0.0))


def test_a_run_is_sized_in_days_hours_dollars_and_energy():
    on = ("parallel", "7b", "--gpu", "H200-SXM", "--gpus", "64", "--global-batch", "512", "--pp", "1", "--tp", "1")
    found = data(*on, "--tokens", "1T", "--price", "2.5")
    assert found["budget"]["dollars"] == pytest.approx(2.5 * found["budget"]["gpu_hours"])
    assert found["budget"]["gpu_hours"] == pytest.approx(64e12 / found["plans"][0]["tokens_per_second"] / 3600)
    assert "GPU-hours" in run(*on, "--tokens", "1T").stdout
    assert "give its --tokens" in str(run(*on, "--price", "2").exception)
    assert data("train", "7b")["checkpoint"]["whole"] == 12 * 6_658_859_008


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tp", "3"), "tensor parallel 3"),
        (("--data", "16", "--node", "3"), "16 GPUs are not whole nodes of 3"),
        (("--data", "10000000"), "10,000,000 GPUs cannot be planned"),
        (("--network", "-1"), "--network"),
        (("--ep", "2", "--data", "2"), "has no experts"),
        (("--cp", "3",), "two pieces a rank"),
        (("--data", "8", "--replicate", "2"), "need ZeRO 2 or 3; zero is 0"),
        (("--lora", "8", "--precision", "half"), "precision is 'half'"),
        (("--tokens", "lots"), "not a number"),
        (("--tokens", "1T", "--goodput", "0"), "goodput of 0 to 1"),
        (("--gpu", "H300"), "H300"),
    ],
)  # fmt: skip
def test_a_step_that_cannot_be_planned_is_one_sentence(arguments, message):
    failed = run("step", "7b", *(() if "--gpu" in arguments else ("--gpu", "H100-SXM5")), *arguments).exception
    assert isinstance(failed, UserError) and message in str(failed) and "\n" not in str(failed)


def test_a_small_run_is_simulated_at_many_sizes(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    on = ("simulate", "7b", "--gpu", "H100-SXM5", "--micro-batch", "6", "--gpus", "8,512,16k")
    found = data(*on)["sizes"]
    assert [row["gpus"] for row in found] == [8, 512, 16000]
    assert found[0]["goodput"] > found[1]["goodput"] > found[2]["goodput"] > 0.5
    assert found[0]["mfu"] > found[1]["mfu"] > found[2]["mfu"]
    same = data(
        "step", "7b", "--gpu", "H100-SXM5", "--micro-batch", "6", "--data", "8", "--zero", "3", "--loss", "fused"
    )
    assert found[0]["step_seconds"] == same["seconds"]
    text = run(*on).stdout
    assert "Assumed: one failure in 50,677 GPU-hours" in text and "goodput" in text
    assert all(len(line) <= 80 for line in text.splitlines() if line[:1] in "┃│┏└")
    events = {"gpus": 8, "tokens": 98304, "events": [{"name": "step", "seconds": 1.5}]}
    (tmp_path / "run.json").write_text(json.dumps(events))
    replayed = data(*on, "--events", str(tmp_path / "run.json"))["sizes"]
    assert [row["step_seconds"] for row in replayed] == [1.5, 1.5, 1.5]
    assert replayed[1]["tokens_per_second"] == pytest.approx(98304 * 64 / 1.5)
    for bad, message in (
        (("--gpus", ""), "give 1 to 32 sizes"),
        (("--gpus", "4", "--tp", "8"), "do not divide"),
        (("--storage", "0"), "--storage"),
        (("--events", "none.json"), "Cannot read none.json"),
    ):
        assert message in str(run(*on[:6], *bad).exception)
