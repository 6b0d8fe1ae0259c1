import ast
import gzip
import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import record_function

import tilewright
from ops.contract import on_gpu
from tilewright.errors import UserError
from tilewright.measure.profile import (
    CATEGORIES,
    Work,
    category,
    idle_gaps,
    profile_steps,
    read_trace,
)
from tilewright.ops.attention import hopper_backward as attention
from tilewright.ops.cross_entropy import hopper as cross_entropy_hopper
from tilewright.runtime import hopper

NAMES = {
    "tilewright_gelu_mlp_matmul_value": "matmul",
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "matmul",
    "cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1": "matmul",
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>(cublasLt::Params)": "matmul",
    "triton_tem_fused_mm_7": "matmul",
    "aten::mm": "matmul",
    "aten::addmm": "matmul",
    "aten::bmm": "matmul",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_128x64x64_4x1x1_cga1x1x1": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, 128>(void)": "attention",
    "void cudnn::fusion::convert_dq_to_16bits<128, true, 128, 128, __nv_bfloat16>(void)": "attention",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)": "attention",
    "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>(Params)": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)": "attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "tilewright_dropout_add_norm_forward": "fused",
    "tilewright_linear_column_sums": "fused",
    "tilewright_linear_matmul": "matmul",
    "tilewright_linear_cross_entropy_matmul_add": "matmul",
    "tilewright::cross_entropy": "fused",
    "triton_poi_fused_gelu_view_9": "pointwise",
    "## Call CompiledFxGraph frnciz7vv7vtjuom65zd5fsqey5fue2dlkclxoazgwexpzfvutpk ##": "pointwise",
    "triton_red_fused_native_layer_norm_backward_12": "pointwise",
    "triton_per_fused__softmax_3": "pointwise",
    "triton_poi_fused__scaled_dot_product_flash_attention_clone_mm_3": "pointwise",
    "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::Base&)>": "pointwise",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>": "pointwise",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<4u>>": "pointwise",
    "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>": "pointwise",
    "aten::native_layer_norm": "pointwise",
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4, (ADAM_MODE)1, false>>": "optimizer",
    "tilewright_optimizer_update": "optimizer",
    "tilewright_attention_prepare": "attention",
    "aten::_fused_adamw_": "optimizer",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "Memcpy DtoD (Device -> Device)": "copy",
    "Memset (Device)": "copy",
    "aten::copy_": "copy",
    "aten::view": "other",
    "somebody_elses_kernel": "other",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_its_category(name):
    assert category(name) == NAMES[name] and category(name) in CATEGORIES


def test_all_kernels_are_named_after_their_op():
    """Jit functions that no other jit function calls are those that are launched."""
    functions, called = defaultdict(set), defaultdict(set)  # of an op, whose files may call each other's
    for path in Path(tilewright.__file__).parent.glob("[or]*/**/*kernels.py"):
        op = path.stem.removesuffix("_kernels") if path.parent.name == "runtime" else path.parent.name
        op = "optimizer" if op == "optim" else op
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                functions[op].add(node.name)
                calls = (inner.func for inner in ast.walk(node) if isinstance(inner, ast.Call))
                called[op] |= {function.id for function in calls if isinstance(function, ast.Name)}
    everywhere = set().union(*called.values())
    for op, names in functions.items():
        is_shared = (Path(tilewright.__file__).parent / "runtime" / f"{op}_kernels.py").exists()  # by all ops
        launched = names - (everywhere if is_shared else called[op])
        named = all(name.startswith(f"tilewright_{op}_") for name in launched)
        assert named and (launched or is_shared), (op, launched)
    assert category(attention.NAME) == "attention" and category(cross_entropy_hopper.NAME) == "fused"
    assert {category(name) for name in hopper.gemms()} == {"matmul"}


# Intervals


def event(kind, name, start, duration, thread=1, **arguments):
    """As in a trace: times in microseconds."""
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration, "tid": thread, "args": arguments}


def window(start, duration):
    return event("user_annotation", "tilewright.steps", start, duration)


spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


@settings(deadline=None)
@given(spans)
def test_busy_is_the_union_and_idle_the_rest(found):
    begin, end = 10, 50
    work = [Work(str(i), start, start + size, size, "", i) for i, (start, size) in enumerate(found)]
    work = [item for item in work if item.end > begin and item.start < end]
    ran = {moment for item in work for moment in range(max(item.start, begin), min(item.end, end))}
    gaps = idle_gaps(work, begin, end)
    assert sum(size for size, _, _ in gaps) == end - begin - len(ran)
    assert all(size > 0 for size, _, _ in gaps)


@settings(deadline=None)
@given(spans, st.integers(1, 3))
def test_busy_and_idle_are_the_whole_step(found, steps):
    events = [window(10, 40)] + [
        event("kernel", "k", start, size, correlation=i) for i, (start, size) in enumerate(found)
    ]
    profile = read_trace(events, steps)
    assert profile.seconds == pytest.approx(40e-6 / steps)
    assert profile.busy_seconds + profile.idle_seconds == pytest.approx(profile.seconds)
    ran = any(size and start < 50 and start + size > 10 for start, size in found)
    assert sum(spent.share for spent in profile.categories) == pytest.approx(1.0 if ran else 0.0)


