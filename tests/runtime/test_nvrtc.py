"""The driver and NVRTC need a GPU. Here an emulator of their C interfaces takes their place and notes what it is told;
and what they are told is compared with the driver's header, where there is one."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import threading
from ctypes import POINTER, c_int, cast

import pytest
import torch

from tilewright.ops.attention import hopper_backward, hopper_forward
from tilewright.runtime import nvrtc

CONTEXT, MODULE, FUNCTION, STREAM, EVENT = 11, 12, 13, 14, 15


class Emulator:
    def __init__(self):
        self.log, self.context, self.launched, self.maps = b"", CONTEXT, [], []
        self.version, self.compiled, self.code = (13, 0), 0, b"cube"

    # NVRTC

    def nvrtcVersion(self, major, minor):
        major._obj.value, minor._obj.value = self.version
        return 0

    def nvrtcCreateProgram(self, program, text, name, count, texts, names):
        self.text, self.name = text, name
        self.headers = {names[i]: texts[i] for i in range(count)}
        program._obj.value = 1
        return 0

    def nvrtcCompileProgram(self, program, count, options):
        self.options = [options[i].decode() for i in range(count)]
        self.compiled += 1
        return 6 if self.log else 0

    def nvrtcGetProgramLogSize(self, program, size):
        size._obj.value = len(self.log) + 1
        return 0

    def nvrtcGetProgramLog(self, program, log):
        log.value = self.log
        return 0

    def nvrtcGetCUBINSize(self, program, size):
        size._obj.value = 4
        return 0

    def nvrtcGetCUBIN(self, program, code):
        code.raw = b"cube"
        return 0

    def nvrtcDestroyProgram(self, program):
        program._obj.value = None
        return 0

    # The driver

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.context
        return 0

    def cuCtxSetCurrent(self, context):
        self.context = context.value
        return 0

    def cuModuleLoadData(self, module, code):
        assert code == b"cube" and self.context == CONTEXT
        module._obj.value = MODULE
        return 0

    def cuModuleGetFunction(self, function, module, name):
        assert module.value == MODULE
        function._obj.value = FUNCTION
        return 0 if name == b"known" else 500

    def cuFuncSetAttribute(self, function, attribute, value):
        assert (function.value, attribute) == (FUNCTION, 8)
        self.shared = value
        return 0

    def cuLaunchKernel(self, function, *sizes_and_rest):
        *sizes, stream, arguments, extra = sizes_and_rest
        if self.context != CONTEXT:
            return 201
        assert function.value == FUNCTION and extra is None
        numbers = [cast(address, POINTER(c_int))[0] for address in arguments]
        self.launched.append((tuple(sizes), stream, numbers))
        return 0

    def cuLaunchKernelEx(self, config, function, arguments, extra):
        if self.context != CONTEXT:
            return 201
        config = config._obj
        attribute = nvrtc._LaunchAttribute.from_address(config.attributes)
        assert config.count == 1 and extra is None and not any(attribute.value[1:])
        what = {(6, 1): "early", (12, EVENT): "tells when it has begun"}[attribute.id, attribute.value[0]]
        sizes = *config.grid, *config.block, config.shared_bytes
        numbers = [cast(address, POINTER(c_int))[0] for address in arguments]
        self.launched.append((sizes, config.stream, numbers, what))
        return 0

    def cuEventCreate(self, event, flags):
        event._obj.value = EVENT
        return 0 if flags == 2 else 1

    def cuEventRecord(self, event, stream):
        self.launched.append(("recorded", event.value, stream))
        return 0

    def cuStreamWaitEvent(self, stream, event, flags):
        self.launched.append(("waits", event.value, stream))
        return flags

    def cuTensorMapEncodeTiled(self, to, kind, rank, address, sizes, strides, box, steps, *rest):
        assert ctypes.addressof(to._obj) % 128 == 0 and ctypes.sizeof(to._obj) == 128
        if self.context != CONTEXT:
            return 201
        to._obj.value = b"map"
        self.maps.append((kind, rank, address, list(sizes), list(strides), list(box), list(steps), rest))
        return 0


@pytest.fixture
def emulator(monkeypatch, tmp_path):
    library, real = Emulator(), torch.empty
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(nvrtc, "_jobs", {})
    nvrtc._tensor_map.cache_clear()
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: library)
    monkeypatch.setattr(nvrtc, "_driver", lambda: library)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None: real(*shape))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    return library


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "some.cu"
    path.write_text("a kernel")
    return path


def test_a_kernel_is_compiled_for_its_device_and_started_with_its_arguments(emulator, source):
    module = nvrtc.Module(source, 0, {"ROWS": 7})
    assert (emulator.text, emulator.name) == (b"a kernel", f"{source.parent.name}/some.cu".encode())
    assert emulator.options == [
        "--gpu-architecture=sm_90a", "--std=c++17", "-DROWS=7", f"--include-path={nvrtc._HEADERS}",
        f"--include-path={source.parent}",
    ]  # fmt: skip
    kernel = module.kernel("known", threads=384, shared_bytes=1000)
    assert emulator.shared == 1000
    kernel(5, (c_int(3), c_int(4)))
    assert emulator.launched == [((5, 1, 1, 384, 1, 1, 1000), STREAM, [3, 4])]


def test_a_kernel_may_begin_before_the_one_in_front_of_it_has_ended(emulator, source):
    kernel = nvrtc.Module(source, 0, {}).kernel("known", threads=256, shared_bytes=64)
    emulator.context = None
    kernel(7, (c_int(3),), begins_early=True)
    assert emulator.launched == [((7, 1, 1, 256, 1, 1, 64), STREAM, [3], "early")]


@pytest.mark.parametrize("version", [12020, 12030])
def test_a_launch_tells_when_it_has_begun_or_by_an_older_driver_when_it_has_ended(
    emulator, source, monkeypatch, version
):
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: version, raising=False)
    kernel, started = nvrtc.Module(source, 0, {}).kernel("known", 256, 64), nvrtc.Started(0)
    kernel(7, (c_int(3),), started=started)
    started.wait()
    sizes, waits = (7, 1, 1, 256, 1, 1, 64), ("waits", EVENT, STREAM)
    if version == 12030:
        assert emulator.launched == [(sizes, STREAM, [3], "tells when it has begun"), waits]
    else:
        assert emulator.launched == [(sizes, STREAM, [3]), ("recorded", EVENT, STREAM), waits]


def test_a_kernel_keeps_its_shared_memory_where_another_of_the_same_function_needs_less(emulator, source):
    module = nvrtc.Module(source, 0, {})
    for wanted, most in ((1000, 1000), (200, 1000), (3000, 3000)):
        module.kernel("known", threads=32, shared_bytes=wanted)(1, ())
        assert emulator.shared == most and emulator.launched[-1][0][-1] == wanted


def test_a_thread_without_a_context_gets_the_modules(emulator, source):
    kernel = nvrtc.Module(source, 0, {}).kernel("known", 32, 0)
    emulator.context = None
    kernel(1, (c_int(8),))
    assert emulator.context == CONTEXT and [numbers for *_, numbers in emulator.launched] == [[8]]
    emulator.context = None
    nvrtc.tensor_map(torch.zeros(8, 64, dtype=torch.bfloat16), 64, 8)
    assert emulator.context == CONTEXT and len(emulator.maps) == 1


def test_what_does_not_compile_says_why_and_what_is_not_there_what(emulator, source):
    with pytest.raises(RuntimeError, match=r"could not find unknown in .*/some\.cu: status 500"):
        nvrtc.Module(source, 0, {}).kernel("unknown", 32, 0)
    emulator.log = b"line 3: no"
    with pytest.raises(nvrtc.CompileError, match=r"some\.cu does not compile: line 3: no"):
        nvrtc.Module(source, 0, {"OTHER": 1})


def test_a_header_may_be_text_and_another_text_is_other_code(emulator, source):
    for text in ("one", "two", "one"):
        nvrtc.Module(source, 0, {}, (("made.cuh", text),))
    assert emulator.headers == {b"made.cuh": b"two"} and emulator.compiled == 2


def test_what_is_compiled_is_so_once_for_all_devices_of_a_kind(emulator, source):
    nvrtc.Module(source, 0, {})
    emulator.text = None
    module = nvrtc.Module(source, 1, {})
    assert module.handle.value == MODULE and emulator.text is None


@pytest.fixture
def forget(monkeypatch):
    """A function after which a process knows no more than what is on disk."""
    return lambda: monkeypatch.setattr(nvrtc, "_jobs", {})


def test_what_another_process_compiled_is_loaded_from_disk(emulator, source, forget, caplog):
    caplog.set_level("DEBUG", "tilewright")
    nvrtc.Module(source, 0, {"ROWS": 7})
    forget()
    assert nvrtc.Module(source, 0, {"ROWS": 7}).handle.value == MODULE and emulator.compiled == 1
    said = [record.getMessage() for record in caplog.records]
    label = f"{source.parent.name}/some.cu"
    assert f"compiled {label}" in said[0] and f"loaded from disk {label} " in said[1] and "-DROWS=7" in said[1], said


def test_what_depends_on_something_else_is_compiled_again(emulator, source, forget, monkeypatch):
    def compiles():
        forget()
        before = emulator.compiled
        nvrtc.Module(source, 0, {"ROWS": 7})
        return emulator.compiled - before

    assert compiles() and not compiles()
    (source.parent / "some.cuh").write_text("a header")
    assert compiles() and not compiles()
    (source.parent / "some.cuh").write_text("another header")
    assert compiles() and not compiles()
    source.write_text("another kernel")
    assert compiles() and not compiles()
    emulator.version = (13, 1)
    assert compiles() and not compiles()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert compiles() and not compiles()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert compiles() and not compiles()


@pytest.mark.parametrize(
    ("module", "config"),
    [
        (hopper_backward, hopper_backward.launch_config(64, torch.bfloat16)),
        (hopper_forward, hopper_forward.launch_config(64, True, torch.bfloat16)),
    ],
    ids=["backward", "forward"],
)
def test_attention_is_not_for_a_compiler_that_crashes_on_it(module, config, emulator, monkeypatch):
    taken = []
    for version in ((12, 8), (12, 9), (13, 0), (13, 4)):
        emulator.version = version
        module._compiler_takes_it.cache_clear()
        monkeypatch.setattr(module.hopper, "kernels", lambda *_: taken.append(version))  # noqa: B023
        module._kernel(torch.device("cuda", 0), config)
    module._compiler_takes_it.cache_clear()
    assert taken == [(13, 0), (13, 4)]


def test_a_damaged_entry_is_compiled_again(emulator, source, forget, tmp_path):
    nvrtc.Module(source, 0, {})
    (entry,) = (tmp_path / "cache" / "kernels").iterdir()
    entry.write_bytes(entry.read_bytes()[:-1])
    forget()
    nvrtc.Module(source, 0, {})
    assert emulator.compiled == 2
    forget()
    nvrtc.Module(source, 0, {})
    assert emulator.compiled == 2


def test_what_does_not_compile_is_not_cached(emulator, source, forget, tmp_path):
    emulator.log = b"no"
    with pytest.raises(nvrtc.CompileError):
        nvrtc.Module(source, 0, {})
    emulator.log = b""
    forget()
    assert nvrtc.Module(source, 0, {}).handle.value == MODULE


def test_ahead_of_time_a_source_is_compiled_once_and_side_by_side(emulator, source):
    """Each compilation waits for the other: one after the other they would never end."""
    together, real = threading.Barrier(2, timeout=30), emulator.nvrtcCompileProgram

    def both(*arguments):
        together.wait()
        return real(*arguments)

    emulator.nvrtcCompileProgram = both
    for rows in (1, 2, 1):
        nvrtc.compile_ahead(source, 0, {"ROWS": rows})
    for rows in (1, 2):
        assert nvrtc.Module(source, 0, {"ROWS": rows}).handle.value == MODULE
    assert emulator.compiled == 2


@pytest.mark.parametrize(("columns", "swizzle"), [(64, 3), (32, 2)])
def test_a_matrix_is_described_by_columns_first(columns, swizzle, emulator):
    matrix = torch.zeros(40, 24, dtype=torch.bfloat16)
    encoded = nvrtc.tensor_map(matrix, columns, 128)
    assert bytes(encoded)[:3] == b"map"
    assert emulator.maps == [(9, 2, matrix.data_ptr(), [24, 40], [48], [columns, 128], [1, 1], (0, swizzle, 3, 0))]
    apart = torch.zeros(8, 64, dtype=torch.bfloat16)[:, :57]
    nvrtc.tensor_map(apart, columns, 128)
    assert emulator.maps[1][3:5] == ([57, 8], [64 * 2])
    one_row = torch.zeros(8, 770, dtype=torch.bfloat16)[:1, :761]  # whose distance to the next means nothing
    nvrtc.tensor_map(one_row, columns, 128)
    assert emulator.maps[2][3:5] == ([761, 1], [768 * 2])  # but must be a multiple of 16 bytes


def test_a_matrix_is_described_once_as_long_as_it_is_the_same(emulator):
    memory = torch.zeros(16, 64, dtype=torch.bfloat16)
    first = nvrtc.tensor_map(memory[:8], 64, 8)
    assert nvrtc.tensor_map(memory[:8], 64, 8) is first and len(emulator.maps) == 1
    others = [
        (memory[:8], 32, 8),
        (memory[:8], 64, 4),
        (memory[8:], 64, 8),
        (memory[:9], 64, 8),
        (memory[:8, :48], 64, 8),
    ]
    others.append((memory[:8].as_strided((8, 64), (32, 1)), 64, 8))
    assert all(nvrtc.tensor_map(*other) is not first for other in others) and len(emulator.maps) == 7


def test_a_head_is_described_within_its_sequence(emulator):
    packed = torch.zeros(2, 40, 3, 4, 128, dtype=torch.float16).unbind(2)[1]  # keys beside queries and values
    assert bytes(nvrtc.head_map(packed, 176))[:3] == b"map"
    strides = [128 * 2, 3 * 4 * 128 * 2, 40 * 3 * 4 * 128 * 2]
    assert emulator.maps == [
        (6, 4, packed.data_ptr(), [128, 4, 40, 2], strides, [64, 1, 176, 1], [1, 1, 1, 1], (0, 3, 3, 0))
    ]
    alone = torch.zeros(64, dtype=torch.bfloat16).as_strided((1, 1, 1, 64), (3, 5, 7, 1))
    nvrtc.head_map(alone, 64)
    assert emulator.maps[1][3:5] == ([64, 1, 1, 1], [128, 128, 128])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here, and so no cuda.h")
def test_the_constants_and_arguments_are_those_of_the_header(tmp_path):
    sizes = {ctypes.c_void_p: 8, ctypes.c_char_p: 8, c_int: 4, ctypes.c_uint32: 4, ctypes.c_size_t: 8}
    told = "".join(
        f'static_assert(same<decltype({name})>({{{", ".join(str(sizes[kind]) for kind in arguments)}}}), "{name}");\n'
        for name, arguments in nvrtc._DRIVER.items()
    )
    (tmp_path / "check.cu").write_text(
        f"""
