"""What a kernel of the backward makes again beside its own, so that nobody keeps it until then.

The gradient of a product's weights reads what the product read: a softmax after dropout, an
activation. The kernel that goes back through that reads what it was made of. So it can write it
again in the same loop, for one more tensor written: nothing more is read, no random number is drawn
twice. A run of its own would read it all once more.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence, Set
from dataclasses import replace

from torch import fx

from remat.frontend.compile.joint.fx_utils import (
    is_elementwise,
    maker,
    node_bytes,
    read_by,
    source,
    takes_long,
)
from remat.frontend.compile.joint.joint_graph import Joint
from remat.frontend.compile.kernels.fusion_groups import (
    Region,
    connect,
    in_order,
    made_of,
    reads_of,
)

_SHARE = 256
"""What takes less than this part of all that is kept is not worth a change."""

_MOST_STEPS = 200
"""Of a kernel, where its functions are compared."""


def made_beside(joint: Joint, regions: Sequence[Region]) -> tuple[Joint, list[Region]] | None:
    """The same step with less kept for the backward, where kernels there can make it again; else
    None. The given joint and regions stay as they are."""
    work = _Beside(joint, regions)
    kept = sorted(work.writer, key=node_bytes, reverse=True)  # equal ones in their order
    least_bytes = sum(map(node_bytes, joint.saved)) / _SHARE
    made = [work.move(node) for node in kept if node_bytes(node) >= least_bytes]
    if not any(made):
        return None
    calls = (*joint.calls[: joint.forward], *work.copies, *joint.calls[joint.forward :])
    joint = replace(joint, calls=calls)
    return joint, in_order(joint, work.regions)


class _Beside:
    def __init__(self, joint: Joint, regions: Sequence[Region]) -> None:
        self.joint = joint
        self.regions = [replace(region) for region in regions]
        connect(joint, self.regions)
        self.reads = [reads_of(region) for region in self.regions]
        self.copies: list[fx.Node] = []
        self.makes_of: list[set[fx.Node]] = [set() for _ in regions]
        """What each reads for these: if it made that anew, too, it would have to come first."""
        self.returned = {source(n) for n in joint.returned}
        self.given = set(joint.given)
        self.kept = {n for region in regions for n in region.written}
        """All that is written."""
        self.writer = {
            n: i
            for i, region in enumerate(regions)
            if region.is_kernel and not region.is_backward
            for n in region.written
        }

    def move(self, node: fx.Node) -> bool:
        """Have a kernel of the backward make it for those who read it there, if one can."""
        later = self._later(node)
        chain = made_of([maker(node)], self.kept - {node}, self.joint)
        if node in self.returned or not later or not all(map(is_elementwise, chain)):
            return False
        read = read_by(chain).difference(chain)
        if not self.joint.mutated.isdisjoint(read):
            return False
        for number, region in enumerate(self.regions):
            others = [i for i in later if i != number]
            if (
                region.is_backward
                and region.is_kernel
                and others
                and node not in self.makes_of[number]
                and self._has(number, node, chain, read)
                and self._is_before(number, others)
            ):
                self._put(node, chain, number, later)
                return True
        return False

    def _later(self, node: fx.Node) -> list[int]:
        """The regions of the backward that read it."""
        return [i for i, r in enumerate(self.regions) if r.is_backward and node in self.reads[i]]

    def _has(self, number: int, node: fx.Node, chain: list[fx.Node], read: Set[fx.Node]) -> bool:
        """Whether a kernel reads what makes it, or may read it instead of what it reads now, and
        works out what takes long anyway."""
        own = self.reads[number]
        if not (read - self.given) & own:
            return False
        more = {n for n in read - own - self.given if not self._later(n)}
        instead = {node}
        if more:
            instead |= {n for n in own if self._is_made_of(n, read | own, number)}
        if sum(map(node_bytes, more)) >= sum(map(node_bytes, instead)):
            return False
        long = list(filter(takes_long, chain))
        if not long:
            return True
        region = self.regions[number]
        inside = {*region.all_nodes, *chain}
        if len(inside) > _MOST_STEPS:
            return False
        same = _Alike(inside)
        there = {same.number(n) for n in region.all_nodes if takes_long(n)}
        return all(same.number(n) in there for n in long)

    def _is_made_of(self, node: fx.Node, read: Set[fx.Node], number: int) -> bool:
        """Whether a tensor that only this kernel reads in the backward is made of these alone."""
        if node not in self.writer or node in self.returned or self._later(node) != [number]:
            return False
        chain = made_of([maker(node)], self.kept - {node}, self.joint)
        is_quick = all(is_elementwise(n) and not takes_long(n) for n in chain)
        return is_quick and read_by(chain).difference(chain) <= read | self.given

    def _is_before(self, number: int, others: Iterable[int]) -> bool:
        """Whether it can run before these."""
        needed: set[int] = set()
        waiting = [number]
        while waiting:
            for need in self.regions[waiting.pop()].needs - needed:
                needed.add(need)
                waiting.append(need)
        return needed.isdisjoint(others)

    def _put(self, node: fx.Node, chain: list[fx.Node], number: int, later: list[int]) -> None:
        copy = node.graph.node_copy(node, lambda n: n)
        copy.meta = dict(node.meta)
        self.copies.append(copy)
        self.makes_of[number] |= read_by(chain)
        before = self.regions[number]
        nodes = dict.fromkeys((*chain, *before.nodes))
        if node not in before.nodes:
            nodes.pop(node, None)
        self.regions[number] = replace(
            before, nodes=[*nodes, copy], written=[*before.written, copy]
        )
        for i in later:
            region = self.regions[i]
            needs = region.needs | ({number} if i != number else set())
            anew = {**region.anew, node: copy}
            self.regions[i] = replace(region, needs=needs, anew=anew)
        for i in {number, *later}:
            self.reads[i] = reads_of(self.regions[i])


class _Alike:
    """Operations of a kernel by what they work out: the same number for the same."""

    def __init__(self, inside: Set[fx.Node]) -> None:
        self.inside = inside
        self.known: dict[fx.Node, int] = {}
        self.numbers: dict[Hashable, int] = {}

    def number(self, node: fx.Node) -> int:
        """Of what a node makes; what is read from memory is only like itself."""
        if node not in self.known:
            own: Hashable = node.name
            if maker(node) in self.inside or source(node) is not node:
                given = (*node.args, *sorted(node.kwargs.items()))
                own = (str(node.target), self._described(given))
            self.known[node] = self.numbers.setdefault(own, len(self.numbers))
        return self.known[node]

    def _described(self, item: object) -> Hashable:
        if isinstance(item, fx.Node):
            return self.number(item)
        if isinstance(item, (list, tuple)):
            return tuple(map(self._described, item))
        return repr(item)
