"""The repeated blocks of a network, from the module paths of its operations.

A *container* is a path whose children are numbered: `transformer.h` with `transformer.h.0`,
`transformer.h.1`. The outermost containers count, each of whose children hold a share of the
forward time worth speaking of; each numbered child is a block. A child that is itself a mere list
of alike blocks (a ResNet stage, `encoder.stages.2` with `encoder.stages.2.layers.5`) stands for
them. A Transformer block is no such list, although T5 numbers its parts: they are not alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from remat.graph import Graph
from remat.strategies.baselines.schedule_builder import segmented_count

_SHARE = 0.05
"""Of the forward time: containers with less are no part of the backbone."""

_LIST = 0.9
"""Of a child's time: where inner containers hold that much, the child is a mere list."""

_ALIKE = 0.5
"""Paths that two blocks share, of those that either has."""


def find_blocks(graph: Graph) -> list[tuple[int, ...]]:
    """The operations of each block of the forward pass, in order of execution.

    A block is a run of consecutive operations, from the first to the last with its path, whatever
    paths those between have; less what lies within another block. Empty without numbered modules.
    """
    count = segmented_count(graph)
    paths = [tuple(filter(None, o.module.split("."))) for o in graph.operations[:count]]
    costs_s = [operation.cost_s for operation in graph.operations[:count]]
    spans: list[tuple[int, int]] = []
    for ops in _outermost(paths, costs_s, list(range(count)), depth=0, least_s=_SHARE):
        spans.append((ops[0], ops[-1]))
    spans.sort()
    found: list[tuple[int, ...]] = []
    for number, (first, last) in enumerate(spans):
        after = spans[number + 1][0] if number + 1 < len(spans) else count
        found.append(tuple(range(first, min(last + 1, after))))
    return [ops for ops in found if ops]


def merge_consecutive(pieces: Sequence[Sequence[int]], k: int) -> list[tuple[int, ...]]:
    """Segments of `k` consecutive pieces each, with what lies between these."""
    groups = [pieces[i : i + k] for i in range(0, len(pieces), k)]
    return [tuple(range(group[0][0], group[-1][-1] + 1)) for group in groups]


def _outermost(
    paths: list[tuple[str, ...]],
    costs_s: list[float],
    ops: list[int],
    depth: int,
    least_s: float,
) -> list[list[int]]:
    """The blocks among `ops`, whose paths agree in the first `depth` parts."""
    children: dict[tuple[str, ...], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for op in ops:
        numbers = (i for i in range(depth, len(paths[op])) if paths[op][i].isdecimal())
        at = next(numbers, None)
        if at is not None:
            children[paths[op][:at]][paths[op][at]].append(op)
    total_s = sum(costs_s[op] for op in ops)
    found: list[list[int]] = []
    for container, numbered in children.items():
        held_s = sum(costs_s[op] for members in numbered.values() for op in members)
        if held_s < least_s * total_s:
            continue
        for members in numbered.values():
            inner = _outermost(paths, costs_s, members, len(container) + 1, 0.0)
            inner_s = sum(costs_s[op] for block in inner for op in block)
            is_list = inner_s >= _LIST * sum(costs_s[op] for op in members)
            if inner and is_list and _are_alike(paths, inner):
                found += inner
            else:
                found.append(members)
    return found


def _are_alike(paths: list[tuple[str, ...]], found: list[list[int]]) -> bool:
    """Whether blocks of one container have the same parts, mostly."""
    parts: dict[tuple[str, ...], list[set[tuple[str, ...]]]] = defaultdict(list)
    for ops in found:
        depth = _common(paths, ops)
        parts[paths[ops[0]][: depth - 1]].append({paths[op][depth:] for op in ops})
    return all(
        len(first & other) >= _ALIKE * len(first | other)
        for first, *others in parts.values()
        for other in others
    )


def _common(paths: list[tuple[str, ...]], ops: list[int]) -> int:
    """The length of the path of the block that `ops` are."""
    shortest = min(len(paths[op]) for op in ops)
    same = next(
        (i for i in range(shortest) if len({paths[op][i] for op in ops}) > 1),
        shortest,
    )
    return next(i + 1 for i in reversed(range(same)) if paths[ops[0]][i].isdecimal())
