"""The operation `remat.write`: calls an operator that writes into a view of a tensor or of its
copy. See `remat.documents.writes`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from remat.documents.base import NAMESPACES
from remat.documents.targets import WRITE_TARGET
from remat.errors import DocumentError
from remat.frontend.common.operators import find_operator, register_operator, written_parameters


class Writer(NamedTuple):
    """An operator that writes into one tensor: its first argument, or the one named `out_name`."""

    operator: OpOverload
    out_name: str


def writer_of(operator: OpOverload) -> Writer | None:
    """Return the `Writer` of an operator that writes into one tensor: its first argument, or one
    that is passed by keyword. None if it writes into none or several or a list, changes shapes or
    strides, or samples random numbers."""
    arguments = operator._schema.arguments
    written = [arguments[position] for position, _ in written_parameters(operator)]
    other_tags = {torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded}
    if len(written) != 1 or str(written[0].type) != "Tensor" or other_tags & {*operator.tags}:
        return None
    if written[0] is arguments[0] or written[0].name == arguments[0].name:
        return Writer(operator, "")
    return Writer(operator, written[0].name) if written[0].kwarg_only else None


def resolve_writer(target: str, namespaces: Collection[str] = NAMESPACES) -> Writer:
    """Return the `Writer` of the operator that a target names.

    Raises `DocumentError` if no such operator exists, or `writer_of` does not accept it.
    """
    operator = find_operator(target, namespaces)
    writer = writer_of(operator)
    if writer is None:
        raise DocumentError(f"{target} is no operator that writes into one tensor")
    return writer


@cache
def _cached_writer(target: str) -> Writer:
    """Return the `Writer` of a target whose namespace was checked before."""
    return resolve_writer(target, (target.partition(".")[0],))


def write(
    buffer: torch.Tensor,
    target: str,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """Call the operator `target` so that it writes into the view of `buffer` with this shape,
    stride and offset. Return the buffer."""
    operator, out_name = _cached_writer(target)
    part = buffer.as_strided(shape, stride, offset)
    if out_name:
        kwargs[out_name] = part
        operator(*args, **kwargs)
    else:
        operator(part, *args, **kwargs)
    return buffer


def write_into_copy(buffer: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Call `write` for a copy of the buffer, and return the copy."""
    return write(buffer.clone(), *args, **kwargs)


register_operator(WRITE_TARGET, write_into_copy)
