"""The memory of a plan over its runs: split by what it is used for, and its copies to the host and
back; and where the backward starts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from remat.costs.devices import Link
from remat.passes.offload.copies import CopyTimes, copy_times, offloaded_values
from remat.plan_data import PlanData
from remat.schedule import Schedule
from remat.simulate import Timeline, overwritten_copies

LAYERS = {
    "constant": "constant (parameters, buffers, batch)",
    "results": "results (gradients, outputs)",
    "activations": "retained activations",
    "activation-gradients": "gradients of activations",
    "recomputed": "recomputed",
    "reloaded": "copied back from the host",
    "workspace": "workspace",
}
"""The layers of the memory picture, bottom first: the key of each, and its label.

*Constant* memory is a single number in a plan. *Results* stay in memory to the end. *Activations*
are the first copies of what forward operations write, *activation gradients* those of what backward
operations write. *Reloaded* are tensors that are being copied back from the host, or were.
*Recomputed* are all other copies. *Workspace* is live while its operation runs.
"""


@dataclass(frozen=True, slots=True)
class MemoryLayers:
    """The live bytes of each layer at each run: `layers[name][run]`. Summed over the layers they
    are the simulator's `during_bytes[run]`."""

    layers: dict[str, list[int]]
    timeline: Timeline

    @property
    def used(self) -> list[str]:
        """The names of the layers that are not always empty, bottom first."""
        return [name for name, sizes in self.layers.items() if any(sizes)]


def memory_layers(plan: PlanData) -> MemoryLayers:
    """Return the live bytes of a plan, by layer and run."""
    graph, runs = plan.graph, plan.schedule.runs
    timeline = plan.timeline()
    count = len(runs)
    of_copies = ("results", "activations", "activation-gradients", "recomputed", "reloaded")
    change = {name: [0] * (count + 2) for name in of_copies}
    layer_names = value_copy_layers(plan, timeline)
    for copy, name in zip(timeline.copies, layer_names, strict=True):
        size = graph.values[copy.value].size_bytes
        change[name][copy.start] += size
        change[name][copy.end + 1] -= size
    layers = {"constant": [graph.constant_bytes] * count}
    layers |= {name: list(accumulate(delta[:count])) for name, delta in change.items()}
    layers["workspace"] = [graph.operations[op].workspace_bytes for op in runs]
    for index in overwritten_copies(graph, plan.schedule, timeline.copies):
        copy = timeline.copies[index]  # its memory is counted as that of the output
        layers[layer_names[index]][copy.end] -= graph.values[copy.value].size_bytes
    return MemoryLayers(layers, timeline)


def value_copy_layers(plan: PlanData, timeline: Timeline) -> list[str]:
    """Return the name of the memory layer of each copy of a value in the timeline."""
    graph, count = plan.graph, len(plan.schedule)
    buffers = {offloaded.buffer for offloaded in offloaded_values(graph)}
    seen: set[int] = set()
    names: list[str] = []
    for copy in timeline.copies:
        if copy.value in buffers or graph.renewal.get(copy.value) == plan.schedule.runs[copy.start]:
            names.append("reloaded")
            continue
        if copy.value in seen:
            names.append("recomputed")
            continue
        seen.add(copy.value)
        if copy.end >= count:
            names.append("results")
        else:
            is_backward = graph.operations[graph.producer[copy.value]].backward
            names.append("activation-gradients" if is_backward else "activations")
    return names


def first_backward_run(plan: PlanData) -> int | None:
    """Return the index of the run that starts the backward pass: the boundary operation's or, if
    the graph has none, the first run of a backward operation. None if there is no such run."""
    graph = plan.graph
    for run, op in enumerate(plan.schedule.runs):
        if op == graph.boundary if graph.boundary is not None else graph.operations[op].backward:
            return run
    return None


def earlier_run_counts(schedule: Schedule) -> list[int]:
    """Return for each run of a schedule how many times its operation ran before. Above 0, the run
    is a recomputation."""
    counts: dict[int, int] = {}
    earlier: list[int] = []
    for op in schedule.runs:
        earlier.append(counts.get(op, 0))
        counts[op] = earlier[-1] + 1
    return earlier


def run_start_times_s(plan: PlanData) -> list[float]:
    """Return the start of each run, and the end of the last one, in seconds."""
    costs = (plan.graph.operations[op].cost_s for op in plan.schedule.runs)
    return list(accumulate(costs, initial=0.0))


def plan_copy_times(plan: PlanData) -> CopyTimes | None:
    """Return the simulated times of a plan's copies between device and host; None if it offloads
    nothing."""
    figures = plan.offload
    if figures is None or not plan.graph.renewal:
        return None
    link = Link(figures.to_host_bytes_per_s, figures.to_device_bytes_per_s)
    return copy_times(plan.graph, plan.schedule.runs, link)
