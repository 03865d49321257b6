"""Traces for an absent GPU against traces made on it.

    python -m benchmarks.software_gpu.absent_gpu gpt2 float32     # on the software GPU

Each family is traced twice with the same torch: on the software GPU, an H100, and with
`device="h100"` in a process that sees no GPU. Compared are the operations in their order, the
sizes, strides and storages of all tensors, and the workspaces: those of the formulas against those
that the allocator counts, for the same operands. `EXPLAINED_DIFFERENCES` lists the differences that
come from the capture on the CPU; a row with no others meets its requirement and says why in its
note.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import remat
from benchmarks.software_gpu.families import DTYPES, FAMILIES, build
from remat.documents.records import Node
from remat.documents.trace import Trace

Row = dict[str, Any]

GPU = "h100"
_MEASURED_BY_LIBRARIES = ("convolution",)
"""Operations whose workspaces are cuDNN's on a GPU, and torch's own on the software GPU."""


@dataclass(frozen=True)
class ExplainedDifference:
    """A difference that comes from the capture on the CPU, where the model is if its GPU is absent.
    `pattern` matches its whole text; without `family` it is one of all families."""

    property: str
    pattern: str
    reason: str
    family: str = ""

    def explains(self, family: str, name: str, text: str) -> bool:
        """Return True if this is the difference `text` of a family's property."""
        is_here = name == self.property and self.family in ("", family)
        return is_here and re.fullmatch(self.pattern, text) is not None


EXPLAINED_DIFFERENCES = (
    ExplainedDifference(
        "tensors",
        r"\S+ \S+: \('(\w+)', \(\), \(\), 0, 'cuda:0'\) absent, "
        r"\('\1', \(\), \(\), 0, 'cpu'\) present",
        "a scalar that the model makes without a device is on the CPU; a capture for an absent GPU "
        "has the model there too, does not tell the two apart, and counts the scalar on the GPU",
    ),
    ExplainedDifference(
        "tensors",
        r"aten\.(_to_copy|histc)\.default \S+: \('float32', (.*)\) absent, "
        r"\('int32', \2\) present",
        "transformers counts tokens per expert in float32 if device.type is cpu, else in int32; "
        "the workspace of their cumsum is then 1,536 bytes instead of 1,024",
        "mixtral",
    ),
)
"""Differences that come from a capture on the CPU, with their reasons."""


def cases() -> list[str]:
    """Return the cases: a family and a precision each."""
    return [f"{family}-{dtype}" for family in FAMILIES for dtype in DTYPES]


def run_case(case: str) -> list[Row]:
    """Return the rows of one case."""
    family, _, dtype = case.rpartition("-")
    return compare(family, dtype)


def compare(family: str, dtype: str) -> list[Row]:
    """Return a row for each property that both traces must share, with its first differences.
    Runs on the software GPU."""
    try:
        present = _trace(family, dtype, "cuda")
    except remat.TraceError as error:
        return [_row(family, dtype, "operations", [f"not captured: {str(error)[:150]}"])]
    absent = _absent_trace(family, dtype)
    differences = {
        "operations": list(_operation_differences(absent, present)),
        "tensors": list(_tensor_differences(absent, present)),
        "storages": list(_storage_differences(absent, present)),
        "libraries": _library_differences(absent, present),
        "workspaces": list(_workspace_differences(present)),
    }
    return [_row(family, dtype, name, items) for name, items in differences.items()]


def _row(family: str, dtype: str, name: str, differences: Sequence[str]) -> Row:
    reasons, unexplained = explain(family, name, differences)
    return {
        "family": family,
        "dtype": dtype,
        "property": name,
        "difference_count": len(differences),
        "explained_count": len(differences) - len(unexplained),
        "differences": [*unexplained, *(d for d in differences if d not in unexplained)][:5],
        "note": "; ".join(reasons),
        "is_met": not unexplained,
    }


