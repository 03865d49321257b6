"""Small values are always retained, out of reserved memory, so that no program decides on them.

Statistics of a normalization, counters and the like are a third of a network's values and a
thousandth of its bytes. Each costs a program as many variables and rows as a large one does, and
the cover cuts that HiGHS derives from memory rows are useless where one more statistic fits into
any gap.
"""

from __future__ import annotations

from dataclasses import replace

from remat.graph import Graph


def reserve_small_values(graph: Graph, max_bytes: int) -> tuple[Graph, int]:
    """Return the graph with its smallest values at no bytes, and the bytes of all these values.

    As many values as `max_bytes` hold together. A schedule that fits the returned graph in a budget
    reduced by these bytes fits the given graph in the full budget: there is never more than one
    live copy of a value that is no result.
    """
    reserved_bytes = 0
    small: set[int] = set()
    by_size = sorted((value.size_bytes, v) for v, value in enumerate(graph.values))
    for size_bytes, v in by_size:
        if v in graph.results:
            continue
        if reserved_bytes + size_bytes > max_bytes:
            break
        reserved_bytes += size_bytes
        small.add(v)
    values = tuple(
        replace(value, size_bytes=0) if v in small else value
        for v, value in enumerate(graph.values)
    )
    # Outputs without bytes have no memory to write into: not counting the overwrite is safe.
    operations = tuple(
        replace(o, overwrites=()) if small.intersection(o.outputs) else o for o in graph.operations
    )
    return replace(graph, values=values, operations=operations), reserved_bytes
