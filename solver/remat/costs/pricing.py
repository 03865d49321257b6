"""Costs into a trace: where they come from is up to the caller; see `by_roofline` and
`remat.measure`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from remat.costs.devices import DEVICES
from remat.costs.roofline import Roofline, seconds_of
from remat.documents.records import Node, TensorMeta
from remat.documents.trace import Trace

log = logging.getLogger("remat")

_ONLY_ON_CPU = ("_for_cpu", "mkldnn", "_safe_softmax", "_native_batch_norm_legit_functional")
"""In names of operations: attention, oneDNN, attention by its formula (which CUDA runs seldom), and
batch norm."""

FLOOR_S = 1e-9
"""No cost below a nanosecond: that is under any clock's resolution, and an operation that costs
nothing would let a solver run it any number of times without noticing."""


@dataclass(frozen=True, slots=True)
class Priced:
    """What one operation takes: seconds, bytes of workspace, and the bytes behind its outputs."""

    cost_s: float
    workspace_bytes: int
    source: str
    output_bytes: tuple[int, ...] = ()
    launch_s: float | None = None


def tensor_metas(trace: Trace) -> dict[str, TensorMeta]:
    """Every tensor of the trace by name."""
    metas = {p.name: p.tensor for p in trace.placeholders}
    metas.update((r.name, r.tensor) for node in trace.nodes for r in node.results)
    return metas


def by_roofline(trace: Trace, roofline: Roofline) -> Trace:
    """A new Trace with costs by a device's data sheet; needs neither device nor torch."""
    if (warning := differences(trace, roofline)) is not None:
        _tell(warning)
    metas = tensor_metas(trace)
    source = f"roofline {roofline.name}"
    priced = {
        node.name: Priced(max(FLOOR_S, seconds_of(node, metas, roofline)), 0, source)
        for node in trace.nodes
        if not node.view
    }
    return with_costs(trace, priced)


def differences(trace: Trace, roofline: Roofline) -> str | None:
    """What to say where a trace is priced for a device on which torch runs other operations: which,
    and what to do. None where it would run the same, as far as one can tell."""
    wanted = roofline.device.capability
    if wanted is None:
        return None
    made = DEVICES[trace.gpu].capability if trace.gpu in DEVICES else None
    if made is not None and made != wanted:
        return (
            f"this trace was made for {trace.gpu} and is priced for {roofline.name}: which kernels "
            f"torch runs depends on the GPU (compute capability {_dotted(made)} and "
            f"{_dotted(wanted)}), and with them memory and time; trace it with "
            f"device={roofline.name!r}"
        )
    if trace.device.partition(":")[0] != "cpu":
        return None
    counts = Counter(_only_on_cpu(node) for node in trace.nodes if not node.view)
    del counts[""]
    if not counts:
        return None
    found = ", ".join(f"{count} x {name}" for name, count in counts.most_common(4))
    return (
        f"this trace was made for the CPU and is priced for {roofline.name}, where torch runs "
        f"other operations than {found}: memory and time will differ; trace it with "
        f"device={roofline.name!r}"
    )


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _only_on_cpu(node: Node) -> str:
    """The operation, if a step on CUDA would have another in its place, else ""."""
    name = node.target.partition(".")[2]
    if any(word in name for word in _ONLY_ON_CPU):
        return name
    # Dropout on the CPU samples a separate mask: see `frontend.capture.eager_kernels.dropout`.
    if name == "bernoulli.p" and node.results[0].tensor.dtype == "bool":
        return name
    return ""


@cache
def _tell(warning: str) -> None:
    """Once: searches price many traces."""
    log.warning(warning)


def with_costs(trace: Trace, priced: Mapping[str, Priced]) -> Trace:
    """A new Trace with costs for the operations named, and storages no smaller than was seen."""

    def update(node: Node) -> Node:
        if node.name not in priced:
            return node
        cost = priced[node.name]
        return node.model_copy(
            update={
                "cost_s": cost.cost_s,
                "launch_s": cost.launch_s,
                "workspace_bytes": cost.workspace_bytes,
                "cost_source": cost.source[:100],
            }
        )

    return trace.replace(
        nodes=tuple(update(node) for node in trace.nodes), storages=_real_sizes(trace, priced)
    )


def _real_sizes(trace: Trace, priced: Mapping[str, Priced]) -> tuple[int, ...]:
    """Sizes of the storages, as large as they were when the operations really ran."""
    sizes = list(trace.storages)
    for node in trace.nodes:
        seen = priced[node.name].output_bytes if node.name in priced else ()
        for result in node.results:
            position = max(result.position, 0)
            if not node.view and position < len(seen):
                sizes[result.storage] = max(sizes[result.storage], seen[position])
    return tuple(sizes)
