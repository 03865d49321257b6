"""`chrome_trace`: a plan in the Chrome trace event format, for Perfetto and chrome://tracing.

The format is described in "Trace Event Format" (Google, 2016). Times are what the plan says, not
what a device did; written beside a profile of the real step, they show where the two differ.
"""

from __future__ import annotations

import json
from collections import Counter

from remat.plan_data import PlanData
from remat.view.drawing.occupancy import LAYERS, backward_run, occupancy, reruns, starts_s

_PID = 1
_FORWARD, _BACKWARD = 1, 2

Event = dict[str, "str | int | float | dict[str, str | int | float]"]


def chrome_trace(plan: PlanData) -> str:
    """JSON text. Each run is a complete event (microseconds) on the track of its pass, in the
    category "run" or "recompute"; counters follow the memory by what holds it, in bytes."""
    graph = plan.graph
    held = occupancy(plan)
    # Ends are the next starts, rounded to nanoseconds: neighbours never overlap.
    starts = [round(start * 1e6, 3) for start in starts_s(plan)]
    begin = backward_run(plan)
    times = Counter(plan.schedule.runs)
    events = _names()
    for run, (op, before) in enumerate(zip(plan.schedule.runs, reruns(plan.schedule), strict=True)):
        operation = graph.operations[op]
        args: dict[str, str | int | float] = {
            "module": operation.module,
            "run": run,
            "time": f"{before + 1} of {times[op]}",
            "output_bytes": sum(graph.values[v].size_bytes for v in operation.outputs),
            "memory_bytes": held.timeline.during_bytes[run],
        }
        events.append(
            {
                "name": operation.name,
                "cat": "recompute" if before else "run",
                "ph": "X",
                "ts": starts[run],
                "dur": round(starts[run + 1] - starts[run], 3),
                "pid": _PID,
                "tid": _FORWARD if begin is None or run < begin else _BACKWARD,
                "args": args,
            }
        )
        now = {layer: held.layers[layer][run] for layer in held.used}
        events.append(_counter(starts[run], now))
    if plan.schedule.runs:
        results = [copy.value for copy in held.timeline.copies if copy.end >= len(plan.schedule)]
        last = dict.fromkeys(held.used, 0) | {
            "constant": graph.constant_bytes,
            "results": sum(graph.values[v].size_bytes for v in results),
        }
        events.append(_counter(starts[-1], {layer: last[layer] for layer in held.used}))
    facts = {
        "budget_bytes": plan.budget_bytes,
        "peak_bytes": plan.peak_bytes,
        "time_s": plan.time_s,
        "layers": LAYERS,
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts})


def _counter(start: float, held: dict[str, int]) -> Event:
    args: dict[str, str | int | float] = {**held}
    return {"name": "memory", "ph": "C", "ts": start, "pid": _PID, "tid": 0, "args": args}


def _names() -> list[Event]:
    """What the process and its tracks are called."""
    named = (
        ("process_name", 0, "remat plan"),
        ("thread_name", _FORWARD, "forward"),
        ("thread_name", _BACKWARD, "backward"),
    )
    return [
        {"name": what, "ph": "M", "ts": 0, "pid": _PID, "tid": track, "args": {"name": name}}
        for what, track, name in named
    ]
