"""Who computes a call of `attention`, and what it refuses."""

from __future__ import annotations

import json

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from ops.contract import DEVICE, HOPPER, assert_equal, assert_near_truth, on_gpu
from tilewright import ops
from tilewright.ops.attention import backends, table
from tilewright.ops.attention.arguments import read
from tilewright.ops.attention.op import reference
from tilewright.runtime import disk_cache

attention = ops.attention


def tensors(queries=6, keys=6, heads=2, kv_heads=2, width=16, dtype=torch.float32, device=DEVICE):
    torch.manual_seed(0)
    shapes = [(2, queries, heads, width), (2, keys, kv_heads, width), (2, keys, kv_heads, width)]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def packed(starts=(0, 2, 6), dtype=torch.int32, longest=4, device=DEVICE, tokens=6, **more):
    q, k, v = (torch.randn(tokens, 2, 16, device=DEVICE) for _ in range(3))
    return lambda: attention(
        q, k, v, cu_seqlens_q=torch.tensor(starts, dtype=dtype, device=device), max_seqlen_q=longest, **more
    )


def call(*changes, **options):
    q, k, v = tensors()
    for index, change in enumerate(changes):
        if change is not None:
            (q, k, v)[index].data = change((q, k, v)[index])
    return lambda: attention(q, k, v, **options)


