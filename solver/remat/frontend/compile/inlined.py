"""What a kernel makes again where it reads it, instead of reading it from memory.

torch's partitioner decides what the backward reads of the forward, and with it what the kernels of
both halves write. Some of that costs no more inside of its readers: rows gathered from a parameter
(the experts of each token), or a normalization of what the reader reads anyway. A plan that wrote
these could only choose between holding them and writing them once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace

import torch
from torch import fx

from remat.frontend.compile.joint import Joint
from remat.frontend.compile.nodes import (
    FUNCTIONS,
    elements,
    is_elementwise,
    is_gather,
    is_number,
    is_product,
    is_sum,
    maker,
    may_run_again,
    node_bytes,
    source,
    tensors,
)
from remat.frontend.compile.regions import Region, made_of, moved_bytes, reads_of

_SHARE = 8
"""For what another still reads, a reader may need an eighth more: indices, means."""

_MOST_READS, _MOST_STEPS = 8, 24
"""What a sum is made of, if it reads or does more, Inductor writes to memory (its options
`realize_acc_reads_threshold` and `realize_opcount_threshold`, which count loads, too). What is
elementwise it makes in one loop with its reader."""


def inlined(joint: Joint, regions: list[Region]) -> list[Region]:
    """The same regions, but that kernels make again what moves no more bytes than to read it; what
    nobody reads then is no longer written."""
    return _Inlining(joint, regions).done()


class _Inlining:
    def __init__(self, joint: Joint, regions: list[Region]) -> None:
        self.joint = joint
        self.regions = list(regions)
        self.given = set(joint.given)
        self.returned = {source(n) for n in joint.returned}
        self.writer = {n: i for i, region in enumerate(regions) for n in region.written}
        self.readers: dict[fx.Node, set[int]] = {}
        for number, region in enumerate(regions):
            for node in reads_of(region):
                self.readers.setdefault(node, set()).add(number)
        self.without: list[set[fx.Node]] = [set() for _ in regions]
        """What each makes again."""

    def done(self) -> list[Region]:
        candidates = [n for n, i in self.writer.items() if self.regions[i].is_kernel]
        for node in sorted(candidates, key=node_bytes, reverse=True):  # equal ones in their order
            if not self._everywhere(node):
                self._where_it_is_small(node)
        return [region for region in self.regions if region.all_nodes]

    def _everywhere(self, node: fx.Node) -> bool:
        """Whether all readers make it, so that it is never written: where they then need no more
        than it takes."""
        readers = sorted(self.readers.get(node, ()))
        if not readers or node in self.returned:
            return False
        more: set[fx.Node] = set()
        trials: dict[int, Region] = {}
        for number in readers:
            if (chain := self._chain(node, number)) is None:
                return False
            more |= self._more(chain, number)
            trials[number] = self._with(node, chain, number)
        if sum(map(node_bytes, more)) > node_bytes(node):
            return False
        own = self.writer[node]
        trials[own] = self._not_writing(node, trials.get(own, self.regions[own]))
        before_bytes = sum(moved_bytes(self.regions[number]) for number in trials)
        if sum(map(moved_bytes, trials.values())) > before_bytes:
            return False
        for number, region in trials.items():
            self._put(number, region)
            if number != own:
                self.without[number].add(node)
        del self.writer[node]
        return True

    def _where_it_is_small(self, node: fx.Node) -> None:
        for number in sorted(self.readers.get(node, ())):
            if (chain := self._chain(node, number)) is None:
                continue
            trial = self._with(node, chain, number)
            is_small = _SHARE * sum(map(node_bytes, self._more(chain, number))) <= node_bytes(node)
            if is_small and moved_bytes(trial) <= moved_bytes(self.regions[number]):
                self._put(number, trial)
                self.without[number].add(node)

    def _chain(self, node: fx.Node, reader: int) -> list[fx.Node] | None:
        """The operations that make it of what is in memory; None where this kernel must not."""
        region = self.regions[reader]
        if not region.is_kernel:
            return None
        chain = made_of([maker(node)], self.writer.keys() - self.without[reader], self.joint)
        read = {source(n) for call in chain for n in call.all_input_nodes}
        own = reads_of(region)
        ends = _ends(node, region)
        if ends and not _is_summed_up(node, chain, region, ends):
            return None
        at_hand = own | self.given
        may_run = self.joint.mutated.isdisjoint(read)
        return chain if may_run and all(_is_made_by_itself(n, at_hand) for n in chain) else None

    def _more(self, chain: Iterable[fx.Node], reader: int) -> set[fx.Node]:
        """What a kernel would read that it does not yet."""
        read = {source(n) for call in chain for n in call.all_input_nodes}
        return read.difference(chain, self.given, reads_of(self.regions[reader]))

    def _with(self, node: fx.Node, chain: Iterable[fx.Node], reader: int) -> Region:
        region = self.regions[reader]
        nodes = sorted({*region.nodes, *chain}, key=self.joint.place.__getitem__)
        alike = [n for n in self._more(chain, reader) if _is_alike(n, node, chain)]
        instead = {**region.instead, node: alike}
        alone = region.alone | _ends(node, region)
        return replace(region, nodes=nodes, instead=instead, alone=alone)

    def _not_writing(self, node: fx.Node, region: Region) -> Region:
        written = [n for n in region.written if n is not node]
        kept = self.writer.keys() - self.without[self.writer[node]] - {node}
        nodes = made_of(map(maker, written), kept, self.joint)
        effects = [n for n in made_of(region.effects, kept, self.joint) if n not in set(nodes)]
        return replace(region, nodes=nodes, written=written, effects=effects)

    def _put(self, number: int, region: Region) -> None:
        for node in reads_of(self.regions[number]):
            self.readers[node].discard(number)
        for node in reads_of(region):
            self.readers.setdefault(node, set()).add(number)
        self.regions[number] = region


def _ends(node: fx.Node, region: Region) -> set[fx.Node]:
    """The operations of a kernel that are not elementwise and are made of it."""
    inside = set(region.nodes)
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        for user in waiting.pop().users:
            if user in seen or (user not in inside and source(user) is user):
                continue
            seen.add(user)
            if user in inside and not is_elementwise(user):
                found.add(user)
            else:
                waiting.append(user)
    return found


def _is_summed_up(
    node: fx.Node, chain: Iterable[fx.Node], region: Region, ends: Iterable[fx.Node]
) -> bool:
    """Whether a kernel may make it for these: for sums, each number about once, and with little
    work. What scatters, sorts or joins wants to read memory."""
    if not all(is_sum(n) or is_product(n) for n in ends):
        return False
    if any(str(call.target) in FUNCTIONS for call in chain):
        return False
    inside = {*region.nodes, *chain}
    if not all(_is_short(n, inside) for n in ends):
        return False
    made = sum(map(elements, tensors(node)))
    readers = [n for n in region.nodes if any(source(i) is node for i in n.all_input_nodes)]
    is_moved = all(map(is_gather, chain))
    return is_moved or all(_most_elements(n) <= made for n in readers)


def _is_short(end: fx.Node, inside: Set[fx.Node]) -> bool:
    """Whether Inductor leaves what it sums up unwritten: written out, with nothing shared."""
    steps = 0
    reads: set[fx.Node] = set()
    waiting = list(end.all_input_nodes)
    while waiting and steps <= _MOST_STEPS:
        read = maker(waiting.pop())
        if read in inside and is_elementwise(read):
            steps += 1
            waiting += read.all_input_nodes
        elif not is_number(read):
            reads.add(read)
    return steps <= _MOST_STEPS and len(reads) <= _MOST_READS


def _most_elements(call: fx.Node) -> int:
    return max(sum(map(elements, tensors(n))) for n in (call, *call.all_input_nodes))


def _is_made_by_itself(call: fx.Node, at_hand: Set[fx.Node]) -> bool:
    """Whether each number of it is made by itself, of no more numbers than there are, but of what
    is at hand."""
    if not is_elementwise(call) or not may_run_again(call):
        return False
    if str(call.target) in FUNCTIONS and any(t.device.type == "cpu" for t in tensors(call)):
        return False  # it takes longer than to read it
    made = sum(map(elements, tensors(call)))
    others = (n for n in call.all_input_nodes if source(n) not in at_hand)
    return all(sum(map(elements, tensors(n))) <= made for n in others)


def _is_alike(read: fx.Node, node: fx.Node, chain: Iterable[fx.Node]) -> bool:
    """Whether a chain reads one tensor at the places at which it makes the other."""
    one, other = (n.meta["val"] for n in (read, node))
    if not isinstance(one, torch.Tensor) or one.shape != other.shape:
        return False
    readers = [n for n in chain if any(source(i) is read for i in n.all_input_nodes)]
    direct = all(read in n.all_input_nodes and not is_gather(n) for n in readers)
    return direct and one.stride() == other.stride()
