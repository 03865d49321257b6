"""The verified peak: the peak of Inductor's own kernels and buffers, simulated after fusion.

A plan assumes kernels that Inductor may not generate: it may refuse a fusion, copy a tensor to
another layout, or add a kernel. So its scheduled kernels, with the buffers that each reads and
writes, are simulated before code generation by the rules of `remat.simulate`: all inputs and
outputs of a kernel are allocated while it runs.

The workspace of extern kernels is measured in the layouts that Inductor selects. The FX graph does
not have these layouts (convolutions become channels-last), and what an extern kernel allocates
inside depends on them: torch 2.11's convolution backward copies a gradient in one layout and not in
another. So each distinct call runs once, on zeros.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._inductor.ir import ExternKernelAlloc, ExternKernelOut, FallbackKernel, IRNode
from torch._inductor.memory import (
    compute_memory_timeline,
    prepare_planning_info,
    reorder_for_peak_memory,
)
from torch._inductor.virtualized import V
from torch._ops import OpOverload
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_leaves, tree_map

from remat.frontend.common.torch_modes import isolated_modes
from remat.frontend.compile.compat import SchedulerPass
from remat.frontend.compile.fx_utils import node_bytes, size_growth_factor
from remat.frontend.compile.inductor.buffer_reuse import (
    concat_buffer_of,
    cpu_reduction_buffers,
    donated_inputs,
    in_place_buffers,
    internal_buffers,
)
from remat.frontend.compile.inductor.copy_operators import check_copy_order, reloading_tensors
from remat.frontend.compile.inductor.fusion_control import plan_number_of, schedule_runs_in
from remat.frontend.compile.registry import CompiledPlan, find_compiled_plan, warn_of_smallest_plan
from remat.frontend.costs.timers import output_storage_bytes
from remat.frontend.memory.meter import allocated_peak, cuda_peak
from remat.limits.units import format_bytes

_measured_bytes: dict[str, int] = {}
"""The workspace of each call that was measured, by operator and arguments."""


def extern_workspace_bytes(kernel: object) -> int | None:
    """Return the bytes that an extern kernel allocates only while it runs, its outputs excluded.

    Each distinct call runs once, on zeros. None where it cannot run standalone (it mutates an
    argument, a size is symbolic, or memory is insufficient), and where the planned workspace counts
    instead: matmuls, except in half precision on CPUs.
    """
    try:
        call = _extern_call(kernel)
        if call is None:
            return None
        key = repr((str(call.operator), tree_map(_extern_argument_key, (call.args, call.kwargs))))
        if key not in _measured_bytes:
            _measured_bytes[key] = _measure_extern_workspace(call)
        return _measured_bytes[key]
    except Exception:  # a call on zeros may raise anything; then the planned workspace counts
        return None


class _ExternCall(NamedTuple):
    """An ATen operator with Inductor's IR nodes as arguments."""

    operator: OpOverload
    args: Any
    kwargs: dict[str, Any]


def _extern_call(kernel: object) -> _ExternCall | None:
    """Return the operator call of an extern kernel, for measuring its workspace; None where that is
    not measured."""
    operator = getattr(kernel, "op_overload", None)
    if not isinstance(operator, OpOverload) or operator.namespace != "aten":
        return None
    if isinstance(kernel, FallbackKernel) and not operator._schema.is_mutable:
        args, kwargs = kernel.unflatten_args(kernel.inputs, kernel.constant_args)
        return _ExternCall(operator, args, dict(kwargs))
    if operator is torch.ops.aten.convolution.default and isinstance(kernel, ExternKernelAlloc):
        return _ExternCall(operator, (*kernel.inputs, *kernel.constant_args), {**kernel.kwargs})
    # A float32 matmul allocates nothing from torch on CPUs; on GPUs the planned workspace counts.
    out: Any = kernel
    if isinstance(out, ExternKernelOut) and _is_half_precision_on_cpu(out):
        args, kwargs = (*out.inputs, *out.constant_args), {**out.kwargs, "out": out}
        return _ExternCall(operator, args, kwargs)
    return None


def _is_half_precision_on_cpu(kernel: Any) -> bool:
    """True if a kernel writes bfloat16 or float16 on the CPU."""
    device = kernel.get_device()
    half_precision = (torch.bfloat16, torch.float16)
    return device is not None and device.type == "cpu" and kernel.get_dtype() in half_precision


