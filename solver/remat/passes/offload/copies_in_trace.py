"""Insert the operations that copy tensors to the host and back into a trace.

Each tensor gets four. `offload` starts the copy to the host behind its producer. `release` waits
for that copy: the memory is free from there on, and not before (`Operation.same_copy_as`). `reload`
allocates memory and starts the copy back. `arrive` waits for it before the first operation of the
backward that needs it. Memory thus depends on the order of operations only, never on how fast a
copy is: the solver and the simulator need no notion of copies.

What arrives is a new copy of the same value, as after a recomputation (`Operation.renews`):
operations that run later read it, recomputations among them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from remat.documents.arguments import Argument, Ref
from remat.documents.records import BaselineRecord, Node, Result, TensorMeta
from remat.documents.targets import (
    ARRIVE_TARGET,
    OFFLOAD_TARGET,
    RELEASE_TARGET,
    RELOAD_TARGET,
)
from remat.documents.trace import Trace
from remat.passes.offload.places import HANDLE_BYTES, CopyPlaces
from remat.simulate import baseline_of

_HANDLE = TensorMeta(dtype="int64", shape=(1,), stride=(1,), device="cpu")


def forward_first(trace: Trace) -> Trace:
    """Return the trace with the nodes of the forward before those of the backward."""
    nodes = tuple(sorted(trace.nodes, key=lambda node: node.backward))
    return trace if nodes == trace.nodes else trace.replace(nodes=nodes)


def insert_copies(trace: Trace, places: Iterable[CopyPlaces]) -> Trace:
    """Return the trace with these tensors offloaded. Copies that start at the same place do so in
    the reverse order of `places`, and end so."""
    return _Insertion(forward_first(trace), places).trace()


class _Insertion:
    """The state of an insertion: operations to add before and after others, and new storages."""

    def __init__(self, trace: Trace, places: Iterable[CopyPlaces]) -> None:
        self.old = trace
        self.storage_bytes = list(trace.storage_bytes)
        self.reloads: dict[int, list[Node]] = defaultdict(list)
        self.arrivals: dict[int, list[Node]] = defaultdict(list)
        self.after: dict[int, list[Node]] = defaultdict(list)
        self.names = {n.name for n in trace.nodes} | set(trace.storage_of)
        for place in places:
            self._add_operations(place)

    def trace(self) -> Trace:
        """Return the new trace."""
        nodes: list[Node] = []
        for index, node in enumerate(self.old.nodes):
            nodes += reversed(self.reloads[index])
            nodes += reversed(self.arrivals[index])
            nodes += [node, *self.after[index]]
        old, unsplit = self.old, self.old.unsplit
        if unsplit is None and old.measured:
            baseline = baseline_of(old.graph())
            unsplit = BaselineRecord(peak_bytes=baseline.peak_bytes, time_s=baseline.time_s)
        return old.replace(
            nodes=tuple(nodes), storage_bytes=tuple(self.storage_bytes), unsplit=unsplit
        )

    def _add_operations(self, place: CopyPlaces) -> None:
        """Add the four operations of a tensor."""
        producer = self.old.nodes[place.producer]
        result = producer.results[place.result]
        name, tensor = result.name, result.tensor
        size_bytes = self.old.storage_bytes[result.storage]
        sent = self._result(f"{name}_sent", _HANDLE, HANDLE_BYTES)
        stored = self._result(f"{name}_stored", _HANDLE, HANDLE_BYTES)
        buffer = self._result(f"{name}_buffer", tensor, size_bytes)
        arrived = result.model_copy(update={"position": -1})
        at_release = self.old.nodes[place.released].backward
        self.after[place.producer].append(
            self._operation(OFFLOAD_TARGET, name, [name], sent, producer, producer.backward)
        )
        self.after[place.released].append(
            self._operation(RELEASE_TARGET, name, [sent.name, name], stored, producer, at_release)
        )
        self.reloads[place.start].append(
            self._operation(RELOAD_TARGET, name, [stored.name], buffer, producer, True)
        )
        self.arrivals[place.needed].append(
            self._operation(ARRIVE_TARGET, name, [buffer.name], arrived, producer, True)
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
        operands: list[str],
        result: Result,
        like: Node,
        backward: bool = False,
    ) -> Node:
        """Return an operation that starts or awaits a copy. It takes no time of the device."""
        args: tuple[Argument, ...] = tuple(map(Ref, operands))
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
