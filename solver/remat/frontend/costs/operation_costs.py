"""`measure_operations`: the costs of a list of operations, each distinct one measured once.

Operations that fail, or exceed the limits of time or memory, are estimated from the others: by a
roofline with one fitted factor, the median ratio of measured to predicted time. So the data sheet
of a similar device is adapted to the speed of this one.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from typing import TypeAlias

import torch

from remat.costs.devices import match_device
from remat.costs.roofline import Roofline, operation_seconds
from remat.costs.trace_costs import MIN_COST_S, OperationCost, with_costs
from remat.documents.records import Node, TensorMeta
from remat.documents.trace import Trace, convolution_nodes
from remat.frontend.common.torch_modes import isolated_modes
from remat.frontend.costs.cost_cache import CostCache, MeasuredCost
from remat.frontend.costs.cost_key import cost_key, device_name, environment_key
from remat.frontend.costs.operands import operand_and_result_bytes
from remat.frontend.costs.operation_benchmark import (
    AboveMemoryLimit,
    OperationBenchmark,
    only_moves_bytes,
)
from remat.limits.units import format_bytes

MeasureProgress: TypeAlias = Callable[[int, int, str], None]
"""A callback that receives the number of measured operations, their total, and the next one's
name."""


@contextmanager
def progress_reporter(progress: MeasureProgress | bool | None) -> Iterator[MeasureProgress]:
    """Yield the function to report progress to: the caller's, one that updates a bar on stderr for
    True, or one that does nothing."""
    if callable(progress):
        yield progress
    elif progress is True and sys.stderr.isatty():
        with _measuring_bar() as report:
            yield report
    else:
        yield _ignore_progress


def _ignore_progress(completed: int, total: int, name: str) -> None:
    """Report nothing."""


@contextmanager
def _measuring_bar() -> Iterator[MeasureProgress]:
    """Yield a function that updates a bar on stderr; one that does nothing if `rich` is not
    installed."""
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:
        yield _ignore_progress
        return
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda completed, total, name: bar.update(
            task, completed=completed, total=total, description=f"measuring {name}"
        )


log = logging.getLogger("remat")

_autotuned_keys: set[str] = set()
"""Keys of the operations that cuDNN has autotuned in this process, on both threads of a step."""

OUTLIER_RATIO = 8.0
"""On the CPU, an operation that takes more than this many times its estimate is measured once more.
When other processes use the cores, a parallel operation of 0.1 ms can take 10 ms in every block."""
MAX_REPEAT_S = 1.0
"""Time limit of all these measurements."""
_MAX_OUTLIER_FACTOR = 8.0
"""Upper limit of the roofline's factor in these estimates: of few operations, all may be
outliers."""

_repeated_keys: set[str] = set()
"""Keys of the operations that this process has measured once more: some stay as slow."""

_OUT_OF_TIME = "no time was left"
_ABOVE_LIMIT = "it would exceed the budget"


def measure_operations(
    operations: Sequence[Node],
    metas: Mapping[str, TensorMeta],
    device: torch.device,
    cache: CostCache | None,
    report: MeasureProgress,
    *,
    trace_device_type: str,
    limit_s: float = math.inf,
    limit_bytes: int | None = None,
) -> dict[str, OperationCost]:
    """Return the cost of each operation by its name, without views. An operation that fails, or
    exceeds a limit, has an estimated cost.

    `metas` has the shapes and layouts of all tensors, which the trace has on devices of the type
    `trace_device_type`. After `limit_s` seconds no more operations are measured. An operation whose
    tensors need more than `limit_bytes` is not measured. `report` is called before each
    measurement.
    """
    deadline = time.monotonic() + limit_s
    shared_key = environment_key(device)
    groups: dict[str, list[Node]] = {}
    keys: dict[str, dict[str, object]] = {}
    for node in operations:
        if not node.view:
            key = cost_key(node, metas, trace_device_type)
            groups.setdefault(key_text := repr(key), []).append(node)
            keys[key_text] = {**shared_key, **key}
    measured: dict[str, MeasuredCost] = {}
    failures: dict[str, str] = {}
    with isolated_modes(device):
        benchmark = OperationBenchmark(operations, metas, trace_device_type, device, limit_bytes)
        for index, (key_text, nodes) in enumerate(groups.items()):
            report(index, len(groups), nodes[0].target)
            cost = cache.get(keys[key_text]) if cache is not None else None
            if cost is None and time.monotonic() > deadline:
                failures[key_text] = _OUT_OF_TIME
                continue
            if cost is None:
                try:
                    cost = benchmark.measure(nodes[0])
                except AboveMemoryLimit:
                    failures[key_text] = _ABOVE_LIMIT
                    continue
                except Exception as error:  # whatever an operation raises, the others still count
                    failures[key_text] = _failure_reason(error)
                    benchmark.recover(nodes[0], error)
                    continue
                if cache is not None:
                    cache.put(keys[key_text], cost)
            if uses_cudnn_autotuning(nodes[0], device) and key_text not in _autotuned_keys:
                _autotune_operation(benchmark, nodes[0], key_text)
            measured[key_text] = cost
        if device.type == "cpu":
            for key_text, cost in _repeat_outliers(benchmark, groups, metas, measured).items():
                measured[key_text] = cost
                if cache is not None:
                    cache.put(keys[key_text], cost)
        report(len(groups), len(groups), "")
        del benchmark
        if device.type == "cuda":
            torch.cuda.empty_cache()  # free the memory that autotuning took, for the step
    source = f"measured {device.type} {device_name(device)}"
    costs = {
        n.name: OperationCost(
            c.cost_s, c.workspace_bytes, source, c.output_bytes, c.launch_s or None
        )
        for key_text, c in measured.items()
        for n in groups[key_text]
    }
    if failures:
        calibration = CalibratedRoofline.fit(
            device, metas, [(groups[key_text][0], cost) for key_text, cost in measured.items()]
        )
        for key_text, reason in failures.items():
            cost_s = max(MIN_COST_S, calibration.seconds(groups[key_text][0]))
            workspace_bytes = assumed_workspace_bytes(groups[key_text][0], metas, device)
            workspace_note = ""
            if workspace_bytes:
                workspace_note = f"; workspace unknown, {format_bytes(workspace_bytes)} planned"
            estimate = OperationCost(
                cost_s,
                workspace_bytes,
                f"estimated: {shorten(reason, 50, placeholder='...')}{workspace_note}",
            )
            costs.update((node.name, estimate) for node in groups[key_text])
        _warn_of_failures(failures, groups, calibration.description)
    return costs


def _repeat_outliers(
    benchmark: OperationBenchmark,
    groups: Mapping[str, Sequence[Node]],
    metas: Mapping[str, TensorMeta],
    measured: Mapping[str, MeasuredCost],
) -> dict[str, MeasuredCost]:
    """Measure operations once more that took far longer than the roofline estimates, each once in
    this process, and return the costs that are lower then, by key.

    Costs from the cache are included: another process may have measured them on a busy machine.
    """
    nodes = {key_text: groups[key_text][0] for key_text in measured}
    calibration = CalibratedRoofline.fit(
        torch.device("cpu"), metas, [(nodes[key_text], measured[key_text]) for key_text in nodes]
    )
    scale = OUTLIER_RATIO * min(1.0, _MAX_OUTLIER_FACTOR / calibration.factor)
    excess_s = {
        key_text: measured[key_text].cost_s - scale * calibration.seconds(node)
        for key_text, node in nodes.items()
        if key_text not in _repeated_keys and not only_moves_bytes(node)
    }
    outliers = [key_text for key_text in excess_s if excess_s[key_text] > 0]
    deadline = time.monotonic() + MAX_REPEAT_S
    corrected: dict[str, MeasuredCost] = {}
    for key_text in sorted(outliers, key=excess_s.__getitem__, reverse=True):
        if time.monotonic() > deadline:
            break
        _repeated_keys.add(key_text)
        try:
            cost = benchmark.measure(nodes[key_text])
        except Exception as error:  # the first measurement stands
            log.debug("cannot measure %s once more: %s", nodes[key_text].target, error)
            continue
        if cost.cost_s < measured[key_text].cost_s:
            corrected[key_text] = cost
    return corrected


def assumed_workspace_bytes(
    node: Node, metas: Mapping[str, TensorMeta], device: torch.device
) -> int:
    """Return the workspace to plan for an operation that could not be measured.

    On CUDA it is as large as its operands and results (attention and convolutions take hundreds of
    megabytes). It is 0 on the CPU, since no measured peak there contains workspaces, and for
    operations that only move bytes.
    """
    if device.type != "cuda" or only_moves_bytes(node):
        return 0
    return operand_and_result_bytes(node, metas)


def uses_cudnn_autotuning(node: Node, device: torch.device) -> bool:
    """True for a convolution on CUDA if `torch.backends.cudnn.benchmark` is set: cuDNN tries
    several algorithms the first time that a process runs it. That must not happen inside a step,
    since the memory that it takes is not part of the plan."""
    is_convolution = "convolution" in node.target
    return device.type == "cuda" and is_convolution and torch.backends.cudnn.benchmark


def _autotune_operation(benchmark: OperationBenchmark, node: Node, key_text: str) -> None:
    """Let cuDNN select an algorithm for an operation, on both threads of a step, and record its
    key; warn if that fails."""
    try:
        benchmark.autotune(node)
    except Exception as error:  # the cost is known, so planning continues
        reason = _failure_reason(error)
        log.warning(
            "cuDNN cannot tune %s before the step (%s), so the first step may exceed its budget. "
            "Leave some memory free for it",
            node.target,
            reason,
        )
        return
    _autotuned_keys.add(key_text)


def _failure_reason(error: Exception) -> str:
    """Return why an operation could not be measured, in one line."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error):
        return "out of memory"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:80]}"