def _extern_argument_key(item: object) -> object:
    """Return the device, dtype and layout of an IR node, and other arguments unchanged."""
    if not isinstance(item, IRNode):
        return item
    return (str(item.get_device()), item.get_dtype(), *_ir_node_layout(item))


def _ir_node_layout(item: Any) -> tuple[list[int], list[int]]:
    """Return the sizes and strides of an IR node. Raises TypeError if one is symbolic."""
    return [int(n) for n in item.get_size()], [int(n) for n in item.get_stride()]


def _zeros_like_ir_node(item: object) -> object:
    """Return zeros in the layout of an IR node, and other arguments unchanged."""
    if not isinstance(item, IRNode):
        return item
    size, stride = _ir_node_layout(item)
    tensor = torch.empty_strided(size, stride, dtype=item.get_dtype(), device=item.get_device())
    return tensor.zero_()


def _measure_extern_workspace(call: _ExternCall) -> int:
    """Run a call on zeros, and return the peak of its allocations in bytes, its outputs
    excluded."""
    items = tree_leaves((call.args, call.kwargs))
    device = next(x.get_device() for x in items if isinstance(x, IRNode))
    assert device is not None
    with isolated_modes(device):
        args, kwargs = tree_map(_zeros_like_ir_node, (call.args, call.kwargs))
        run: Callable[[], object] = lambda: call.operator(*args, **kwargs)  # noqa: E731
        sizes = () if "out" in kwargs else output_storage_bytes(run())
        if device.type == "cuda":
            allocated_before = torch.cuda.memory_allocated(device)
            peak = cuda_peak(run, device) - allocated_before
        else:
            peak = allocated_peak(run)
    return max(0, peak - sum(sizes))


logger = logging.getLogger("remat")


class PeakOverBudget(Exception):
    """Raised when the verified peak of a graph exceeds its limit: the budget or, for "min", the
    peak under plain torch.compile.

    `separate_buffers` are the names of outputs that were planned in place, but need memory of their
    own.
    """

    def __init__(
        self,
        compiled: CompiledPlan,
        peak_bytes: int,
        limit_bytes: int,
        separate_buffers: Collection[str],
    ) -> None:
        of_graph = "budget of this graph" if compiled.budget_bytes else "peak under plain compile"
        self.summary = (
            f"Inductor's kernels need {format_bytes(peak_bytes)}, and the {of_graph} is "
            f"{format_bytes(limit_bytes)}"
        )
        super().__init__(
            f'{self.summary}; pass a larger budget, or use backend="remat", which replans the graph'
        )
        self.compiled = compiled
        self.excess_bytes = peak_bytes - limit_bytes
        self.separate_buffers = frozenset(separate_buffers)


class PeakVerifier(SchedulerPass):
    """Scheduler pass, after fusion, that stores the verified peak of a graph in its plan.

    Raises `PeakOverBudget` if the peak exceeds the graph's limit, and `CopiesOutOfOrder` if copies
    of offloaded tensors are not where they were planned. A graph that keeps Inductor's own
    kernels also gets the order in which Inductor runs them by default. `cache_key` identifies the
    plan and becomes part of the key of Inductor's code cache, so that code which was verified for
    one plan is not reused for another.
    """

    def __init__(self, cache_key: str) -> None:
        self._cache_key = cache_key

    def __call__(self, nodes: list[Any]) -> list[Any]:
        compiled = _plan_of_kernels(nodes)
        if compiled is None:
            return nodes
        if compiled.is_plain:
            nodes = in_inductor_order(nodes)
        check_copy_order(nodes)
        is_backward = bool(V.graph.is_backward)
        retained = compiled.retained_names if is_backward else frozenset[str]()
        donated_bytes = compiled.donated_bytes if is_backward else {}
        peak_bytes = (
            compiled.primals_bytes
            + compiled.batch_copy_bytes
            + live_peak_bytes(
                nodes, retained, storages=compiled.storages, donated_bytes=donated_bytes
            )
        )
        if is_backward:
            peak_bytes += compiled.retained_bytes + compiled.layout_copy_bytes
        else:
            compiled.layout_copy_bytes = layout_copy_bytes()
        phase = "backward" if is_backward else "forward"
        compiled.verified_by_half[phase] = peak_bytes
        budget_bytes = compiled.budget_bytes
        logger.info(
            "%s: verified: the %s's kernels use %s%s",
            compiled.title,
            phase,
            format_bytes(peak_bytes),
            "" if budget_bytes is None else f" of {format_bytes(budget_bytes)}",
        )
        if is_backward:
            warn_of_smallest_plan(compiled)
        limit_bytes = compiled.limit_bytes
        if limit_bytes is not None and peak_bytes > limit_bytes:
            separate = _separate_buffer_names(nodes, compiled, retained)
            raise PeakOverBudget(compiled, peak_bytes, limit_bytes, separate)
        return nodes

    def uuid(self) -> str:
        """Return the key of this pass in Inductor's cache; cached code is not verified again."""
        return self._cache_key


