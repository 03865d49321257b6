"""The memory of a training step whose parameters, gradients and optimizer state are sharded over
several GPUs (FSDP), by arithmetic on the step of one GPU.

As `torch.distributed.fsdp.fully_shard` does when it is applied to each block and to the model:
every GPU has an equal shard of everything, computes on its own batch, gathers the parameters of a
block before it runs, and of the next one while it runs, and reduces the gradients of a block after
its backward.
Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from remat.costs.optimizer_memory import OptimizerMemory
from remat.documents.trace import (
    Placeholder,
    Trace,
    accumulated_gradient_bytes,
    trained_parameters,
)
from remat.graph import Graph
from remat.report.eager_step import value_of_storage
from remat.schedule import Schedule
from remat.simulate import peak_and_time

_GATHERED_BLOCKS = 2
"""The block that runs and the next one, whose parameters are gathered meanwhile."""

_REDUCED_BUFFERS = 2
"""The gradients of a block, or of what is outside of blocks, and the buffer from which they are
reduced."""


def sharded_peak_bytes(
    trace: Trace, graph: Graph, schedule: Schedule, optimizer: OptimizerMemory, gpus: int
) -> int:
    """Return the peak in bytes of each of `gpus` GPUs. `graph` is the trace's, or that of eager
    mode; `optimizer` is for one GPU."""
    parameters = {p.storage: p for p in trace.placeholders if p.kind == "parameter"}
    trained = {p.storage: p for p in trained_parameters(trace)}
    blocks, root_bytes = _bytes_by_block(trace, parameters.values())
    trained_blocks, trained_root_bytes = _bytes_by_block(trace, trained.values())
    parameter_bytes = sum(blocks) + root_bytes
    trained_bytes = sum(trained_blocks) + trained_root_bytes
    gathered_bytes = root_bytes + _GATHERED_BLOCKS * max(blocks, default=0)
    gathered_bytes += _REDUCED_BUFFERS * (trained_root_bytes + max(trained_blocks, default=0))
    shards_bytes = -(-(parameter_bytes + trained_bytes + optimizer.state_bytes) // gpus)
    optimizer_bytes = -(-optimizer.temporary_bytes // gpus)
    activations_bytes = _activations_peak_bytes(trace, graph, schedule, parameter_bytes)
    return shards_bytes + max(activations_bytes + gathered_bytes, optimizer_bytes)


def _bytes_by_block(trace: Trace, parameters: Iterable[Placeholder]) -> tuple[list[int], int]:
    """Return the bytes of the parameters of each block (a module with a number in its path), and of
    those outside of blocks."""
    blocks: dict[str, int] = defaultdict(int)
    root_bytes = 0
    for parameter in parameters:
        parts = parameter.target.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        if number is None:
            root_bytes += trace.allocated_bytes(parameter.storage)
        else:
            blocks[".".join(parts[: number + 1])] += trace.allocated_bytes(parameter.storage)
    return list(blocks.values()), root_bytes


def _activations_peak_bytes(
    trace: Trace, graph: Graph, schedule: Schedule, parameter_bytes: int
) -> int:
    """Return the peak of the step without its parameters and their gradients."""
    value_of = value_of_storage(trace, graph)
    gradients = {value_of.get(trace.storage_of[g.name]) for g in trace.gradients}
    values = tuple(
        replace(value, size_bytes=0) if v in gradients else value
        for v, value in enumerate(graph.values)
    )
    constant_bytes = graph.constant_bytes - parameter_bytes
    if trace.accumulates_gradients:
        constant_bytes -= accumulated_gradient_bytes(trace)
    without = replace(graph, values=values, constant_bytes=constant_bytes)
    return peak_and_time(without, schedule)[0]
