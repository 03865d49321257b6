"""`chrome_trace`: a plan in the Chrome trace event format, for Perfetto and chrome://tracing.

The format is described in "Trace Event Format" (Google, 2016). Times are predicted by the plan, not
measured; compare them with a profile of the real step to see where the two differ.
"""

from __future__ import annotations

import json
from collections import Counter

from remat.plan_data import PlanData
from remat.view.memory import (
    LAYERS,
    earlier_run_counts,
    first_backward_run,
    memory_layers,
    plan_copy_times,
    run_start_times_s,
)

_PID = 1
_FORWARD, _BACKWARD = 1, 2
_COPY_TRACKS = {"to_host": 3, "to_device": 4}

Event = dict[str, "str | int | float | dict[str, str | int | float]"]


def chrome_trace(plan: PlanData) -> str:
    """Return a plan as Chrome trace events, in JSON.

    Each run is a complete event (in microseconds) on the track "forward" or "backward", with the
    category "run" or "recompute". A counter has the live bytes of each memory layer. Copies of
    offloaded tensors have a track for each direction, and a counter of the bytes on the host.
    """
    graph = plan.graph
    memory = memory_layers(plan)
    # A run ends where the next starts, rounded to nanoseconds: events never overlap.
    starts_us = [round(start * 1e6, 3) for start in run_start_times_s(plan)]
    boundary = first_backward_run(plan)
    run_counts = Counter(plan.schedule.runs)
    events = _track_name_events()
    earlier_runs = earlier_run_counts(plan.schedule)
    for run, (op, earlier) in enumerate(zip(plan.schedule.runs, earlier_runs, strict=True)):
        operation = graph.operations[op]
        args: dict[str, str | int | float] = {
            "module": operation.module,
            "run": run,
            "time": f"{earlier + 1} of {run_counts[op]}",
            "output_bytes": sum(graph.values[v].size_bytes for v in operation.outputs),
            "memory_bytes": memory.timeline.during_bytes[run],
        }
        events.append(
            {
                "name": operation.name,
                "cat": "recompute" if earlier else "run",
                "ph": "X",
                "ts": starts_us[run],
                "dur": round(starts_us[run + 1] - starts_us[run], 3),
                "pid": _PID,
                "tid": _FORWARD if boundary is None or run < boundary else _BACKWARD,
                "args": args,
            }
        )
        live_bytes = {layer: memory.layers[layer][run] for layer in memory.used}
        events.append(_memory_counter_event(starts_us[run], live_bytes))
    if plan.schedule.runs:
        results = [copy.value for copy in memory.timeline.copies if copy.end >= len(plan.schedule)]
        at_end = dict.fromkeys(memory.used, 0) | {
            "constant": graph.constant_bytes,
            "results": sum(graph.values[v].size_bytes for v in results),
        }
        events.append(
            _memory_counter_event(starts_us[-1], {layer: at_end[layer] for layer in memory.used})
        )
    events += _offload_copy_events(plan)
    facts = {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "time_s": plan.time_s,
        "layers": LAYERS,
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts})


def _offload_copy_events(plan: PlanData) -> list[Event]:
    """Return the events of the copies of offloaded tensors between device and host; none if the
    plan offloads nothing."""
    times = plan_copy_times(plan)
    if times is None:
        return []
    events: list[Event] = []
    for direction, track in _COPY_TRACKS.items():
        name = f"copies {direction.replace('_', ' ')}"
        events.append(_track_name_event("thread_name", track, name))
    for copy in times.copies:
        start_us, end_us = round(copy.start_s * 1e6, 3), round(copy.end_s * 1e6, 3)
        events.append(
            {
                "name": copy.tensor,
                "cat": "copy",
                "ph": "X",
                "ts": start_us,
                "dur": round(end_us - start_us, 3),
                "pid": _PID,
                "tid": _COPY_TRACKS[copy.direction],
                "args": {"bytes": copy.size_bytes},
            }
        )
    for start_s, size_bytes in times.host_bytes:
        start_us = round(start_s * 1e6, 3)
        events.append(_memory_counter_event(start_us, {"on_host": size_bytes}, "host memory"))
    return events


def _memory_counter_event(
    start_us: float, bytes_by_layer: dict[str, int], name: str = "memory"
) -> Event:
    """Return an event of the counter `name` with the live bytes of each layer from `start_us`
    on."""
    args: dict[str, str | int | float] = {**bytes_by_layer}
    return {"name": name, "ph": "C", "ts": start_us, "pid": _PID, "tid": 0, "args": args}


def _track_name_events() -> list[Event]:
    """Return the metadata events that name the process and its tracks "forward" and "backward"."""
    names = (
        ("process_name", 0, "remat plan"),
        ("thread_name", _FORWARD, "forward"),
        ("thread_name", _BACKWARD, "backward"),
    )
    return [_track_name_event(kind, track, name) for kind, track, name in names]


def _track_name_event(kind: str, track: int, name: str) -> Event:
    """Return the event that gives a track, or the process, its name."""
    return {"name": kind, "ph": "M", "ts": 0, "pid": _PID, "tid": track, "args": {"name": name}}
