"""A plan's text about the tensors that are offloaded to the host."""

from __future__ import annotations

from remat.limits.units import format_bytes, format_seconds
from remat.passes.offload.copies import offloaded_values
from remat.plan_data import PlanData


def offload_lines(plan: PlanData) -> list[str]:
    """Return the lines about all offloaded tensors, or why there are none; no line if they may not
    be offloaded."""
    graph = plan.graph
    if not graph.renewal:
        reason = plan.declined.not_offloaded
        return [] if reason is None else [f"nothing is offloaded: {reason}"]
    lines = [
        f"{len(graph.renewal)} tensors of "
        f"{format_bytes(sum(graph.values[v].size_bytes for v in graph.renewal))} are offloaded to "
        "the host"
    ]
    if plan.offload is not None:
        copies_s, waiting_s = plan.offload.copies_s, plan.offload.waiting_s
        lines.append(
            f"copies take {format_seconds(copies_s)}, for {format_seconds(waiting_s)} of which the "
            f"step waits ({waiting_s / (plan.time_s or 1.0):.2%} of its time)"
        )
    return lines


def host_lines(plan: PlanData, op: int) -> list[str]:
    """Return a line for each output of an operation that is offloaded, indented."""
    graph = plan.graph
    run_of = {o: run for run, o in reversed([*enumerate(plan.schedule.runs)])}  # first runs
    lines: list[str] = []
    for offloaded in offloaded_values(graph):
        if graph.producer[offloaded.value] != op:
            continue
        value = graph.values[offloaded.value]
        readers = (
            run
            for run in range(run_of[offloaded.arrive] + 1, len(plan.schedule))
            if offloaded.value in graph.operations[plan.schedule.runs[run]].inputs
        )
        if (reader := next(readers, None)) is None:
            purpose = "and nothing reads it then"
        else:
            purpose = f"for run {reader} ({graph.operations[plan.schedule.runs[reader]].name})"
        waits_s = sum(graph.operations[o].cost_s for o in (offloaded.release, offloaded.arrive))
        lines.append(
            f"  {value.name} ({format_bytes(value.size_bytes)}) is offloaded: it leaves the device "
            f"by run {run_of[offloaded.release]} and starts to come back in run "
            f"{run_of[offloaded.reload]}, {purpose}; the step waits "
            f"{format_seconds(waits_s)} for its copies"
        )
    return lines
