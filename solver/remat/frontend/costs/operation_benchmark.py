"""`OperationBenchmark`: measures single operations on one device, on tensors created for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from remat.costs.roofline import traffic_bytes
from remat.documents.arguments import Ref
from remat.documents.records import Node, TensorMeta
from remat.documents.targets import ADD_PRODUCT_TARGET
from remat.documents.writes import call_of_write, is_write
from remat.errors import RematError, one_line
from remat.frontend.common.operators import MEASURABLE_NAMESPACES, Operator, resolve_operator
from remat.frontend.common.torch_modes import NEEDS_GRAD_MODE, run_with_grad_mode
from remat.frontend.common.writes import resolve_writer
from remat.frontend.costs.cost_cache import MeasuredCost
from remat.frontend.costs.cost_key import environment_key
from remat.frontend.costs.operands import OperandFactory, operand_and_result_bytes
from remat.frontend.costs.timers import measure_on_cpu, measure_on_cuda
from remat.frontend.memory.device_memory import free_bytes, run_in_backward

_COPY_BYTES = 64 << 20
_MIN_COPY_BYTES = 64 << 10

_copy_seconds: dict[str, float] = {}
"""Seconds that a copy of `_COPY_BYTES` takes per byte, by the conditions of `cost_key`: the numbers
of pieces that are tried for a step all need it."""

MAX_OPERAND_SETS = 32
"""Upper limit of the sets of operands of one operation: operands that need more sets are small, and
their operation takes less time than its launch."""

MAX_MEMORY_FRACTION = 0.9
"""The fraction of the free memory that operands and results may take; the rest is for workspaces
and other processes."""


class AboveMemoryLimit(Exception):
    """The tensors of an operation need more memory than the limit of its measurement."""


def operand_set_count(
    operand_bytes: int,
    required_bytes: int,
    cache_bytes: int,
    available_bytes: int | None,
    limit_bytes: int | None = None,
) -> int:
    """Return the number of operand sets to cycle through, so that no call finds its operands in the
    L2 cache. The sets together have twice the cache's size, within the available memory,
    `limit_bytes` and `MAX_OPERAND_SETS`.

    A call needs `required_bytes` of memory, with its results and the forwards that it depends on.
    """
    count = 1
    if operand_bytes < 2 * cache_bytes:
        count = -(-2 * cache_bytes // max(operand_bytes, 1)) + 1
    if available_bytes is not None:
        count = min(count, int(MAX_MEMORY_FRACTION * available_bytes) // max(required_bytes, 1))
    if limit_bytes is not None:
        count = min(count, limit_bytes // max(required_bytes, 1))
    return max(1, min(count, MAX_OPERAND_SETS))


def l2_cache_bytes(device: torch.device) -> int:
    """Return the size of a CUDA device's L2 cache; 64 MiB, a large one, where torch does not report
    it."""
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20


def only_moves_bytes(node: Node) -> bool:
    """True for an operation of remat whose time is the time to move its bytes: all except
    `add_product` and `write`, which compute as well."""
    computes = node.target == ADD_PRODUCT_TARGET or is_write(node)
    return node.target.startswith("remat.") and not computes


def _written_views(node: Node, metas: Mapping[str, TensorMeta]) -> Iterable[tuple[str, TensorMeta]]:
    """Return the name and metadata of the view that a `remat.write` writes into."""
    call, _ = call_of_write(node, metas)
    return [(result.name, result.tensor) for result in call.results]


class OperationBenchmark:
    """Measures operations of `nodes` on `device`.

    `metas` has the shapes and layouts of their tensors, which the trace has on devices of the type
    `trace_device_type`. The tensors of a measurement take at most `limit_bytes`.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        metas: Mapping[str, TensorMeta],
        trace_device_type: str,
        device: torch.device,
        limit_bytes: int | None = None,
    ) -> None:
        nodes = list(nodes)
        parts = {
            name: m for node in nodes if is_write(node) for name, m in _written_views(node, metas)
        }
        self._metas = {**metas, **parts}
        self._limit_bytes = limit_bytes
        self._operands = OperandFactory(self._metas, trace_device_type, device, nodes)
        self._device = device

    def measure(self, node: Node) -> MeasuredCost:
        """Return the measured cost of an operation. An operation of remat that only moves bytes
        does not run: its cost is the time of a copy of as many bytes.

        Raises `MemoryError` if the operands do not fit, `AboveMemoryLimit` if they exceed the
        limit, and any error of the operation.
        """
        if only_moves_bytes(node):
            # These may change the model's state (save, restore), so they never run here.
            return MeasuredCost(traffic_bytes(node, self._metas) * self.copy_s_per_byte(), 0)
        operations = [node, *self._operands.required_forwards(node)]
        required_bytes = sum(operand_and_result_bytes(n, self._metas) for n in operations)
        available_bytes = free_bytes(self._device)
        if available_bytes is not None and required_bytes > MAX_MEMORY_FRACTION * available_bytes:
            raise MemoryError(f"out of memory: needs {required_bytes:,} bytes")
        if self._limit_bytes is not None and required_bytes > self._limit_bytes:
            raise AboveMemoryLimit(f"needs {required_bytes:,} bytes")
        if self._device.type == "cpu":
            return measure_on_cpu(self.prepare(node))
        set_count = operand_set_count(
            operand_and_result_bytes(node, self._metas),
            required_bytes,
            l2_cache_bytes(self._device),
            available_bytes,
            self._limit_bytes,
        )
        other_calls = [self.prepare(node) for _ in range(set_count - 1)]
        return measure_on_cuda(self.prepare(node), self._device, other_calls)

    def prepare(self, node: Node) -> Callable[[], object]:
        """Return a function that runs an operation on newly created operands; for a `remat.write`,
        the operator that it calls."""
        if is_write(node):
            operator, node = self._write_call(node)
        else:
            operator = resolve_operator(node.target, MEASURABLE_NAMESPACES)
        args, kwargs = self._operands.create_arguments(node, operator)
        if node.target in NEEDS_GRAD_MODE:
            return lambda: run_with_grad_mode(operator, args, kwargs)
        return lambda: operator(*args, **kwargs)

    def _write_call(self, node: Node) -> tuple[Operator, Node]:
        """Return the operator of a `remat.write`, and its call with the view as an argument."""
        writer = resolve_writer(str(node.args[1]))
        call, _ = call_of_write(node, self._metas)
        if writer.out_name:
            part = Ref(call.results[0].name)
            call = call.model_copy(update={"kwargs": {**call.kwargs, writer.out_name: part}})
        return writer.operator, call

    def autotune(self, node: Node) -> None:
        """Run an operation on each thread of a step, so that its library selects an algorithm for
        it: cuDNN's choice belongs to a thread, and the backward, with its recomputations, has its
        own."""
        call = self.prepare(node)
        call()
        run_in_backward(call, self._device)

    def copy_s_per_byte(self) -> float:
        """Return the seconds of a `copy_` per byte read or written. It is measured once in this
        process with a tensor of `_COPY_BYTES`, or of half of the memory limit if that is
        smaller."""
        size_bytes = _COPY_BYTES
        if self._limit_bytes is not None:
            size_bytes = min(size_bytes, max(_MIN_COPY_BYTES, self._limit_bytes // 2))
        conditions = repr((environment_key(self._device), size_bytes))
        if conditions not in _copy_seconds:
            source = torch.zeros(size_bytes, dtype=torch.uint8, device=self._device)
            destination = torch.zeros_like(source)
            is_cpu = self._device.type == "cpu"
            copy: Callable[[], object] = lambda: destination.copy_(source)  # noqa: E731
            cost = measure_on_cpu(copy) if is_cpu else measure_on_cuda(copy, self._device)
            _copy_seconds[conditions] = cost.cost_s / (2 * size_bytes)
        return _copy_seconds[conditions]

    def recover(self, node: Node, error: Exception) -> None:
        """Free the allocator's cached memory of a GPU after `error`, the failure of an operation;
        nothing on a CPU.

        Raises `RematError` if the failure broke the CUDA context.
        """
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        except Exception as context_error:
            raise RematError(
                f"measuring {node.target} (operation {node.name}) broke the CUDA context: "
                f"{one_line(error)}; then {one_line(context_error)}. This process cannot use the "
                "device any more: start another one, and report the operation"
            ) from error
