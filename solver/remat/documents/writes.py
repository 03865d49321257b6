"""Writes: operations of a trace that call an operator which writes into a tensor.

A model's code fills a buffer in parts: `buffer[:, :n] = x`, `torch.mm(a, b, out=part)`. Each such
call is one operation `remat.write`. It reads the buffer before the call, and its result is the
buffer after it, in a storage of its own. If a schedule frees the former with the operation, the
call writes into that memory, as in eager mode; if not, into a copy.

The arguments are the buffer, the operator's target, the part that it writes (shape, strides and
offset in elements), and the operator's other arguments. The operator's result is not used.
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
    """True if an operation calls an operator that writes into a tensor."""
    return node.target == WRITE_TARGET


def written_buffer(node: Node) -> str:
    """Return the name of the tensor that a write reads, and writes into unless it is read later.

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
    """Return the call of the operator as an operation, whose first argument and result are the part
    that it writes, and the metadata of its tensors. Any other operation is returned as it is.

    The write costs what this call costs. Its target names the functional operator (`add` for
    `add_`), which the formulas of the cost models know.
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
    """Raise ValueError unless the operation has a buffer and one result of the same layout."""
    name = written_buffer(node)
    before = trace.tensors[name]
    match node.results:
        case (Result(position=-1) as after,) if after.tensor == before:
            sizes_bytes = trace.storage_bytes
            if sizes_bytes[after.storage] == sizes_bytes[trace.storage_of[name]]:
                return
    raise ValueError(f"operation {node.name} returns another tensor than the one it writes into")


def _integers(items: Argument) -> _IntList:
    assert isinstance(items, tuple)
    return tuple(item for item in items if isinstance(item, int))
