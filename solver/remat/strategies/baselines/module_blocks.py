"""Where the forward pass of a network may be cut: between the repeated blocks of its modules, or
where a single value crosses.

A *container* is a path whose children are numbered: `transformer.h` with `transformer.h.0`,
`transformer.h.1`. Containers count if they are outermost and take a relevant share of the forward
time; each numbered child is a block. A child that is itself only a list of similar blocks (a ResNet
stage, `encoder.stages.2` with `encoder.stages.2.layers.5`) is replaced by them. A Transformer block
is no such list, although T5 numbers its parts: they are not similar. Nor is an `nn.Sequential` of
layers, which have no parts.

A *cut point* is a place of the forward order that one value crosses, the *state*, not counting
values that are retained anyway: values that are negligible next to the state (masks, statistics),
and values that operations far apart read repeatedly (position biases, an encoder's output).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from remat.graph import Graph
from remat.strategies.baselines.schedule_builder import segmented_count

_MIN_CONTAINER_SHARE = 0.05
"""Containers with a smaller share of the forward time are no part of the backbone."""

_MIN_LIST_SHARE = 0.9
"""A child is only a list if inner containers take this share of its time."""

_MIN_COMMON_SHARE = 0.5
"""Share of the paths of two blocks that similar blocks have in common."""


def find_blocks(graph: Graph) -> list[tuple[int, ...]]:
    """Return the operations of each block of the forward pass, in order of execution.

    A block is a run of consecutive operations, from the first to the last with its path, whatever
    paths those between have, without the operations of another block. Empty without numbered
    modules.
    """
    count = segmented_count(graph)
    paths = [tuple(filter(None, o.module.split("."))) for o in graph.operations[:count]]
    costs_s = [operation.cost_s for operation in graph.operations[:count]]
    spans: list[tuple[int, int]] = []
    for ops in _outermost_blocks(
        paths, costs_s, list(range(count)), depth=0, min_share=_MIN_CONTAINER_SHARE
    ):
        spans.append((ops[0], ops[-1]))
    spans.sort()
    blocks: list[tuple[int, ...]] = []
    for number, (first, last) in enumerate(spans):
        after = spans[number + 1][0] if number + 1 < len(spans) else count
        blocks.append(tuple(range(first, min(last + 1, after))))
    return [ops for ops in blocks if ops]


def merge_segments(segments: Sequence[Sequence[int]], k: int) -> list[tuple[int, ...]]:
    """Return segments of `k` consecutive segments each, with what lies between these."""
    groups = [segments[i : i + k] for i in range(0, len(segments), k)]
    return [tuple(range(group[0][0], group[-1][-1] + 1)) for group in groups]


def _outermost_blocks(
    paths: list[tuple[str, ...]],
    costs_s: list[float],
    ops: list[int],
    depth: int,
    min_share: float,
) -> list[list[int]]:
    """Return the blocks among `ops`, whose paths agree in the first `depth` parts. Containers with
    less than `min_share` of the time of `ops` are left out."""
    children: dict[tuple[str, ...], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for op in ops:
        numbers = (i for i in range(depth, len(paths[op])) if paths[op][i].isdecimal())
        number_index = next(numbers, None)
        if number_index is not None:
            children[paths[op][:number_index]][paths[op][number_index]].append(op)
    total_s = sum(costs_s[op] for op in ops)
    blocks: list[list[int]] = []
    for container, numbered in children.items():
        container_s = sum(costs_s[op] for members in numbered.values() for op in members)
        if container_s < min_share * total_s:
            continue
        for members in numbered.values():
            inner = _outermost_blocks(paths, costs_s, members, len(container) + 1, 0.0)
            inner_s = sum(costs_s[op] for block in inner for op in block)
            is_list = inner_s >= _MIN_LIST_SHARE * sum(costs_s[op] for op in members)
            if inner and is_list and _are_blocks_similar(paths, inner):
                blocks += inner
            else:
                blocks.append(members)
    return blocks


def _are_blocks_similar(paths: list[tuple[str, ...]], blocks: list[list[int]]) -> bool:
    """True if blocks have parts, and the blocks of one container have mostly the same parts.
    Containers of single layers do not count, unless there are no others."""
    parts: dict[tuple[str, ...], list[set[tuple[str, ...]]]] = defaultdict(list)
    for ops in blocks:
        depth = _block_path_length(paths, ops)
        parts[paths[ops[0]][: depth - 1]].append({paths[op][depth:] for op in ops})
    judged = [names for names in parts.values() if any(block != {()} for block in names)]
    return bool(judged) and all(
        len(first & other) >= _MIN_COMMON_SHARE * len(first | other)
        for first, *others in judged
        for other in others
    )


def _block_path_length(paths: list[tuple[str, ...]], ops: list[int]) -> int:
    """Return how many leading parts of a module path name the block: up to the last number in the
    part that all `ops` share."""
    shortest = min(len(paths[op]) for op in ops)
    common = next(
        (i for i in range(shortest) if len({paths[op][i] for op in ops}) > 1),
        shortest,
    )
    return next(i + 1 for i in reversed(range(common)) if paths[ops[0]][i].isdecimal())


_NEGLIGIBLE_SHARE = 1 / 16
"""Share of the state's size up to which another value that crosses the cut is always retained."""

_SHARED_SPAN = 0.25
"""Share of the forward pass that lies between the readers of a shared value."""


def cut_points(graph: Graph) -> dict[int, int]:
    """Return the operations of the forward pass after which the order may be cut, each with its
    state, the value that crosses there."""
    count = segmented_count(graph)
    last_read = [max((u for u in users if u < count), default=-1) for users in graph.consumers]
    shared = {
        v
        for v, users in enumerate(graph.consumers)
        if sum(u < count for u in users) >= 3
        and last_read[v] - graph.producer[v] > _SHARED_SPAN * count
    }
    cuts: dict[int, int] = {}
    crossing: set[int] = set()
    for op in range(count - 1):
        crossing.update(v for v in graph.operations[op].outputs if last_read[v] > op)
        crossing -= {v for v in graph.operations[op].inputs if last_read[v] <= op}
        crossing_sizes = sorted((graph.values[v].size_bytes, v) for v in crossing - shared)
        if not crossing_sizes:
            continue
        size, state = crossing_sizes.pop()
        if not crossing_sizes or crossing_sizes[-1][0] <= _NEGLIGIBLE_SHARE * size:
            cuts[op] = state
    return cuts
