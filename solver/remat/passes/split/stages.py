"""Stages of a region: which of its operations run together for each piece, and their order among
all others."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from remat.documents.trace import Trace
from remat.errors import RematError
from remat.passes.split.regions import Region, mutated_storages
from remat.passes.split.states import PartialSum, Rows


class OperationGroup(NamedTuple):
    """Operations that are written together: all of a stage of a region, or one alone ("node",
    "view"). `number` is the number of the stage, or the index of the operation."""

    kind: str
    number: int
    region: int = -1


def operation_stages(region: Region) -> dict[int, int]:
    """Return the stage of each operation of the region, by its index in `trace.nodes`.

    An operation that reads a tensor which an earlier stage completes is in a later stage.
    Operations of the backward are in later stages than the forward.
    """
    trace, produced = region.trace, region.produced
    level_of: dict[str, int] = {}
    stage_of: dict[int, int] = {}
    backward_level = 0
    for backward in (False, True):
        for index, node in enumerate(trace.nodes):
            if node.backward != backward:
                continue
            level = backward_level if backward else 0
            for name in node.operand_names:
                is_by_piece = index in region.split_calls and isinstance(produced.get(name), Rows)
                is_completed = name in produced and not is_by_piece
                level = max(level, level_of.get(name, 0) + is_completed)
            if index in region.split_calls:
                stage_of[index] = level
            level_of.update((result.name, level) for result in node.results)
        backward_level = 1 + max((level_of[name] for name in level_of), default=0)
    return stage_of


def completed_tensors(region: Region) -> tuple[set[str], set[int]]:
    """Return the region's tensors that are needed as a whole: sums, and what operations outside of
    it or the caller read. And return the indices of its views of them, which are also written as a
    whole."""
    names_read = {
        name
        for index, operands in enumerate(region.trace.operands)
        if index not in region.split_calls
        for name in operands
    }
    names_read.update(o.name for o in region.trace.outputs)
    names_read.update(g.name for g in region.trace.gradients)
    needed = {name for name, state in region.produced.items() if isinstance(state, PartialSum)}
    views: set[int] = set()
    for index in sorted(region.split_calls, reverse=True):
        node = region.trace.nodes[index]
        names = {r.name for r in node.results}
        if not node.view:
            needed |= names & names_read
        elif not names.isdisjoint(names_read):
            views.add(index)
            names_read.update(region.trace.operands[index])
    return needed, views


def split_bytes(region: Region) -> int:
    """Return the bytes of the tensors that a step split in this region never has as a whole."""
    completed, _ = completed_tensors(region)
    trace = region.trace
    storages = {
        result.storage
        for index in region.split_calls
        for result in trace.nodes[index].results
        if not trace.nodes[index].view and isinstance(region.produced[result.name], Rows)
    }
    storages -= {trace.storage_of[name] for name in completed}
    return sum(trace.storage_bytes[storage] for storage in storages)


def ordered_stage_groups(
    regions: Sequence[Region], kept_views: Iterable[int]
) -> list[tuple[OperationGroup, list[int]]]:
    """Return the operations of a trace in a valid order: the operations of a stage of a region in
    one group, each other operation in its own. A view of a region that is also needed as a whole is
    written once more, in a group of its own. Raises `RematError` if there is no such order."""
    trace = regions[0].trace
    nodes = trace.nodes
    group_of = {
        index: OperationGroup("stage", stage, number)
        for number, region in enumerate(regions)
        for index, stage in operation_stages(region).items()
    }
    members: dict[OperationGroup, list[int]] = {}
    for index in range(len(nodes)):
        members.setdefault(group_of.get(index, OperationGroup("node", index)), []).append(index)
    members.update({OperationGroup("view", index): [index] for index in kept_views})
    by_piece: dict[str, OperationGroup] = {}
    whole: dict[str, OperationGroup] = {}
    for group, indices in members.items():
        names = [r.name for index in indices for r in nodes[index].results]
        whole.update((n, group) for n in names if group.kind == "view" or n not in whole)
        by_piece.update((n, group) for n in names if group.kind != "view")
    waits_for: dict[OperationGroup, set[OperationGroup]] = {}
    for group, indices in members.items():
        in_pieces = regions[group.region].produced if group.kind == "stage" else {}
        read = {name for index in indices for name in trace.operands[index]}
        waits_for[group] = {
            by_piece[name] if name in in_pieces else whole[name] for name in read if name in whole
        } - {group}
    _keep_mutation_order(trace, members, waits_for)
    priority = {g: (nodes[i[0]].backward, i[0]) for g, i in members.items()}
    return _topological_groups(members, waits_for, priority)


def _keep_mutation_order(
    trace: Trace,
    members: Mapping[OperationGroup, Sequence[int]],
    waits_for: Mapping[OperationGroup, set[OperationGroup]],
) -> None:
    """Add to `waits_for` that an operation which writes into a tensor keeps its order with all
    others that read or write that tensor."""
    group_of = {i: g for g, indices in members.items() if g.kind != "view" for i in indices}
    touching: dict[int, list[int]] = {}
    for index, node in enumerate(trace.nodes):
        storages = {trace.storage_of[name] for name in trace.operands[index]}
        for storage in storages | {result.storage for result in node.results}:
            touching.setdefault(storage, []).append(index)
    for index, node in enumerate(trace.nodes):
        for storage in mutated_storages(trace, node):
            for other in touching[storage]:
                one, two = (group_of[i] for i in sorted((index, other)))
                if one != two:
                    waits_for[two].add(one)


def _topological_groups(
    members: Mapping[OperationGroup, list[int]],
    waits_for: Mapping[OperationGroup, set[OperationGroup]],
    priority: Mapping[OperationGroup, tuple[bool, int]],
) -> list[tuple[OperationGroup, list[int]]]:
    """Return the groups in topological order; among groups that are ready, `priority` decides.
    Raises `RematError` if there is no such order."""
    followers: dict[OperationGroup, list[OperationGroup]] = {}
    for group, others in waits_for.items():
        for other in others:
            followers.setdefault(other, []).append(group)
    missing = {group: len(others) for group, others in waits_for.items()}
    ready = [(priority[group], group) for group in members if not missing[group]]
    heapq.heapify(ready)
    ordered: list[tuple[OperationGroup, list[int]]] = []
    while ready:
        _, group = heapq.heappop(ready)
        ordered.append((group, members[group]))
        for follower in followers.get(group, ()):
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (priority[follower], follower))
    if len(ordered) < len(members):
        raise RematError("the stages of regions depend on one another")
    return ordered
