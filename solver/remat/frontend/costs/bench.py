"""`Bench`: runs single operations by themselves on one device, on tensors made for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from remat.costs.roofline import traffic_bytes
from remat.documents.records import Node, TensorMeta
from remat.errors import RematError, one_line
from remat.frontend.common.grad_mode import NEEDS_GRAD_MODE, with_grad_mode
from remat.frontend.common.operators import resolve
from remat.frontend.costs.cache import Cost
from remat.frontend.costs.tensors import Operands, operand_bytes
from remat.frontend.costs.timers import time_cpu, time_cuda
from remat.frontend.memory.device_memory import free_bytes

_COPY_BYTES = 64 << 20

MOST_COPIES = 32
"""Of an operation's operands: more than that are small, and take less time than their launch."""

MEMORY_SHARE = 0.9
"""Of the free memory, what operands and results may take; the rest is for workspaces and others."""


def copies(operands: int, needed: int, l2: int, free: int | None) -> int:
    """How many sets of operands to take by turns: as many as twice the cache holds, within the
    memory, up to `MOST_COPIES`."""
    wanted = -(-2 * l2 // max(operands, 1)) + 1 if operands < 2 * l2 else 1
    if free is not None:
        wanted = min(wanted, int(MEMORY_SHARE * free) // max(needed, 1))
    return max(1, min(wanted, MOST_COPIES))


def l2_bytes(device: torch.device) -> int:
    """The size of a CUDA device's cache; that of the largest where torch does not tell."""
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20


class Bench:
    """Runs operations of `nodes`, whose tensors are at the device type `home`, on `device`."""

    def __init__(
        self,
        nodes: Iterable[Node],
        metas: Mapping[str, TensorMeta],
        home: str,
        device: torch.device,
    ) -> None:
        self._metas = metas
        self._operands = Operands(metas, home, device, nodes)
        self._device = device
        self._copy_s_per_byte: float | None = None

    def cost(self, node: Node) -> Cost:
        """What it takes."""
        if node.target.startswith("remat."):
            # Our helpers move tensors (save, restore, accumulate) and may act on the model's own
            # state, so they are priced by the bytes that they move and never run here.
            return Cost(traffic_bytes(node, self._metas) * self.copy_s_per_byte(), 0)
        runs = [node, *self._operands.forwards(node)]
        needed = sum(operand_bytes(run, self._metas) for run in runs)
        free = free_bytes(self._device)
        if free is not None and needed > MEMORY_SHARE * free:
            raise MemoryError(f"out of memory: needs {needed:,} bytes")
        if self._device.type == "cpu":
            return time_cpu(self._run(node))
        sets = copies(operand_bytes(node, self._metas), needed, l2_bytes(self._device), free)
        others = [self._run(node) for _ in range(sets - 1)]
        return time_cuda(self._run(node), self._device, others)

    def _run(self, node: Node) -> Callable[[], object]:
        """A call of an operation on tensors of its own."""
        operator = resolve(node.target)
        args, kwargs = self._operands.make(node, operator)
        if node.target in NEEDS_GRAD_MODE:
            return lambda: with_grad_mode(operator, args, kwargs)
        return lambda: operator(*args, **kwargs)

    def tune(self, node: Node) -> None:
        """Run an operation once, for what its library remembers of that."""
        self._run(node)()

    def copy_s_per_byte(self) -> float:
        """Seconds for each byte read or written by a large `copy_`."""
        if self._copy_s_per_byte is None:
            source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=self._device)
            into = torch.zeros_like(source)
            cpu = self._device.type == "cpu"
            run: Callable[[], object] = lambda: into.copy_(source)  # noqa: E731
            cost = time_cpu(run) if cpu else time_cuda(run, self._device)
            self._copy_s_per_byte = cost.cost_s / (2 * _COPY_BYTES)
        return self._copy_s_per_byte

    def release(self, node: Node, error: Exception) -> None:
        """After a failure: give back what the allocator has kept.

        Raises `RematError` where the device does not answer any more."""
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        except Exception as broken:
            raise RematError(
                f"measuring {node.target} (operation {node.name}) broke the CUDA context: "
                f"{one_line(error)}; then {one_line(broken)}. Nothing runs on the device in this "
                "process any more: start another, and report the operation"
            ) from error