def _separate_buffer_names(
    kernels: Sequence[Any], compiled: CompiledPlan, retained: Collection[str]
) -> set[str]:
    """Return the names of the values that the plan counts as written in place, and Inductor writes
    to a separate buffer. `retained` are names of inputs that stay allocated, and are not
    overwritten."""
    in_place = in_place_buffers(kernels, donated_inputs().difference(retained))
    graph, runs = compiled.plan.graph, compiled.plan.schedule.runs
    num_in_place: Counter[int] = Counter()
    for kernel in kernels:
        num_applied = sum(buffer.get_name() in in_place for buffer in kernel.get_outputs())
        for plan_number, run in schedule_runs_in(kernel):
            if plan_number == compiled.number and not graph.operations[runs[run]].renews:
                num_in_place[runs[run]] += num_applied
    operations = ((graph.operations[op], applied) for op, applied in num_in_place.items())
    missed = (op for op, applied in operations if applied < len(op.overwrites))
    return {graph.values[v].name for operation in missed for v in operation.outputs}


class _MemoryTimeline:
    """Allocated bytes during each kernel of a graph."""

    def __init__(self, num_kernels: int) -> None:
        self._changes = [0] * (num_kernels + 1)

    def add(self, start: int, end: int, size_bytes: int, freed_bytes: int | None = None) -> None:
        """Allocate `size_bytes` before kernel `start`, and free them, or `freed_bytes`, before
        kernel `end`."""
        self._changes[start] += size_bytes
        self._changes[end] -= size_bytes if freed_bytes is None else freed_bytes

    def allocated_bytes(self) -> Iterator[int]:
        """Yield the bytes that are allocated during each kernel."""
        return accumulate(self._changes[:-1])


def live_peak_bytes(
    kernels: Sequence[Any],
    retained: Iterable[str] = (),
    storages: Mapping[str, tuple[str, int]] | None = None,
    overwritable: Iterable[str] | None = None,
    donated_bytes: Mapping[str, int] | None = None,
) -> int:
    """Return the peak in bytes of a graph's buffers, and of the inputs that the graph may free.

    Inputs `retained` stay allocated to the end. `storages` has the name and bytes of the storage
    that an input belongs to; it is freed with the last of its inputs. Inputs `overwritable` may be
    overwritten in place; by default those that torch donates. `donated_bytes` are inputs that are
    freed once they are read, although Inductor counts them as owned by the caller. The workspace of
    an extern kernel counts while it runs, and a tensor that comes back from the host from the start
    of its copy on.
    """
    num_kernels = len(kernels)
    retained = set(retained)
    allowed = (donated_inputs() if overwritable is None else set(overwritable)) - retained
    overwritten = set(in_place_buffers(kernels, allowed).values())
    unallocated = {name for k in kernels for name in internal_buffers(k) - cpu_reduction_buffers(k)}
    module: Any = V.graph.module
    placeholders = module.graph.find_nodes(op="placeholder")
    input_bytes = {str(n.target): node_bytes(n) for n in placeholders}
    storage_ends: dict[str, int] = {}
    storage_sizes: dict[str, int] = {}
    concatenated: dict[str, list[Any]] = {}
    timeline = _MemoryTimeline(num_kernels)
    for lifetime in _buffer_lifetimes(kernels):
        name = lifetime.buffer.get_name()
        if name in unallocated:
            continue
        if (concat := concat_buffer_of(name)) is not None:
            concatenated.setdefault(concat, []).append(lifetime)
            continue
        is_live_to_end = lifetime.end_step == -1 or name in retained
        # The memory of an overwritten buffer belongs to the kernel's output from its last read on.
        end = num_kernels if is_live_to_end else lifetime.end_step + (name not in overwritten)
        factor = _buffer_growth_factor(name)
        allocated = round(factor * lifetime.size_alloc)
        freed = round(factor * lifetime.size_free)
        if name in input_bytes:  # torch counts what one kernel reads of it: half, or twice
            allocated = freed = input_bytes[name]
        if storages and name in storages:
            storage, size_bytes = storages[name]
            storage_ends[storage] = max(end, storage_ends.get(storage, 0))
            storage_sizes[storage] = min(size_bytes, storage_sizes.get(storage, 0) + allocated)
            continue
        timeline.add(lifetime.start_step, end, allocated, freed)
    for concat, slices in concatenated.items():  # from its first slice to the last read of any
        ends = [num_kernels if s.end_step == -1 else s.end_step + 1 for s in slices]
        size_bytes = round(_buffer_growth_factor(concat) * max(s.size_alloc for s in slices))
        timeline.add(min(s.start_step for s in slices), max(ends), size_bytes)
    last_read = {read.name: n for n, k in enumerate(kernels) for read in k.read_writes.reads}
    for name, size_bytes in (donated_bytes or {}).items():
        timeline.add(0, last_read.get(name, 0) + 1, size_bytes)
    for storage, end in storage_ends.items():
        timeline.add(0, end, storage_sizes[storage])
    for reloading in reloading_tensors(kernels):
        timeline.add(reloading.start, reloading.end, reloading.size_bytes)
    pairs = zip(timeline.allocated_bytes(), kernels, strict=True)
    return max((allocated + _kernel_workspace_bytes(k) for allocated, k in pairs), default=0)


