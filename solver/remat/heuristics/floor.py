"""Lower bounds on the peak that need no solver: of schedules of the order, and of any order."""

from __future__ import annotations

from remat.graph import Graph


def least_peak_bytes(graph: Graph) -> int:
    """Bytes that some operation needs whatever is recomputed, constant memory included, in this
    order: in another one, fewer results may be there when it first runs.

    When an operation first runs, its inputs and outputs are there, every result made before (those
    are never dropped), and every earlier output of an operation that runs only once and that is
    still to be read.
    """
    size = [value.size_bytes for value in graph.values]
    last_read = [max(users, default=-1) for users in graph.consumers]
    stays = [
        v in graph.results or not graph.operations[graph.producer[v]].recomputable
        for v in range(len(size))
    ]
    leave: list[list[int]] = [[] for _ in graph.operations]
    kept: set[int] = set()
    kept_bytes = 0
    most = 0
    for op, operation in enumerate(graph.operations):
        read_bytes = sum(size[v] for v in set(operation.inputs) - kept)
        most = max(most, kept_bytes + read_bytes + graph.least_made_bytes[op])
        for v in operation.outputs:
            if stays[v] and (v in graph.results or last_read[v] > op):
                kept.add(v)
                kept_bytes += size[v]
                if v not in graph.results:
                    leave[last_read[v]].append(v)
        for v in leave[op]:
            kept.discard(v)
            kept_bytes -= size[v]
    return graph.constant_bytes + most


def least_peak_of_any_order_bytes(graph: Graph) -> int:
    """Bytes that every schedule needs, in whatever order, constant memory included: for some
    operation alone, or for all results at the end."""
    size = [value.size_bytes for value in graph.values]
    alone = (
        sum(size[v] for v in o.inputs) + made
        for o, made in zip(graph.operations, graph.least_made_bytes, strict=True)
    )
    at_end = sum(size[v] for v in graph.results)
    return graph.constant_bytes + max(at_end, max(alone, default=0))
