"""Plans and traces as flat JSON with units in its keys, as CSV, and as tables of text."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from remat.costs.trace_costs import OperationCost, with_costs
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.frontend.compile.registry import CompiledPlan
from remat.limits.budget import Budget
from remat.limits.units import format_bytes, format_seconds
from remat.plan import Plan
from remat.report.report import Fact, Report, Table, largest_rows
from remat.simulate import baseline_of
from remat.solve import SWEEP_BUDGETS

JsonObject = dict[str, object]
"""A flat JSON object: a name with its unit, and the value."""

_MAX_TARGETS = 12
"""Kinds of operation in the table of costs."""


def plan_summary(plan: Plan) -> JsonObject:
    """Return the numbers of a plan, without its schedule. Overheads are fractions of the baseline's
    time."""
    recomputed = plan.schedule.recomputed(plan.graph)
    return {
        "status": plan.status.name,
        "strategy": plan.solve.get("strategy"),
        "budget_bytes": plan.budget_bytes,
        "requested_budget_bytes": plan.requested_budget_bytes,
        "reserve_bytes": plan.terms.reserved_for_others_bytes or 0,
        "peak_bytes": plan.peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "constant_bytes": plan.graph.constant_bytes,
        "library_bytes": plan.graph.library_bytes,
        **({} if plan.allocator is None else asdict(plan.allocator)),
        "time_s": plan.time_s,
        "baseline_time_s": plan.baseline_time_s,
        "overhead": plan.overhead,
        "lower_bound": plan.lower_bound,
        "bound_scope": plan.bound_scope,
        "gap": plan.gap,
        "operations": len(plan.graph),
        "recomputed_operations": len(recomputed),
        "recomputations": sum(recomputed.values()),
        "host_bytes": plan.host_bytes,
        "solved_in_s": plan.solve.get("total_s"),
        "cost_source": plan.terms.cost_source,
    }


def compiled_plan_summary(compiled: CompiledPlan) -> JsonObject:
    """Return the numbers of a plan of torch.compile's backend, with the verified peak.

    `graph_budget_bytes` is the graph's part of the budget, None for "min". After replanning, the
    plan's `budget_bytes` may be smaller.
    """
    return {
        "module": compiled.module,
        **plan_summary(compiled.plan),
        "graph_budget_bytes": compiled.budget_bytes,
        "verified_bytes": compiled.verified_bytes,
        "torch_compile_bytes": compiled.baseline_bytes,
        "external_bytes": compiled.external_bytes,
        "rounds": compiled.rounds,
        "planned_in_s": compiled.planned_s,
    }


def to_json_text(summary: Mapping[str, object]) -> str:
    """Return strict JSON text, without NaN and infinity."""
    return json.dumps(summary, indent=2, allow_nan=False)


def to_csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Return CSV text with a header line; the columns are the keys of the first row."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def frontier_table(plans: Sequence[Plan]) -> Table:
    """Return a table of plans, one line each. It has the bytes on the host if any plan offloads."""
    has_offload = any(plan.host_bytes for plan in plans)
    table = [
        [
            "budget",
            "peak",
            "of baseline",
            "extra time",
            "lower bound",
            "gap",
            "recomputed",
            *["on the host"] * has_offload,
            "solved in",
        ]
    ]
    for plan in plans:
        solved_s = plan.solve.get("total_s")
        table.append(
            [
                format_bytes(plan.requested_budget_bytes),
                format_bytes(plan.peak_bytes),
                f"{plan.share:.1%}",
                f"{plan.overhead:+.2%}",
                "" if plan.lower_bound is None else f"{plan.lower_bound:+.2%}",
                "" if plan.gap is None else f"{plan.gap:.2%}",
                str(sum(plan.schedule.recomputed(plan.graph).values())),
                *[format_bytes(plan.host_bytes)] * has_offload,
                format_seconds(solved_s) if isinstance(solved_s, float) else "",
            ]
        )
    return Table(table)


def trace_report(trace: Trace) -> Report:
    """Return the report of a trace: model, device, operations, graph inputs, peak, and the source
    of the costs."""
    nodes = [node for node in trace.nodes if not node.view]
    backward = sum(node.backward for node in nodes)
    sizes: Counter[str] = Counter()
    for kind, storage in dict.fromkeys((p.kind, p.storage) for p in trace.placeholders):
        sizes[kind] += trace.allocated_bytes(storage)
    resident = ", ".join(f"{format_bytes(size)} {kind}s" for kind, size in sizes.items())
    graph = (trace if trace.measured else _with_zero_costs(trace)).graph()
    baseline = baseline_of(graph)
    time = "not measured yet: `remat measure`"
    if trace.measured:
        time = f"{format_seconds(baseline.time_s)} (costs {trace.cost_source})"
    facts = [
        Fact("trace", f"{trace.model or 'a model'} on {trace.device_label}"),
        Fact(
            "operations",
            f"{len(nodes)}: {len(nodes) - backward} forward, {backward} backward",
        ),
        Fact("resident", resident or "nothing"),
        Fact(
            "peak",
            f"{format_bytes(baseline.peak_bytes)} without recomputation "
            f"({format_bytes(graph.constant_bytes)} constant)",
        ),
        Fact("time", time),
    ]
    return Report(facts)


def measured_report(trace: Trace) -> Report:
    """Return the report of a trace with costs, and a table of the step's time by kind of operation,
    the most expensive first."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for node in trace.nodes:
        if not node.view:
            sums[node.target][0] += node.cost_s or 0.0
            sums[node.target][1] += 1
    total_s = sum(spent_s for spent_s, _ in sums.values()) or 1.0
    rows = [
        (name, str(runs), format_seconds(spent_s), f"{spent_s / total_s:.1%}")
        for name, (spent_s, runs) in largest_rows(sums, _MAX_TARGETS, "more kinds")
    ]
    costs = Table([("operation", "runs", "time", "share"), *rows])
    return Report(*trace_report(trace).parts, costs)


def require_feasible_plan(plans: Sequence[Plan], budgets: Sequence[str] | None) -> None:
    """Raise `RematError` if no budget is feasible. `budgets` is None or empty for the default
    ones, which include "min"."""
    if not plans:
        names = ", ".join(budgets) if budgets else f"{SWEEP_BUDGETS[0]} to {SWEEP_BUDGETS[-1]}"
        remedy = "`--budget min` finds the smallest feasible one"
        if any(Budget.parse(budget).is_min for budget in budgets or SWEEP_BUDGETS):
            remedy = "another `--strategy` may find a schedule"
        raise RematError(f"none of the budgets {names} is feasible; {remedy}")


def _with_zero_costs(trace: Trace) -> Trace:
    """Return the trace with costs of zero, which is enough to simulate the memory."""
    zero_cost = OperationCost(0.0, 0, "none")
    return with_costs(trace, {node.name: zero_cost for node in trace.nodes if not node.view})
