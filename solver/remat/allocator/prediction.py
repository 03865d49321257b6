"""Prediction of the peaks that torch's allocator will report for a plan on a CUDA device.

The simulator counts bytes; the allocator counts blocks, and reserves segments of the device's
memory. So a plan whose peak equals its budget can have a slightly higher allocated peak (the last
mebibyte of a large block is not split off), and a still higher reserved peak (fragments between
blocks). `predict_allocator_peaks` replays the allocator (`remat.allocator.replay`) over two steps:
the first starts with an empty allocator, the second with the segments of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from remat.allocator.replay import AllocationEvent, replay_events
from remat.costs.devices import DEVICES
from remat.costs.optimizer_memory import OptimizerMemory
from remat.documents.targets import FREE_PREVIOUS_OUTPUTS_TARGET, PREVIOUS_OUTPUTS_TARGET
from remat.documents.trace import Trace, trained_parameters
from remat.graph import Graph
from remat.passes.outputs import held_output_storages
from remat.plan_data import AllocatorPrediction, P
from remat.schedule import Schedule
from remat.simulate import Copy, overwritten_copies, simulate

_STEPS = 2
"""The number of replayed training steps."""

_CUBLAS_OPERATIONS = frozenset(
    f"aten.{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear"),
        *("matmul", "_addmm_activation", "_int_mm", "_scaled_mm"),
    )
)


def is_on_cuda(trace: Trace) -> bool:
    """True if the step runs on a CUDA device, so that torch's caching allocator serves it."""
    return trace.device.partition(":")[0] == "cuda"


def uses_cublas(target: str) -> bool:
    """True if an operator, by its name, is a matrix product, for which cuBLAS retains a
    workspace."""
    return target.rpartition(".")[0] in _CUBLAS_OPERATIONS


def uses_cublaslt(target: str) -> bool:
    """True if torch may compute an operator, by its name, with cuBLASLt: a matrix product with a
    bias, in integers or scaled."""
    names = ("addmm", "_addmm_activation", "linear", "_int_mm", "_scaled_mm")
    return target.rpartition(".")[0] in {f"aten.{name}" for name in names}


def predict_allocator_peaks(trace: Trace, schedule: Schedule) -> AllocatorPrediction:
    """Return the predicted peaks of two steps of a measured trace under a schedule. Raises
    `GraphError` for a schedule of another trace."""
    events = list(step_allocation_events(trace, schedule))
    default, expandable = replay_events(events), replay_events(events, is_expandable=True)
    return AllocatorPrediction(
        default.requested_bytes,
        default.allocated_bytes,
        default.reserved_bytes,
        expandable.allocated_bytes,
        expandable.reserved_bytes,
    )


def with_prediction(plan: P, trace: Trace) -> P:
    """Return the plan with the predicted peaks of torch's allocator; unchanged without a CUDA
    device."""
    if not is_on_cuda(trace):
        return plan
    return replace(plan, allocator=predict_allocator_peaks(trace, plan.schedule))


