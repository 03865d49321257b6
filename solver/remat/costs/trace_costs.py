"""Costs of operations in a trace: measured (`remat.measure`), by a roofline, or scaled in size.

To scale a cost to a tensor size that was not measured, its time grows by the factor that a roofline
predicts (for which only the ratio of arithmetic to memory rates matters); this is accurate enough
to compare schedules and to describe a plan. Memory is never underestimated: workspaces grow like
the storage that grows most, and a storage that was measured to be larger than its tensor is larger
by the same factor at all sizes.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from remat.costs.devices import DEVICES, DeviceSpec
from remat.costs.roofline import Roofline, operation_seconds
from remat.costs.workspaces.formulas import operation_workspace
from remat.documents.records import Node
from remat.documents.trace import Trace
from remat.errors import RematError

log = logging.getLogger("remat")

_ONLY_ON_CPU = ("_for_cpu", "mkldnn", "_safe_softmax", "_native_batch_norm_legit_functional")
"""Parts of the names of operations that torch runs only on the CPU: attention, oneDNN, the softmax
of attention without a fused kernel (seldom on CUDA), and batch norm."""

MIN_COST_S = 1e-9
"""The lower limit of a cost: a nanosecond, which is below any clock's resolution. A solver could
recompute an operation without any cost arbitrarily often."""


@dataclass(frozen=True, slots=True)
class OperationCost:
    """The time and memory of one operation in a trace, and the source of these numbers.

    `output_bytes` are the storage sizes of its results. `launch_s` is the time of the CPU to launch
    the operation on a GPU.
    """

    cost_s: float
    workspace_bytes: int
    source: str
    output_bytes: tuple[int, ...] = ()
    launch_s: float | None = None


def roofline_of(trace: Trace) -> Roofline | None:
    """Return the data sheet that the costs of a trace come from; None if they were measured, or if
    the trace has none.

    Raises `RematError` for rates that are no data sheet of remat: the trace does not have them.
    """
    source = next((node.cost_source for node in trace.nodes if node.cost_source), "")
    method, _, device = source.partition(" ")
    if method != "roofline":
        return None
    if device not in DEVICES:
        raise RematError(
            f"the costs of this trace are of the rates of {device!r}, which it does not have, "
            "so pieces and copies would have no costs: pass the Roofline as `costs` to "
            "remat.optimize, or solve without split and offload"
        )
    return Roofline(device)


def roofline_source(roofline: Roofline) -> str:
    """Return the name of a roofline as the source of costs, such as "roofline h100"."""
    return f"roofline {roofline.name}"


def with_roofline_costs(trace: Trace, roofline: Roofline) -> Trace:
    """Return the trace with costs estimated by a device's data sheet; needs neither the device nor
    torch. Warns if torch would run other operations on that device.

    Operations of a CUDA trace have the workspaces that torch's kernels allocate on the device.
    """
    if (warning := device_mismatch_warning(trace, roofline)) is not None:
        _warn_once(warning)
    metas = trace.tensors
    source = roofline_source(roofline)
    device = _device_of_workspaces(trace, roofline)

    def cost(node: Node) -> OperationCost:
        cost_s = max(MIN_COST_S, operation_seconds(node, metas, roofline))
        if device is None:
            return OperationCost(cost_s, 0, source)
        workspace = operation_workspace(node, metas, device)
        return OperationCost(cost_s, workspace.size_bytes, source, workspace.storage_bytes)

    return with_costs(trace, {node.name: cost(node) for node in trace.nodes if not node.view})


def _device_of_workspaces(trace: Trace, roofline: Roofline) -> DeviceSpec | None:
    """Return the CUDA device whose kernels decide the workspaces: the roofline's, or the trace's
    GPU for a roofline without a compute capability, such as custom rates. None if the trace is not
    on CUDA, or no data sheet is known."""
    if trace.device.partition(":")[0] != "cuda":
        return None
    if roofline.device.capability is not None:
        return roofline.device
    return DEVICES.get(trace.gpu)


def device_mismatch_warning(trace: Trace, roofline: Roofline) -> str | None:
    """Return a warning if torch is known to run other operations on the roofline's device than a
    trace contains; else None. It names the operations, or the compute capabilities, and the
    remedy."""
    capability = roofline.device.capability
    if capability is None:
        return None
    traced_capability = DEVICES[trace.gpu].capability if trace.gpu in DEVICES else None
    if traced_capability is not None and traced_capability != capability:
        return (
            f"this trace was made for {trace.gpu} and is estimated for {roofline.name}: which "
            "kernels torch runs depends on the GPU (compute capability "
            f"{_dotted(traced_capability)} and {_dotted(capability)}), and so do memory and time; "
            f"trace it with device={roofline.name!r}"
        )
    if trace.device.partition(":")[0] != "cpu":
        return None
    counts = Counter(_cpu_operation_name(node) for node in trace.nodes if not node.view)
    del counts[""]
    if not counts:
        return None
    cpu_operations = ", ".join(f"{count} x {name}" for name, count in counts.most_common(4))
    return (
        f"this trace was made for the CPU and is estimated for {roofline.name}, where torch runs "
        f"other operations than {cpu_operations}: memory and time will differ; trace it with "
        f"device={roofline.name!r}"
    )


def _dotted(capability: tuple[int, int]) -> str:
    """Return a compute capability as text: "9.0"."""
    return ".".join(map(str, capability))


def _cpu_operation_name(node: Node) -> str:
    """Return the name of an operation that torch runs only on the CPU, or "" for another one."""
    name = node.target.partition(".")[2]
    if any(word in name for word in _ONLY_ON_CPU):
        return name
    # Dropout on the CPU samples a separate mask: see `frontend.capture.eager_kernels.sampling`.
    if name == "bernoulli.p" and node.results[0].tensor.dtype == "bool":
        return name
    return ""


@cache
def _warn_once(warning: str) -> None:
    """Log a warning, each text only once in a process: a search estimates many traces."""
    log.warning(warning)


def with_costs(trace: Trace, costs: Mapping[str, OperationCost]) -> Trace:
    """Return the trace with the costs of its operations, by name. Storages that were measured to be
    larger than in the trace are enlarged."""

    def update(node: Node) -> Node:
        if node.name not in costs:
            return node
        cost = costs[node.name]
        return node.model_copy(
            update={
                "cost_s": cost.cost_s,
                "launch_s": cost.launch_s,
                "workspace_bytes": cost.workspace_bytes,
                "cost_source": cost.source[:100],
            }
        )

    return trace.replace(
        nodes=tuple(update(node) for node in trace.nodes),
        storage_bytes=_measured_storage_bytes(trace, costs),
    )


def _measured_storage_bytes(trace: Trace, costs: Mapping[str, OperationCost]) -> tuple[int, ...]:
    """Return the size of each storage of the trace: the one in `costs` if that is larger."""
    sizes = list(trace.storage_bytes)
    for node in trace.nodes:
        measured_bytes = costs[node.name].output_bytes if node.name in costs else ()
        for result in node.results:
            position = max(result.position, 0)
            if not node.view and position < len(measured_bytes):
                sizes[result.storage] = max(sizes[result.storage], measured_bytes[position])
    return tuple(sizes)


SCALED_COST_SOURCE = "estimated: measured at other sizes"

_TYPICAL = Roofline.custom(
    "typical", fp32_flops_per_s=1e11, bytes_per_s=1e10, half_flops_per_s=2e11, launch_s=1e-6
)
"""A device with ten FLOPs per byte of memory traffic."""


def with_scaled_costs(
    trace: Trace, measured: Trace, captured_storage_bytes: tuple[int, ...]
) -> Trace:
    """Return `trace` with the scaled costs of `measured`, a trace of the same operations.

    `captured_storage_bytes` are the storage sizes of `measured` as captured, before the measurement
    enlarged them.
    """
    sizes = list(
        zip(trace.storage_bytes, measured.storage_bytes, captured_storage_bytes, strict=True)
    )
    max_growth = max((size / captured for size, _, captured in sizes if captured), default=1.0)
    metas, measured_metas = trace.tensors, measured.tensors

    def with_scaled_cost(node: Node, measured_node: Node) -> Node:
        cost_s = measured_node.cost_s
        if cost_s:
            cost_s *= operation_seconds(node, metas, _TYPICAL) / operation_seconds(
                measured_node, measured_metas, _TYPICAL
            )
        workspace_bytes = measured_node.workspace_bytes
        if workspace_bytes is not None:
            workspace_bytes = math.ceil(workspace_bytes * max(1.0, max_growth))
        return node.model_copy(
            update={
                "cost_s": cost_s,
                "launch_s": measured_node.launch_s,
                "workspace_bytes": workspace_bytes,
                "cost_source": SCALED_COST_SOURCE,
            }
        )

    nodes = tuple(map(with_scaled_cost, trace.nodes, measured.nodes))
    storages = tuple(_scaled_storage_bytes(*storage_sizes) for storage_sizes in sizes)
    return trace.replace(nodes=nodes, storage_bytes=storages)


def _scaled_storage_bytes(size_bytes: int, measured_bytes: int, captured_storage_bytes: int) -> int:
    """Return the size of a storage, enlarged by the factor by which the measured one is larger than
    the captured one."""
    if measured_bytes <= captured_storage_bytes:
        return size_bytes
    if not captured_storage_bytes:
        return measured_bytes
    return math.ceil(size_bytes * (measured_bytes / captured_storage_bytes))
