"""Plans and traces in figures: flat JSON with units in its keys, and lines of text."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from remat.costs.trace_costs import OperationCost, with_costs
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.frontend.compile.registry import CompiledPlan
from remat.limits.units import format_bytes, format_seconds
from remat.plan import Plan
from remat.plan_data import RESERVED_BYTES_STAT
from remat.report.tables import aligned, largest
from remat.schedule import Schedule
from remat.simulate import simulate

Figures = dict[str, object]

_TARGETS = 12


def plan_figures(plan: Plan) -> Figures:
    """A plan without its schedule. Overheads are shares of the time without recomputation."""
    again = plan.schedule.recomputed(plan.graph)
    return {
        "status": plan.status.name,
        "strategy": plan.stats.get("strategy"),
        "budget_bytes": plan.budget_bytes,
        "reserve_bytes": plan.stats.get(RESERVED_BYTES_STAT, 0),
        "peak_bytes": plan.peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "constant_bytes": plan.graph.constant_bytes,
        "library_bytes": plan.graph.library_bytes,
        **{key: size for key, size in plan.stats.items() if key.endswith("_peak_bytes")},
        "time_s": plan.time_s,
        "baseline_time_s": plan.baseline_time_s,
        "overhead": plan.overhead,
        "lower_bound": plan.lower_bound,
        "bound_scope": plan.bound_scope,
        "gap": plan.gap,
        "operations": len(plan.graph),
        "recomputed_operations": len(again),
        "recomputations": sum(again.values()),
        "solved_in_s": plan.stats.get("total_s"),
        "cost_source": plan.stats.get("cost_source"),
    }


def compiled_figures(compiled: CompiledPlan) -> Figures:
    """A plan of torch.compile's backend: that, and what became of it. `asked_bytes` is what the
    graph's part of the budget was, None for "min"; the plan's own may be less, after rounds."""
    return {
        "module": compiled.module,
        **plan_figures(compiled.plan),
        "asked_bytes": compiled.budget_bytes,
        "verified_bytes": compiled.verified_bytes,
        "torch_compile_bytes": compiled.baseline_bytes,
        "external_bytes": compiled.external_bytes,
        "rounds": compiled.rounds,
        "planned_in_s": compiled.planned_s,
    }


def json_of(figures: Mapping[str, object]) -> str:
    """JSON text, in the standard's own terms: no NaN, no infinity."""
    return json.dumps(figures, indent=2, allow_nan=False)


def csv_of(rows: Sequence[Mapping[str, object]]) -> str:
    """A line for each row, under the names of the first one's columns."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def frontier_table(plans: Iterable[Plan]) -> str:
    """A line for each plan."""
    table = [["budget", "peak", "of all", "extra time", "at least", "gap", "again", "solved in"]]
    for plan in plans:
        solved_s = plan.stats.get("total_s")
        table.append(
            [
                format_bytes(plan.budget_bytes),
                format_bytes(plan.peak_bytes),
                f"{plan.share:.1%}",
                f"{plan.overhead:+.2%}",
                "" if plan.lower_bound is None else f"{plan.lower_bound:+.2%}",
                "" if plan.gap is None else f"{plan.gap:.2%}",
                str(sum(plan.schedule.recomputed(plan.graph).values())),
                format_seconds(solved_s) if isinstance(solved_s, float) else "",
            ]
        )
    return "\n".join(aligned(table))


def describe_trace(trace: Trace) -> str:
    """What a trace holds, with where its costs come from."""
    nodes = [node for node in trace.nodes if not node.view]
    backward = sum(node.backward for node in nodes)
    sizes: Counter[str] = Counter()
    for kind, storage in dict.fromkeys((p.kind, p.storage) for p in trace.placeholders):
        sizes[kind] += trace.allocated_bytes(storage)
    resident = ", ".join(f"{format_bytes(size)} {kind}s" for kind, size in sizes.items())
    priced = trace if trace.measured else _free_of_charge(trace)
    graph = priced.graph()
    baseline = simulate(graph, Schedule.keep_all(graph))
    lines = [
        f"trace       {trace.model or 'a model'} on {trace.place}",
        f"operations  {len(nodes)}: {len(nodes) - backward} forward, {backward} backward",
        f"placed      {resident or 'nothing'}",
        f"peak        {format_bytes(baseline.peak_bytes)} without recomputation "
        f"({format_bytes(graph.constant_bytes)} constant)",
    ]
    if trace.measured:
        lines.append(f"time        {format_seconds(baseline.time_s)} (costs {trace.cost_source})")
    else:
        lines.append("time        not measured yet: `remat measure`")
    return "\n".join(lines)


def describe_costs(trace: Trace) -> str:
    """Where a step's time goes, by kind of operation; the dearest first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for node in trace.nodes:
        if not node.view:
            sums[node.target][0] += node.cost_s or 0.0
            sums[node.target][1] += 1
    total_s = sum(spent_s for spent_s, _ in sums.values()) or 1.0
    rows = [
        (name, str(runs), format_seconds(spent_s), f"{spent_s / total_s:.1%}")
        for name, (spent_s, runs) in largest(sums, _TARGETS, "more kinds")
    ]
    return "\n".join(aligned([("operation", "runs", "time", "share"), *rows]))


def check_any(plans: Sequence[Plan], budgets: Sequence[str] | None) -> None:
    """Raises `RematError` where no budget at all could be met."""
    if not plans:
        raise RematError(
            f"none of the budgets {', '.join(budgets or ())} can be met: `--budget min` tells the "
            "smallest that can"
        )


def _free_of_charge(trace: Trace) -> Trace:
    """With costs of zero: sizes need no clock."""
    free = OperationCost(0.0, 0, "none")
    return with_costs(trace, {node.name: free for node in trace.nodes if not node.view})
