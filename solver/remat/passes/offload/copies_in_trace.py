"""A trace with the copies of `offload_values`: the operations of its graph, as nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from remat.costs.devices import Link
from remat.documents.arguments import Ref
from remat.documents.records import Node, Result, TensorMeta
from remat.documents.targets import (
    ARRIVE_TARGET,
    OFFLOAD_TARGET,
    RELEASE_TARGET,
    RELOAD_TARGET,
)
from remat.documents.trace import Trace
from remat.passes.offload.copies_in_graph import (
    HANDLE_BYTES,
    CopyOperation,
    HostStay,
    offload_values,
)
from remat.passes.trace_writer import TraceWriter

_TARGETS = {
    "offload": OFFLOAD_TARGET,
    "release": RELEASE_TARGET,
    "reload": RELOAD_TARGET,
    "arrive": ARRIVE_TARGET,
}

_HANDLE = TensorMeta(dtype="int64", shape=(1,), stride=(1,), device="cpu")


def offload_tensors(
    trace: Trace,
    stays: Iterable[HostStay],
    link: Link,
    recomputed_s: Mapping[str, float] = MappingProxyType({}),
) -> Trace:
    """Return the trace in which these values are offloaded, as `offload_values` does it in the
    trace's graph. Nodes of the forward come first."""
    graph = trace.graph()
    offloaded = offload_values(graph, stays, link, recomputed_s)
    writer = TraceWriter(trace)
    names = {v: value.name for v, value in enumerate(graph.values)}
    result_of = {result.name: result for node in trace.nodes for result in node.results}
    nodes = iter(sorted(trace.nodes, key=lambda node: node.backward))
    for operation, source in zip(offloaded.graph.operations, offloaded.sources, strict=True):
        if not isinstance(source, CopyOperation):
            if trace.operations[source] is not None:
                for node in nodes:  # the operation, after views before it
                    writer.add(node)
                    if node is trace.operations[source]:
                        break
            continue
        result = result_of[names[source.value]]
        (output,) = operation.outputs
        if output == source.value:
            result = result.model_copy(update={"position": -1})
        else:
            is_buffer = source.kind == "reload"
            size_bytes = trace.storage_bytes[result.storage] if is_buffer else HANDLE_BYTES
            result = Result(
                name=writer.new_name(offloaded.graph.values[output].name),
                tensor=result.tensor if is_buffer else _HANDLE,
                storage=writer.new_storage(size_bytes),
            )
            names[output] = result.name
        writer.add(
            Node(
                name=writer.new_name(operation.name),
                target=_TARGETS[source.kind],
                args=tuple(Ref(names[v]) for v in reversed(operation.inputs)),  # a handle first
                results=(result,),
                backward=operation.backward,
                recomputable=False,
                module=operation.module,
                cost_s=0.0,
                workspace_bytes=0,
                cost_source="link",
            )
        )
    for node in nodes:
        writer.add(node)
    return writer.trace()