#include <cuda.h>
#include <cstddef>
#include <initializer_list>
template <class F> struct Sizes;
template <class... A> struct Sizes<CUresult(A...)> {{
  static constexpr bool same(std::initializer_list<int> told) {{
    int sizes[] = {{(int)sizeof(A)...}}, i = 0;
    if (told.size() != sizeof...(A)) return false;
    for (int size : told) if (size != sizes[i++]) return false;
    return true;
  }}
}};
template <class F> constexpr bool same(std::initializer_list<int> told) {{ return Sizes<F>::same(told); }}
{told}
static_assert(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 == {nvrtc._KINDS[torch.bfloat16]});
static_assert(CU_TENSOR_MAP_DATA_TYPE_FLOAT16 == {nvrtc._KINDS[torch.float16]});
static_assert(CU_TENSOR_MAP_SWIZZLE_64B == {nvrtc._SWIZZLES[64]});
static_assert(CU_TENSOR_MAP_SWIZZLE_128B == {nvrtc._SWIZZLES[128]});
static_assert(CU_TENSOR_MAP_L2_PROMOTION_L2_256B == {nvrtc._L2_256B});
static_assert(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES == {nvrtc._MAX_DYNAMIC_SHARED_SIZE_BYTES});
static_assert(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION == {nvrtc._PROGRAMMATIC_STREAM_SERIALIZATION});
static_assert(CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT == {nvrtc._LAUNCH_COMPLETION_EVENT});
static_assert(CU_EVENT_DISABLE_TIMING == {nvrtc._DISABLE_TIMING});
static_assert(offsetof(CUlaunchAttributeValue, launchCompletionEvent.event) == 0);
static_assert(offsetof(CUlaunchAttributeValue, launchCompletionEvent.flags) == {ctypes.sizeof(ctypes.c_uint64)});
static_assert(sizeof(CUlaunchConfig) == {ctypes.sizeof(nvrtc._LaunchConfig)});
static_assert(offsetof(CUlaunchConfig, hStream) == {nvrtc._LaunchConfig.stream.offset});
static_assert(offsetof(CUlaunchConfig, attrs) == {nvrtc._LaunchConfig.attributes.offset});
static_assert(offsetof(CUlaunchConfig, numAttrs) == {nvrtc._LaunchConfig.count.offset});
static_assert(sizeof(CUlaunchAttribute) == {ctypes.sizeof(nvrtc._LaunchAttribute)});
static_assert(offsetof(CUlaunchAttribute, value) == {nvrtc._LaunchAttribute.value.offset});
static_assert(CUDA_ERROR_INVALID_CONTEXT == {nvrtc._INVALID_CONTEXT});
static_assert(sizeof(CUtensorMap) == {nvrtc._MAP_BYTES} && {nvrtc._MAP_ALIGNMENT} % alignof(CUtensorMap) == 0);
"""
    )
    command = ["nvcc", "-std=c++17", "-c", "-o", str(tmp_path / "check.o"), str(tmp_path / "check.cu")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
