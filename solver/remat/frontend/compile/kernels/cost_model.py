"""What regions cost: kernels by what they move, calls of libraries as measured.

A kernel that a compiler makes reads and writes its tensors once, so it costs what a copy of as many
bytes does on this device, which is measured at a few sizes; or, on CPUs, its arithmetic, where that
takes longer: exponentials and their kin are measured, random numbers and truth values are counted.
Calls of libraries (matrix products, convolutions, attention) are measured, each distinct one once.
All measurements are kept in the cost cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from remat.costs.pricing import Priced
from remat.documents.arguments import Argument, Ref
from remat.documents.records import Node, Result, TensorMeta
from remat.errors import TraceError
from remat.frontend.common.operators import encode_argument
from remat.frontend.compile.joint.fx_utils import (
    FUNCTIONS,
    elements,
    is_draw,
    is_work,
    node_bytes,
    tensors,
)
from remat.frontend.compile.joint.joint_graph import Joint
from remat.frontend.compile.joint.symbolic_sizes import largest
from remat.frontend.compile.kernels.cpu_costs import counted_s, scalars_s
from remat.frontend.compile.kernels.fusion_groups import Region
from remat.frontend.compile.kernels.inline_producers import ends_of
from remat.frontend.costs.cache import CostCache
from remat.frontend.costs.operations import measure_operations

MEASURE_S = 5.0
"""Somebody waits for the first step: what is not measured by then is estimated."""

_MEASURED = frozenset({"aten", "prims"})
"""Namespaces of operations that may run on made-up tensors."""

_FUNCTION_BYTES = 1 << 18
"""Of a tensor in cache."""

_SMALLEST_BYTES = 1 << 12


class Price(NamedTuple):
    """Seconds, and bytes that calls of libraries hold while they run."""

    cost_s: float
    workspace_bytes: int = 0


class Prices:
    """Of the regions of a joint graph. Without `fused`, each operation of a kernel costs what it
    would by itself: for comparison."""

    def __init__(self, joint: Joint, *, fused: bool = True) -> None:
        self._joint = joint
        self._fused = fused or joint.kernels is None
        self._device = _device(joint.calls)
        self._copies: dict[int, float] = {}
        self._functions: dict[str, float] = {}
        self._cache = CostCache()

    def __call__(self, region: Region, moved_bytes: int) -> Price:
        called = [n for n in region.nodes if n.name in self._called]
        calls = [self._called[n.name] for n in called]
        others = [n for n in region.all_nodes if is_work(n) and n.name not in self._called]
        cost_s = sum(priced.cost_s for priced in calls)
        if others and self._fused:
            work_s = sum(map(self._arithmetic_s, others)) + self._shared(scalars_s(region))
            cost_s += max(self._copy_s(moved_bytes), work_s)
        else:
            cost_s += sum(map(self._alone_s, others))
        held = [self._scratch.get(n, self._called[n.name].workspace_bytes) for n in called]
        held += [self._scratch.get(n, 0) for n in region.written if n.name not in self._called]
        # What a sum reads is drawn by a loop of its own, and written.
        drawn = (n for n in region.nodes if is_draw(n) and ends_of(n, region))
        return Price(cost_s, max(held, default=0) + sum(map(node_bytes, drawn)))

    def _alone_s(self, node: fx.Node) -> float:
        moved_bytes = node_bytes(node) + sum(map(node_bytes, node.all_input_nodes))
        work_s = self._shared(counted_s([node], [node], node.all_input_nodes))
        return max(self._copy_s(moved_bytes), self._arithmetic_s(node) + work_s)

    def _arithmetic_s(self, node: fx.Node) -> float:
        """Of an operation in a kernel, on CPUs; on GPUs it hides behind the memory."""
        if self._device.type != "cpu" or self._joint.kernels is None:
            return 0.0
        target, made = str(node.target), sum(map(elements, tensors(node)))
        return made * self._function_s(target) if target in FUNCTIONS else 0.0

    def _shared(self, core_s: float) -> float:
        """Of one core's time in Inductor's code, what all of them take."""
        return core_s / torch.get_num_threads() if self._joint.kernels is not None else 0.0

    def _function_s(self, target: str) -> float:
        """Seconds for a number, beside reading and writing it."""
        if target not in self._functions:
            size = _FUNCTION_BYTES // 4
            meta = self._flat("float32", size)
            alone_s = self._measured_alone(target, meta) - self._whole_copy_s(2 * _FUNCTION_BYTES)
            self._functions[target] = max(0.0, alone_s) / size
        return self._functions[target]

    # -- what is measured -----------------------------------------------------------------------

    @cached_property
    def _called(self) -> dict[str, Priced]:
        """Calls of libraries by name: those of the forward first, which may run again."""
        nodes: list[Node] = []
        metas: dict[str, TensorMeta] = {}
        for node in self._joint.calls:
            if _may_be_measured(node) and not self._joint.is_fused(node):
                try:
                    nodes.append(record_of(node, metas, backward=self._joint.is_backward(node)))
                except (TraceError, ValueError):
                    continue  # it has an argument or a tensor that is no data: counted as a copy
        return self._measured(nodes, metas)

    @cached_property
    def _scratch(self) -> dict[fx.Node, int]:
        """Of calls of libraries, in the layouts that Inductor chose for them, and of what its own
        kernels write."""
        found: dict[fx.Node, int] = {}
        for kernel in self._joint.kernels or ():
            if kernel.scratch_bytes is not None:
                # One that only changes a tensor writes none of a name of its own.
                made = kernel.written or kernel.parts
                calls = [n for n in kernel.parts if not self._joint.is_fused(n)]
                for node in (*made, *calls):
                    found[node] = max(kernel.scratch_bytes, found.get(node, 0))
        return found

    def _copy_s(self, moved_bytes: int) -> float:
        """Seconds of a copy that reads and writes so many bytes, between two measured sizes."""
        below = max(_SMALLEST_BYTES, 1 << max(0, moved_bytes.bit_length() - 1))
        share = max(0.0, moved_bytes / below - 1)
        return (1 - share) * self._whole_copy_s(below) + share * self._whole_copy_s(2 * below)

    def _whole_copy_s(self, moved_bytes: int) -> float:
        if moved_bytes not in self._copies:
            meta = self._flat("uint8", moved_bytes // 2)
            self._copies[moved_bytes] = self._measured_alone("aten.clone.default", meta)
        return self._copies[moved_bytes]

    def _flat(self, dtype: str, size: int) -> TensorMeta:
        return TensorMeta(dtype=dtype, shape=(size,), stride=(1,), device=str(self._device))

    def _measured_alone(self, target: str, meta: TensorMeta) -> float:
        """Seconds of an operation from one such tensor to another."""
        result = Result(name="y", tensor=meta, storage=0)
        node = Node(name="y", target=target, args=(Ref("x"),), results=(result,))
        return self._measured([node], {"x": meta, "y": meta})["y"].cost_s

    def _measured(self, nodes: Sequence[Node], metas: dict[str, TensorMeta]) -> dict[str, Priced]:
        return measure_operations(
            nodes, metas, self._device, self._cache, _silent, home=self._device.type,
            limit_s=MEASURE_S,
        )  # fmt: skip


def _silent(done: int, total: int, name: str) -> None:
    """There are few."""


def _device(calls: Iterable[fx.Node]) -> torch.device:
    """Where the step runs: the accelerator, if any tensor is there."""
    devices = (tensor.device for node in calls for tensor in tensors(node))
    return max(dict.fromkeys(devices), key=lambda d: d.type != "cpu", default=torch.device("cpu"))


def _may_be_measured(node: fx.Node) -> bool:
    target = node.target
    if not (is_work(node) and isinstance(target, OpOverload)):
        return False
    return target.namespace in _MEASURED and not target._schema.is_mutable


def record_of(node: fx.Node, metas: dict[str, TensorMeta], *, backward: bool) -> Node:
    """A call as data; what its tensors are goes to `metas`."""

    def reference(item: object) -> Argument:
        if not isinstance(item, fx.Node):
            raise TraceError(f"an argument of type {type(item).__name__} is no data")
        value = item.meta.get("val")
        if isinstance(value, torch.Tensor):
            metas[_name(item)] = _meta(value)
            return Ref(_name(item))
        return int(largest(value)) if isinstance(value, (int, torch.SymInt)) else value  # type: ignore[return-value]

    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        results = [Result(name=_name(node), tensor=_meta(value), storage=0)]
    else:
        users = {u.args[1]: _name(u) for u in node.users if len(u.args) == 2}
        results = [
            Result(
                name=users.get(position, f"{_name(node)}_{position}_"),
                tensor=_meta(item),
                storage=position,
                position=position,
            )
            for position, item in enumerate(value)
            if isinstance(item, torch.Tensor)
        ]
    metas.update((result.name, result.tensor) for result in results)
    return Node(
        name=_name(node),
        target=str(node.target),
        args=tuple(encode_argument(item, reference) for item in node.args),
        kwargs={key: encode_argument(item, reference) for key, item in node.kwargs.items()},
        results=tuple(results),
        backward=backward,
    )


def _name(node: fx.Node) -> str:
    return f"n{node.name}" if node.name.startswith("__") else node.name


def _meta(tensor: torch.Tensor) -> TensorMeta:
    return TensorMeta(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(map(largest, tensor.shape)),
        stride=tuple(map(largest, tensor.stride())),
        offset=largest(tensor.storage_offset()),
        device=str(tensor.device),
    )
