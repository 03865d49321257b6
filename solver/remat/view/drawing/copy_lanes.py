"""The copies of a plan with offloaded tensors: when each engine copies, when the step waits, and
the bytes on the host."""

from __future__ import annotations

from dataclasses import dataclass

from remat.costs.devices import Link
from remat.limits.units import format_bytes, format_seconds
from remat.passes.offload.copies import CopyTimes, copy_times
from remat.plan_data import PlanData


@dataclass(frozen=True, slots=True)
class Bar:
    """A span of seconds in a lane, with its tooltip."""

    start_s: float
    end_s: float
    tip: str


@dataclass(frozen=True, slots=True)
class CopyLanes:
    """The simulated copies of a plan, and the bars of a picture by the name of their lane: "to
    host", "to device" and, if the step waits for any, "waiting"."""

    times: CopyTimes
    lanes: dict[str, list[Bar]]


def copy_lanes(plan: PlanData) -> CopyLanes | None:
    """Return the lanes of a plan's copies; None if it offloads nothing."""
    figures = plan.offload
    if figures is None or not plan.graph.renewal:
        return None
    link = Link(figures.to_host_bytes_per_s, figures.to_device_bytes_per_s)
    times = copy_times(plan.graph, plan.schedule.runs, link)
    lanes: dict[str, list[Bar]] = {"to host": [], "to device": []}
    for copy in times.copies:
        lane = copy.direction.replace("_", " ")
        seconds = format_seconds(copy.end_s - copy.start_s)
        tip = f"{copy.tensor} {lane}: {format_bytes(copy.size_bytes)} in {seconds}"
        lanes[lane].append(Bar(copy.start_s, copy.end_s, tip))
    waits = [wait for wait in times.waits if wait.end_s > wait.start_s]
    if waits:
        lanes["waiting"] = [
            Bar(w.start_s, w.end_s, f"waits {format_seconds(w.end_s - w.start_s)} for {w.tensor}")
            for w in waits
        ]
    return CopyLanes(times, lanes)
