"""Rewrite a trace so that tensors are on the host until the backward reads them.

Each of them gets four operations. `offload` starts the copy to the host behind its producer.
`release` waits for that copy, at the first point of the schedule where it will have ended, so that
the memory is free from there on. `reload` allocates memory and starts the copy back: as late as it
can and still end in time, or right behind `release`. `arrive` waits for it before the first
operation of the backward that needs it. Memory thus depends on the order of operations only, never
on how fast a copy is: the solver and the simulator need no notion of copies.

What arrives is a new copy of the same value, as after a recomputation (`Operation.renews`):
operations that run later read it, recomputations among them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from types import MappingProxyType

from remat.costs.link import Link
from remat.documents.arguments import Argument, Ref
from remat.documents.records import BaselineRecord, Node, Result, TensorMeta
from remat.documents.targets import ARRIVE_TARGET, OFFLOAD_TARGET, RELEASE_TARGET, RELOAD_TARGET
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.passes.offload.candidates import Candidate, offload_candidates
from remat.simulate import baseline_of

_HANDLE = TensorMeta(dtype="int64", shape=(1,), stride=(1,), device="cpu")
_HANDLE_BYTES = 8


def offload_tensors(
    trace: Trace,
    tensors: Iterable[str],
    link: Link,
    needed_by: Mapping[str, str] = MappingProxyType({}),
) -> Trace:
    """Return the trace in which these tensors are offloaded; the costs of its operations decide
    where copies start and end.

    A tensor is back before the first operation of the backward that reads it, or before the one
    that `needed_by` names if that comes earlier: for recomputations that read it. A tensor that is
    needed before its copy to the host has ended stays on the device. Raises `RematError` for a
    tensor that is not one of `offload_candidates(trace)`.
    """
    if [n.backward for n in trace.nodes] != sorted(n.backward for n in trace.nodes):
        trace = trace.replace(nodes=tuple(sorted(trace.nodes, key=lambda node: node.backward)))
    by_name = {candidate.tensor: candidate for candidate in offload_candidates(trace)}
    names = list(dict.fromkeys(tensors))
    if unknown := [name for name in names if name not in by_name]:
        raise RematError(
            f"{unknown[0]} cannot be offloaded: it is an input, an output or a gradient, is "
            "written over, does not fill its storage, or is not read in the backward"
        )
    index = {node.name: i for i, node in enumerate(trace.nodes)}
    first_backward = next(i for i, node in enumerate(trace.nodes) if node.backward)
    chosen: list[Candidate] = []
    for name in names:
        candidate = by_name[name]
        needed = index[needed_by[name]] if name in needed_by else candidate.first_backward_reader
        needed = max(first_backward, min(needed, candidate.first_backward_reader))
        chosen.append(replace(candidate, first_backward_reader=needed))
    return _Rewriting(trace, chosen, link).trace()


class _Rewriting:
    """The state of a rewriting: operations to add before and after others, and new storages."""

    def __init__(self, trace: Trace, candidates: list[Candidate], link: Link) -> None:
        self.old = trace
        self.storage_bytes = list(trace.storage_bytes)
        self.reloads: dict[int, list[Node]] = defaultdict(list)
        self.arrivals: dict[int, list[Node]] = defaultdict(list)
        self.after: dict[int, list[Node]] = defaultdict(list)
        self.names = {n.name for n in trace.nodes} | set(trace.storage_of)
        costs = [0.0 if node.view else node.cost_s or 0.0 for node in trace.nodes]
        self.end_s = list(accumulate(costs))
        self._place(candidates, link)

    def trace(self) -> Trace:
        """Return the new trace."""
        nodes: list[Node] = []
        for index, node in enumerate(self.old.nodes):
            nodes += reversed(self.reloads[index])  # they were added from the last one needed on
            nodes += reversed(self.arrivals[index])
            nodes += [node, *self.after[index]]
        old, unsplit = self.old, self.old.unsplit
        if unsplit is None and old.measured:
            baseline = baseline_of(old.graph())
            unsplit = BaselineRecord(peak_bytes=baseline.peak_bytes, time_s=baseline.time_s)
        return old.replace(
            nodes=tuple(nodes), storage_bytes=tuple(self.storage_bytes), unsplit=unsplit
        )

    # -- where copies start and end ---------------------------------------------------------------

    def _place(self, candidates: list[Candidate], link: Link) -> None:
        """Decide where the copies of each tensor start and end, and add its operations."""
        released: dict[str, int] = {}  # the node after which the memory is free
        free_s = 0.0
        for candidate in sorted(candidates, key=lambda c: c.producer):
            begin_s = max(free_s, self.end_s[candidate.producer])
            end_s = begin_s + candidate.size_bytes / link.to_host_bytes_per_s
            index = max(bisect_left(self.end_s, end_s), candidate.last_forward_reader)
            if index < candidate.first_backward_reader - 1:
                released[candidate.tensor] = index
                free_s = end_s
        first_backward = next(i for i, n in enumerate(self.old.nodes) if n.backward)
        next_start_s = self.end_s[-1]
        for candidate in sorted(candidates, key=lambda c: -c.first_backward_reader):
            if candidate.tensor not in released:
                continue
            reader = candidate.first_backward_reader
            needed_s = min(next_start_s, self.end_s[reader - 1])
            start_s = needed_s - candidate.size_bytes / link.to_device_bytes_per_s
            start = bisect_right(self.end_s, start_s)  # starts at or before start_s
            start = max(start, released[candidate.tensor] + 1, first_backward)
            if start <= reader:
                next_start_s = start_s
                self._add_operations(candidate, released[candidate.tensor], start)

    def _add_operations(self, candidate: Candidate, released: int, start: int) -> None:
        """Add the four operations of a tensor."""
        tensor = self.old.tensors[candidate.tensor]
        name, producer = candidate.tensor, self.old.nodes[candidate.producer]
        reader = self.old.nodes[candidate.first_backward_reader]
        sent = self._result(f"{name}_sent", _HANDLE, _HANDLE_BYTES)
        stored = self._result(f"{name}_stored", _HANDLE, _HANDLE_BYTES)
        buffer = self._result(f"{name}_buffer", tensor, candidate.size_bytes)
        arrived = Result(name=name, tensor=tensor, storage=self.old.storage_of[name])
        at_release = self.old.nodes[released].backward
        self.after[candidate.producer].append(
            self._operation(OFFLOAD_TARGET, name, (Ref(name),), sent, producer)
        )
        self.after[released].append(
            self._operation(
                RELEASE_TARGET, name, (Ref(sent.name), Ref(name)), stored, producer, at_release
            )
        )
        self.reloads[start].append(
            self._operation(RELOAD_TARGET, name, (Ref(stored.name),), buffer, reader, True)
        )
        self.arrivals[candidate.first_backward_reader].append(
            self._operation(ARRIVE_TARGET, name, (Ref(buffer.name),), arrived, reader, True)
        )

    def _result(self, name: str, tensor: TensorMeta, size_bytes: int) -> Result:
        self.storage_bytes.append(size_bytes)
        return Result(name=self._new_name(name), tensor=tensor, storage=len(self.storage_bytes) - 1)

    def _new_name(self, name: str) -> str:
        unique, number = name, 1
        while unique in self.names:
            number += 1
            unique = f"{name}_{number}"
        self.names.add(unique)
        return unique

    def _operation(
        self,
        target: str,
        tensor: str,
        args: tuple[Argument, ...],
        result: Result,
        like: Node,
        backward: bool = False,
    ) -> Node:
        """Return an operation that starts or awaits a copy. It takes no time of the device."""
        return Node(
            name=self._new_name(f"{target.split('.')[1]}_{tensor}"),
            target=target,
            args=args,
            results=(result,),
            backward=backward,
            recomputable=False,
            module=like.module,
            cost_s=0.0,
            workspace_bytes=0,
            cost_source="link",
        )
