"""`EagerStep`: a training step in eager mode, with the checkpoints of its code or of its blocks.

Checkpoints work as `torch.utils.checkpoint` with `use_reentrant=False`: the first saved tensor that
the backward reads recomputes the whole region.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from remat.allocator.prediction import is_on_cuda
from remat.costs.devices import DEVICES
from remat.costs.optimizer_memory import OptimizerMemory, optimizer_memory
from remat.costs.sharding import ONE_GPU, Sharding
from remat.documents.trace import Trace, trained_parameters
from remat.errors import RematError
from remat.graph import Graph
from remat.report.eager_step import eager_graph, with_eager_masks
from remat.report.sharded_memory import (
    check_mixed_precision,
    ddp_bucket_bytes,
    sharded_optimizer_step_bytes,
    sharded_training_memory,
    with_ddp_buckets,
)
from remat.report.sharded_time import added_communication_s
from remat.report.training_memory import (
    TrainingMemory,
    optimizer_step_bytes,
    reserved_range,
)
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.strategies.baselines.module_blocks import find_blocks
from remat.strategies.baselines.schedule_builder import (
    Segments,
    checkpoint_segments,
    eager_backward_order,
    segment_borders,
)

AS_WRITTEN, NONE, BLOCKS, SELECTIVE = "as written", "none", "blocks", "selective"
"""Values of the option `checkpoint`, besides "every:N": the checkpoints of the model's code, none,
each repeated block, and each block with selective checkpoints."""

_MATMULS = frozenset({"aten.mm.default", "aten.addmm.default"})
_ATTENTION = "_scaled_dot_product_"
"""Selective checkpoints save the results of attention, and of the first of every two matmuls of a
block, as torchtitan's `activation_checkpoint.selective_ac_option = "op"` does."""


def check_checkpoint(checkpoint: str) -> None:
    """Raise `RematError` unless this is a value of the option `checkpoint`."""
    if checkpoint not in (AS_WRITTEN, NONE, BLOCKS, SELECTIVE) and not _interval(checkpoint):
        raise RematError(
            f"the checkpoint is {str(checkpoint)[:40]!r}; pass {AS_WRITTEN!r}, {NONE!r}, "
            f"{BLOCKS!r}, {SELECTIVE!r}, or 'every:2' for the second of every two blocks"
        )


def _interval(checkpoint: str) -> int:
    """Return N of "every:N"; 0 for another value."""
    match = re.fullmatch("every:([1-9][0-9]{0,8})", str(checkpoint))
    return int(match[1]) if match else 0