def _warn_of_failures(
    failures: Mapping[str, str], groups: Mapping[str, list[Node]], estimate_description: str
) -> None:
    """Log one warning for each reason why operations could not be measured, except limits of time
    and memory. `groups` has the operations of each key."""
    targets_by_reason: dict[str, list[str]] = {}
    for key_text, reason in failures.items():
        if reason in (_OUT_OF_TIME, _ABOVE_LIMIT):
            continue
        targets_by_reason.setdefault(reason, []).append(groups[key_text][0].target)
    for reason, targets in targets_by_reason.items():
        names = ", ".join(sorted(set(targets))[:5])
        log.warning(
            "cannot measure %d operations (%s): %s; estimated %s. Pass costs=remat.Roofline(...) "
            "to estimate all operations",
            len(targets),
            names,
            reason,
            estimate_description,
        )


def with_measured_convolutions(trace: Trace) -> Trace:
    """Return a trace with costs, in which convolutions have measured workspaces; their times stay.

    The trace's device is a GPU of this machine. Each distinct convolution runs there on tensors
    created for it, unless the user's cost cache has it. One that fails, for example because its
    tensors do not fit, gets a workspace as large as its operands and results, with a warning.
    """
    nodes = convolution_nodes(trace)
    if not nodes:
        return trace
    device = torch.device(trace.device)
    cache = CostCache()
    try:
        with progress_reporter(None) as report:
            measured = measure_operations(
                nodes, trace.tensors, device, cache, report, trace_device_type=device.type
            )
    finally:
        cache.close()
    costs: dict[str, OperationCost] = {}
    for node in nodes:
        cost = measured[node.name]
        costs[node.name] = OperationCost(
            node.cost_s or 0.0,
            cost.workspace_bytes,
            node.cost_source,
            cost.output_bytes,
            node.launch_s,
        )
    return with_costs(trace, costs)


