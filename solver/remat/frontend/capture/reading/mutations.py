"""Mutated buffers and inputs. The joint graph is functional; the model that it stands for is not.

The graph computes the new value of a buffer as a separate tensor. One copy at the end of the
forward writes it into the buffer, after the last forward operation that reads the old value. That
copy, and every operation that reads the old value, runs exactly once. The backward reads a copy of
the old value.
"""

from __future__ import annotations

from remat.documents.arguments import Ref
from remat.documents.records import Node, Placeholder, Result
from remat.documents.targets import COPY_TARGET
from remat.errors import TraceError
from remat.frontend.capture.reading.trace_builder import TraceBuilder
from remat.rewrite import BATCH_NORM, BATCH_NORM_CUDA, BATCH_NORM_RECOMPUTES

BATCH_NORM_TRAINING_INDEX = 5
"""Position of `training` among the arguments of `BATCH_NORM`; two later in the backwards."""

BATCH_NORM_BACKWARDS = (
    "aten.native_batch_norm_backward.default",
    "aten.batch_norm_backward.default",
)


def add_buffer_write(builder: TraceBuilder, buffer: Placeholder, new_value: str) -> None:
    """Add a copy of the tensor named `new_value` into a buffer or input, after the last forward
    node that reads the old value.

    Raises `TraceError` if the step would then compute something else, or the buffer requires a
    gradient.
    """
    if buffer.requires_grad:
        raise TraceError(
            f"the model writes in place into {buffer.kind} {buffer.target}, which requires a "
            "gradient; write into a clone"
        )
    _preserve_old_buffer_value(builder, buffer)
    last = max(
        (
            i
            for i, node in enumerate(builder.nodes)
            if not node.backward
            and (
                builder.reads_storage(node, buffer.storage)
                or any(r.name == new_value for r in node.results)
            )
        ),
        default=-1,
    )
    write = Node(
        name=f"write_{buffer.name}",
        target=COPY_TARGET,
        args=(Ref(buffer.name), Ref(new_value)),
        recomputable=False,
    )
    builder.nodes.insert(last + 1, write)


def _preserve_old_buffer_value(builder: TraceBuilder, buffer: Placeholder) -> None:
    """Forbid the recomputation of forward nodes that read the buffer; redirect backward nodes to a
    copy of it. Batch norms in training mode do not read it. Raises `TraceError` if the backward
    reads a view of it."""
    copy: Result | None = None
    for i, node in enumerate(builder.nodes):
        if not builder.reads_storage(node, buffer.storage) or is_training_batch_norm(node):
            continue
        if node.view and any(r.storage == buffer.storage for r in node.results):
            later = builder.nodes[i:]
            if any(n.backward and builder.reads_storage(n, buffer.storage) for n in later):
                raise TraceError(
                    f"the backward reads a view of {buffer.kind} {buffer.target}, which the "
                    "forward overwrites; use a clone of it in the forward"
                )
        elif not node.backward:
            builder.nodes[i] = node.model_copy(update={"recomputable": False})
        else:
            copy = copy or builder.new_dense_result(
                f"old_{buffer.name}", buffer.tensor, buffer.tensor.stride
            )
            builder.nodes[i] = node.with_operands({buffer.name: copy.name})
    if copy is not None:
        clone = Node(
            name=copy.name,
            target="aten.clone.default",
            args=(Ref(buffer.name),),
            results=(copy,),
            recomputable=False,
        )
        builder.nodes.insert(0, clone)


def forbid_batch_norm_recomputation(builder: TraceBuilder) -> None:
    """Mark batch norms as not recomputable if they are not in training mode, or if their new
    running statistics are read by anything but the write into the buffers: a recomputed batch norm
    uses the statistics of the batch, and does not return the running ones."""
    readers: dict[str, list[Node]] = {}
    for node in builder.nodes:
        for name in node.operand_names:
            readers.setdefault(name, []).append(node)
    for i, node in enumerate(builder.nodes):
        if node.target not in BATCH_NORM_RECOMPUTES:
            continue
        results_of_rerun = BATCH_NORM_RECOMPUTES[node.target].results
        statistics = [r.name for r in node.results if r.position >= results_of_rerun]
        other_readers = [
            n for s in statistics for n in readers.get(s, ()) if n.target != COPY_TARGET
        ]
        if other_readers or not is_training_batch_norm(node):
            builder.nodes[i] = node.model_copy(update={"recomputable": False})


def is_training_batch_norm(node: Node) -> bool:
    """True for batch norms in training mode: they update the running statistics, and what they
    normalize does not depend on them."""
    if node.target == BATCH_NORM:
        return node.args[BATCH_NORM_TRAINING_INDEX] is True
    return node.target == BATCH_NORM_CUDA
