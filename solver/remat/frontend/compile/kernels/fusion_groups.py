"""Regions: operations that become one kernel. What the solver sees as one operation.

A compiler makes one kernel of an operation and those around it; what is made and read inside of it
takes no memory, and what two kernels need is made in both. Which kernels Inductor makes of a step
without recomputation is read off it (`observe.py`); a plan is for these, and Inductor is held to
them (`kernels.py`). Without a compiler every operation is a region of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from remat.errors import TraceError
from remat.frontend.compile.joint.fx_utils import (
    changes,
    has_effect,
    is_item,
    is_work,
    maker,
    may_run_again,
    node_bytes,
    read_by,
    source,
)
from remat.frontend.compile.joint.joint_graph import Joint

Group = tuple[list[fx.Node], list[fx.Node]]
"""Tensors that one kernel writes, and its operations that change what outlives the step."""


@dataclass
class Region:
    """Operations in their order, and those of their tensors that are written to memory. `effects`
    are operations that change what outlives the step, with what only these need: part of the first
    run alone. `is_kernel` where a compiler makes it, not a library. `needs` are the numbers of
    regions that must have run. `instead` has what is made again instead of being read
    (`inlined.py`), and what is read instead at the same places; sums of it make it `alone`, each
    for itself. `anew` has tensors of which it reads another that is the same (`beside.py`)."""

    nodes: list[fx.Node]
    written: list[fx.Node]
    effects: list[fx.Node]
    is_backward: bool
    is_kernel: bool = False
    needs: set[int] = field(default_factory=set[int])
    instead: dict[fx.Node, list[fx.Node]] = field(default_factory=dict[fx.Node, list[fx.Node]])
    alone: frozenset[fx.Node] = frozenset()
    anew: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])

    @property
    def all_nodes(self) -> list[fx.Node]:
        """Of the first run."""
        return [*self.nodes, *self.effects]


def find_regions(joint: Joint) -> list[Region]:
    """All regions, in an order in which they can run: that of the kernels, else of the graph."""
    groups = _groups(joint)
    while True:
        regions = _regions(joint, groups)
        order, stuck = _sorted(joint, regions)
        if not stuck:
            return order
        # What one kernel writes may need what another does and the other way round, where Inductor
        # did not tell all that they write.
        groups = [
            each
            for number, group in enumerate(groups)
            for each in (_apart(group) if number in stuck else [group])
        ]
        if len(groups) == len(regions):
            raise TraceError("the operations of this step need each other in a circle")


def in_order(joint: Joint, regions: Sequence[Region]) -> list[Region]:
    """The same, each after those that it needs now."""
    connect(joint, regions)
    order, stuck = _sorted(joint, regions)
    assert not stuck
    return order


def _sorted(joint: Joint, regions: Sequence[Region]) -> tuple[list[Region], set[int]]:
    kernel = _kernel_of(joint)
    ranks = [_rank(region, kernel) for region in regions]
    return _ordered(regions, ranks, [_last(joint, region) for region in regions])


def _apart(group: Group) -> list[Group]:
    """Each tensor by itself, what is changed with the last."""
    written, changing = group
    alone: list[Group] = [([node], []) for node in written[:-1]]
    return [*alone, (written[-1:], changing)]


def _kernel_of(joint: Joint) -> dict[fx.Node, int]:
    """The number of the kernel that writes a tensor, or calls a library."""
    found: dict[fx.Node, int] = {}
    for number, kernel in enumerate(joint.kernels or ()):
        for node in kernel.written:
            found.setdefault(source(node), number)
        for node in kernel.parts:
            if not joint.is_fused(node):
                found.setdefault(node, number)
    return found


def _rank(region: Region, kernel: Mapping[fx.Node, int]) -> int:
    """The last of its kernels; -1 where Inductor does not tell."""
    return max((kernel.get(n, -1) for n in (*region.written, *region.all_nodes)), default=-1)


def _last(joint: Joint, region: Region) -> int:
    return max(joint.place[node] for node in region.all_nodes)


def _regions(joint: Joint, groups: list[Group]) -> list[Region]:
    kept = {node for written, _ in groups for node in written}
    regions: list[Region] = []
    for written, changing in groups:
        nodes = made_of(map(maker, written), kept, joint)
        effects = [n for n in made_of(changing, kept, joint) if n not in set(nodes)]
        own = maker(written[0]) if written else changing[0]
        is_kernel = bool(written) and joint.is_fused(own)
        regions.append(Region(nodes, written, effects, joint.is_backward(own), is_kernel))
    _check_once(regions)
    connect(joint, regions)
    return regions


def _check_once(regions: Iterable[Region]) -> None:
    """Kernels make again what each of them needs, but not what gives another thing then."""
    seen: set[fx.Node] = set()
    for region in regions:
        once = {n for n in region.all_nodes if not may_run_again(n)}
        if twice := seen & once:
            names = ", ".join(sorted(str(n.target) for n in twice))
            raise TraceError(f"two kernels need what {names} makes, which must not run twice")
        seen |= once


def _groups(joint: Joint) -> list[Group]:
    """Tensors that are written, those of one kernel or call together, with the operations of that
    kernel that change something. Where no kernel names them, each by itself."""
    wanted = _written(joint)
    seen: set[fx.Node] = set()
    groups: list[Group] = []
    named = {source(n) for kernel in joint.kernels or () for n in kernel.written}
    for kernel in joint.kernels or ():
        # Of some that it writes Inductor does not tell: they belong where their operation is.
        parts = [*kernel.parts, *(u for p in kernel.parts for u in p.users if is_item(u))]
        own = [source(n) for n in kernel.written] + [n for n in parts if n not in named]
        new = [n for n in dict.fromkeys(own) if n not in seen and n in joint.place]
        fused = [n for n in new if n in wanted and joint.is_fused(maker(n))]
        changing = [n for n in new if has_effect(n)]
        seen.update(fused, changing)
        if fused or changing:
            groups.append((fused, changing))
    alone: dict[fx.Node, list[fx.Node]] = {}
    for node in sorted(wanted - seen, key=joint.place.__getitem__):
        alone.setdefault(maker(node), []).append(node)
    groups += [(written, []) for written in alone.values()]
    return groups + [([], [n]) for n in joint.calls if has_effect(n) and n not in seen]


def _written(joint: Joint) -> set[fx.Node]:
    """What is in memory at some time: what kernels write, what calls of libraries read and make,
    what the backward reads of the forward, what is returned. Without kernels, everything."""
    found = {source(n) for n in joint.returned} | {source(n) for n in joint.saved}
    found |= {source(n) for kernel in joint.kernels or () for n in kernel.written}
    for node in joint.calls:
        if is_work(node) and not joint.is_fused(node):
            found |= {n for n in node.users if is_item(n)} or {node}
            if not changes(node):
                found |= {source(n) for n in node.all_input_nodes}
    return {n for n in found if n in joint.place and is_work(maker(n)) and not changes(maker(n))}


def made_of(last: Iterable[fx.Node], kept: set[fx.Node], joint: Joint) -> list[fx.Node]:
    """These operations, and what they need that is not in memory."""
    found: set[fx.Node] = set()
    waiting = list(last)
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        for read in map(source, node.all_input_nodes):
            if read in joint.place and is_work(maker(read)) and read not in kept:
                waiting.append(maker(read))
    return sorted(found, key=joint.place.__getitem__)


def reads_of(region: Region) -> set[fx.Node]:
    """The tensors whose storage it reads, but for what it makes itself."""
    own = set(region.all_nodes)
    read = {region.anew.get(n, n) for n in read_by(own)}
    return {n for n in read if n.op == "placeholder" or maker(n) not in own}


def moved_bytes(region: Region) -> int:
    """What it reads from memory and writes there."""
    return sum(map(node_bytes, (*region.written, *reads_of(region))))


def connect(joint: Joint, regions: Sequence[Region]) -> None:
    """Set what must have run before each: who writes what it reads, and, where an operation writes
    into a tensor, those who read that before."""
    writer = {node: number for number, region in enumerate(regions) for node in region.written}
    for region in regions:
        region.needs = {writer[n] for n in reads_of(region) if n in writer}
    changed = {source(n) for call in joint.calls for n in changes(call)}
    readers: dict[fx.Node, set[int]] = {}
    last: dict[fx.Node, int] = {}
    of: dict[fx.Node, set[int]] = {}
    for number, region in enumerate(regions):
        for node in region.all_nodes:
            of.setdefault(node, set()).add(number)
    for node in joint.calls:
        written = {source(n) for n in changes(node)}
        for storage in changed.intersection(map(source, node.all_input_nodes)):
            here = of.get(node, set())
            for number in here:
                if storage in last:
                    regions[number].needs |= {last[storage]} - {number}
                if storage in written:
                    regions[number].needs |= readers.get(storage, set()) - {number}
                    last[storage] = number
            readers.setdefault(storage, set()).update(here)


def _ordered(
    regions: Sequence[Region], ranks: Sequence[int], last: Sequence[int]
) -> tuple[list[Region], set[int]]:
    """The forward first, then by rank and by `last`, but each after those that it needs; and the
    numbers of those that need each other. What has no rank follows what it needs."""
    readers: list[list[int]] = [[] for _ in regions]
    for number, region in enumerate(regions):
        for other in region.needs:
            readers[other].append(number)
    waits = [len(region.needs) for region in regions]
    rank = list(ranks)
    ready: list[tuple[bool, int, int, int]] = []

    def is_ready(number: int) -> None:
        region = regions[number]
        if rank[number] < 0:
            rank[number] = max((rank[need] for need in region.needs), default=-1)
        heapq.heappush(ready, (region.is_backward, rank[number], last[number], number))

    for number, wait in enumerate(waits):
        if not wait:
            is_ready(number)
    order: list[int] = []
    while ready:
        number = heapq.heappop(ready)[-1]
        order.append(number)
        for reader in readers[number]:
            waits[reader] -= 1
            if not waits[reader]:
                is_ready(reader)
    return [regions[number] for number in order], set(range(len(regions))).difference(order)
