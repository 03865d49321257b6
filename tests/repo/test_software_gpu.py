"""The software GPU's runtime: real memory and copies, and no silent success."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from scripts.software_gpu.build import DRIVER_LIBRARY, build_library, missing_entry_points
from scripts.software_gpu.environment import DEVICES, gpu_environment
from tests.helpers.paths import ROOT

from remat.costs.devices import DEVICES as DATA_SHEETS
from remat.costs.devices import match_device

CUDA = next(iter(getattr(find_spec("nvidia.cu13"), "submodule_search_locations", None) or []), None)

pytestmark = pytest.mark.skipif(
    CUDA is None or sys.platform != "linux",
    reason="needs the package nvidia-cuda-runtime, on Linux",
)

SUCCESS, OUT_OF_MEMORY, INVALID_VALUE = 0, 2, 1
NOT_SUPPORTED, CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED = 801, 900, 901
HOST, DEVICE, UNREGISTERED = 1, 2, 0
MIB = 1 << 20


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert CUDA is not None
    return build_library(Path(CUDA).parents[1], tmp_path_factory.mktemp("software-gpu"))


@pytest.fixture
def cuda(folder: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(folder / DRIVER_LIBRARY))
    library.cudaGetLastError()
    library.cudaGetErrorString.restype = ctypes.c_char_p
    return library


def allocate(cuda: ctypes.CDLL, size: int) -> ctypes.c_void_p:
    pointer = ctypes.c_void_p()
    assert cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size)) == SUCCESS
    return pointer


def copy(cuda: ctypes.CDLL, to: object, source: object, size: int, stream: object = None) -> int:
    return cuda.cudaMemcpyAsync(to, source, ctypes.c_size_t(size), 4, stream)


def in_child(folder: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code with the library as `cuda` in a process of its own."""
    head = f"import ctypes as c; cuda = c.CDLL({str(folder / DRIVER_LIBRARY)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", head + code],
        env=os.environ | variables, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_device_memory_is_zero_and_copies_are_real(cuda: ctypes.CDLL) -> None:
    one, other = allocate(cuda, 64), allocate(cuda, 64)
    assert one.value != other.value
    back = ctypes.create_string_buffer(b"x" * 64, 64)
    assert copy(cuda, back, one, 64) == SUCCESS
    assert back.raw == bytes(64)
    assert copy(cuda, one, b"activations", 11) == SUCCESS
    assert copy(cuda, other, one, 64) == SUCCESS
    assert copy(cuda, back, other, 64) == SUCCESS
    assert back.raw == b"activations".ljust(64, b"\0")
    assert cuda.cudaMemset(other, 255, ctypes.c_size_t(3)) == SUCCESS
    assert copy(cuda, back, other, 64) == SUCCESS
    assert back.raw[:5] == b"\xff\xff\xffiv"
    cuda.cudaFree(one)
    cuda.cudaFree(other)


def test_freed_memory_is_free_and_cannot_be_freed_twice(cuda: ctypes.CDLL) -> None:
    figure: Callable[[], int] = cuda.software_gpu_device_bytes
    before = figure()
    pointer = allocate(cuda, 5 * MIB)
    assert figure() == before + 6 * MIB  # in units of 2 MiB
    assert cuda.cudaFree(pointer) == SUCCESS
    assert figure() == before
    assert cuda.cudaFree(pointer) == INVALID_VALUE


def test_a_use_after_free_ends_the_process(folder: Path) -> None:
    code = """
p = c.c_void_p(); cuda.cudaMalloc(c.byref(p), c.c_size_t(64))
c.memset(p, 1, 64); print("written", flush=True)
cuda.cudaFree(p); c.memset(p, 1, 64)
"""
    child = in_child(folder, code)
    assert child.stdout.split() == ["written"]
    assert child.returncode < 0


def test_a_device_that_is_full_runs_out_of_memory(folder: Path) -> None:
    code = """
p, s = c.c_void_p(), c.c_size_t
print(cuda.cudaMalloc(c.byref(p), s(6 << 20)), cuda.cudaMalloc(c.byref(p), s(6 << 20)))
free, total = s(), s(); cuda.cudaMemGetInfo(c.byref(free), c.byref(total))
print(free.value, total.value)
"""
    child = in_child(folder, code, REMAT_SOFTWARE_GPU_MEMORY_BYTES=str(10 * MIB))
    assert child.stdout.split() == ["0", str(OUT_OF_MEMORY), str(4 * MIB), str(10 * MIB)]


