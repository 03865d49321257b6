"""Memory reuse: elementwise operations of the backward write over their first argument, if nothing
reads it later.

Such an operation has an overload with `out=`, and `out` may be the argument itself: each element of
the result depends on the same element of the argument. The result is the same, bit for bit.
Operations of the forward are left as they are: recomputing one needs its original arguments.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, NamedTuple

from remat.documents.arguments import Ref
from remat.documents.targets import ACCUMULATE_TARGET
from remat.documents.writes import is_write, written_buffer

if TYPE_CHECKING:
    from remat.documents.records import Node
    from remat.documents.trace import Trace


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


def reusable_arguments(
    trace: Trace,
    retained: Container[int],
    arriving: Iterable[int] = (),
    *,
    writes_only: bool = False,
) -> dict[str, str]:
    """Map each operation that may write its result over its first argument to that argument, by
    names.

    The argument is a temporary of the backward: it is not a parameter, saved tensor, tangent,
    output or gradient (`retained`), and `AccumulateGrad` has not read it, since that may keep it as
    `.grad`. The operation is its last reader in the trace. A schedule in which another operation
    reads it later overwrites nothing there. `arriving` are storages that are copied back from
    the host: the copy is a temporary of the backward, too.

    A write (`remat.documents.writes`) may overwrite its buffer under the same conditions; in the
    forward, an operation of the forward must have produced the buffer. With `writes_only`, only
    writes overwrite an argument.
    """
    temporaries = set(arriving)
    of_forward: set[int] = set()
    last_reader: dict[int, str] = {}
    for node, operands in zip(trace.nodes, trace.operands, strict=True):
        if node.view:
            continue
        read = {trace.storage_of[name] for name in operands}
        last_reader.update(dict.fromkeys(read, node.name))
        of_phase = temporaries if node.backward else of_forward
        of_phase.update(r.storage for r in node.results if r.storage not in retained)
        if node.target == ACCUMULATE_TARGET:
            temporaries -= read
    arguments: dict[str, str] = {}
    for node in trace.nodes:
        argument = None
        if is_write(node):
            argument = written_buffer(node)
        elif node.backward and node.target in OUT_VARIANTS and not writes_only:
            argument = _overwritable_first_argument(trace, node)
        if argument is None:
            continue
        storage = trace.storage_of[argument]
        is_temporary = storage in (temporaries if node.backward else of_forward)
        if is_temporary and last_reader[storage] == node.name:
            arguments[node.name] = argument
    return arguments


def _overwritable_first_argument(trace: Trace, node: Node) -> str | None:
    """Return the first argument if it has the dtype, shape, strides and storage size of the result,
    and a storage that no other argument shares. Complex tensors may be lazily conjugated views."""
    match node.args, node.results:
        case (Ref(name), *_), (result,):
            meta, storage = trace.tensors[name], trace.storage_of[name]
            others = {*node.operand_names} - {name}
            is_alike = (
                (meta.dtype, meta.shape, meta.stride)
                == (result.tensor.dtype, result.tensor.shape, result.tensor.stride)
                and not meta.dtype.startswith("complex")
                and trace.storage_bytes[storage] == trace.storage_bytes[result.storage]
                and all(trace.storage_of[other] != storage for other in others)
            )
            return name if is_alike else None
    return None
