"""Gradients in the form that autograd accumulates without a copy.

Autograd takes over a gradient without copying it only if no other tensor shares its memory and it
has the layout of its parameter. If not, a copy is added to the graph, so that the plan counts it.
The gradients of tied weights (one parameter with several names) are summed in place, as autograd
does.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat.documents.arguments import Literal, Ref, referenced_names
from remat.documents.records import Gradient, Node, Placeholder, TensorMeta
from remat.documents.targets import ADD_INTO_TARGET
from remat.frontend.capture.reading.trace_builder import TraceBuilder


def add_gradients(
    builder: TraceBuilder, gradients: Sequence[tuple[Placeholder, str, frozenset[int]]]
) -> None:
    """Add one gradient record per placeholder, each in its own storage. `gradients` are triples of
    a placeholder, the name of a gradient tensor, and the indices of the outputs that depend on the
    placeholder. A tied weight has several triples."""
    taken = {builder.storage_by_name[o.name] for o in builder.outputs}
    taken |= {p.storage for p in builder.placeholders}
    producer_index = {r.name: i for i, n in enumerate(builder.nodes) for r in n.results}
    names_by_owner: dict[str, list[str]] = {}
    sources_by_owner: dict[str, set[int]] = {}
    for owner, name, sources in gradients:
        names_by_owner.setdefault(owner.name, []).append(name)
        sources_by_owner.setdefault(owner.name, set()).update(sources)

    def gradients_of_others(owner: str) -> list[str]:
        return [name for other, names in names_by_owner.items() if other != owner for name in names]

    for owner in builder.placeholders:
        if owner.name not in names_by_owner:
            continue
        name, *summands = sorted(
            names_by_owner[owner.name], key=lambda n: producer_index.get(n, -1)
        )
        stride = _gradient_stride(owner.tensor)
        meta = builder.meta_by_name[name]
        is_shared = summands and _is_gradient_storage_shared(
            builder, name, [*summands, *gradients_of_others(owner.name)]
        )
        has_layout = is_same_layout(meta.shape, meta.stride, stride)
        if builder.storage_by_name[name] in taken or is_shared or not has_layout:
            name = _add_gradient_copy(builder, name, owner, stride)
        taken.add(builder.storage_by_name[name])
        for index, summand in enumerate(summands):
            addition = Node(
                name=f"tied_{owner.name}_{index}",
                target=ADD_INTO_TARGET,
                args=(Ref(name), Ref(summand)),
                backward=True,
                recomputable=False,
            )
            _insert_after_producers(builder, addition)
        builder.gradients.append(
            Gradient(
                placeholder=owner.name,
                name=name,
                sources=tuple(sorted(sources_by_owner[owner.name])),
            )
        )


def _is_gradient_storage_shared(builder: TraceBuilder, name: str, gradients: Sequence[str]) -> bool:
    """True if another of `gradients` is in the storage of the tensor `name`, or an operation other
    than a view reads that storage. Then nothing may be added to it in place."""
    storage = builder.storage_by_name[name]
    if any(builder.storage_by_name[other] == storage for other in gradients):
        return True
    others = {r.storage for n in builder.nodes for r in n.results} - {storage}
    return any(
        any(builder.storage_by_name.get(read) == storage for read in n.operand_names)
        and (not n.results or any(r.storage in others for r in n.results))
        for n in builder.nodes
    )


def _add_gradient_copy(
    builder: TraceBuilder, name: str, owner: Placeholder, stride: tuple[int, ...]
) -> str:
    """Add a contiguous clone of a gradient whose dimensions are in the order of `stride`, and a
    view of it in its owner's layout; return the name of this view."""
    shape = owner.tensor.shape
    order = sorted(range(len(shape)), key=lambda d: -stride[d])
    is_contiguous = stride == _contiguous_stride(shape)
    if not is_contiguous:
        name = _add_permuted_view(builder, f"ordered_{owner.name}", name, order)
    ordered_shape = builder.meta_by_name[name].shape
    copy = builder.new_dense_result(
        f"grad_{owner.name}", builder.meta_by_name[name], _contiguous_stride(ordered_shape)
    )
    clone = Node(
        name=copy.name,
        target="aten.clone.default",
        args=(Ref(name),),
        kwargs={"memory_format": Literal("memory_format", "contiguous_format")},
        results=(copy,),
        backward=True,
    )
    _insert_after_producers(builder, clone)
    if is_contiguous:
        return copy.name
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return _add_permuted_view(builder, f"layout_{owner.name}", copy.name, inverse)


def _add_permuted_view(builder: TraceBuilder, view: str, name: str, order: Sequence[int]) -> str:
    """Add the operation `view`, a view of the tensor `name` with its dimensions in this order;
    return its name."""
    meta = builder.meta_by_name[name]
    update = {
        "shape": tuple(meta.shape[d] for d in order),
        "stride": tuple(meta.stride[d] for d in order),
    }
    result = builder.new_view_result(view, meta.model_copy(update=update), name)
    node = Node(
        name=view,
        target="aten.permute.default",
        args=(Ref(name), tuple(order)),
        results=(result,),
        view=True,
        backward=True,
    )
    _insert_after_producers(builder, node)
    return view


def _insert_after_producers(builder: TraceBuilder, node: Node) -> None:
    """Insert a node after the last one that produces, or adds into, a tensor that it reads; at the
    start if none does."""
    read = set(referenced_names(node.args))
    last = max(
        (
            i
            for i, n in enumerate(builder.nodes)
            if any(r.name in read for r in n.results)
            or (n.target == ADD_INTO_TARGET and read & set(referenced_names(n.args)))
        ),
        default=-1,
    )
    builder.nodes.insert(last + 1, node)


def _contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _gradient_stride(owner: TensorMeta) -> tuple[int, ...]:
    """Return the stride that autograd gives the gradient of the parameter `owner`: the same if the
    parameter is dense, in any order of its dimensions, else a contiguous one."""
    step = 1
    for stride, size in sorted(zip(owner.stride, owner.shape, strict=True)):
        if size > 1:
            if stride != step:
                return _contiguous_stride(owner.shape)
            step *= size
    return owner.stride


def is_same_layout(
    shape: Sequence[int], stride: Sequence[int], other_stride: Sequence[int]
) -> bool:
    """True if two strides for this shape are equal in all dimensions larger than 1."""
    return all(a == b for a, b, size in zip(stride, other_stride, shape, strict=True) if size > 1)
