"""Operations that write into memory which is there: `remat.write`, and overloads with `out=`.

A model fills a buffer in parts: `buffer[:, :n] = x`, `torch.mm(a, b, out=part)`. Each such call is
one operation `remat.write`, which calls an operator that mutates a view of a buffer. It reads the
old buffer, and returns the new one as another storage. If the schedule frees the old buffer with
the operation, the operator writes into its memory, as in eager mode. If not, it writes into a copy.
The arguments are the buffer, the operator's target, the view that it writes into (shape, strides
and offset in elements), and the operator's other arguments. The operator's result is not used.

Elementwise operations of the backward write over their first argument, if nothing reads it later.
Such an operation has an overload with `out=`, and `out` may be the argument itself: each element of
the result depends on the same element of the argument. The result is the same, bit for bit.
Operations of the forward are left as they are: recomputing one needs its original arguments.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import NamedTuple

from remat.documents.arguments import Argument, Ref
from remat.documents.records import Node, Result, TensorMeta
from remat.documents.targets import WRITE_TARGET

_IntList = tuple[int, ...]


class OutVariant(NamedTuple):
    """The overload of an operation that writes its result into the tensor passed as `out_name`."""

    target: str
    out_name: str


OUT_VARIANTS = {
    "aten.abs.default": OutVariant("aten.abs.out", "out"),
    "aten.add.Tensor": OutVariant("aten.add.out", "out"),
    "aten.cos.default": OutVariant("aten.cos.out", "out"),
    "aten.div.Tensor": OutVariant("aten.div.out", "out"),
    "aten.elu_backward.default": OutVariant("aten.elu_backward.grad_input", "grad_input"),
    "aten.exp.default": OutVariant("aten.exp.out", "out"),
    "aten.gelu_backward.default": OutVariant("aten.gelu_backward.grad_input", "grad_input"),
    "aten.hardsigmoid_backward.default": OutVariant(
        "aten.hardsigmoid_backward.grad_input", "grad_input"
    ),
    "aten.hardtanh_backward.default": OutVariant("aten.hardtanh_backward.grad_input", "grad_input"),
    "aten.log.default": OutVariant("aten.log.out", "out"),
    "aten.mul.Tensor": OutVariant("aten.mul.out", "out"),
    "aten.neg.default": OutVariant("aten.neg.out", "out"),
    "aten.pow.Tensor_Scalar": OutVariant("aten.pow.Tensor_Scalar_out", "out"),
    "aten.reciprocal.default": OutVariant("aten.reciprocal.out", "out"),
    "aten.rsqrt.default": OutVariant("aten.rsqrt.out", "out"),
    "aten.sgn.default": OutVariant("aten.sgn.out", "out"),
    "aten.sigmoid.default": OutVariant("aten.sigmoid.out", "out"),
    "aten.sigmoid_backward.default": OutVariant("aten.sigmoid_backward.grad_input", "grad_input"),
    "aten.silu_backward.default": OutVariant("aten.silu_backward.grad_input", "grad_input"),
    "aten.sin.default": OutVariant("aten.sin.out", "out"),
    "aten.softplus_backward.default": OutVariant("aten.softplus_backward.grad_input", "grad_input"),
    "aten.sqrt.default": OutVariant("aten.sqrt.out", "out"),
    "aten.sub.Tensor": OutVariant("aten.sub.out", "out"),
    "aten.tanh.default": OutVariant("aten.tanh.out", "out"),
    "aten.tanh_backward.default": OutVariant("aten.tanh_backward.grad_input", "grad_input"),
}
"""Variants with `out=` that torch computes elementwise, without a temporary.

The result has the memory layout of the first argument. Operators whose result takes its layout from
another argument, such as `threshold_backward`, are left out. A trace records the layout from a fake
tensor, and a kernel may choose another one: overwriting a different argument would change the
result's strides, and with them the order in which a later reduction adds.
"""


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
        shape=_integer_items(shape),
        stride=_integer_items(stride),
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


def _integer_items(items: Argument) -> _IntList:
    """Return the integers of an argument that is a tuple of them."""
    assert isinstance(items, tuple)
    return tuple(item for item in items if isinstance(item, int))