@dataclass(frozen=True)
class EagerStep:
    """A training step in eager mode: its trace with costs, its graph with the lifetimes of
    autograd, and the schedule with the recomputations of its checkpoints. `checkpoint` is the
    option, and `checkpoint_count` the number of checkpoints."""

    trace: Trace
    eager_trace: Trace
    graph: Graph
    schedule: Schedule
    checkpoint: str = AS_WRITTEN
    checkpoint_count: int = 0
    sharding: Sharding = ONE_GPU
    device: str = ""
    _memories: dict[tuple[Sharding, str], TrainingMemory] = field(
        default_factory=dict, compare=False, repr=False
    )
    """Memories by the optimizer's name: a replay of the allocator takes long."""

    @classmethod
    def of(
        cls,
        trace: Trace,
        checkpoint: str = AS_WRITTEN,
        sharding: Sharding = ONE_GPU,
        device: str = "",
    ) -> EagerStep:
        """Return the step of a trace with costs on one of the GPUs of `sharding`. `device` is the
        data sheet of their links, by default the trace's GPU. Raises the errors of
        `_checkpointed_regions`, and `RematError` for a trace in another dtype than mixed precision
        computes in."""
        check_mixed_precision(trace, sharding)
        device = device or trace.gpu
        eager_trace = with_eager_masks(trace)
        regions = _checkpointed_regions(trace, checkpoint)
        plain = eager_graph(eager_trace, regions=regions)
        if not regions:
            schedule = Schedule.keep_all(plain)
            return cls(
                trace, eager_trace, plain, schedule, checkpoint, 0, sharding.sharding, device
            )
        borders = segment_borders(plain, regions)
        saved = set(_saved_values(trace, plain, regions, checkpoint))
        computed = {v for ops in regions for op in ops for v in plain.operations[op].outputs}
        graph = eager_graph(eager_trace, unpacked=computed - borders, regions=regions)
        backward = eager_backward_order(graph)
        schedule = checkpoint_segments(graph, regions, borders | saved, backward)
        graph = _with_retained_values(graph, regions, borders, saved, backward)
        count = len(regions)
        return cls(
            trace, eager_trace, graph, schedule, checkpoint, count, sharding.sharding, device
        )

    def with_trace(self, trace: Trace) -> EagerStep:
        """Return the step of another trace with the same `checkpoint`."""
        return EagerStep.of(trace, self.checkpoint, self.sharding, self.device)

    def with_sharding(self, sharding: Sharding) -> EagerStep:
        """Return the same step, shared by GPUs in another way."""
        return replace(self, sharding=sharding)

    @property
    def time_s(self) -> float:
        """The time of all operations, with the recomputations of checkpoints and communication that
        computation does not hide."""
        computation_s = sum(self.graph.operations[op].cost_s for op in self.schedule.runs)
        return computation_s + self.communication_s

    @cached_property
    def communication_s(self) -> float:
        """The time that communication between GPUs adds."""
        return added_communication_s(
            self.eager_trace, self.graph, self.schedule, self.sharding, self.device
        )

    @property
    def peak_bytes(self) -> int:
        """The peak of forward and backward."""
        return peak_and_time(self.graph, self.schedule)[0]

    def optimizer(self, name: str) -> OptimizerMemory:
        """Return the memory of an optimizer of the trained parameters, or of the largest part of
        them that one GPU updates."""
        tensors = {p.storage: p.tensor for p in trained_parameters(self.trace)}
        embeddings = {
            self.trace.tensors[node.operand_names[0]].shape
            for node in self.trace.nodes
            if node.target == "aten.embedding.default"
        }
        parts = self.sharding.optimizer_tensors(list(tensors.values()))
        memories = [
            optimizer_memory(
                name,
                part,
                is_cuda=is_on_cuda(self.trace),
                gpu=DEVICES.get(self.trace.gpu),
                embedding_shapes=embeddings,
            )
            for part in parts
        ]
        if len(memories) == 1:
            return memories[0]
        peak_bytes = self.peak_bytes

        def largest(memory: OptimizerMemory) -> int:
            in_optimizer_bytes = optimizer_step_bytes(self.graph, memory)
            return max(peak_bytes + memory.state_bytes, in_optimizer_bytes)

        return max(memories, key=largest)

    def memory(self, optimizer: OptimizerMemory) -> TrainingMemory:
        """Return the memory of a training loop in eager mode with an optimizer, on one GPU."""
        key = self.sharding, optimizer.name
        if key not in self._memories:
            self._memories[key] = self._memory(optimizer)
        return self._memories[key]

    def _memory(self, optimizer: OptimizerMemory) -> TrainingMemory:
        step = self.eager_trace, self.graph, self.schedule
        if not self.sharding.is_fsdp:
            return with_ddp_buckets(
                TrainingMemory.of(*step, optimizer), self.eager_trace, self.sharding
            )
        one = self.with_sharding(ONE_GPU)
        whole = one.memory(one.optimizer(optimizer.name))
        return sharded_training_memory(*step, optimizer, self.sharding, whole)

    def reserved_range_bytes(self, optimizer: OptimizerMemory) -> tuple[int, int]:
        """Return the range of what torch's allocator reserves for steps of nearly this size; see
        `reserved_range`. For shards, the range is that of one GPU, relative to the peak."""
        memory = self.memory(optimizer)
        if not is_on_cuda(self.trace):
            return memory.reserved_bytes, memory.reserved_bytes
        one = self.with_sharding(ONE_GPU)
        whole = one.optimizer(optimizer.name)
        low, high = reserved_range(self.eager_trace, self.graph, self.schedule, whole)
        return int(low * memory.peak_bytes), int(high * memory.peak_bytes)

    def optimizer_step_bytes(self, optimizer: OptimizerMemory) -> int:
        """Return the bytes that are live on a GPU while the optimizer's step runs."""
        step = self.eager_trace, self.graph, self.schedule
        if self.sharding.is_fsdp:
            return sharded_optimizer_step_bytes(*step, optimizer, self.sharding)
        step_bytes = optimizer_step_bytes(self.graph, optimizer)
        return step_bytes + ddp_bucket_bytes(self.eager_trace, self.sharding)

    def with_blocks_checkpointed(self) -> EagerStep | None:
        """Return the step with a checkpoint for each block; None without repeated blocks."""
        if not find_blocks(self.trace.graph()):
            return None
        return EagerStep.of(self.trace, BLOCKS, self.sharding, self.device)


