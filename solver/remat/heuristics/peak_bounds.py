"""Lower bounds on the peak that need no solver: for schedules of the order, and for any order."""

from __future__ import annotations

from remat.graph import Graph


def peak_lower_bound_bytes(graph: Graph) -> int:
    """Return a lower bound on the peak of every schedule of the order, constant memory included.
    See `largest_operation`."""
    return largest_operation(graph)[0]


def largest_operation(graph: Graph) -> tuple[int, int | None]:
    """Return the largest number of bytes that an operation needs in every schedule of the order,
    constant memory included, and the index of that operation; None for a graph without operations.

    When an operation first runs, its inputs and outputs are live, and so are every result produced
    before (results are never freed) and every earlier output of an operation that runs only once
    and that is still to be read. In another order, fewer results may exist when it first runs.
    """
    size = [value.size_bytes for value in graph.values]
    last_read = [max(users, default=-1) for users in graph.consumers]
    for v, op in graph.renewal.items():  # its first copy is read until then
        last_read[v] = max((user for user in graph.consumers[v] if user < op), default=-1)
    is_permanent = [
        v in graph.results or not graph.operations[graph.producer[v]].recomputable
        for v in range(len(size))
    ]
    freed_after: list[list[int]] = [[] for _ in graph.operations]
    retained: set[int] = set()
    retained_bytes = 0
    peak_bytes, largest = 0, None
    for op, operation in enumerate(graph.operations):
        read_bytes = sum(size[v] for v in set(operation.inputs) - retained)
        needed_bytes = retained_bytes + read_bytes + graph.min_produced_bytes[op]
        if largest is None or needed_bytes > peak_bytes:
            peak_bytes, largest = needed_bytes, op
        for v in operation.outputs:
            if (
                v not in operation.renews
                and is_permanent[v]
                and (v in graph.results or last_read[v] > op)
            ):
                retained.add(v)
                retained_bytes += size[v]
                if v not in graph.results:
                    freed_after[last_read[v]].append(v)
        for v in freed_after[op]:
            retained.discard(v)
            retained_bytes -= size[v]
    return graph.constant_bytes + peak_bytes, largest


def peak_lower_bound_any_order_bytes(graph: Graph) -> int:
    """Return a lower bound on the peak of every schedule in any order, constant memory included:
    the need of some single operation, or all results at the end."""
    size = [value.size_bytes for value in graph.values]
    single_operations = (
        sum(size[v] for v in o.inputs) + produced
        for o, produced in zip(graph.operations, graph.min_produced_bytes, strict=True)
    )
    largest_bytes = graph.constant_bytes + max(single_operations, default=0)
    return max(end_bytes(graph), largest_bytes)


def end_bytes(graph: Graph) -> int:
    """Return the bytes that are allocated at the end of every schedule, whatever it splits or
    offloads: the results, and constant memory."""
    return graph.constant_bytes + sum(graph.values[v].size_bytes for v in graph.results)