nested = st.recursive(st.just([]), lambda inside: st.lists(inside, max_size=3), max_leaves=12)


@settings(deadline=None)
@given(st.lists(nested, min_size=1, max_size=3), st.sampled_from([0, 2]))
def test_own_times_of_one_thread_add_up_to_its_union(trees, before):
    """An op takes `before` us of its own before each inner op and 3 at its end."""
    events, own = [], {}

    def run(inside, start):
        name, now = f"op{len(own)}", start
        own[name] = before * len(inside) + 3
        for inner in inside:
            now = run(inner, now + before)
        events.append(event("cpu_op", name, start, now + 3 - start))
        return now + 3

    now = 0
    for tree in trees:
        now = run(tree, now) + before
    profile = read_trace([window(0, now), *events], 1)
    assert profile.device == "cpu" and profile.launches == len(own)
    assert profile.busy_seconds == pytest.approx(sum(own.values()) / 1e6)
    if len(own) <= 40:
        assert {one.name: round(one.seconds * 1e6) for one in profile.kernels} == own


def test_threads_do_not_take_from_each_other():
    events = [window(0, 10), event("cpu_op", "a", 0, 10, thread=1), event("cpu_op", "b", 2, 4, thread=2)]
    profile = read_trace(events, 1)
    assert {one.name: round(one.seconds * 1e6) for one in profile.kernels} == {"a": 10, "b": 4}
    assert profile.busy_seconds == pytest.approx(10e-6)


# A device


def launched(number, name, called, start, duration, *, call="cudaLaunchKernel", thread=1, kind="kernel"):
    return [
        event("cuda_driver" if call.startswith("cu") and call[2].isupper() else "cuda_runtime", call, called, 1, thread,
              correlation=number),
        event(kind, name, start, duration, thread=7, correlation=number),
    ]  # fmt: skip


def device_trace():
    """Two steps in one window of 200 us; the device runs behind the host, backward launches from thread 2."""
    annotations = [("forward", 0, 10), ("backward", 10, 10), ("optimizer", 20, 10), ("forward", 100, 10)]
    return [
        window(0, 200),
        event("gpu_user_annotation", "tilewright.steps", 5, 190),
        *(event("user_annotation", f"tilewright.{name}", start, size) for name, start, size in annotations),
        event("cpu_op", "aten::mm", 0, 10),
        *launched(1, "nvjet_a", 2, 5, 20),
        *launched(2, "tilewright_rope_rotate", 12, 30, 10, call="cuLaunchKernelEx", thread=2),
        *launched(3, "multi_tensor_apply_kernel", 22, 40, 10),
        *launched(4, "Memcpy HtoD (Pinned -> Device)", 60, 45, 10, call="cudaMemcpyAsync", kind="gpu_memcpy"),
        event("cuda_runtime", "cudaGraphLaunch", 102, 3, correlation=5),
        event("kernel", "nvjet_b", 110, 20, correlation=5),
        event("kernel", "nvjet_b", 130, 20, correlation=5),
    ]


def test_a_kernel_belongs_to_the_phase_that_launched_it():
    phases = {
        spent.name: (round(spent.seconds * 2e6), spent.calls * 2) for spent in read_trace(device_trace(), 2).phases
    }
    assert phases == {"forward": (20, 1), "backward": (10, 1), "optimizer": (10, 1), "other": (10, 1), "graph": (40, 2)}


def test_categories_launches_and_gaps_of_a_device():
    profile = read_trace(device_trace(), 2)
    assert profile.device == "cuda" and profile.launches == 5 / 2
    assert {spent.name: round(spent.seconds * 2e6) for spent in profile.categories} == {
        "matmul": 60, "fused": 10, "optimizer": 10, "copy": 10,
    }  # fmt: skip
    # Busy: 5 to 25, 30 to 55 (two streams overlap), 110 to 150.
    assert profile.busy_seconds * 2 == pytest.approx(85e-6) and profile.idle_seconds * 2 == pytest.approx(115e-6)
    assert profile.gaps == 2 / 2  # those of 5 us do not count
    first, second = profile.longest_gaps[:2]
    assert (first.before, first.after) == ("Memcpy HtoD (Pinned -> Device)", "nvjet_b")
    assert first.seconds == pytest.approx(55e-6) and second.seconds == pytest.approx(50e-6)
    assert second.before == "nvjet_b" and len(profile.longest_gaps) == 4


def test_kernels_beyond_forty_are_summed():
    events = [window(0, 10_000)] + [event("kernel", f"k{i}", 100 * i, i, correlation=i) for i in range(1, 61)]
    profile = read_trace(events, 1)
    assert [one.name for one in profile.kernels[:2]] == ["k60", "k59"] and len(profile.kernels) == 41
    assert profile.kernels[-1].name == "20 others" and profile.kernels[-1].calls == 20
    assert sum(one.seconds for one in profile.kernels) == pytest.approx(profile.busy_seconds)
    assert sum(one.share for one in profile.kernels) == pytest.approx(1.0)


