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

from remat.frontend.compile.joint.fx_utils import (
    FUNCTIONS,
    elements,
    is_draw,
    is_elementwise,
    is_gather,
    is_number,
    is_product,
    is_seed,
    is_sum,
    maker,
    node_bytes,
    read_by,
    source,
    takes_long,
    tensors,
)
from remat.frontend.compile.joint.joint_graph import Joint
from remat.frontend.compile.kernels.cpu_costs import scalars_s
from remat.frontend.compile.kernels.fusion_groups import Region, made_of, moved_bytes, reads_of

_SHARE = 8
"""For what another still reads, a reader may need an eighth more: indices, means."""

_MOST_READS, _MOST_STEPS = 8, 24
"""What a sum is made of, if it reads or does more, Inductor writes to memory (its options
`realize_acc_reads_threshold` and `realize_opcount_threshold`, which count loads, too). What is
elementwise it makes in one loop with its reader."""


def inlined(joint: Joint, regions: list[Region], *, draws: bool = False) -> list[Region]:
    """The same regions, but that kernels make again what moves no more bytes than to read it; what
    nobody reads then is no longer written. With `draws`, random numbers too, on CPUs, where masks
    take longer to write and to read."""
    return _Inlining(joint, regions, draws).done()


class _Inlining:
    def __init__(self, joint: Joint, regions: list[Region], draws: bool) -> None:
        self.joint = joint
        self.draws = draws
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
        anew = {n for region in self.regions for n in region.anew.values()}
        candidates = [
            n for n, i in self.writer.items() if self.regions[i].is_kernel and n not in anew
        ]
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
            if (trial := self._trial(node, number)) is None:
                return False
            trials[number], needed = trial
            more |= needed
        if sum(map(node_bytes, more)) > node_bytes(node):
            return False
        own = self.writer[node]
        trials[own] = self._not_writing(node, trials.get(own, self.regions[own]))
        before_bytes = sum(moved_bytes(self.regions[number]) for number in trials)
        if sum(map(moved_bytes, trials.values())) > before_bytes:
            return False
        before_s = sum(scalars_s(self.regions[number]) for number in trials)
        if sum(map(scalars_s, trials.values())) > before_s:
            return False
        for number, region in trials.items():
            self._put(number, region)
            if number != own:
                self.without[number].add(node)
        del self.writer[node]
        return True

    def _where_it_is_small(self, node: fx.Node) -> None:
        for number in sorted(self.readers.get(node, ())):
            if (trial := self._trial(node, number)) is None:
                continue
            region, more = trial
            is_small = _SHARE * sum(map(node_bytes, more)) <= node_bytes(node)
            before = self.regions[number]
            is_cheap = scalars_s(region) <= scalars_s(before)
            if is_small and is_cheap and moved_bytes(region) <= moved_bytes(before):
                self._put(number, region)
                self.without[number].add(node)

    def _trial(self, node: fx.Node, number: int) -> tuple[Region, set[fx.Node]] | None:
        """A kernel that makes it of what is in memory, and what of that the kernel does not read
        yet; None where it must not."""
        region = self.regions[number]
        if not region.is_kernel:
            return None
        chain = made_of([maker(node)], self.writer.keys() - self.without[number], self.joint)
        read, own = read_by(chain), reads_of(region)
        at_hand = own | self.given
        if not self.joint.mutated.isdisjoint(read):
            return None
        if any(region.anew.get(n) in region.written for n in read):
            return None  # it would need its own result before that is made
        if not all(self._is_drawn(n) or _is_made_by_itself(n, at_hand) for n in chain):
            return None
        ends = ends_of(node, region)
        if ends and not _is_summed_up(node, chain, region, ends):
            return None
        more = read.difference(chain, at_hand)
        alike = [n for n in more if _is_alike(n, node, chain)]
        alike.sort(key=lambda n: n.name)  # the same plan in every process
        larger = replace(
            region,
            nodes=sorted({*region.nodes, *chain}, key=self.joint.place.__getitem__),
            instead={**region.instead, node: alike},
            alone=region.alone | ends,
        )
        return larger, more

    def _is_drawn(self, call: fx.Node) -> bool:
        """Whether it is a random number that may be drawn again, or its seed."""
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors(call))
        return self.draws and on_cpu and (is_draw(call) or is_seed(call))

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


def ends_of(node: fx.Node, region: Region) -> set[fx.Node]:
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
    if not is_elementwise(call):
        return False
    if takes_long(call):
        return False
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
