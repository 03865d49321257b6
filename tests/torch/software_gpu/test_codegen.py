"""Kernels for GPUs, planned and compiled without one: torch's CPU build and Triton suffice."""

from __future__ import annotations

import re
from dataclasses import astuple

import pytest
from scripts.software_gpu.codegen.child import CodegenError, generate_code, is_available
from scripts.software_gpu.codegen.gpus import GPUS, KIB, MIB
from scripts.software_gpu.codegen.results import (
    CodegenRequest,
    CodegenResult,
    KernelSource,
    ModelRequest,
)
from tests.helpers.paths import ROOT

MODEL = "tests.helpers.training.generated_kernels:classifier"
MOST_REGISTERS = 255
"""The limit of a thread, on all of these GPUs."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # half a minute, if the machine does nothing else
]

needs_triton = pytest.mark.skipif(
    not is_available(), reason="needs Triton, which `make venv` installs on Linux, x86-64"
)


@pytest.fixture(scope="module")
def results() -> list[CodegenResult]:
    """The kernels of a step at 60% of its peak, for each GPU."""
    model = ModelRequest(MODEL, budgets=("60%",), options={"time_limit": 2.0})
    return generate_code(CodegenRequest(tuple(GPUS), model))


@needs_triton
def test_every_kernel_compiles_for_every_architecture(results: list[CodegenResult]) -> None:
    assert [result.architecture for result in results] == ["sm_80", "sm_90", "sm_100"]
    for result in results:
        assert not result.failures
        assert {binary.kernel for binary in result.binaries} == {s.name for s in result.sources}
        kinds = {source.name.removeprefix("triton_")[:3] for source in result.sources}
        assert kinds == {"poi", "per", "red"}
        assert any("tl.rand" in s.text or "philox" in s.text for s in result.sources)
        for binary in result.binaries:
            assert binary.cubin_bytes > 0
            assert 0 < binary.registers <= MOST_REGISTERS


@needs_triton
def test_the_plan_recomputes_within_its_budget(results: list[CodegenResult]) -> None:
    for result in results:
        (graph,) = result.graphs
        assert graph.recomputations > 0
        assert graph.budget_bytes is not None
        assert graph.verified_bytes <= graph.budget_bytes < graph.baseline_bytes
        assert not result.infeasible


@needs_triton
def test_broken_kernels_are_reported(results: list[CodegenResult]) -> None:
    """One fault for each stage: Python, Triton, ptxas, the limits of the GPU; and a kernel for
    another GPU."""
    good, other = (
        next(source for source in result.sources if source.name.startswith("triton_red"))
        for result in results[1::-1]
    )
    *_, store = re.finditer(r"( +)tl\.store\((\w+) .*", good.text)
    indent, pointer = store.groups()
    unknown_instruction = (
        'tl.inline_asm_elementwise("fly.f32 $0, $1;", "=f,f", [xindex.to(tl.float32)], '
        "dtype=tl.float32, is_pure=False, pack=1)"
    )
    large_tile = "tl.full((64, 2048), 1, tl.bfloat16)"
    large_product = f"tl.reshape(tl.dot({large_tile}, tl.trans({large_tile})), (4096,))"
    lines = {
        "triton": "tl.no_such_function()",
        "ptxas": unknown_instruction,
        "limit": f"tl.store({pointer} + tl.arange(0, 4096), {large_product})",
    }
    texts = {
        "python": good.text.replace("def ", "define ", 1),
        **{
            fault: f"{good.text[: store.start()]}{indent}{line}\n{good.text[store.start() :]}"
            for fault, line in lines.items()
        },
    }
    faults = {
        fault: KernelSource(f"{good.name}_{fault}", text.replace(good.name, f"{good.name}_{fault}"))
        for fault, text in texts.items()
    }
    (result,) = generate_code(
        CodegenRequest((GPUS["h100"].key,), sources=(good, *faults.values(), other))
    )
    assert {binary.kernel for binary in result.binaries} == {good.name}
    messages = {failure.kernel: failure.message for failure in result.failures}
    expected = {
        "python": "SyntaxError",
        "triton": "no_such_function",
        "ptxas": "Not a name of any known instruction: 'fly'",
        "limit": "bytes of shared memory",
    }
    for fault, message in expected.items():
        assert message in messages.pop(faults[fault].name)
    assert messages == {other.name: "generated for sm_80, and NVIDIA H100 80GB HBM3 is sm_90"}


def test_a_failure_of_the_process_is_an_error() -> None:
    with pytest.raises(CodegenError, match="KeyError: 'v100'"):
        generate_code(CodegenRequest(("v100",)))


def test_the_properties_are_those_of_the_software_gpu() -> None:
    """The kernels that are compiled here are those that it would launch."""
    text = (ROOT / "scripts/software_gpu/runtime/devices.c").read_text()
    table = text.partition("DeviceModel models[] = {")[2].partition("};")[0]
    rows = re.findall(r'\{"(\w+)", "([^"]+)",([^}]+)\}', table)
    units = {"KIB": KIB, "MIB": MIB}
    for key, name, numbers in rows:
        fields = [
            eval(field.strip().replace("(size_t)", ""), units) for field in numbers.split(",")
        ]
        gpu = GPUS[key]
        figures = astuple(gpu)[2:9]
        assert (gpu.name, *figures) == (name, *fields[:6], fields[-1])
    assert len(rows) == len(GPUS)