# The real profiler


def small_step(device="cpu", width=256):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width)).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(64, width, device=device)
    calls = []

    def step():
        calls.append(None)
        with record_function("tilewright.forward"):
            loss = model(x).square().mean()
        with record_function("tilewright.backward"):
            loss.backward()
        with record_function("tilewright.optimizer"):
            optimizer.step()
            optimizer.zero_grad()

    return step, calls


@pytest.mark.skipif(torch.cuda.is_available(), reason="there, the device's kernels are measured")
def test_a_real_step_on_the_host(tmp_path):
    step, calls = small_step()
    path = tmp_path / "profiles" / "trace.json.gz"
    profile = profile_steps(step, steps=2, trace=path)
    assert len(calls) == 3  # one while the profiler warms up
    assert profile.device == "cpu" and profile.steps == 2
    kernels = {one.name: one for one in profile.kernels}
    # Forward has two matmuls, backward the gradients of two weights and of one input.
    assert kernels["aten::addmm"].calls == 2 and kernels["aten::mm"].calls == 3
    assert kernels["aten::_fused_adamw_"].calls == 1 and kernels["aten::_fused_adamw_"].category == "optimizer"
    assert {spent.name for spent in profile.phases} >= {"forward", "backward", "optimizer"}
    for spent in (profile.categories, profile.phases, profile.kernels):
        assert sum(one.share for one in spent) == pytest.approx(1.0)
        assert sum(one.seconds for one in spent) == pytest.approx(profile.busy_seconds, rel=1e-6)  # one thread
    with gzip.open(path) as file:
        assert read_trace(json.load(file)["traceEvents"], 2) == profile  # every figure is from the file
    assert os.listdir(path.parent) == ["trace.json.gz"]


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "other"])
def test_work_is_in_the_phase_it_was_called_in(phase):
    x = torch.randn(64, 64, requires_grad=True)

    def step():
        for name in ("forward", "backward", "optimizer", "other"):
            with record_function(f"tilewright.{name}"):
                if name == phase:
                    torch.autograd.grad((x @ x).sum(), x)

    assert [spent.name for spent in profile_steps(step, steps=2, trace=None).phases] == [phase]


def test_the_window_begins_and_ends_with_the_device_idle(monkeypatch):
    happened = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    profile_steps(lambda: happened.append("step"), steps=2, trace=None)
    # With a device, torch's profiler waits for it once more by itself.
    assert happened in (["step", "wait", "step", "step", "wait"], ["step", "wait", "step", "step", "wait", "wait"])


def test_rows_and_the_dictionary_hold_the_whole():
    profile = read_trace(device_trace(), 2)
    rows = profile.rows()
    assert [row[0] for row in rows[:3]] == ["step"] * 3 and {len(row) for row in rows} == {5}
    seconds = {name: value for table, name, value, _, _ in rows if table == "step"}
    assert seconds["busy"] + seconds["idle"] == pytest.approx(seconds["whole"])
    assert {row[0] for row in rows} == {"step", "category", "phase", "kernel", "gap"}
    assert json.loads(json.dumps(profile.as_dict()))["kernels"][0]["name"] == "nvjet_b"


def test_a_place_that_cannot_be_written_to_shows_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    step, calls = small_step()
    with pytest.raises(UserError, match="choose another file"):
        profile_steps(step, trace=tmp_path / "file" / "trace.json.gz")
    with pytest.raises(UserError, match="at least 1"):
        profile_steps(step, steps=0, trace=None)
    assert not calls


def test_a_step_that_fails_leaves_no_trace_and_no_profiler(tmp_path):
    def step():
        raise FloatingPointError("the loss is nan.")

    with pytest.raises(FloatingPointError):
        profile_steps(step, trace=tmp_path / "trace.json.gz")
    assert os.listdir(tmp_path) == []
    assert profile_steps(small_step()[0], steps=1, trace=None).seconds > 0.0


# Memory


# A GPU


@on_gpu
def test_a_real_step_on_a_gpu(tmp_path):
    step, _ = small_step("cuda", 2048)
    step()
    profile = profile_steps(step, steps=3, trace=tmp_path / "trace.json.gz")
    assert profile.device == "cuda" and 0.0 < profile.busy_seconds < profile.seconds
    assert {spent.name for spent in profile.categories} >= {"matmul", "pointwise", "optimizer"}
    phases = {spent.name: spent.seconds for spent in profile.phases}
    assert all(phases[name] > 0.0 for name in ("forward", "backward", "optimizer"))
    assert profile.kernels[0].category == "matmul" and profile.launches >= 10


@on_gpu
def test_a_replayed_graph_is_one_launch_and_no_phase():
    x = torch.randn(1024, 1024, device="cuda")
    graph = torch.cuda.CUDAGraph()
    x @ x
    with torch.cuda.graph(graph):
        for _ in range(5):
            x @ x

    def step():
        with record_function("tilewright.forward"):
            graph.replay()

    profile = profile_steps(step, steps=2, trace=None)
    assert [spent.name for spent in profile.phases] == ["graph"] and profile.phases[0].calls >= 5
    assert profile.launches == 1
