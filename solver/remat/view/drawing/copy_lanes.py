"""The copies of a plan with offloaded tensors: when each engine copies, when the step waits, and
the bytes on the host."""

from __future__ import annotations

from dataclasses import dataclass

from remat.costs.link import Link
from remat.limits.units import format_bytes, format_seconds
from remat.passes.offload.copies import CopyTimes, copy_times, offloaded_values
from remat.plan_data import TO_DEVICE_RATE_STAT, TO_HOST_RATE_STAT, PlanData
from remat.view.drawing.memory_layers import run_start_times_s


@dataclass(frozen=True, slots=True)
class Bar:
    """A span of seconds in a lane, with its tooltip."""

    start_s: float
    end_s: float
    tip: str


@dataclass(frozen=True, slots=True)
class CopyLanes:
    """Bars by the name of their lane, and the bytes on the host from a second on, in order."""

    lanes: dict[str, list[Bar]]
    host_bytes: tuple[tuple[float, int], ...]

    @property
    def largest_host_bytes(self) -> int:
        """The largest number of bytes on the host at once."""
        return max((size for _, size in self.host_bytes), default=0)


def plan_copies(plan: PlanData) -> CopyTimes | None:
    """Return the simulated copies of a plan; None for one that offloads nothing, or does not say
    for which bandwidth it is."""
    rates = [plan.stats.get(key) for key in (TO_HOST_RATE_STAT, TO_DEVICE_RATE_STAT)]
    if not plan.graph.renewal or not all(isinstance(r, int | float) and r > 0 for r in rates):
        return None
    link = Link(*(float(rate) for rate in rates if rate is not None))
    return copy_times(plan.graph, plan.schedule.runs, link)


def copy_lanes(plan: PlanData) -> CopyLanes | None:
    """Return the lanes of a plan's copies: "to host", "to device" and, if the step waits for any,
    "waiting"; None where `plan_copies` is."""
    times = plan_copies(plan)
    if times is None:
        return None
    lanes: dict[str, list[Bar]] = {"to host": [], "to device": []}
    for copy in times.copies:
        tip = f"{copy.tensor} {copy.direction.replace('_', ' ')}: {format_bytes(copy.size_bytes)}"
        tip += f" in {format_seconds(copy.end_s - copy.start_s)}"
        lanes[copy.direction.replace("_", " ")].append(Bar(copy.start_s, copy.end_s, tip))
    awaited = {op: o.value for o in offloaded_values(plan.graph) for op in (o.release, o.arrive)}
    starts_s = run_start_times_s(plan)
    for run, op in enumerate(plan.schedule.runs):
        if op in awaited and starts_s[run + 1] > starts_s[run]:
            name = plan.graph.values[awaited[op]].name
            tip = f"waits {format_seconds(starts_s[run + 1] - starts_s[run])} for {name}"
            lanes.setdefault("waiting", []).append(Bar(starts_s[run], starts_s[run + 1], tip))
    return CopyLanes(lanes, times.host_bytes)
