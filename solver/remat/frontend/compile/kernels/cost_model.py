"""Cost model of fusion groups: generated kernels by the bytes they move, extern kernels measured.

A generated kernel reads and writes each of its tensors once. So it takes as long as a copy of the
same number of bytes on this device, which is measured at a few sizes. On CPUs it takes the time of
its arithmetic, if that is longer: transcendental functions are measured, random numbers and boolean
masks have a fixed cost for each element. Extern kernels (matmuls, convolutions, attention) are
measured, each distinct one once. All measurements are in the cost cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload

from remat.costs.trace_costs import OperationCost
from remat.documents.arguments import Ref
from remat.documents.records import Node, Result, TensorMeta
from remat.errors import TraceError
from remat.frontend.capture.reading.trace_builder import TraceBuilder
from remat.frontend.compile.fx_utils import (
    TRANSCENDENTAL,
    is_operation,
    is_seeded_random,
    max_size,
    node_bytes,
    num_elements,
    output_tensors,
    storage_by_schema,
)
from remat.frontend.compile.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.fusion_groups import (
    FusionGroup,
    scalar_operations_s,
    scalar_work_s,
)
from remat.frontend.compile.kernels.inline_producers import non_elementwise_consumers_in_group
from remat.frontend.costs.cost_cache import CostCache
from remat.frontend.costs.operation_costs import measure_operations

MAX_MEASURE_S = 5.0
"""Seconds for measuring, as the user waits for the first step: the rest is estimated."""

_MEASURABLE_NAMESPACES = frozenset({"aten", "prims"})
"""Namespaces of operations that may run on random inputs to be measured."""

_FUNCTION_BYTES = 1 << 18
"""Size of the tensor on which a transcendental function is measured: it fits in the cache."""

_MIN_COPY_BYTES = 1 << 12
"""The smallest number of bytes of a measured copy."""


class GroupCost(NamedTuple):
    """Seconds of a fusion group, and the workspace bytes that its kernels allocate."""

    cost_s: float
    workspace_bytes: int = 0


class KernelCostModel:
    """Costs of the fusion groups of one joint graph.

    Without `fused`, for comparison, each operation of a generated kernel costs as much as in a
    kernel of its own.
    """

    def __init__(self, joint: CompiledJointGraph, *, fused: bool = True) -> None:
        self._joint = joint
        self._fused = fused or joint.kernels is None
        self._device = joint.device
        self._copy_s_by_bytes: dict[int, float] = {}
        self._function_s_by_target: dict[str, float] = {}
        self._cache = CostCache()

    def __call__(self, group: FusionGroup, moved_bytes: int) -> GroupCost:
        """Return the seconds and workspace of a fusion group that reads and writes
        `moved_bytes`."""
        extern = [n for n in group.nodes if n.name in self._extern_costs]
        generated = [
            n for n in group.all_nodes if is_operation(n) and n.name not in self._extern_costs
        ]
        cost_s = sum(self._extern_costs[n.name].cost_s for n in extern)
        if generated and self._fused:
            function_s = sum(map(self._function_s, generated))
            arithmetic_s = function_s + self._on_all_cores_s(scalar_work_s(group))
            cost_s += max(self._copy_s(moved_bytes), arithmetic_s)
        else:
            cost_s += sum(map(self._single_operation_s, generated))
        workspaces = [
            self._workspace_bytes.get(n, self._extern_costs[n.name].workspace_bytes) for n in extern
        ]
        workspaces += [
            self._workspace_bytes.get(n, 0)
            for n in group.written
            if n.name not in self._extern_costs
        ]
        # A loop of its own generates the random numbers that a reduction reads, and writes them.
        written_random = [
            n
            for n in group.nodes
            if is_seeded_random(n) and non_elementwise_consumers_in_group(n, group)
        ]
        workspace_bytes = max(workspaces, default=0) + sum(map(node_bytes, written_random))
        return GroupCost(cost_s, workspace_bytes)

    def _single_operation_s(self, node: fx.Node) -> float:
        """Return the seconds of an operation in a kernel of its own."""
        moved_bytes = node_bytes(node) + sum(map(node_bytes, node.all_input_nodes))
        scalar_s = self._on_all_cores_s(scalar_operations_s([node], [node], node.all_input_nodes))
        return max(self._copy_s(moved_bytes), self._function_s(node) + scalar_s)

    def _function_s(self, node: fx.Node) -> float:
        """Return the seconds that a transcendental function takes in a CPU kernel, without reading
        and writing. 0 for other operations, and on GPUs, where memory access takes longer."""
        if self._device.type != "cpu" or self._joint.kernels is None:
            return 0.0
        target = str(node.target)
        elements = sum(map(num_elements, output_tensors(node)))
        return elements * self._function_element_s(target) if target in TRANSCENDENTAL else 0.0

    def _on_all_cores_s(self, core_s: float) -> float:
        """Return the seconds on all cores of work that takes one core `core_s` in Inductor's code;
        0 without Inductor."""
        return core_s / torch.get_num_threads() if self._joint.kernels is not None else 0.0

    def _function_element_s(self, target: str) -> float:
        """Return the seconds of a transcendental function for each element, without reading and
        writing it. It is measured once."""
        if target not in self._function_s_by_target:
            elements = _FUNCTION_BYTES // 4
            meta = self._flat_meta("float32", elements)
            function_s = self._measure_unary_s(target, meta)
            function_s -= self._measured_copy_s(2 * _FUNCTION_BYTES)
            self._function_s_by_target[target] = max(0.0, function_s) / elements
        return self._function_s_by_target[target]

    # -- measurements ---------------------------------------------------------------------------

    @cached_property
    def _extern_costs(self) -> dict[str, OperationCost]:
        """The measured costs of extern kernels by node name; absent for calls that cannot run on
        random inputs. The forward is measured first: it may be recomputed."""
        reader = TraceBuilder(value_of=max_size, storage_of=storage_by_schema)
        nodes: list[Node] = []
        for node in self._joint.operations:
            if _may_measure_node(node) and not self._joint.is_generated(node):
                with suppress(TraceError, ValueError):  # else the call costs a copy
                    nodes.append(reader.read_call(node, backward=self._joint.is_backward(node)))
        return self._measure_nodes(nodes, reader.meta_by_name)

    @cached_property
    def _workspace_bytes(self) -> dict[fx.Node, int]:
        """The workspaces that Inductor's kernels have in its layouts (`kernel_workspaces`)."""
        return kernel_workspaces(self._joint)

    def _copy_s(self, moved_bytes: int) -> float:
        """Return the seconds of a copy that reads and writes `moved_bytes` in total, interpolated
        between two measured sizes."""
        below = max(_MIN_COPY_BYTES, 1 << max(0, moved_bytes.bit_length() - 1))
        weight = max(0.0, moved_bytes / below - 1)
        below_s, above_s = self._measured_copy_s(below), self._measured_copy_s(2 * below)
        return (1 - weight) * below_s + weight * above_s

    def _measured_copy_s(self, moved_bytes: int) -> float:
        """Return the measured seconds of a copy that reads and writes `moved_bytes` in total."""
        if moved_bytes not in self._copy_s_by_bytes:
            meta = self._flat_meta("uint8", moved_bytes // 2)
            copy_s = self._measure_unary_s("aten.clone.default", meta)
            self._copy_s_by_bytes[moved_bytes] = copy_s
        return self._copy_s_by_bytes[moved_bytes]

    def _flat_meta(self, dtype: str, elements: int) -> TensorMeta:
        """Return the metadata of a contiguous one-dimensional tensor on the step's device."""
        return TensorMeta(dtype=dtype, shape=(elements,), stride=(1,), device=str(self._device))

    def _measure_unary_s(self, target: str, meta: TensorMeta) -> float:
        """Measure the seconds of an operation whose input and output have the same metadata."""
        result = Result(name="y", tensor=meta, storage=0)
        node = Node(name="y", target=target, args=(Ref("x"),), results=(result,))
        return self._measure_nodes([node], {"x": meta, "y": meta})["y"].cost_s

    def _measure_nodes(
        self, nodes: Sequence[Node], metas: dict[str, TensorMeta]
    ) -> dict[str, OperationCost]:
        """Return the costs of operations by name: from the cost cache, or measured within
        `MAX_MEASURE_S`, after which the rest is estimated. `metas` has the metadata of tensors."""
        return measure_operations(
            nodes,
            metas,
            self._device,
            self._cache,
            _ignore_progress,
            trace_device_type=self._device.type,
            limit_s=MAX_MEASURE_S,
        )


def kernel_workspaces(joint: CompiledJointGraph) -> dict[fx.Node, int]:
    """Return the workspace of Inductor's kernels in bytes, by the tensors that they write and by
    extern operation, in the layouts that Inductor selected. An operation whose kernel's workspace
    is unknown is absent.

    A generated kernel says nothing about extern operations: that which adds the bias of a
    convolution writes the convolution's tensor, too, but has no workspace.
    """
    workspaces: dict[fx.Node, int] = {}
    for kernel in joint.kernels or ():
        if kernel.workspace_bytes is None:
            continue
        # A kernel that only mutates a tensor writes none that has a name of its own.
        nodes = {*(kernel.written or kernel.origins)}
        if kernel.is_extern:
            nodes.update(n for n in kernel.origins if not joint.is_generated(n))
        else:
            nodes = {n for n in nodes if joint.is_generated(n)}
        for node in nodes:
            workspaces[node] = max(kernel.workspace_bytes, workspaces.get(node, 0))
    return workspaces


def _ignore_progress(measured: int, total: int, name: str) -> None:
    """Do nothing with the progress of measuring: there are few measurements."""


def _may_measure_node(node: fx.Node) -> bool:
    """True for a functional operation of a namespace that may run on random inputs."""
    target = node.target
    if not (is_operation(node) and isinstance(target, OpOverload)):
        return False
    return target.namespace in _MEASURABLE_NAMESPACES and not target._schema.is_mutable
