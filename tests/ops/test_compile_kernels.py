import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from ops.ptx import order

SCRIPT = Path(__file__).with_name("compile_kernels.py")
BF, F32 = "bfloat16", "float32"
HALF, INT8, FP8, INT4 = "float16", "int8", "float8_e4m3fn", "uint8"


def _assembles() -> bool:
    """Whether the assembler that Triton brings runs here."""
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    try:
        return subprocess.run([assembler, "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


needs_assembler = pytest.mark.skipif(not _assembles(), reason="Triton brings no assembler of NVIDIA's for this machine")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What the compiler makes of a case, in one process for all of them: to begin with torch takes it seconds."""
    errors = tmp_path_factory.mktemp("compiler") / "stderr"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, str(SCRIPT)]
    with (
        errors.open("w") as file,
        subprocess.Popen(command, stdin=-1, stdout=-1, stderr=file, text=True, env=environment) as process,
    ):

        def ask(case):
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
            kernels = []
            for line in process.stdout:
                if line == "\n":
                    return kernels
                kernels.append(json.loads(line))
            pytest.fail(errors.read_text()[-2000:])  # it ends where it cannot compile

        yield ask


@needs_assembler
@pytest.mark.parametrize(
    ("case", "spill_free"),
    [
        (("dropout_add_norm", BF, BF, BF, 80, "layer", False), True),
        (("dropout_add_norm", BF, BF, BF, 128, "layer", True), True),
        (("dropout_add_norm", BF, BF, BF, 768, "layer", False), True),
        (("dropout_add_norm", BF, F32, F32, 2048, "layer", False), True),
        (("dropout_add_norm", BF, BF, BF, 12288, "layer", False), True),
        (("dropout_add_norm", BF, BF, BF, 16384, "layer", False), True),
        (("dropout_add_norm", BF, BF, BF, 16384, "rms", False), False),
        (("dropout_add_norm", F32, F32, F32, 5120, "rms", True), False),
        (("dropout_add_norm", BF, BF, BF, 20000, "layer", True), False),
        (("dropout_add_norm", F32, F32, F32, 907, "rms", False), True),
        (("dropout_add_norm", F32, F32, F32, 6943, "rms", False), True),
        (("cross_entropy", BF, 50304, False), True),
        (("cross_entropy", BF, 128256, False), True),
        (("cross_entropy", F32, 128256, True), True),
        (("activation", BF, 1024, "silu", "separate", None), True),
        (("activation", BF, 11008, "gelu", "packed", F32), True),
        (("activation", F32, 8192, "gelu_tanh", "plain", F32), True),
        (("activation", BF, 8192, "gelu", "separate", BF), True),
        (("attention", 64), True),
        (("attention", 128), True),
        (("attention", 64, True), True),
        (("attention_triton", BF, 64), True),
        (("append_to_cache", BF, 32, 8, 64), True),
        (("append_to_cache", BF, 32, 8, 128, INT8), True),
        (("append_to_cache", HALF, 32, 8, 64, FP8), True),
        (("decode_attention", BF, 1, 32, 8, 128), True),
        (("decode_attention", BF, 1, 32, 8, 128, INT8), True),
        (("decode_attention", BF, 1, 32, 8, 128, FP8), True),
        (("decode_attention", HALF, 1, 32, 8, 64, FP8), True),
        (("decode_attention", F32, 1, 8, 8, 256), True),
        (("decode_attention", BF, 8, 64, 8, 96), True),
        (("embedding", F32, BF, 768), True),
        (("quantized_linear", INT8, BF, 1, None, False), True),
        (("quantized_linear", INT8, BF, 128, None, False), True),
        (("quantized_linear", FP8, HALF, 32, None, False), True),
        (("quantized_linear", INT4, BF, 1, 32, True), True),
        (("quantized_linear", INT4, BF, 64, 128, True), True),
        (("quantized_linear", INT4, HALF, 64, 128, False), True),
        (("few_rows_linear", BF, 14336), True),
        (("few_rows_linear", BF, 768, "gelu"), True),
        (("quantized_linear", INT4, BF, 1, 128, False, "gelu_tanh"), True),
        (("rope", BF, 64, 8, 128, False), True),
        (("rope", BF, 64, 8, 128, True), True),
        (("rope", F32, 32, 8, 96, True), True),
    ],
    ids=str,
)
def test_the_real_compiler_takes_the_kernels_and_an_h200_can_hold_them(case, spill_free, compiled):
    kernels = compiled(case)
    assert {"forward"} < {kernel["kernel"] for kernel in kernels}
    for kernel in kernels:
        assert kernel["shared"] <= 232_448, kernel
        assert not kernel["pdl"], kernel
        # A few spilled words are in the noise (22 of them in int4 with float16 by Triton 3.6); a tile of them is what
        # made backward at 16384 slow.
        assert not spill_free or kernel["spilled"] <= 96, kernel


@needs_assembler
def test_no_width_in_float32_spills_a_tile(compiled):
    """Drawn anew each run. Kernels that spilled 1,216 to 3,120 bytes a thread took 7 to 10 times as long as those of
    the next width; up to 544 bytes nothing of it was measured.
    """
    seed = random.SystemRandom().getrandbits(32)
    draw = random.Random(seed)
    for _ in range(4):
        width = draw.randrange(64, 16384)
        for kernel in compiled(("dropout_add_norm", F32, F32, F32, width, draw.choice(["layer", "rms"]), False)):
            assert kernel["spilled"] <= 640, (seed, width, kernel)


@needs_assembler
def test_an_optimizer_reads_vectors_whether_or_not_a_step_can_be_taken_back(compiled):
    """Though it learns where they are from a table."""
    for rule, tensors in (("lion", 3), ("adamw", 4)):  # parameter, gradient and states
        for kernel in compiled(("optimizer", rule)):
            assert kernel["vectors"] == 2 * tensors and not kernel["spilled"], kernel  # eight numbers: 16 bytes twice


@needs_assembler
def test_the_guide_s_kernels_load_16_bytes_at_once_where_rows_are_aligned(compiled):
    """Its mask ends at a multiple of the state; at a number known at run time only, every load would be of 2 bytes."""
    for dtype, state, a_tensor in ((BF, 384, 1), (BF, 127, 0)):
        forward, backward = compiled(("lltm", dtype, state))
        assert (forward["vectors"], backward["vectors"]) == (4 * a_tensor, 6 * a_tensor)
        assert not forward["spilled"] and not backward["spilled"]


PARAMETERS = {"weight", "bias", "scale", "zero"}  # that no kernel of a chain writes
CACHE = {"k", "v"}  # whose last keys a kernel of the chain writes: brought into L2, and never loaded


@needs_assembler
@pytest.mark.parametrize(
    ("case", "fetched"),
    [
        (("few_rows_linear", BF, 14336), {"weight"}),
        (("few_rows_linear", BF, 768, "gelu_tanh"), {"weight"}),
        (("quantized_linear", INT8, BF, 1, None, False, "gelu"), {"weight"}),
        (("quantized_linear", INT8, BF, 1, None, False), {"weight"}),
        (("quantized_linear", FP8, HALF, 32, None, False), {"weight"}),
        (("quantized_linear", INT4, BF, 1, 128, True), {"weight"}),
        (("dropout_add_norm", BF, BF, BF, 4096, "rms", False), {"weight"}),
        (("dropout_add_norm", BF, BF, BF, 20000, "layer", False), {"weight", "bias"}),
        (("decode_attention", BF, 1, 32, 8, 128, INT8), {"k", "v", "lengths"}),
        (("decode_attention", BF, 8, 64, 8, 64), {"k", "v", "lengths"}),
        (("decode_attention", HALF, 1, 8, 8, 20), set()),  # rows of 40 bytes
        (("append_to_cache", BF, 32, 8, 64), set()),
        (("activation", BF, 1024, "silu", "packed", None), set()),
        (("activation", BF, 1024, "gelu_tanh", "plain", BF), {"bias"}),
    ],
    ids=lambda each: "-".join(map(str, sorted(each) if isinstance(each, set) else each)),
)
def test_in_a_chain_parameters_alone_are_read_before_the_wait_and_nothing_is_written(case, fetched, compiled):
    """The rule of `runtime/pdl.py`, in the order that the compiler has given instructions, and the assembler."""
    kernels = [kernel for kernel in compiled(("in_chain", *case)) if "ptx" in kernel]
    assert kernels
    for kernel in kernels:
        assert kernel["pdl"] and kernel["spilled"] <= 96 and kernel["shared"] <= 232_448, kernel["name"]
        found = order(kernel["ptx"], kernel["arguments"])
        label = kernel["name"], found.before
        assert found.is_straight and found.triggers < found.waits, label
        for access in found.before:
            assert access.line > found.triggers and access.tensors, label
            if access.instruction.startswith("cp.async.bulk.prefetch"):
                assert access.tensors <= PARAMETERS | CACHE, label
            elif access.instruction.startswith("ld.global.cg"):  # past L1, where it would be stale after the wait
                assert access.tensors == {"lengths"}, label
            else:
                assert access.instruction.startswith("ld.global") and access.tensors <= PARAMETERS, label
        loads = [access for access in found.before if access.instruction.startswith("ld.")]
        prefetches = len(found.before) - len(loads)
        assert sorted(kernel["early"]) == ["LDG"] * len(loads) + ["UBLKPF"] * prefetches, label
        if kernel["kernel"] not in ("join", "whole"):
            assert frozenset().union(*(access.tensors for access in found.before)) == fetched, label
        others = frozenset().union(*(access.tensors for access in found.after))
        assert kernel["kernel"] == "join" or fetched - PARAMETERS <= others, label  # and loaded after it
        assert others - PARAMETERS and any(a.instruction.startswith("st.global") for a in found.after), label
