"""`measure`: adds costs to a trace, by running each distinct operation alone, or by a roofline.

Operations run on tensors created for them (see `operands`), never on the model's, so a measurement
changes nothing but the cost cache. It needs no more memory than the planned step
(`step_measurement_limit_bytes`). Operations that cannot be measured are estimated from the measured
ones, and their `cost_source` says so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch

import remat.frontend.runtime.operations  # noqa: F401  # registers the operations that add pieces
from remat.costs.devices import find_device
from remat.costs.roofline import Roofline
from remat.costs.trace_costs import with_costs, with_roofline_costs
from remat.documents.records import Node
from remat.documents.trace import Trace
from remat.errors import RematError, wrong_type
from remat.frontend.costs.cost_cache import CostCache
from remat.frontend.costs.operation_costs import (
    MeasureProgress,
    measure_operations,
    progress_reporter,
)
from remat.frontend.memory.device_memory import keeps_cublas_workspaces
from remat.heuristics.peak_bounds import peak_lower_bound_bytes
from remat.simulate import baseline_of, peak_and_time
from remat.strategies.baselines.module_blocks import find_blocks
from remat.strategies.baselines.schedule_builder import checkpoint_segments


def step_measurement_limit_bytes(trace: Trace, budget_bytes: int | None) -> int:
    """Return the bytes that measuring a step may take in addition to its constant memory.

    The total is at most the budget, or the peak with each repeated block checkpointed, whichever is
    larger. For the budget "min" (`budget_bytes` is None), a lower bound of the peak replaces the
    budget.
    """
    graph = trace.graph_of_sizes
    peaks_bytes = [peak_lower_bound_bytes(graph) if budget_bytes is None else budget_bytes]
    try:
        if blocks := find_blocks(graph):
            checkpointed = checkpoint_segments(graph, blocks)
            peaks_bytes.append(peak_and_time(graph, checkpointed)[0])
    except RematError:  # a block that cannot be recomputed
        pass
    return max(0, max(peaks_bytes) - graph.constant_bytes)


def block_measurement_limit_bytes(trace: Trace) -> int:
    """Return the bytes that measuring a block may take in addition to its parameters: its peak
    without recomputation, which is also its peak when it is checkpointed as a whole."""
    graph = trace.graph_of_sizes
    inputs = {p.storage for p in trace.placeholders if p.kind == "input"}
    inputs_bytes = sum(map(trace.allocated_bytes, inputs))
    return max(0, baseline_of(graph).peak_bytes - graph.constant_bytes + inputs_bytes)


log = logging.getLogger("remat")


def measure(
    trace: Trace,
    device: str | torch.device | Roofline | None = None,
    *,
    cache: CostCache | str | os.PathLike[str] | bool | None = None,
    progress: MeasureProgress | bool | None = None,
    limit_bytes: int | None = None,
) -> Trace:
    """Return a trace whose operations have `cost_s` (seconds), `workspace_bytes` and `cost_source`.

    `device` is "cpu", "cuda", "cuda:1", or a `Roofline`, which needs no device; the default is the
    trace's device. `cache` is a path or a `CostCache`, by default the user's; False neither reads
    nor writes costs. `progress` is called with (completed, total, name); True shows a bar on
    stderr. Views cost nothing. An operation that fails is estimated, with a warning of the logger
    "remat" for each distinct reason; one whose tensors need more than `limit_bytes` is estimated,
    too, so that measuring does not exceed this limit.

    Raises `RematError` if this machine does not have the device, and TypeError for another object,
    such as a model.
    """
    if not isinstance(trace, Trace):
        raise wrong_type("measure", "a Trace", trace, "pass remat.trace(model, inputs)")
    return _measure_nodes(trace, trace.nodes, device, cache, progress, limit_bytes)


def measure_pieces(
    trace: Trace,
    device: str | torch.device | Roofline | None = None,
    *,
    cache: CostCache | str | os.PathLike[str] | bool | None = None,
    limit_bytes: int | None = None,
) -> Trace:
    """Return the trace with measured costs of the operations that have none: of the pieces of
    others. A `Roofline` estimates all operations, also those that have costs.

    Arguments and errors are as in `measure`.
    """
    missing = [node for node in trace.nodes if node.cost_s is None]
    return _measure_nodes(trace, missing, device, cache, None, limit_bytes)


def _measure_nodes(
    trace: Trace,
    nodes: Sequence[Node],
    device: str | torch.device | Roofline | None,
    cache: CostCache | str | os.PathLike[str] | bool | None,
    progress: MeasureProgress | bool | None,
    limit_bytes: int | None,
) -> Trace:
    """Return the trace with costs of these nodes, or of all nodes by a `Roofline`; the other
    arguments are as in `measure`."""
    if isinstance(device, Roofline):
        return with_roofline_costs(trace, device)
    target_device = _checked_measuring_device(
        _parse_measuring_device(device or trace.device), trace
    )
    cost_cache = _open_cost_cache(cache)
    try:
        with progress_reporter(progress) as report:
            costs = measure_operations(
                nodes,
                trace.tensors,
                target_device,
                cost_cache,
                report,
                trace_device_type=trace.device.partition(":")[0],
                limit_bytes=limit_bytes,
            )
            trace_with_costs = with_costs(trace, costs)
            if target_device.type == "cuda" and not keeps_cublas_workspaces():
                # The workspace of cuBLAS is measured as part of each matrix product.
                return trace_with_costs.replace(library_bytes=0)
            return trace_with_costs
    finally:
        if cost_cache is not None and cost_cache is not cache:
            cost_cache.close()


def check_cost_source(costs: object) -> None:
    """Raise the error that `measure` would raise for an invalid option `costs`, before a trace
    exists: TypeError for an object of another type, `RematError` for an unknown or absent
    device."""
    if costs is None or isinstance(costs, Roofline):
        return
    if not isinstance(costs, str | torch.device):
        remedy = 'pass costs="cpu", "cuda" or remat.Roofline("h100")'
        raise wrong_type("costs", "a device or a remat.Roofline", costs, remedy)
    _check_can_measure(_parse_measuring_device(costs))


def _parse_measuring_device(device: str | torch.device) -> torch.device:
    """Return torch's device of this name. Raises `RematError` for another name, such as a GPU's,
    with the roofline to pass."""
    try:
        return torch.device(device)
    except RuntimeError:
        name = str(device).removeprefix("roofline:")
        try:
            estimate = f"remat.Roofline({find_device(name).name!r})"
        except ValueError:
            estimate = "remat.Roofline('h100') for a GPU that this machine does not have"
        raise RematError(
            f"cannot measure: {str(device)!r} is no device of this machine; pass 'cpu', 'cuda' or "
            + estimate
        ) from None


def _checked_measuring_device(device: torch.device, trace: Trace) -> torch.device:
    """Return the device with its index. Raises `RematError` if nothing can be measured on it, and
    warns if the trace is for another type of device."""
    _check_can_measure(device)
    if device.type != trace.device.partition(":")[0]:
        log.warning(
            "this trace was made for %s and is measured on %s: torch may choose other operations "
            "there; trace it on %s to be sure",
            trace.device,
            device,
            device.type,
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_can_measure(device: torch.device) -> None:
    """Raise `RematError` unless the device is a CPU or an available GPU."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RematError(
            "cannot measure on cuda: torch sees no CUDA device here; measure where one is, or "
            "estimate with remat.Roofline('h200') or another data sheet"
        )
    if device.type not in ("cpu", "cuda"):
        raise RematError(f"cannot measure on {device.type}; pass 'cpu', 'cuda' or a remat.Roofline")


def _open_cost_cache(cache: CostCache | str | os.PathLike[str] | bool | None) -> CostCache | None:
    """Return the cache that the option names: a `CostCache` itself, the user's for None or True,
    None for False."""
    if isinstance(cache, CostCache):
        return cache
    if isinstance(cache, bool):
        return CostCache() if cache else None
    return CostCache(cache)