@pytest.mark.parametrize("device", DEVICES)
def test_devices_are_those_of_the_data_sheets(folder: Path, device: str) -> None:
    code = """
b = c.create_string_buffer(4096); assert cuda.cudaGetDeviceProperties(b, 0) == 0
v = c.c_int(); figures = []
for attribute in (75, 76, 16):
    assert cuda.cudaDeviceGetAttribute(c.byref(v), attribute, 0) == 0; figures.append(v.value)
free, total = c.c_size_t(), c.c_size_t(); cuda.cudaMemGetInfo(c.byref(free), c.byref(total))
print(b.value.decode(), *figures, total.value, sep=";")
"""
    child = in_child(folder, code, REMAT_SOFTWARE_GPU_DEVICE=device)
    name, *figures = child.stdout.strip().split(";")
    major, minor, multiprocessors, memory_bytes = map(int, figures)
    sheet = match_device(name)
    assert sheet is DATA_SHEETS[device]
    assert sheet.capability == (major, minor)
    assert multiprocessors == {"a100": 108, "h100": 132, "b200": 148}[device]
    # The driver keeps a part of the memory that the data sheet promises, or gives a little more.
    assert 0.98 <= memory_bytes / sheet.memory_bytes <= 1.07


def test_an_unknown_device_is_named(folder: Path) -> None:
    child = in_child(folder, "cuda.cudaMemGetInfo(c.byref(c.c_size_t()), c.byref(c.c_size_t()))",
                     REMAT_SOFTWARE_GPU_DEVICE="h900")  # fmt: skip
    assert child.returncode == 2
    assert "h900" in child.stderr


@pytest.mark.parametrize("name", ["cudaMemcpy2DAsync", "cudaMallocManaged", "cuMemAllocPitch"])
def test_a_missing_entry_point_fails_with_its_name(
    cuda: ctypes.CDLL, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    function = getattr(cuda, name, None) or getattr(cuda, f"{name}_v2")
    assert function() == NOT_SUPPORTED
    assert name in cuda.cudaGetErrorString(NOT_SUPPORTED).decode()
    assert name in capfd.readouterr().err


def test_a_missing_attribute_fails_with_its_number(
    cuda: ctypes.CDLL, capfd: pytest.CaptureFixture[str]
) -> None:
    value = ctypes.c_int()
    assert cuda.cudaDeviceGetAttribute(ctypes.byref(value), 84, 0) == NOT_SUPPORTED
    assert "84" in capfd.readouterr().err


def test_every_declared_entry_point_is_implemented_or_fails(folder: Path) -> None:
    """A stub exists for each one that is not implemented, so nothing is missing in the library."""
    assert CUDA is not None
    assert missing_entry_points(folder / DRIVER_LIBRARY, Path(CUDA)) == []


def test_pinned_memory_is_counted_and_recognized(cuda: ctypes.CDLL) -> None:
    class Attributes(ctypes.Structure):
        _fields_ = (("type", ctypes.c_int), ("device", ctypes.c_int), ("rest", ctypes.c_byte * 120))

    def kind(pointer: object) -> int:
        attributes = Attributes()
        assert cuda.cudaPointerGetAttributes(ctypes.byref(attributes), pointer) == SUCCESS
        return attributes.type

    before = cuda.software_gpu_pinned_bytes()
    pinned, on_device = ctypes.c_void_p(), allocate(cuda, 8)
    assert cuda.cudaHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(4096), 0) == SUCCESS
    assert cuda.software_gpu_pinned_bytes() == before + 4096
    assert pinned.value is not None
    inside = ctypes.c_void_p(pinned.value + 4095)
    assert [kind(pinned), kind(inside), kind(on_device)] == [HOST, HOST, DEVICE]
    assert cuda.cudaFreeHost(pinned) == SUCCESS
    assert cuda.software_gpu_pinned_bytes() == before
    buffer = ctypes.create_string_buffer(64)
    assert kind(buffer) == UNREGISTERED
    assert cuda.cudaHostRegister(buffer, ctypes.c_size_t(64), 0) == SUCCESS
    assert kind(buffer) == HOST
    assert cuda.cudaHostRegister(buffer, ctypes.c_size_t(64), 0) != SUCCESS
    assert cuda.cudaHostUnregister(buffer) == SUCCESS
    assert kind(buffer) == UNREGISTERED
    cuda.cudaFree(on_device)


def begin_capture(cuda: ctypes.CDLL) -> ctypes.c_void_p:
    stream = ctypes.c_void_p()
    assert cuda.cudaStreamCreate(ctypes.byref(stream)) == SUCCESS
    assert cuda.cudaStreamBeginCapture(stream, 0) == SUCCESS
    return stream


