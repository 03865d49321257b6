"""Mutated buffers and inputs: the graph is functional, the model is not.

A new value is written into its buffer at the end of the forward part that reads the old one, once,
however often its operations run. Whoever reads the old value runs once too, and the backward reads
a copy of it.
"""

from __future__ import annotations

from remat.documents.arguments import Ref, rename
from remat.documents.records import Node, Placeholder, Result
from remat.documents.trace import COPY
from remat.errors import TraceError
from remat.frontend.capture.reading.trace_builder import Draft, read_names
from remat.rewrite import BATCH_NORM, BATCH_NORM_OF_CUDA, RERUNS

BATCH_NORM_TRAINING = 5
"""Position of `training` among the arguments of `BATCH_NORM`; two later in the backwards."""

BATCH_NORM_BACKWARDS = (
    "aten.native_batch_norm_backward.default",
    "aten.batch_norm_backward.default",
)


def write_back(draft: Draft, buffer: Placeholder, new: str) -> None:
    """Write the tensor `new` into `buffer`, behind the last forward node that reads the old value.

    Raises `TraceError` where that cannot be done without changing the step.
    """
    if buffer.requires_grad:
        raise TraceError(
            f"the model writes in place into {buffer.kind} {buffer.target}, which requires a "
            "gradient; write into a clone"
        )
    _protect_readers(draft, buffer)
    last = max(
        (
            i
            for i, node in enumerate(draft.nodes)
            if not node.backward
            and (draft.reads(node, buffer.storage) or any(r.name == new for r in node.results))
        ),
        default=-1,
    )
    write = Node(
        name=f"write_{buffer.name}",
        target=COPY,
        args=(Ref(buffer.name), Ref(new)),
        recomputable=False,
    )
    draft.nodes.insert(last + 1, write)


def _protect_readers(draft: Draft, buffer: Placeholder) -> None:
    copy: Result | None = None
    for i, node in enumerate(draft.nodes):
        if not draft.reads(node, buffer.storage) or is_training_batch_norm(node):
            continue
        if node.view and any(r.storage == buffer.storage for r in node.results):
            if any(n.backward and draft.reads(n, buffer.storage) for n in draft.nodes[i:]):
                raise TraceError(
                    f"the backward reads a view of {buffer.kind} {buffer.target}, which the "
                    "forward overwrites; use a clone of it in the forward"
                )
        elif not node.backward:
            draft.nodes[i] = node.model_copy(update={"recomputable": False})
        else:
            copy = copy or draft.fresh_result(
                f"old_{buffer.name}", buffer.tensor, buffer.tensor.stride
            )
            draft.nodes[i] = _renamed(node, {buffer.name: copy.name})
    if copy is not None:
        clone = Node(
            name=copy.name,
            target="aten.clone.default",
            args=(Ref(buffer.name),),
            results=(copy,),
            recomputable=False,
        )
        draft.nodes.insert(0, clone)


def pin_batch_norms(draft: Draft) -> None:
    """A batch norm that runs again makes no new running statistics. Where somebody other than the
    write into the buffers reads those, it must run once."""
    readers: dict[str, list[Node]] = {}
    for node in draft.nodes:
        for name in read_names(node):
            readers.setdefault(name, []).append(node)
    for i, node in enumerate(draft.nodes):
        if node.target not in RERUNS:
            continue
        new = RERUNS[node.target].results
        statistics = [r.name for r in node.results if r.position >= new]
        others = [n for s in statistics for n in readers.get(s, ()) if n.target != COPY]
        if others or not is_training_batch_norm(node):
            draft.nodes[i] = node.model_copy(update={"recomputable": False})


def is_training_batch_norm(node: Node) -> bool:
    """Training-mode batch norm does not look at the running statistics that it updates."""
    if node.target == BATCH_NORM:
        return node.args[BATCH_NORM_TRAINING] is True
    return node.target == BATCH_NORM_OF_CUDA


def _renamed(node: Node, names: dict[str, str]) -> Node:
    def name_of(name: str) -> str:
        return names.get(name, name)

    return node.model_copy(
        update={
            "args": tuple(rename(item, name_of) for item in node.args),
            "kwargs": {key: rename(item, name_of) for key, item in node.kwargs.items()},
        }
    )