def _buffer_lifetimes(kernels: Sequence[Any]) -> Sequence[Any]:
    """Return Inductor's own records of the lifetimes of buffers, and of inputs that the graph may
    free."""
    scheduler = V.graph.scheduler
    outputs = OrderedSet(V.graph.get_output_names())
    _, freeable_inputs = prepare_planning_info(
        list(kernels),
        scheduler.name_to_buf,
        scheduler.name_to_fused_node,
        OrderedSet(V.graph.graph_inputs.keys()),
        outputs,
    )
    lifetimes, _, _ = compute_memory_timeline(list(kernels), freeable_inputs, outputs)
    return lifetimes


def _kernel_workspace_bytes(kernel: Any) -> int:
    """Return the bytes that a kernel allocates only while it runs: measured in Inductor's layouts,
    else as planned. 0 unless it is an extern kernel."""
    if not kernel.is_extern():
        return 0
    if (measured := extern_workspace_bytes(kernel.node)) is not None:
        return measured
    compiled = _plan_of_kernels([kernel])
    planned = [0 if compiled is None else compiled.workspace_bytes]
    for plan_number, run in schedule_runs_in(kernel):
        if (compiled := find_compiled_plan(plan_number)) is not None:
            plan = compiled.plan
            planned.append(plan.graph.operations[plan.schedule.runs[run]].workspace_bytes)
    return max(planned)


def _buffer_growth_factor(name: str) -> float:
    """Return a buffer's largest size divided by its size in the first call, which Inductor reports;
    1.0 for a scalar or a tuple."""
    buffer = V.graph.try_get_buffer(name)
    if buffer is None:
        buffer = V.graph.graph_inputs.get(name)
    try:
        expression = buffer.get_numel()  # type: ignore[union-attr]
    except (AttributeError, NotImplementedError):
        return 1.0  # a scalar, or a tuple of tensors
    return size_growth_factor(expression, V.graph.sizevars.shape_env)


def layout_copy_bytes() -> int:
    """Return the bytes of parameters and batch tensors that the forward saves for the backward as a
    copy in another layout. In the backward they have the names of the originals."""
    module: Any = V.graph.module
    returned = module.graph.output_node().args[0]
    pairs = zip(returned, V.graph.graph_outputs, strict=True)
    inputs = [(n, out) for n, out in pairs if isinstance(n, fx.Node) and n.op == "placeholder"]
    sizes = [(node_bytes(n), out) for n, out in inputs]  # a scalar has no bytes and no name
    return sum(size for size, out in sizes if size and out.get_name() not in V.graph.graph_inputs)


def in_inductor_order(kernels: list[Any]) -> list[Any]:
    """Return the kernels in the order that Inductor gives them by default after fusion."""
    scheduler = V.graph.scheduler
    return reorder_for_peak_memory(
        kernels,
        scheduler.name_to_buf,
        scheduler.name_to_fused_node,
        OrderedSet(V.graph.graph_inputs.keys()),
        OrderedSet(V.graph.get_output_names()),
    )


def _plan_of_kernels(kernels: Sequence[Any]) -> CompiledPlan | None:
    """Return the plan that the kernels belong to; None without a plan."""
    number = plan_number_of(kernels)
    return None if number is None else find_compiled_plan(number)
