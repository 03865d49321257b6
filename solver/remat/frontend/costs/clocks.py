"""Clocks for operations that run: measured time, or time estimated by a roofline.

A block that cannot be captured is run and timed. If the costs of the planned blocks come from the
roofline of another device, its time must come from there, too: times of two devices must not be
added.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from remat.costs.roofline import Roofline, operation_seconds
from remat.documents.arguments import Ref
from remat.documents.records import Node, Result, TensorMeta
from remat.errors import DocumentError, TraceError
from remat.frontend.common.operators import argument_from_torch
from remat.frontend.common.pytree import tensors_in


class Clock(Protocol):
    """Gives the seconds of all operations since a fixed time."""

    def seconds(self) -> float:
        """Return the seconds so far."""
        ...


class _MeasuringClock:
    """The machine's clock, read after the GPUs are synchronized."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in devices if device.type == "cuda"]

    def seconds(self) -> float:
        for device in self._devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()


class _RooflineClock(TorchDispatchMode):
    """A mode that adds up the seconds of each operator, estimated by a roofline."""

    def __init__(self, roofline: Roofline) -> None:
        super().__init__()
        self._roofline = roofline
        self._seconds = 0.0

    def seconds(self) -> float:
        return self._seconds

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(func, OpOverload):
            self._seconds += _operator_seconds(func, args, kwargs or {}, result, self._roofline)
        return result


@contextmanager
def clock(roofline: Roofline | None, devices: Iterable[torch.device]) -> Iterator[Clock]:
    """Yield a clock for the operations inside of this context: estimated if `roofline` is given."""
    if roofline is None:
        yield _MeasuringClock(devices)
        return
    with _RooflineClock(roofline) as roofline_clock:
        yield roofline_clock


def _operator_seconds(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    roofline: Roofline,
) -> float:
    """Return the seconds of one call of an operator, estimated by a roofline; zero for a view.

    If the call cannot be written as a `Node`, or a formula fails for it, return the time to read
    and write its tensors.
    """
    metas: dict[str, TensorMeta] = {}
    names: dict[int, str] = {}

    def encode(item: object) -> Ref:
        if not isinstance(item, torch.Tensor):
            raise TraceError(f"an argument of {func} is a {type(item).__name__}")
        name = names.setdefault(id(item), f"t{len(names)}")
        metas[name] = _meta(item)
        return Ref(name)

    operands = tensors_in((args, kwargs))
    results = tensors_in(result)
    storages = {t.untyped_storage()._cdata for t in operands if _has_storage(t)}
    is_view = bool(results) and all(
        _has_storage(t) and t.untyped_storage()._cdata in storages for t in results
    )
    is_write = any(
        a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments
    )
    try:
        node = Node(
            name="timed",
            target=str(func),
            args=tuple(argument_from_torch(item, encode) for item in args),
            kwargs={key: argument_from_torch(item, encode) for key, item in kwargs.items()},
            results=tuple(
                Result(name=f"r{number}", tensor=_meta(t), storage=number)
                for number, t in enumerate(results)
            ),
            view=is_view and not is_write,
        )
        return operation_seconds(node, metas, roofline)
    except (DocumentError, TraceError, ValueError, RuntimeError):
        size_bytes = sum(t.nbytes for t in (*operands, *results) if _has_storage(t))
        return roofline.seconds(0, size_bytes, "float32")


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        device=str(tensor.device),
    )
