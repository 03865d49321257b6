"""Workspaces of CUDA operators by formulas, against those that torch allocated."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from remat.costs.devices import DEVICES
from remat.costs.layouts import span_bytes
from remat.costs.workspaces.formulas import (
    FORMULAS,
    STORAGES,
    OperationWorkspace,
    operation_workspace,
    workspace_buffers,
)
from remat.documents.arguments import Ref, decode_argument
from remat.documents.records import Node, Result, TensorMeta
from remat.errors import DocumentError

RECORDINGS = sorted(Path("tests/data/cuda_workspaces").glob("torch-*.json.gz"))

BOUNDED_TARGETS = frozenset({"aten.embedding_dense_backward.default"})
"""Operators whose formula may be larger than the recorded workspace, by up to 1 KiB."""

SLACK_BYTES = 1024


@dataclass(frozen=True)
class Call:
    """A recorded call: an operation, its operands, and its workspace on each device."""

    node: Node
    metas: dict[str, TensorMeta]
    workspace_bytes: dict[str, int]
    storage_bytes: dict[int, int]


@cache
def recorded_calls(path: Path) -> tuple[Call, ...]:
    return tuple(_call(case) for case in json.loads(gzip.decompress(path.read_bytes()))["cases"])


def _call(case: dict[str, Any]) -> Call:
    metas: dict[str, TensorMeta] = {}

    def decode(argument: Any) -> Any:
        if isinstance(argument, dict) and "tensor" in argument:
            name = f"t{len(metas)}"
            metas[name] = _meta(argument["tensor"])
            return Ref(name)
        if isinstance(argument, list):
            return tuple(map(decode, argument))
        return decode_argument(argument)

    node = Node(
        name="call",
        target=case["target"],
        args=tuple(map(decode, case["args"])),
        kwargs={name: decode(value) for name, value in case["kwargs"].items()},
        results=tuple(
            Result(
                name=f"result_{i}",
                tensor=_meta(row["tensor"]),
                storage=row["storage"],
                position=row["position"],
            )
            for i, row in enumerate(case["results"])
        ),
    )
    larger = {r["position"]: r["storage_bytes"] for r in case["results"] if "storage_bytes" in r}
    return Call(node, metas, case["workspace_bytes"], larger)


def _meta(row: list[Any]) -> TensorMeta:
    dtype, shape, stride, offset, device = row
    return TensorMeta(
        dtype=dtype, shape=tuple(shape), stride=tuple(stride), offset=offset, device=device
    )


def _formula(call: Call, device: str) -> OperationWorkspace:
    return operation_workspace(call.node, call.metas, DEVICES[device])


def _differences(path: Path) -> Iterator[tuple[Call, str, int, int]]:
    """Yield each call whose formula differs from the recording: device, formula, recorded."""
    for call in recorded_calls(path):
        for device, recorded in call.workspace_bytes.items():
            size = _formula(call, device).size_bytes
            if size != recorded:
                yield call, device, size, recorded


@pytest.mark.slow
@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_formulas_equal_what_torch_allocates(path: Path) -> None:
    different = [
        f"{call.node.target}: {size:,} instead of {recorded:,} on {device}, {call.metas}"
        for call, device, size, recorded in _differences(path)
        if call.node.target not in BOUNDED_TARGETS
    ]
    assert not different, different[:3]


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_bounds_are_slightly_above_what_torch_allocates(path: Path) -> None:
    differences = [d for d in _differences(path) if d[0].node.target in BOUNDED_TARGETS]
    assert differences  # without any, the operator has an exact formula
    for call, device, size, recorded in differences:
        assert recorded <= size <= recorded + SLACK_BYTES, (call.node.target, device, call.metas)


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_storages_that_are_larger_than_results(path: Path) -> None:
    # Only the single calls returned their results: they ran on each device.
    calls = [call for call in recorded_calls(path) if len(call.workspace_bytes) > 1]
    assert {call.node.target for call in calls if call.storage_bytes} == STORAGES.keys()
    for call in calls:
        sizes = dict(enumerate(_formula(call, "h100").storage_bytes))
        spans = {r.position: span_bytes(r.tensor) for r in call.node.results}
        larger = {i: size for i, size in sizes.items() if size > spans.get(i, 0)}
        assert larger == call.storage_bytes, call


CHECKED_BY_LOOPS = {
    "bitsandbytes.gemm_4bit.default",
    "bitsandbytes.int8_scaled_mm.default",
    "remat.flex_attention.default",
    "remat.flex_attention_backward.default",
    "torch_attn._varlen_attn.default",
    "torch_attn._varlen_attn_backward.default",
}
"""Operators that are not torch's: loops on the software GPU check them (docs/how-to/fit.md)."""


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_each_formula_is_checked_with_a_workspace(path: Path) -> None:
    checked = Counter(
        call.node.target for call in recorded_calls(path) if max(call.workspace_bytes.values())
    )
    assert FORMULAS.keys() - checked.keys() == CHECKED_BY_LOOPS


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_buffers_add_up_to_the_workspace(path: Path) -> None:
    counts: Counter[int] = Counter()
    for call in recorded_calls(path):
        size_bytes = _formula(call, "h100").size_bytes
        node = call.node.model_copy(update={"workspace_bytes": size_bytes})
        buffers = workspace_buffers(node, call.metas, DEVICES["h100"])
        assert sum(buffers) == size_bytes, call
        counts[len(buffers)] += 1
    assert counts[2] > counts[0] / 100  # such as partial sums and their semaphores


def test_another_workspace_than_the_formula_gives_is_one_buffer() -> None:
    """A measured one, for example."""
    x = TensorMeta(dtype="float32", shape=(4096, 512), stride=(512, 1), device="cuda:0")
    result = Result(
        name="sum_1",
        tensor=x.model_copy(update={"shape": (512,), "stride": (1,)}),
        storage=0,
        position=-1,
    )
    node = Node(
        name="sum_1", target="aten.sum.dim_IntList", args=(Ref("x"), (0,)), results=(result,)
    )
    size_bytes = operation_workspace(node, {"x": x}, DEVICES["h100"]).size_bytes
    for workspace_bytes, count in ((size_bytes, 2), (size_bytes + 512, 1), (0, 0)):
        measured = node.model_copy(update={"workspace_bytes": workspace_bytes})
        buffers = workspace_buffers(measured, {"x": x}, DEVICES["h100"])
        assert (len(buffers), sum(buffers)) == (count, workspace_bytes)


def test_a_recording_exists() -> None:
    assert RECORDINGS


def test_another_argument_than_the_operator_takes_is_an_error() -> None:
    x = TensorMeta(dtype="float32", shape=(4096, 4096), stride=(4096, 1), device="cuda:0")
    node = Node(name="mm_1", target="aten.mm.default", args=(Ref("x"), Ref("x")))
    assert operation_workspace(node, {"x": x}, DEVICES["h100"]).size_bytes == 0
    vector = TensorMeta(dtype="float32", shape=(4096,), stride=(1,), device="cuda:0")
    with pytest.raises(DocumentError, match="mm_1"):
        operation_workspace(node, {"x": vector}, DEVICES["h100"])
