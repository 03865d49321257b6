"""Lines of tables and pictures for operations: the pieces of an operation share one."""

from __future__ import annotations

from collections.abc import Sequence

from remat.graph import Graph


def lines_of_operations(graph: Graph, ops: Sequence[int] | None = None) -> dict[str, list[int]]:
    """Return the operations (of all, or of `ops`) on each line, by its name. A line is an
    operation, or all pieces of one; lines are in the order of their first operations."""
    lines: dict[str, list[int]] = {}
    for op in range(len(graph)) if ops is None else ops:
        operation = graph.operations[op]
        lines.setdefault(operation.piece_of or operation.name, []).append(op)
    return lines


def line_label(graph: Graph, name: str, ops: Sequence[int]) -> str:
    """Return the name of a line, with the number of pieces: "mm x 8"."""
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