def _checkpointed_regions(trace: Trace, checkpoint: str) -> Segments:
    """Return the operations of each checkpoint. Raises `RematError` for checkpoints of blocks if
    the model has no repeated blocks, or fewer than the N of "every:N"."""
    if checkpoint == NONE:
        return []
    if checkpoint == AS_WRITTEN:
        regions: dict[int, list[int]] = defaultdict(list)
        for op, node in enumerate(trace.operations):
            if node is not None and node.checkpoint and not node.backward:
                regions[node.checkpoint].append(op)
        return list(regions.values())
    blocks = find_blocks(trace.graph())
    if not blocks:
        raise RematError(
            f"the model has no repeated blocks to checkpoint (checkpoint={checkpoint!r}): blocks "
            "are modules in a ModuleList or Sequential; pass 'none', or call "
            "torch.utils.checkpoint in the model's code"
        )
    interval = _interval(checkpoint) or 1
    if interval > len(blocks):
        raise RematError(
            f"checkpoint={checkpoint!r} selects no block: the model has {len(blocks):,} repeated "
            "blocks; pass a smaller number"
        )
    return blocks[interval - 1 :: interval]


def _saved_values(trace: Trace, graph: Graph, regions: Segments, checkpoint: str) -> Iterator[int]:
    """Yield the values inside of regions that selective checkpoints save."""
    if checkpoint not in (AS_WRITTEN, SELECTIVE):
        return
    for ops in regions:
        matmul_count = 0
        for op in ops:
            node = trace.operations[op]
            if node is None:
                continue
            is_matmul = node.target in _MATMULS
            matmul_count += is_matmul
            is_saved = node.is_saved
            if checkpoint == SELECTIVE:
                is_saved = _ATTENTION in node.target or (is_matmul and matmul_count % 2 == 1)
            if is_saved:
                yield from graph.operations[op].outputs


def _with_retained_values(
    graph: Graph,
    regions: Segments,
    borders: Collection[int],
    saved: Collection[int],
    backward: Sequence[int],
) -> Graph:
    """Return the graph in which operations of a region's backward read what torch holds for it.

    The last one reads the arguments of the region: checkpoints release them once the last saved
    tensor of the region is. A selective checkpoint holds the results that it saves until they are
    read in the recomputation; those after the operation with which it ends, as long as arguments.
    """
    operations = list(graph.operations)
    for region in regions:
        outputs = {v for op in region for v in operations[op].outputs}
        arguments = {v for op in region for v in operations[op].inputs} - outputs
        inner = outputs.difference(borders)
        readers = [op for op in backward if inner & {*operations[op].inputs}]
        if not readers:
            continue
        read = {v for op in readers for v in operations[op].inputs} & inner
        end = max(graph.producer[v] for v in read)
        results = outputs.intersection(saved)
        later = {v for v in results if graph.producer[v] > end}
        for op, values in ((readers[0], results - later), (readers[-1], arguments | later)):
            inputs = values.union(operations[op].inputs)
            operations[op] = replace(operations[op], inputs=tuple(sorted(inputs)))
    return replace(graph, operations=tuple(operations))
