"""Rewrite a trace so that tensors are on the host until the backward reads them.

Each of them gets four operations. `offload` starts the copy to the host behind its producer.
`release` waits for that copy, at the first point of the schedule where it will have ended, so that
the memory is free from there on. `reload` allocates memory and starts the copy back: as late as it
can and still end in time, or right behind `release`. `arrive` waits for it before the first reader
of the backward. Memory thus depends on the order of operations only, never on how fast a copy is:
the solver and the simulator need no notion of copies.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate

from remat.costs.link import Link
from remat.documents.arguments import Argument, Ref, rename_refs
from remat.documents.records import BaselineRecord, Node, Result, TensorMeta
from remat.documents.targets import ARRIVE_TARGET, OFFLOAD_TARGET, RELEASE_TARGET, RELOAD_TARGET
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.passes.offload.candidates import Candidate, offload_candidates
from remat.simulate import baseline_of

_HANDLE = TensorMeta(dtype="int64", shape=(1,), stride=(1,), device="cpu")
_HANDLE_BYTES = 8


def offload_tensors(trace: Trace, tensors: Iterable[str], link: Link) -> Trace:
    """Return the trace in which these tensors are offloaded; the costs of its operations decide
    where copies start and end.

    A tensor that the backward needs before its copy to the host has ended stays on the device.
    Raises `RematError` for a tensor that is not one of `offload_candidates(trace)`.
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
    return _Rewriting(trace, [by_name[name] for name in names], link).trace()


class _Rewriting:
    """The state of a rewriting: operations to add before and after others, and new storages."""

    def __init__(self, trace: Trace, candidates: list[Candidate], link: Link) -> None:
        self.old = trace
        self.storage_bytes = list(trace.storage_bytes)
        self.reloads: dict[int, list[Node]] = defaultdict(list)
        self.arrivals: dict[int, list[Node]] = defaultdict(list)
        self.after: dict[int, list[Node]] = defaultdict(list)
        self.renamed: dict[str, str] = {}  # tensors of offloaded storages, for the backward
        self.new_storage: dict[int, int] = {}
        self.names = {n.name for n in trace.nodes} | set(trace.storage_of)
        self.producer = {r.name: node for node in trace.nodes for r in node.results}
        costs = [0.0 if node.view else node.cost_s or 0.0 for node in trace.nodes]
        self.end_s = list(accumulate(costs))
        self._place(candidates, link)

    def trace(self) -> Trace:
        """Return the new trace."""
        nodes: list[Node] = []
        for index, node in enumerate(self.old.nodes):
            nodes += reversed(self.reloads[index])  # they were added from the last one needed on
            nodes += reversed(self.arrivals[index])
            nodes += self._backward_node(node) if node.backward else [node]
            nodes += self.after[index]
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
        arrived = self._result(f"{name}_reloaded", tensor, candidate.size_bytes)
        at_release = self.old.nodes[released].backward
        self.after[candidate.producer].append(
            _operation(OFFLOAD_TARGET, (Ref(name),), sent, producer, backward=False)
        )
        self.after[released].append(
            _operation(
                RELEASE_TARGET, (Ref(sent.name), Ref(name)), stored, producer, backward=at_release
            )
        )
        self.reloads[start].append(
            _operation(RELOAD_TARGET, (Ref(stored.name),), buffer, reader, backward=True)
        )
        self.arrivals[candidate.first_backward_reader].append(
            _operation(ARRIVE_TARGET, (Ref(buffer.name),), arrived, reader, backward=True)
        )
        self.renamed[name] = arrived.name
        self.new_storage[self.old.storage_of[name]] = arrived.storage

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

    # -- readers in the backward ------------------------------------------------------------------

    def _backward_node(self, node: Node) -> list[Node]:
        """Return an operation of the backward that reads reloaded tensors, after the views of them
        that the forward had made."""
        views: list[Node] = []

        def new_name(name: str) -> str:
            return self._reloaded(name, views)

        args = tuple(rename_refs(item, new_name) for item in node.args)
        kwargs = {key: rename_refs(item, new_name) for key, item in node.kwargs.items()}
        results = tuple(
            r.model_copy(update={"storage": self.new_storage.get(r.storage, r.storage)})
            for r in node.results
        )
        changed = node.model_copy(update={"args": args, "kwargs": kwargs, "results": results})
        return [*views, changed]

    def _reloaded(self, name: str, views: list[Node]) -> str:
        """Return the name of a tensor for a reader in the backward; add the views that it needs."""
        if self.old.storage_of[name] not in self.new_storage or name in self.renamed:
            return self.renamed.get(name, name)
        node = self.producer[name]
        if node.backward:
            return name  # a view that the backward makes, of the reloaded tensor
        args = tuple(rename_refs(a, lambda n: self._reloaded(n, views)) for a in node.args)
        kwargs = {
            k: rename_refs(a, lambda n: self._reloaded(n, views)) for k, a in node.kwargs.items()
        }
        results = []
        for result in node.results:
            self.renamed[result.name] = self._new_name(f"{result.name}_reloaded")
            changes = {
                "name": self.renamed[result.name],
                "storage": self.new_storage[result.storage],
            }
            results.append(result.model_copy(update=changes))
        views.append(
            node.model_copy(
                update={
                    "name": self._new_name(f"{node.name}_reloaded_op"), "args": args,
                    "kwargs": kwargs, "results": tuple(results), "backward": True,
                }
            )
        )  # fmt: skip
        return self.renamed[name]


def _operation(
    target: str, args: tuple[Argument, ...], result: Result, like: Node, *, backward: bool
) -> Node:
    """Return an operation that starts or awaits a copy. It takes no time of the device itself."""
    return Node(
        name=f"{result.name}_op",
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
