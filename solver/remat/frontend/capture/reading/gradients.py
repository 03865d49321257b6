"""Gradients as autograd wants them.

Autograd takes a gradient over without a copy only if nothing else owns its memory and it is laid
out like its parameter. Where that is not so, the copy is made in the graph, where the plan sees it.
The gradients of a parameter's several names (tied weights) are summed in place, as autograd does.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat.documents.arguments import Literal, Ref, refs
from remat.documents.records import Gradient, Node, Placeholder, TensorMeta
from remat.documents.trace import ADD_INTO
from remat.frontend.capture.reading.trace_builder import Draft


def own_gradients(draft: Draft, found: Sequence[tuple[Placeholder, str]]) -> None:
    """Give each placeholder with gradients (pairs of owner and tensor) one gradient of its own."""
    taken = {draft.storage_of[o.name] for o in draft.outputs}
    taken |= {p.storage for p in draft.placeholders}
    made_at = {r.name: i for i, n in enumerate(draft.nodes) for r in n.results}
    names_of: dict[str, list[str]] = {}
    for owner, name in found:
        names_of.setdefault(owner.name, []).append(name)

    def elsewhere(owner: str) -> list[str]:
        return [name for other, names in names_of.items() if other != owner for name in names]

    for owner in draft.placeholders:
        if owner.name not in names_of:
            continue
        name, *others = sorted(names_of[owner.name], key=lambda n: made_at.get(n, -1))
        stride = _expected_stride(owner.tensor)
        meta = draft.meta_of[name]
        is_shared = others and _is_read_otherwise(draft, name, [*others, *elsewhere(owner.name)])
        fits = same_layout(meta.shape, meta.stride, stride)
        if draft.storage_of[name] in taken or is_shared or not fits:
            name = _copy(draft, name, owner, stride)
        taken.add(draft.storage_of[name])
        for number, other in enumerate(others):
            total = Node(
                name=f"tied_{owner.name}_{number}",
                target=ADD_INTO,
                args=(Ref(name), Ref(other)),
                backward=True,
                recomputable=False,
            )
            _insert(draft, total)
        draft.gradients.append(Gradient(placeholder=owner.name, name=name))


def _is_read_otherwise(draft: Draft, name: str, gradients: Sequence[str]) -> bool:
    """Whether an operation reads this memory, or one of these gradients is there, too: then nothing
    may be added to it in place."""
    storage = draft.storage_of[name]
    if any(draft.storage_of[other] == storage for other in gradients):
        return True
    made = {r.storage for n in draft.nodes for r in n.results} - {storage}
    return any(
        any(draft.storage_of.get(read) == storage for read in (*refs(n.args), *refs(n.kwargs)))
        and (not n.results or any(r.storage in made for r in n.results))
        for n in draft.nodes
    )


def _copy(draft: Draft, name: str, owner: Placeholder, stride: tuple[int, ...]) -> str:
    copy = draft.fresh_result(f"grad_{owner.name}", draft.meta_of[name], stride)
    dense = stride == _contiguous(owner.tensor.shape)
    clone = Node(
        name=copy.name,
        target="aten.clone.default",
        args=(Ref(name),),
        kwargs={
            "memory_format": Literal(
                "memory_format", "contiguous_format" if dense else "channels_last"
            )
        },
        results=(copy,),
        backward=True,
    )
    _insert(draft, clone)
    return copy.name


def _insert(draft: Draft, node: Node) -> None:
    """Put a node behind the last one that makes, or writes into, what it reads."""
    needed = set(refs(node.args))
    last = max(
        (
            i
            for i, n in enumerate(draft.nodes)
            if any(r.name in needed for r in n.results)
            or (n.target == ADD_INTO and needed & set(refs(n.args)))
        ),
        default=-1,
    )
    draft.nodes.insert(last + 1, node)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def _expected_stride(owner: TensorMeta) -> tuple[int, ...]:
    """The stride that autograd's gradient layout contract asks for: the parameter's own where that
    is contiguous or channels-last, else contiguous."""
    n = owner.shape
    if len(n) == 4:
        channels_last = (n[1] * n[2] * n[3], 1, n[1] * n[3], n[1])
        if owner.stride == channels_last and owner.stride != _contiguous(n):
            return channels_last
    return _contiguous(n)


def same_layout(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Equal strides, where sizes of one do not matter."""
    return all(a == b for a, b, size in zip(one, other, shape, strict=True) if size > 1)