def explain(family: str, name: str, differences: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the reasons of the explained differences among those of a property, and the others."""
    reasons: dict[str, None] = {}
    unexplained: list[str] = []
    for text in differences:
        cause = next((k for k in EXPLAINED_DIFFERENCES if k.explains(family, name, text)), None)
        if cause is None:
            unexplained.append(text)
        else:
            reasons[cause.reason] = None
    return list(reasons), unexplained


def _trace(family: str, dtype: str, device: str) -> Trace:
    """Return the trace of a family's step. A model for an absent GPU stays on the CPU."""
    is_present = device == "cuda"
    model, batch = build(family, dtype, "cuda" if is_present else "cpu")
    context = torch.autocast("cuda" if is_present else "cpu", torch.bfloat16)
    # A capture runs no convolution, so both can have the layouts of cuDNN.
    cudnn = torch.backends.cudnn.flags(enabled=True)
    with cudnn, context if dtype == "autocast" else contextlib.nullcontext():
        return remat.trace(model, (), batch, device=None if is_present else device)


def _absent_trace(family: str, dtype: str) -> Trace:
    """Return the trace for the absent GPU, made by a process that sees none."""
    environment = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        command = [sys.executable, "-m", "benchmarks.software_gpu.absent_gpu", family, dtype]
        subprocess.run([*command, "--trace", str(file)], env=environment, check=True)
        return Trace.load(file)


def _operation_differences(absent: Trace, present: Trace) -> Iterator[str]:
    """Yield where the sequences of operations differ; views count."""
    first, second = ([node.target for node in trace.nodes] for trace in (absent, present))
    matcher = difflib.SequenceMatcher(a=first, b=second, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            yield f"{_counted(first[a:b])} absent, {_counted(second[c:d])} present"


def _counted(targets: Sequence[str]) -> str:
    counts = Counter(targets)
    return ", ".join(f"{n} x {t}" if n > 1 else t for t, n in counts.items()) or "nothing"


def _node_pairs(absent: Trace, present: Trace) -> Iterator[tuple[Node, Node]]:
    """Yield the operations of both traces that correspond to each other."""
    first, second = ([node.target for node in trace.nodes] for trace in (absent, present))
    matcher = difflib.SequenceMatcher(a=first, b=second, autojunk=False)
    for a, b, size in matcher.get_matching_blocks():
        yield from zip(absent.nodes[a : a + size], present.nodes[b : b + size], strict=True)


def _tensor_differences(absent: Trace, present: Trace) -> Iterator[str]:
    """Yield results with other dtypes, shapes, strides or offsets, and other views."""
    for first, second in _node_pairs(absent, present):
        if first.view != second.view or len(first.results) != len(second.results):
            yield f"{first.target}: view {first.view} absent, {second.view} present"
            continue
        for a, b in zip(first.results, second.results, strict=True):
            layouts = [
                (r.tensor.dtype, r.tensor.shape, r.tensor.stride, r.tensor.offset, r.tensor.device)
                for r in (a, b)
            ]
            if layouts[0] != layouts[1]:
                yield f"{first.target} {first.name}: {layouts[0]} absent, {layouts[1]} present"


def _storage_differences(absent: Trace, present: Trace) -> Iterator[str]:
    """Yield results that share storages in one trace only, or have storages of other sizes."""
    paired: dict[int, int] = {}
    for first, second in _node_pairs(absent, present):
        for a, b in zip(first.results, second.results, strict=False):
            expected = paired.setdefault(a.storage, b.storage)
            sizes = absent.storage_bytes[a.storage], present.storage_bytes[b.storage]
            if expected != b.storage:
                yield f"{first.target} {first.name}: another storage"
            elif sizes[0] != sizes[1]:
                text = f"{sizes[0]:,} bytes absent, {sizes[1]:,} present"
                yield f"{first.target} {first.name}: {text}"


def _library_differences(absent: Trace, present: Trace) -> list[str]:
    first, second = absent.library_bytes, present.library_bytes
    return [] if first == second else [f"{first:,} bytes absent, {second:,} present"]


def _workspace_differences(present: Trace) -> Iterator[str]:
    """Yield operations whose workspace by formula is not the one that the allocator counts. Both
    are for the operands of the trace on the GPU: other operands are among the other properties."""
    from remat.frontend.common.torch_modes import isolated_modes
    from remat.frontend.costs.cost_key import cost_key
    from remat.frontend.costs.operation_benchmark import OperationBenchmark
    from remat.frontend.costs.timers import measure_memory_on_cuda

    estimated = {
        n.name: n.workspace_bytes for n in remat.measure(present, remat.Roofline(GPU)).nodes
    }
    metas = present.tensors
    device = torch.device("cuda", 0)
    measured: dict[str, int | None] = {}
    with isolated_modes(device):
        benchmark = OperationBenchmark(present.nodes, metas, "cuda", device)
        for node in present.nodes:
            if node.view or any(word in node.target for word in _MEASURED_BY_LIBRARIES):
                continue
            key = repr(cost_key(node, metas, "cuda"))
            if key in measured:
                continue
            try:
                size = measure_memory_on_cuda(benchmark.prepare(node), device)[0]
            except (remat.RematError, RuntimeError):
                size = None  # its operands cannot be made
            measured[key] = size
            if size is not None and size != estimated[node.name]:
                yield f"{node.target} {node.name}: {estimated[node.name]:,} by formula, {size:,}"


def main(argv: Sequence[str] | None = None) -> None:
    """Print the rows of one case, or write the trace for the absent GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("dtype", choices=DTYPES)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="only write this trace")
    options = parser.parse_args(argv)
    torch.backends.cudnn.enabled = False  # the software GPU does not replace cuDNN
    torch.backends.cuda.enable_cudnn_sdp(False)
    if options.trace:
        _trace(options.family, options.dtype, GPU).save(options.trace)
        return
    for row in compare(options.family, options.dtype):
        print(f"{row['property']}: {row['difference_count']} differences {row['note']}")
        for difference in row["differences"]:
            print(f"    {difference}")
    sys.stdout.flush()
    os._exit(0)  # not by the exit handlers of CUDA libraries


if __name__ == "__main__":
    main()
