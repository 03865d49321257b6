"""Lines of tables and pictures for operations, where the pieces of an operation share one; and the
table of a module's operations, or of an operation's pieces."""

from __future__ import annotations

from collections.abc import Sequence

from remat.graph import Graph
from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.report.plan_report import split_lines_of_operations
from remat.report.report import Table

_MAX_ROWS = 60


def lines_of_operations(graph: Graph, ops: Sequence[int] | None = None) -> dict[str, list[int]]:
    """Return the operations (of all, or of `ops`) on each line, by its name. A line is an
    operation, or all pieces of one; lines are in the order of their first operations."""
    lines: dict[str, list[int]] = {}
    for op in range(len(graph)) if ops is None else ops:
        operation = graph.operations[op]
        lines.setdefault(operation.piece_of or operation.name, []).append(op)
    return lines


def line_label(graph: Graph, name: str, ops: Sequence[int]) -> str:
    """Return the name of a line, with the number of pieces if it is split: "mm x 8"."""
    pieces = {graph.operations[op].piece for op in ops if graph.operations[op].piece_of}
    return f"{name} x {len(pieces)}" if pieces else name


def operation_labels(graph: Graph) -> list[str]:
    """Return the label of each operation's line."""
    labels = [""] * len(graph)
    for name, ops in lines_of_operations(graph).items():
        label = line_label(graph, name, ops)
        for op in ops:
            labels[op] = label
    return labels


def module_lines(plan: PlanData, path: str, ops: Sequence[int]) -> list[str]:
    """Return a table of a module's operations, in order. Of very many, only the recomputed and the
    largest are listed. The pieces of an operation share a line."""
    graph = plan.graph
    recomputed = plan.schedule.recomputed(graph)

    def output_bytes(ops: Sequence[int]) -> int:
        outputs = (v for op in ops for v in graph.operations[op].outputs)
        return sum(graph.values[v].size_bytes for v in outputs if not _is_part_of_sum(graph, v))

    def recomputations(ops: Sequence[int]) -> int:
        return sum(recomputed.get(op, 0) for op in ops)

    def totals(ops: Sequence[int]) -> tuple[str, str, str]:
        """Return the output bytes, time and recomputed time of some operations, as text."""
        time_s = sum(graph.operations[op].cost_s for op in ops)
        extra_s = sum(graph.operations[op].cost_s * recomputed.get(op, 0) for op in ops)
        return format_bytes(output_bytes(ops)), format_seconds(time_s), format_seconds(extra_s)

    rows = lines_of_operations(graph, ops)
    by_importance = sorted(
        rows, key=lambda name: (not recomputations(rows[name]), -output_bytes(rows[name]))
    )
    listed = set(by_importance[:_MAX_ROWS])
    table = [("operation", "pass", "", "output", "time", "extra time")]
    for name, members in rows.items():
        if name not in listed:
            continue
        times = recomputations(members)
        state = f"recomputed {times}x" if times else _retained_text(graph, members)
        label = line_label(graph, name, members)
        table.append((label, phase(graph, members[0]), state, *totals(members)))
    rest = [op for name, members in rows.items() if name not in listed for op in members]
    if rest:
        table.append((f"{len(rest)} more", "", "", *totals(rest)))
    table.append(("total", "", "", *totals(ops)))
    recomputed_count = sum(op in recomputed for op in ops)
    return [
        f"{path}: {len(ops)} {plural('operation', len(ops))}, {recomputed_count} recomputed",
        *split_lines_of_operations(plan, ops),
        *Table(table, "lllr").lines(),
    ]


def _is_part_of_sum(graph: Graph, value: int) -> bool:
    """True for an output of a piece that other pieces of the same operation add to: the operation
    has one output, which is their sum."""
    name = graph.operations[graph.producer[value]].piece_of
    return bool(name) and any(
        graph.operations[op].piece_of == name for op in graph.consumers[value]
    )


def phase(graph: Graph, op: int) -> str:
    """Return "forward" or "backward"."""
    return "backward" if graph.operations[op].backward else "forward"


def plural(word: str, count: int) -> str:
    """Return a regular noun in the number that `count` requires."""
    return word if count == 1 else f"{word}s"


def _retained_text(graph: Graph, ops: Sequence[int]) -> str:
    """Return the state of an operation that is not recomputed, or of its pieces, as text."""
    op = ops[0]
    operation = graph.operations[op]
    outputs = {v for op in ops for v in graph.operations[op].outputs}
    outputs = {v for v in outputs if not _is_part_of_sum(graph, v)}
    if op not in graph.renewal.values() and not graph.renewal.keys().isdisjoint(operation.outputs):
        return "offloaded"
    if outputs and outputs <= graph.results:
        return "retained (result)"
    if not operation.recomputable:
        return "retained (not recomputable)"
    return "retained"