def step_allocation_events(
    trace: Trace,
    schedule: Schedule,
    steps: int = _STEPS,
    *,
    graph: Graph | None = None,
    optimizer: OptimizerMemory | None = None,
) -> Iterator[AllocationEvent]:
    """Yield the allocations and frees of `steps` training steps, in order, from a new process on.

    Parameters, buffers and inputs come first, and with gradient accumulation the `.grad` of
    parameters. Each run allocates its outputs, then the buffers of its workspace; these are freed
    first, then the values of which this is the last use. cuBLAS allocates one half of the trace's
    `library_bytes` at the first matrix product of the forward and the other at that of the
    backward, which runs in another thread, and never frees them. With an `optimizer`, its step
    allocates its state the first time, and temporary tensors each time. At the end of a step its
    outputs and gradients are freed (`zero_grad`); outputs that the loop keeps, at the end of the
    next forward. `graph` says when values are freed, by default as
    in plans.
    """
    sizes = trace.storage_bytes
    constants = {p.storage: None for p in trace.placeholders if p.kind != "tangent"}
    for storage in constants:
        yield AllocationEvent(("constant", storage), sizes[storage])
    if trace.accumulates_gradients:
        for p in trained_parameters(trace):
            yield AllocationEvent(("grad", p.name), sizes[p.storage])
    graph = graph or trace.graph()
    timeline = simulate(graph, schedule)
    value_bytes = [sizes[trace.storage_of[value.name]] for value in graph.values]
    produced: list[list[int]] = [[] for _ in schedule.runs]
    freed: list[list[int]] = [[] for _ in range(len(schedule) + 1)]
    overwritten_indices = overwritten_copies(graph, schedule, timeline.copies)
    overwritten: dict[int, int] = {}  # by run, the copy that it writes over
    for index, copy in enumerate(timeline.copies):
        produced[copy.start].append(index)
        if index in overwritten_indices:
            overwritten[copy.end] = index
        else:
            freed[copy.end].append(index)
    allocation = list(range(len(timeline.copies)))  # by copy, the one that allocated its memory
    for run, index in sorted(overwritten.items()):
        allocation[produced[run].pop()] = allocation[index]
    # True for the backward's cuBLAS workspace, False for the forward's.
    pending_cublas_workspaces = {False, True} if trace.library_bytes else set[bool]()
    buffers = _workspace_buffers(trace, graph)
    retained = _copies_of_kept_outputs(trace, graph, timeline.copies)
    previous: list[AllocationEvent] = []
    for step in range(steps):
        for run, op in enumerate(schedule.runs):
            node, operation = trace.operations[op], graph.operations[op]
            is_backward = operation.backward
            target = "" if node is None else node.target
            if target == PREVIOUS_OUTPUTS_TARGET:
                continue
            if target == FREE_PREVIOUS_OUTPUTS_TARGET:
                yield from previous
                continue
            for index in produced[run]:
                yield AllocationEvent(
                    (step, allocation[index]), value_bytes[timeline.copies[index].value]
                )
            if (
                node is not None
                and is_backward in pending_cublas_workspaces
                and uses_cublas(node.target)
            ):
                pending_cublas_workspaces.remove(is_backward)
                yield AllocationEvent(("cublas", is_backward), trace.library_bytes // 2)
            for index, size_bytes in enumerate(buffers[op]):
                yield AllocationEvent(("workspace", index), size_bytes)
            for index in range(len(buffers[op])):
                yield AllocationEvent(("workspace", index), None)
            for index in freed[run]:
                yield AllocationEvent((step, allocation[index]), None)
        if optimizer is not None:
            yield from _optimizer_events(optimizer, is_first_step=step == 0)
        previous = [
            AllocationEvent((step, allocation[i]), None) for i in freed[-1] if i in retained
        ]
        for index in freed[-1]:
            if index not in retained:
                yield AllocationEvent((step, allocation[index]), None)


def _copies_of_kept_outputs(trace: Trace, graph: Graph, copies: Sequence[Copy]) -> set[int]:
    """Return the indices of the copies of outputs that are live until the next forward returns."""
    if not any(node.target == PREVIOUS_OUTPUTS_TARGET for node in trace.nodes):
        return set()
    storages = set(held_output_storages(trace))
    names = [value.name for value in graph.values]
    return {n for n, copy in enumerate(copies) if trace.storage_of[names[copy.value]] in storages}


def _workspace_buffers(trace: Trace, graph: Graph) -> list[list[int]]:
    """Return the sizes of the buffers of each operation's workspace, by formula where the GPU is
    known, else one buffer. A large one and a small one fit where one block as large as both does
    not."""
    from remat.costs.workspaces.formulas import workspace_buffers  # only traces have workspaces

    device, metas = DEVICES.get(trace.gpu), trace.tensors
    buffers: list[list[int]] = []
    for node, operation in zip(trace.operations, graph.operations, strict=True):
        size_bytes = operation.workspace_bytes
        if node is not None and device is not None and size_bytes == node.workspace_bytes:
            buffers.append(workspace_buffers(node, metas, device))
        else:
            buffers.append([size_bytes] if size_bytes else [])
    return buffers


def _optimizer_events(
    optimizer: OptimizerMemory, *, is_first_step: bool
) -> Iterator[AllocationEvent]:
    """Yield the allocations and frees of an optimizer's step."""
    if is_first_step:
        for index, size_bytes in enumerate(optimizer.state_sizes_bytes):
            yield AllocationEvent(("state", index), size_bytes)
    for index, size_bytes in enumerate(optimizer.temporary_sizes_bytes):
        yield AllocationEvent(("temporary", index), size_bytes)
    for index in range(len(optimizer.temporary_sizes_bytes)):
        yield AllocationEvent(("temporary", index), None)