ONES = torch.ones
BAD = {
    "q is no tensor": (lambda: attention(1, 2, 3), TypeError, "q must be a tensor"),
    "integers": (call(lambda q: q.int()), TypeError, "q has dtype torch.int32; convert it"),
    "three dimensions": (call(lambda q: q[0]), ValueError, r"q has shape \(6, 2, 16\), but \(batch, sequence, heads"),
    "mixed dtypes": (call(None, lambda k: k.half()), TypeError, "k is torch.float16, but q is torch.float32; convert"),
    "another batch": (call(lambda q: q[:1]), ValueError, "differ from that of q in tokens and heads alone"),
    "k and v": (call(None, None, lambda v: v[:, :5]), ValueError, "of k and v must be equal"),
    "heads": (lambda: attention(*tensors(heads=3)), ValueError, "q has 3 heads and k 2; the first must be a multiple"),
    "no heads": (lambda: attention(*tensors(kv_heads=0)), ValueError, "q has 2 heads and k 0"),
    "no head_dim": (lambda: attention(*tensors(width=0)), ValueError, "head_dim is 0; it must be at least 1"),
    "narrow": (lambda: attention(*tensors(width=8), backend="triton"), ValueError, "16 to 256 in steps of 8"),
    "wide": (lambda: attention(*tensors(width=264), backend="triton"), ValueError, "head_dim of 16 to 256"),
    "odd": (lambda: attention(*tensors(width=20), backend="triton"), ValueError, "steps of 8, and this one is 20"),
    "float64": (call(*[torch.Tensor.double] * 3, backend="triton"), ValueError, "does not take torch.float64"),
    "negative window": (call(window=-1), ValueError, "window is -1; give how many keys"),
    "window of three": (call(window=(1, 2, 3)), ValueError, "window is .*; give how many keys"),
    "scale": (call(scale=0.0), ValueError, "scale is 0.0; give a finite number above 0"),
    "softcap": (call(softcap=-2.0), ValueError, "softcap is -2.0; give a finite number of at least 0"),
    "p": (call(p=1.0), ValueError, "p is 1.0; a dropout probability lies in"),
    "mask's shape": (call(bias=ONES(5, 6, device=DEVICE)), ValueError, r"bias has shape \(5, 6\), but .*2, 6, 6\)"),
    "mask's dtype": (call(bias=ONES(6, 6, device=DEVICE).int()), TypeError, "bias is torch.int32; give .* of booleans"),
    "slopes' shape": (call(alibi=ONES(3, device=DEVICE)), ValueError, r"alibi has shape \(3,\), but \(2,\)"),
    "slopes' dtype": (call(alibi=ONES(2, device=DEVICE).half()), TypeError, "alibi is torch.float16; give .* float32"),
    "slopes' gradient": (call(alibi=ONES(2, device=DEVICE, requires_grad=True)), ValueError, "alibi requires"),
    "backend": (call(backend="cpp"), ValueError, "no backend 'cpp'; choose one of auto, hopper, triton, cudnn, flash"),
    "lengths alone": (call(max_seqlen_q=4), ValueError, "need cu_seqlens_q"),
    "starts of int64": (packed(dtype=torch.int64), TypeError, "cu_seqlens_q is torch.int64; give an int32 tensor"),
    "starts of two dimensions": (packed(starts=((0, 6),)), ValueError, r"cu_seqlens_q has shape \(1, 2\)"),
    "no longest": (packed(longest=None), ValueError, "max_seqlen_q is None; give the tokens of the longest"),
    "packed bias": (packed(bias=ONES(6, 6, device=DEVICE)), ValueError, "a bias does not go with packed sequences"),
    "starts that fall": (packed((0, 4, 3)), ValueError, "cu_seqlens_q falls from 4 to 3; it must not decrease"),
    "starts beyond": (packed((0, 4, 7)), ValueError, "cu_seqlens_q goes from 0 to 7, but there are 6 tokens"),
    "longer than the longest": (packed((0, 1, 6)), ValueError, "a sequence of 5 tokens; its longest is"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_computed_is_one_sentence_before_any_launch(case, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    run, kind, words = BAD[case]
    with pytest.raises(kind, match=f"attention: .*{words}") as raised:
        run()
    assert "\n" not in str(raised.value)


@on_gpu
@pytest.mark.parametrize("backend", ["hopper", "triton", "cudnn", "flash", "efficient"])
def test_a_cpu_tensor_is_not_for_a_gpus_backend(backend):
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot take this call: the tensors are on cpu"):
        attention(*tensors(device="cpu"), backend=backend)


@pytest.mark.parametrize("backend", ["hopper", "triton", "cudnn", "flash", "efficient"])
def test_without_kernels_for_its_device_a_backend_says_so(backend, monkeypatch):
    monkeypatch.setattr(backends.dispatch, "INTERPRETED", False)
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot take this call: the tensors are on cpu"):
        attention(*tensors(device="cpu"), backend=backend)


@on_gpu
@pytest.mark.parametrize("backend", ["auto", "triton", "math", "hopper"])
def test_nothing_waits_for_packed_sequences_to_be_read(backend):
    if backend == "hopper" and not HOPPER:
        return
    q, k, v = (torch.randn(300, 2, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    starts = torch.tensor([0, 100, 300], dtype=torch.int32, device=DEVICE)

    def step():
        attention(q, k, v, cu_seqlens_q=starts, max_seqlen_q=200, backend=backend).sum().backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


LACKING = {
    "flash": ({"window": 3}, "it has no window"), "cudnn": ({"softcap": 2.0}, "it has no soft-cap"),
    "efficient": ({"return_lse": True}, "no log-sum-exp"), "hopper": ({"softcap": 2.0}, "no soft-cap"),
}  # fmt: skip


@pytest.mark.parametrize("backend", LACKING)
def test_a_backend_that_was_named_and_lacks_something_says_what(backend):
    options, words = LACKING[backend]
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot take this call: .*{words}; leave it at"):
        attention(*tensors(dtype=torch.bfloat16, width=64), backend=backend, **options)


CHOICES = [
    ({}, {}, "PyTorch", ""), ({}, {"causal": False}, "PyTorch", ""),
    ({"keys": 9}, {}, "triton", "PyTorch has no causal mask or a window over another number of keys"),
    ({}, {"window": 3}, "triton", "PyTorch has no window"), ({}, {"softcap": 3.0}, "triton", "PyTorch has no soft-cap"),
    ({}, {"return_lse": True}, "triton", "PyTorch has no log-sum-exp"),
    ({"width": 12}, {"window": 3}, "reference", "PyTorch has no window, and triton cannot take it"),
    ({"keys": 0}, {}, "reference", "nothing to compute"), ({}, {"backend": "math"}, "math", "it was named"),
]  # fmt: skip


@pytest.mark.parametrize(("sizes", "options", "ran", "why"), CHOICES)
def test_auto_takes_triton_where_pytorch_cannot_say_it(sizes, options, ran, why):
    q, k, v = tensors(**sizes)
    with ops.explain() as found:
        out = attention(q, k, v, **options)
    (path,) = found
    assert path.ran == ran or (ran, path.ran) == ("PyTorch", "reference"), path
    assert why in path.why
    options.pop("backend", None)
    expected = reference(q.double(), k.double(), v.double(), **options)
    pairs = zip(out, expected, strict=True) if isinstance(out, tuple) else [(out, expected)]
    assert_near_truth(*map(list, zip(*pairs, strict=True)), 9)


def test_causal_is_aligned_at_the_last_query_and_key():
    q, k, v = tensors(queries=2, keys=6)
    whole = attention(torch.cat((q.new_zeros(2, 4, 2, 16), q), 1), k, v)
    assert_near_truth([attention(q, k, v)], [whole[:, 4:].double()], 6)
    one = attention(q[:, 1:], k, v)  # which sees all, so any backend takes it
    assert_near_truth([one], [whole[:, 5:].double()], 6)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    table._read.cache_clear()
    yield
    table._read.cache_clear()


KEY = table.Key("Some GPU", torch.bfloat16, 64, True, 1500)


def test_what_is_learned_is_found_for_all_lengths_of_the_bucket(empty_cache):
    assert table.find(KEY) == ""
    table.learn({KEY: "flash", KEY._replace(causal=False): "cudnn"})
    assert table.find(KEY._replace(length=1025)) == table.find(KEY._replace(length=2048)) == "flash"
    assert table.find(KEY._replace(causal=False)) == "cudnn"
    assert table.find(KEY._replace(length=2049)) == table.find(KEY._replace(head_dim=128)) == ""
    table.learn({KEY: "triton"})
    assert table.find(KEY) == "triton" and table.find(KEY._replace(causal=False)) == "cudnn"


def test_the_users_measurements_come_before_the_packages(empty_cache, tmp_path, monkeypatch):
    packaged = tmp_path / "measured.json"
    packaged.write_text(json.dumps({str(KEY): "cudnn", str(KEY._replace(length=9000)): "flash"}))
    monkeypatch.setattr(table, "PACKAGED", packaged)
    table.learn({KEY: "triton"})
    assert table.find(KEY) == "triton" and table.find(KEY._replace(length=9000)) == "flash"
    assert json.loads(packaged.read_text())[str(KEY)] == "cudnn", "the package stays as it is"


def test_a_damaged_table_is_left_out(empty_cache):
    disk_cache.put(table._entry(), b"[1, 2")
    assert table.find(KEY) == ""


def test_the_package_brings_measurements_of_backends_there_are():
    for key, backend in json.loads(table.PACKAGED.read_text()).items():
        assert key.count(" / ") == 4 and backend in backends.BACKENDS


def test_auto_takes_what_was_measured_to_be_fastest_and_can_take_the_call(monkeypatch):
    """On a GPU that is made up."""
    monkeypatch.setattr(table, "gpu_name", lambda device: "Some GPU")
    measured = {"triton": True, "hopper": False, "no such": False}
    for name, is_taken in measured.items():
        monkeypatch.setattr(table, "find", lambda key, name=name: name if key.gpu == "Some GPU" else "")
        monkeypatch.setattr(backends, "_is_on_gpu", lambda q: True)
        with ops.explain() as found:
            attention(*tensors())
        (path,) = found
        assert (path.ran == "triton") == is_taken
        assert not is_taken or path.why == "it is the fastest measured on this GPU"


@pytest.mark.parametrize("fastest", ["", "triton", "hopper"])
def test_auto_takes_hopper_for_packed_sequences_where_that_was_measured(fastest, monkeypatch):
    """On a GPU that is made up."""
    monkeypatch.setattr(table, "gpu_name", lambda device: "Some GPU")
    monkeypatch.setattr(table, "find", lambda key: fastest if key.packed and key.length == 4 else "")
    monkeypatch.setattr(backends, "_is_on_gpu", lambda q: True)
    ours = backends.BACKENDS["hopper"]._replace(
        why_not=lambda inputs: "", capability=backends.BACKENDS["triton"].capability
    )
    monkeypatch.setitem(backends.BACKENDS, "hopper", ours._replace(run=backends.BACKENDS["triton"].run))
    with ops.explain() as found:
        packed()()
    (path,) = found
    assert path.ran == ("hopper" if fastest == "hopper" else "triton")


@on_gpu
@pytest.mark.parametrize("backend", ["cudnn", "flash", "efficient", "triton", "math"])
def test_every_backend_computes_the_same(backend):
    q, k, v = (t.requires_grad_() for t in tensors(256, 256, width=64, dtype=torch.bfloat16))
    for causal in (True, False):
        out = attention(q, k, v, causal=causal, backend=backend)
        truth = reference(q.double(), k.double(), v.double(), causal=causal)
        upstream = torch.randn_like(out)
        found = [out, *torch.autograd.grad(out, (q, k, v), upstream)]
        assert_near_truth(found, [truth, *torch.autograd.grad(truth, (q, k, v), upstream.double())], 256)


def test_a_window_that_leaves_out_nothing_is_none():
    q, k, v = tensors(queries=4, keys=9)
    for window, left in ((8, -1), (7, 7), (2**40, -1)):
        assert read(q, k, v, True, window, None, 0.0, None, None, 0.0, None, None, None, None, False).left == left
    assert_equal([attention(q, k, v, window=8)], [attention(q, k, v)])


def test_packed_sequences_need_no_second_starts():
    q, k, v = (torch.randn(6, 2, 16, device=DEVICE) for _ in range(3))
    starts = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE)
    once = attention(q, k, v, cu_seqlens_q=starts, max_seqlen_q=4)
    both = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 4, "max_seqlen_k": 4}
    assert_equal([once], [attention(q, k, v, **both)])
    assert read(q, k, v, True, None, None, 0.0, None, None, 0.0, starts, None, 4, None, False).longest_k == 4


@pytest.mark.parametrize(
    ("backend", "is_packed"), [("auto", False), ("flash", False), ("triton", True), ("math", True)]
)
def test_a_compiler_with_symbols_for_sizes_compiles_once_for_all_lengths(backend, is_packed):
    counter, compiled_at_first = CompileCounterWithBackend("eager"), 0
    torch.compiler.reset()

    @torch.compile(dynamic=True, fullgraph=True, backend=counter)
    def compiled(*arguments, **options):
        return attention(*arguments, backend=backend, **options)

    for length in (7, 12):
        options = {"scale": 0.3, "softcap": 5.0} if is_packed else {"scale": 0.3}
        inputs = [torch.randn(2, length, heads, 16, device=DEVICE).half() for heads in (4, 2, 2)]
        if is_packed:
            inputs, starts = [x.flatten(0, 1) for x in inputs], torch.tensor([0, 5, length + 2, 2 * length])
            options |= {"cu_seqlens_q": starts.to(DEVICE, torch.int32), "max_seqlen_q": length - 2}
        inputs = [x.requires_grad_() for x in inputs]
        out, expected = compiled(*inputs, **options), reference(*(x.double() for x in inputs), **options)
        found = [out, *torch.autograd.grad(out.sum(), inputs)]
        assert_near_truth(found, [expected, *torch.autograd.grad(expected.sum(), inputs)], 2 * length * 16)
        compiled_at_first = compiled_at_first or counter.frame_count
    assert counter.frame_count == compiled_at_first > 0
