"""Writes: operations `remat.write`, which call an operator that mutates a view of a buffer.

A model fills a buffer in parts: `buffer[:, :n] = x`, `torch.mm(a, b, out=part)`. Each such call is
one operation `remat.write`. It reads the old buffer, and returns the new one as another storage. If
the schedule frees the old buffer with the operation, the operator writes into its memory, as in
eager mode. If not, it writes into a copy.

The arguments are the buffer, the operator's target, the view that it writes into (shape, strides
and offset in elements), and the operator's other arguments. The operator's result is not used.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from remat.documents.arguments import Argument, Ref
from remat.documents.records import Node, Result, TensorMeta
from remat.documents.targets import WRITE_TARGET

if TYPE_CHECKING:
    from remat.documents.trace import Trace

_IntList = tuple[int, ...]


def is_write(node: Node) -> bool:
    """True if the operation is a `remat.write`."""
    return node.target == WRITE_TARGET


def written_buffer(node: Node) -> str:
    """Return the name of a write's buffer.

    Raises ValueError if the operation does not have the arguments of a write.
    """
    match node.args:
        case (Ref(name), str(), tuple(shape), tuple(stride), int(), *_):
            if len(shape) == len(stride) and all(type(n) is int for n in (*shape, *stride)):
                return name
    raise ValueError(f"operation {node.name} does not have the arguments of {WRITE_TARGET}")


def call_of_write(
    node: Node, metas: Mapping[str, TensorMeta]
) -> tuple[Node, Mapping[str, TensorMeta]]:
    """Return a write as the operation that it calls, with the metadata of the tensors.

    Cost models use it: a write costs as much as the operator's call for the view. The target is the
    functional variant (`add` for `add_`), the result is the view, and the view is also the first
    argument of an operator that mutates its first argument. Other operations are returned
    unchanged.
    """
    if not is_write(node):
        return node, metas
    buffer = metas[written_buffer(node)]
    _, target, shape, stride, offset, *others = node.args
    assert isinstance(target, str)
    assert isinstance(offset, int)
    part = TensorMeta(
        dtype=buffer.dtype,
        shape=_integers(shape),
        stride=_integers(stride),
        offset=offset,
        device=buffer.device,
    )
    name = f"part_of_{node.name}"
    namespace, operator, overload = target.split(".")
    writes_first_argument = operator.endswith("_")
    call = node.model_copy(
        update={
            "target": ".".join((namespace, operator.rstrip("_"), overload)),
            "args": (Ref(name), *others) if writes_first_argument else tuple(others),
            "results": (Result(name=name, tensor=part, storage=node.results[0].storage),),
        }
    )
    return call, ChainMap({name: part}, metas)  # type: ignore[arg-type]  # not changed


def check_write(trace: Trace, node: Node) -> None:
    """Raise ValueError unless a write has one result with the layout of its buffer."""
    name = written_buffer(node)
    before = trace.tensors[name]
    match node.results:
        case (Result(position=-1) as after,) if after.tensor == before:
            sizes_bytes = trace.storage_bytes
            if sizes_bytes[after.storage] == sizes_bytes[trace.storage_of[name]]:
                return
    raise ValueError(f"operation {node.name} must return one tensor with the layout of {name}")


def _integers(items: Argument) -> _IntList:
    assert isinstance(items, tuple)
    return tuple(item for item in items if isinstance(item, int))