def test_a_captured_graph_copies_when_it_is_launched(cuda: ctypes.CDLL) -> None:
    source, target = ctypes.create_string_buffer(b"first", 8), allocate(cuda, 8)
    back, graph, run = ctypes.create_string_buffer(8), ctypes.c_void_p(), ctypes.c_void_p()
    stream = begin_capture(cuda)
    assert copy(cuda, target, source, 8, stream) == SUCCESS
    # A stream that waits for an event of the captured one is captured, too.
    event, other = ctypes.c_void_p(), ctypes.c_void_p()
    cuda.cudaEventCreate(ctypes.byref(event))
    cuda.cudaStreamCreate(ctypes.byref(other))
    cuda.cudaEventRecord(event, stream)
    cuda.cudaStreamWaitEvent(other, event, 0)
    assert cuda.cudaMemsetAsync(target, ord("F"), ctypes.c_size_t(1), other) == SUCCESS
    assert cuda.cudaStreamEndCapture(stream, ctypes.byref(graph)) == SUCCESS
    copy(cuda, back, target, 8)
    assert back.value == b""  # recorded, not done
    text = ctypes.create_string_buffer(1000)
    cuda.software_gpu_describe_graph(graph, text, ctypes.c_size_t(1000))
    assert text.value.decode().splitlines() == ["copy 8", "fill 1"]
    assert cuda.cudaGraphInstantiateWithFlags(ctypes.byref(run), graph, 0) == SUCCESS
    for word in (b"first", b"again"):
        source.value = word
        assert cuda.cudaGraphLaunch(run, stream) == SUCCESS
        copy(cuda, back, target, 8)
        assert back.value == b"F" + word[1:]
    cuda.cudaGraphExecDestroy(run)
    cuda.cudaGraphDestroy(graph)
    cuda.cudaFree(target)


def test_a_captured_graph_has_the_products_of_cublas(cuda: ctypes.CDLL) -> None:
    """torch warns of a captured graph without nodes: it takes that for a wrong stream."""
    handle, graph, stream = ctypes.c_void_p(), ctypes.c_void_p(), begin_capture(cuda)
    assert cuda.cublasCreate_v2(ctypes.byref(handle)) == SUCCESS
    assert cuda.cublasSetStream_v2(handle, stream) == SUCCESS
    assert cuda.cublasSgemm_v2(handle) == SUCCESS
    arguments = [ctypes.c_void_p()] * 14
    assert cuda.cublasLtMatmul(handle, *arguments, stream) == SUCCESS
    assert cuda.cudaStreamEndCapture(stream, ctypes.byref(graph)) == SUCCESS
    text = ctypes.create_string_buffer(1000)
    cuda.software_gpu_describe_graph(graph, text, ctypes.c_size_t(1000))
    assert text.value.decode().splitlines() == ["kernel cublasSgemm_v2", "kernel cublasLtMatmul"]
    cuda.cudaGraphDestroy(graph)


def test_a_capture_refuses_to_synchronize(cuda: ctypes.CDLL) -> None:
    stream, graph = begin_capture(cuda), ctypes.c_void_p()
    assert cuda.cudaStreamSynchronize(stream) == CAPTURE_UNSUPPORTED
    assert cuda.cudaStreamEndCapture(stream, ctypes.byref(graph)) == CAPTURE_INVALIDATED
    assert graph.value is None
    assert cuda.cudaStreamSynchronize(stream) == SUCCESS


def test_virtual_memory_is_mapped_and_returned(cuda: ctypes.CDLL) -> None:
    size, start, handle = ctypes.c_size_t(2 * MIB), ctypes.c_uint64(), ctypes.c_uint64()
    before = cuda.software_gpu_device_bytes()
    assert cuda.cuMemAddressReserve(ctypes.byref(start), size, size, 0, 0) == SUCCESS
    assert cuda.cuMemCreate(ctypes.byref(handle), size, None, 0) == SUCCESS
    assert cuda.cuMemMap(start, size, ctypes.c_size_t(0), handle, 0) == SUCCESS
    assert cuda.cuMemRelease(handle) == SUCCESS
    assert cuda.software_gpu_device_bytes() == before + 2 * MIB  # the mapping still uses it
    ctypes.memset(start.value, 7, 2 * MIB)
    assert cuda.cuMemUnmap(start, size) == SUCCESS
    assert cuda.software_gpu_device_bytes() == before
    assert cuda.cuMemAddressFree(start, size) == SUCCESS


def test_the_environment_keeps_what_was_set(folder: Path) -> None:
    base = {"PATH": "/bin", "PYTHONPATH": "/mine", "LD_LIBRARY_PATH": "/lib"}
    variables = gpu_environment(folder, "a100", is_expandable=True, base=base)
    assert variables["PATH"] == "/bin"
    assert variables["PYTHONPATH"].split(":")[0] == str(ROOT)
    assert variables["PYTHONPATH"].split(":")[-1] == "/mine"
    assert variables["LD_LIBRARY_PATH"].split(":") == [str(folder), "/lib"]
    assert variables["REMAT_SOFTWARE_GPU_DEVICE"] == "a100"
