"""Passes for the option `outputs`: what the caller does with the outputs of a step."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from remat.documents.arguments import Ref
from remat.documents.records import Gradient, Node, Output, Result, TensorMeta
from remat.documents.targets import FREE_PREVIOUS_OUTPUTS_TARGET, PREVIOUS_OUTPUTS_TARGET
from remat.documents.trace import Trace, dropped_output_storages
from remat.errors import no_loss_returned
from remat.limits.options import OUTPUTS_LOSS, are_dropped


def with_outputs(trace: Trace, outputs: str) -> Trace:
    """Return the same step for a caller with this option `outputs`: the same trace if it holds the
    outputs; if it drops them, a trace that says so, and for "loss" one without other outputs.
    Raises `TraceError` for "loss" if the step returns no loss."""
    if not are_dropped(outputs):
        return trace
    if outputs == OUTPUTS_LOSS:
        trace = _without_other_outputs(trace)
    return trace.replace(outputs_dropped=True)


def held_output_storages(trace: Trace) -> list[int]:
    """Return the storages of the outputs that the caller's variables hold until the step ends,
    without outputs that are graph inputs, and those that the model stores."""
    storages = {trace.storage_of[o.name] for o in trace.outputs if not o.is_stored}
    storages -= {p.storage for p in trace.placeholders} | dropped_output_storages(trace)
    return sorted(storages)


def with_previous_outputs(trace: Trace) -> Trace:
    """Return a trace with costs for a loop whose variables hold the outputs of the step before
    until the forward returns. For predictions only: these outputs are results of an operation that
    does nothing, at the start of the forward."""
    sizes = [trace.storage_bytes[storage] for storage in held_output_storages(trace)]
    source = next((node.cost_source for node in trace.nodes if node.cost_source), "")
    results = tuple(
        Result(
            name=f"previous_output_{index}",
            tensor=TensorMeta(dtype="uint8", shape=(size,), stride=(1,), device=trace.device),
            storage=len(trace.storage_bytes) + index,
            position=index,
        )
        for index, size in enumerate(sizes)
    )
    if not results:
        return trace
    previous = Node(
        name="previous_outputs",
        target=PREVIOUS_OUTPUTS_TARGET,
        results=results,
        recomputable=False,
        cost_s=0.0,
        workspace_bytes=0,
        cost_source=source,
    )
    changes = {"name": "free_previous_outputs", "target": FREE_PREVIOUS_OUTPUTS_TARGET}
    args = tuple(Ref(result.name) for result in results)
    freed = previous.model_copy(update={**changes, "results": (), "args": args})
    end = 1 + max((n for n, node in enumerate(trace.nodes) if not node.backward), default=-1)
    nodes = (previous, *trace.nodes[:end], freed, *trace.nodes[end:])
    return trace.replace(nodes=nodes, storage_bytes=(*trace.storage_bytes, *sizes))


def without_previous_outputs(trace: Trace) -> Trace:
    """Return the trace as before `with_previous_outputs`, with storages that nothing uses."""
    targets = (PREVIOUS_OUTPUTS_TARGET, FREE_PREVIOUS_OUTPUTS_TARGET)
    return trace.replace(nodes=tuple(n for n in trace.nodes if n.target not in targets))


def unreturned_bytes(trace: Trace) -> int:
    """Return the bytes of the outputs that `outputs="loss"` does not return, without outputs that
    are graph inputs."""
    outputs = [output for output in trace.outputs if not _is_returned(trace, output)]
    storages = {trace.storage_of[output.name] for output in outputs}
    storages -= {placeholder.storage for placeholder in trace.placeholders}
    return sum(trace.allocated_bytes(storage) for storage in storages)


def returns_loss(trace: Trace) -> bool:
    """True if gradients come from a returned output of one element. A loss that is only stored in
    an attribute is not returned."""
    return _loss_output(trace) is not None


def loss_code(trace: Trace) -> str:
    """Return the code that takes the loss from what the model returns: `.loss`, `["loss"]`, `[0]`.
    The step must return a loss."""
    loss = _loss_output(trace)
    assert loss is not None
    return trace.result.access_of(loss)


def _loss_output(trace: Trace) -> int | None:
    """Return the index of the first returned output of one element that gradients come from; None
    without any."""
    return next(
        (
            n
            for n, o in enumerate(trace.outputs)
            if o.tangent and not o.is_stored and prod(trace.tensors[o.name].shape) == 1
        ),
        None,
    )


def differentiated_bytes(trace: Trace) -> int:
    """Return the bytes of the returned outputs that gradients come from: the loss is computed from
    them outside of the step. 0 if the step returns the loss."""
    if returns_loss(trace):
        return 0
    outputs = [o.name for o in trace.outputs if o.tangent and not o.is_stored]
    return sum(trace.allocated_bytes(s) for s in {trace.storage_of[name] for name in outputs})


def _without_other_outputs(trace: Trace) -> Trace:
    """Return the step without the outputs that are no loss (see `_is_returned`), and without the
    operations that only they need, except random ones and writes. Raises `TraceError` without a
    loss."""
    if not returns_loss(trace):
        raise no_loss_returned(trace.model or "the model")
    dropped = {n for n, output in enumerate(trace.outputs) if not _is_returned(trace, output)}
    if not dropped:
        return trace
    returned = tuple(output for n, output in enumerate(trace.outputs) if n not in dropped)
    needed = {o.name for o in returned} | {g.name for g in trace.gradients}
    mutable = {p.storage for p in trace.placeholders}
    nodes: list[Node] = []
    for node in reversed(trace.nodes):
        writes = not node.view and (
            not node.results or any(result.storage in mutable for result in node.results)
        )
        # Without a random operation, later ones would sample other numbers.
        if node.random or writes or any(result.name in needed for result in node.results):
            needed.update(node.operand_names)
            nodes.append(node)
    return trace.replace(
        nodes=tuple(reversed(nodes)),
        outputs=returned,
        gradients=tuple(_with_renumbered_sources(g, dropped) for g in trace.gradients),
        result=trace.result.without_leaves(dropped),
        stores=tuple(
            s.model_copy(update={"value": s.value.without_leaves(dropped)}) for s in trace.stores
        ),
    )


def _with_renumbered_sources(gradient: Gradient, dropped: Collection[int]) -> Gradient:
    """Return the gradient with the new indices of its outputs, after some were dropped."""
    sources = [n - sum(d < n for d in dropped) for n in gradient.sources if n not in dropped]
    return gradient.model_copy(update={"sources": tuple(sources)})


def _is_returned(trace: Trace, output: Output) -> bool:
    """True if `outputs="loss"` keeps this output: it has a tangent, has one element, or is
    stored."""
    has_one_element = prod(trace.tensors[output.name].shape) == 1
    return bool(output.tangent) or output.is_stored or has_one_element
