"""Recording of in-place writes into tensors that the step allocates.

Torch's functionalization replaces a write into a part of a buffer by a copy of the whole buffer. So
a capture records such a write below functionalization, as a call of `remat.write`.

Functionalization still replaces writes into inputs of the step, writes into several tensors at
once, and differentiable elementwise operators on a whole tensor, such as `relu_`. The latter then
are ordinary operations, which can be split and recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import OpOverload

from remat.errors import TraceError
from remat.frontend.capture.eager_kernels.overrides import kernels_registered
from remat.frontend.capture.operator_recorder import OperatorRecorder
from remat.frontend.capture.reading.constant_folding import count_write
from remat.frontend.common.operators import written_arguments
from remat.frontend.common.writes import Writer, writer_of

Tensor = torch.Tensor

_KEY = DispatchKey.Functionalize


@contextmanager
def writes_recorded(recorder: OperatorRecorder) -> Iterator[None]:
    """Within the context, record writes into tensors that the step allocates by `recorder`, not by
    functionalization."""
    writes = _FunctionalizedWrites(recorder)
    kernels = {
        (operator, _KEY): partial(writes.run, operator) for operator in _mutating_operators()
    }
    with kernels_registered(kernels):
        yield


class _FunctionalizedWrites:
    """Kernels of mutating operators for functional tensors: a write is recorded by `recorder`, or
    functionalized by torch's own kernel."""

    def __init__(self, recorder: OperatorRecorder) -> None:
        self._recorder = recorder
        self._scattered: dict[int, Tensor] = {}
        """Tensors with a functionalized write, by the address of the wrapper's storage. Their
        values are no longer views of one recorded tensor."""

    def run(self, operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Call a mutating operator: record its write into a tensor that the step allocates, or else
        let torch functionalize it."""
        writer = writer_of(operator)
        written = [t for t in written_arguments(operator, args, kwargs) if isinstance(t, Tensor)]
        for tensor in written:
            count_write(tensor)
        if writer is not None and len(written) == 1 and self._is_recorded(writer, written[0]):
            return self._record(operator, written[0], args, kwargs)
        for tensor in written:
            if torch._is_functional_tensor(tensor):
                self._scattered[tensor.untyped_storage()._cdata] = tensor
        return operator._op_dk(_KEY, *args, **kwargs)

    def _is_recorded(self, writer: Writer, target: Tensor) -> bool:
        if not torch._is_functional_tensor(target):
            return False
        if target.untyped_storage()._cdata in self._scattered:
            return False
        fake = _fake_of_functional(target)
        if not self._recorder.may_write(fake):
            return False
        is_elementwise = torch.is_grad_enabled() and _is_pointwise_in_place(writer.operator)
        return not is_elementwise or not self._recorder.is_whole(fake)

    def _record(
        self, operator: OpOverload, target: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        fake = _fake_of_functional(target)
        layout = fake.shape, fake.stride()
        inner_args = [_unwrapped_argument(item) for item in args]
        inner_kwargs = {key: _unwrapped_argument(item) for key, item in kwargs.items()}
        with (
            torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(_KEY)),
            self._recorder.write_recorded(operator, fake),
        ):
            operator(*inner_args, **inner_kwargs)
        if layout != (fake.shape, fake.stride()):
            raise TraceError(
                f"{operator} resizes the tensor passed as `out`; pass one of the result's shape, "
                f"{tuple(fake.shape)}"
            )
        return target if operator._schema.returns else None


@cache
def _mutating_operators() -> tuple[OpOverload, ...]:
    """Return all operators of ATen that write into their arguments."""
    operators: list[OpOverload] = []
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        packet_name, _, overload = name.partition(".")
        if namespace != "aten":
            continue
        packet = getattr(torch.ops.aten, packet_name, None)
        operator = getattr(packet, overload or "default", None)
        if isinstance(operator, OpOverload) and operator._schema.is_mutable:
            operators.append(operator)
    return tuple(operators)


@cache
def _is_pointwise_in_place(operator: OpOverload) -> bool:
    """True for an in-place operator whose functional variant is pointwise."""
    name = operator.overloadpacket.__name__.removesuffix("_")
    packet = getattr(torch.ops.aten, name, None)
    functional = getattr(packet, operator._overloadname, None)
    return isinstance(functional, OpOverload) and torch.Tag.pointwise in functional.tags


def _fake_of_functional(wrapper: Tensor) -> Tensor:
    """Return the fake tensor that a functional tensor wraps, after pending writes into its
    views."""
    torch._sync(wrapper)
    return torch._from_functional_tensor(wrapper)


def _unwrapped_argument(item: Any) -> Any:
    if isinstance(item, Tensor) and torch._is_functional_tensor(item):
        return _fake_of_functional(item)
    if isinstance(item, (list, tuple)):
        return [_unwrapped_argument(inner) for inner in item]
    return item
