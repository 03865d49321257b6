"""Small values set aside: kept throughout, out of a reserve, so that no program decides on them.

Statistics of a normalization, counters and the like are a third of a network's values and a
thousandth of its bytes. Each costs a program as many variables and rows as a large one does, and
covers of its memory rows (the cuts that HiGHS derives from them) come to nothing where one more
statistic fits into any gap.
"""

from __future__ import annotations

from dataclasses import replace

from remat.graph import Graph


def set_aside(graph: Graph, most_bytes: int) -> tuple[Graph, int]:
    """The graph with its smallest values at no bytes, and the bytes that all of them take.

    As many as `most_bytes` hold together. A schedule fits the graph's budget if it fits the
    answer's in a budget smaller by these bytes: there is never more than one live copy of a value
    that is no result.
    """
    reserve_bytes = 0
    small: set[int] = set()
    by_size = sorted((value.size_bytes, v) for v, value in enumerate(graph.values))
    for size_bytes, v in by_size:
        if v in graph.results:
            continue
        if reserve_bytes + size_bytes > most_bytes:
            break
        reserve_bytes += size_bytes
        small.add(v)
    values = tuple(
        replace(value, size_bytes=0) if v in small else value
        for v, value in enumerate(graph.values)
    )
    # Outputs of no bytes have no room for an input: what is not counted as overwritten is safe.
    operations = tuple(
        replace(o, overwrites=()) if small.intersection(o.outputs) else o for o in graph.operations
    )
    return replace(graph, values=values, operations=operations), reserve_bytes
