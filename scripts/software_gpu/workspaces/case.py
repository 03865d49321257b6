"""One call of an operator whose workspace is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

from remat.documents.records import TensorMeta


@dataclass(frozen=True)
class Case:
    """One call of an operator: `args` contain the metadata of tensors."""

    target: str
    args: tuple[object, ...]
    kwargs: dict[str, object] = field(default_factory=dict)


def tensor(
    *shape: int,
    dtype: str = "float32",
    order: tuple[int, ...] | None = None,
    stride: tuple[int, ...] | None = None,
    offset: int = 0,
    device: str = "cuda:0",
) -> TensorMeta:
    """Return the metadata of a dense tensor. `order` has the dimensions from the slowest to the
    fastest, by default as in `shape`; `stride` has the strides themselves."""
    if stride is None:
        strides, step = [0] * len(shape), 1
        for dim in reversed(order or range(len(shape))):
            strides[dim] = step
            step *= max(shape[dim], 1)
        stride = tuple(strides)
    return TensorMeta(dtype=dtype, shape=shape, stride=stride, offset=offset, device=device)