_FALLBACK_DEVICES = {"cpu": "cpu", "cuda": "a100"}
"""Names of data sheets by device type, for devices without a data sheet of their own."""


@dataclass(frozen=True)
class CalibratedRoofline:
    """A roofline whose times are multiplied by a factor, the median of `sample_count` ratios."""

    metas: Mapping[str, TensorMeta]
    roofline: Roofline
    factor: float
    sample_count: int

    @classmethod
    def fit(
        cls,
        device: torch.device,
        metas: Mapping[str, TensorMeta],
        measured: Iterable[tuple[Node, MeasuredCost]],
    ) -> CalibratedRoofline:
        """Fit the factor to measured operations; it is 1 if there are none. A device without a data
        sheet has the roofline of a similar one."""
        spec = match_device(device_name(device)) if device.type == "cuda" else None
        roofline = Roofline(spec.name if spec else _FALLBACK_DEVICES.get(device.type, "cpu"))
        ratios = [cost.cost_s / operation_seconds(node, metas, roofline) for node, cost in measured]
        factor = statistics.median(ratios) if ratios else 1.0
        return cls(metas, roofline, factor, len(ratios))

    def seconds(self, node: Node) -> float:
        """Return the estimated seconds of an operation."""
        return self.factor * operation_seconds(node, self.metas, self.roofline)

    @property
    def description(self) -> str:
        """The method of estimation, as text for messages."""
        return (
            f"by the roofline of {self.roofline.name}, times {self.factor:.2g} as fitted to "
            f"{self.sample_count} measured operations"
        )
