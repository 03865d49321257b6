"""The memory of a training step whose parameters, gradients and optimizer state are sharded over
several GPUs (FSDP2), by simulation of the step of one GPU.

As `torch.distributed.fsdp.fully_shard` does when it is applied to each block and to the model
(`_fsdp_param_group.py` and `_fsdp_collectives.py` of torch 2.13): every GPU has an equal shard of
everything, padded to the largest, and computes on its own batch. The parameters outside of blocks
are gathered during the whole step, those of a block while it runs; with
`reshard_after_forward=False` they stay until its backward ends.

- A gather allocates a flat buffer, then the parameters that are copied from it. In the forward, the
  buffer lives until the next block's parameters have been copied from theirs. In the backward, the
  next block is gathered into its buffer while a block runs.
- After the backward of a block, its gradients are copied into a flat buffer, which is reduced to a
  shard, and lives until the next reduction. With several replicas of a shard (HSDP), the shard in
  the dtype of the reduction lives until the backward ends.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from remat.costs.layouts import item_bytes
from remat.costs.optimizer_memory import OptimizerMemory
from remat.costs.sharding import Sharding
from remat.documents.trace import (
    Placeholder,
    Trace,
    accumulated_gradient_bytes,
    trained_parameters,
)
from remat.errors import RematError
from remat.graph import Graph
from remat.report.eager_step import value_of_storage
from remat.report.training_memory import TrainingMemory
from remat.schedule import Schedule
from remat.simulate import Timeline, simulate

ROOT = ""
"""The name of the unit of all parameters outside of blocks."""


def sharded_training_memory(
    trace: Trace,
    graph: Graph,
    schedule: Schedule,
    optimizer: OptimizerMemory,
    sharding: Sharding,
    whole: TrainingMemory,
) -> TrainingMemory:
    """Return the memory of each GPU of a loop whose parameters are sharded. `graph` is the trace's,
    or eager mode's; `optimizer` is that of a shard, and `whole` the memory of the loop on one GPU,
    whose fragments those of a sharded step are taken from, relative to the peak."""
    step = ShardedStep.of(trace, graph, schedule, sharding)
    shards_bytes = step.shards_bytes
    peak = max(
        (
            *step.forward_candidates(),
            *step.backward_candidates(),
            step.at_optimizer_step(optimizer),
        ),
        key=lambda moment: moment.total_bytes,
    )
    peak_bytes = peak.total_bytes + shards_bytes + optimizer.state_bytes
    ratio = peak_bytes / max(1, whole.peak_bytes)
    resident = trace.placeholder_bytes()
    parts = {
        "parameters": shards_bytes,
        "gathered parameters": peak.gathered_bytes,
        "buffers": resident["buffer"] + resident["constant"],
        "inputs": resident["input"],
        "libraries": trace.library_bytes,
        "gradients": peak.gradient_bytes,
        "buffers of reduction": peak.reduction_bytes,
    }
    others_bytes = sum(parts[name] for name in ("buffers", "inputs", "libraries"))
    is_in_optimizer = peak.optimizer_bytes is not None
    name = "outputs" if is_in_optimizer else "activations"
    parts[name] = peak.activation_bytes - others_bytes
    parts["optimizer state"] = optimizer.state_bytes
    parts["optimizer step"] = peak.optimizer_bytes or 0
    return TrainingMemory(
        peak_bytes,
        peak_bytes,
        int(whole.reserved_bytes * ratio),
        int(whole.expandable_bytes * ratio),
        is_in_optimizer,
        {name: size for name, size in parts.items() if size},
    )


def sharded_optimizer_step_bytes(
    trace: Trace,
    graph: Graph,
    schedule: Schedule,
    optimizer: OptimizerMemory,
    sharding: Sharding,
) -> int:
    """Return the bytes that are live on each GPU while the optimizer's step runs."""
    step = ShardedStep.of(trace, graph, schedule, sharding)
    live = step.at_optimizer_step(optimizer)
    return live.total_bytes + step.shards_bytes + optimizer.state_bytes


def check_mixed_precision(trace: Trace, sharding: Sharding) -> None:
    """Raise `RematError` if a floating-point parameter has another dtype than the one in which
    `fully_shard` gathers parameters."""
    dtype = sharding.mixed_precision_param
    dtypes = {p.tensor.dtype for p in trace.placeholders if p.kind == "parameter"}
    if dtype and dtypes - {dtype}:
        raise RematError(
            f"the trace has parameters in {', '.join(sorted(dtypes - {dtype}))}, and "
            f"mixed_precision_param is {dtype!r}: trace the model in the dtype of its computation, "
            f"model.to(torch.{dtype}); its shards count as float32"
        )


def ddp_bucket_bytes(trace: Trace, sharding: Sharding) -> int:
    """Return the bytes of DDP's buckets, which are as large as all gradients; 0 if gradients are
    views of them."""
    if not sharding.is_ddp or sharding.gradient_as_bucket_view:
        return 0
    return accumulated_gradient_bytes(trace)


def with_ddp_buckets(memory: TrainingMemory, trace: Trace, sharding: Sharding) -> TrainingMemory:
    """Return the memory of a loop with DDP's buckets."""
    size_bytes = ddp_bucket_bytes(trace, sharding)
    if not size_bytes:
        return memory
    return TrainingMemory(
        memory.peak_bytes + size_bytes,
        memory.allocated_bytes + size_bytes,
        memory.reserved_bytes + size_bytes,
        memory.expandable_bytes + size_bytes,
        memory.is_in_optimizer,
        {**memory.parts, "buckets of DDP": size_bytes},
    )


def block_containers(trace: Trace) -> tuple[str, ...]:
    """Return the paths of the modules whose children are the blocks, in the order of the
    parameters; "" is the model."""
    units = (_fsdp_unit(p.target) for p in trace.placeholders if p.kind == "parameter")
    return tuple(dict.fromkeys(unit.rpartition(".")[0] for unit in units if unit != ROOT))


@dataclass(frozen=True, slots=True)
class _LiveBytes:
    """The bytes of a GPU at one time of a step, without its shards of parameters and of the
    optimizer's state. `activation_bytes` has all that is not sharded; `optimizer_bytes` is None
    outside of the optimizer's step."""

    activation_bytes: int
    gathered_bytes: int = 0
    gradient_bytes: int = 0
    reduction_bytes: int = 0
    optimizer_bytes: int | None = None

    @property
    def total_bytes(self) -> int:
        """The sum of all parts."""
        total = self.activation_bytes + self.gathered_bytes + self.gradient_bytes
        return total + self.reduction_bytes + (self.optimizer_bytes or 0)


@dataclass(frozen=True)
class ShardedStep:
    """The runs of a step whose units, the blocks and all that is outside of them, are sharded.

    `timeline` has no parameters and gradients. `gathered` and `reduced` are the padded elements of
    all and of the trained parameters of each unit, as bytes in the dtypes of gathering and
    reduction; `gradient_shards` are the bytes of a GPU's shards of gradients. `gradients` are the
    units of the gradients' values. `accumulates` is True if shards of gradients exist already.
    """

    graph: Graph
    schedule: Schedule
    timeline: Timeline
    gathered: dict[str, int]
    reduced: dict[str, int]
    gradient_shards: dict[str, int]
    gradients: dict[int, str]
    sharding: Sharding
    shards_bytes: int
    accumulates: bool

    @classmethod
    def of(cls, trace: Trace, graph: Graph, schedule: Schedule, sharding: Sharding) -> ShardedStep:
        """Return the step of a trace; `graph` is the trace's, or eager mode's."""
        parameters = {p.storage: p for p in trace.placeholders if p.kind == "parameter"}
        trained = {p.storage: p for p in trained_parameters(trace)}
        shards, shard_dtype, reduce_dtype = sharding.shards, "", ""
        if sharding.mixed_precision_param:
            shard_dtype, reduce_dtype = "float32", sharding.mixed_precision_reduce or "float32"
        stored = _padded_bytes_by_unit(parameters.values(), shards, shard_dtype)
        stored_gradients = _padded_bytes_by_unit(trained.values(), shards, shard_dtype)
        gradients = _units_of_gradients(trace, graph)
        activations = _graph_without_parameters(trace, graph, gradients)
        return cls(
            graph,
            schedule,
            simulate(activations, schedule),
            _padded_bytes_by_unit(parameters.values(), shards),
            _padded_bytes_by_unit(trained.values(), shards, reduce_dtype),
            {unit: size // shards for unit, size in stored_gradients.items()},
            gradients,
            sharding,
            sum(stored.values()) // shards,
            trace.accumulates_gradients,
        )

    @property
    def blocks_in_forward(self) -> dict[str, tuple[int, int]]:
        """The first and the last run of each block in the forward."""
        return self._block_spans(range(self.boundary))

    @property
    def blocks_in_backward(self) -> dict[str, tuple[int, int]]:
        """The first and the last run of each block in the backward, in their order."""
        spans = self._block_spans(range(self.boundary, len(self.schedule)))
        return dict(sorted(spans.items(), key=lambda item: item[1]))

    @property
    def _first_gradient_bytes(self) -> int:
        """The bytes of the shards of gradients before the backward."""
        return sum(self.gradient_shards.values()) if self.accumulates else 0

    def forward_candidates(self) -> Iterator[_LiveBytes]:
        """Yield the live bytes of the forward that may be its peak."""
        before, during = self.timeline.before_bytes, self.timeline.during_bytes
        root_bytes, gradient_bytes = self.gathered[ROOT], self._first_gradient_bytes
        spans = self.blocks_in_forward
        entered, left = _names_by_run(spans)
        buffer_bytes = root_bytes  # that the latest gather was copied from
        live_bytes = root_bytes
        yield _LiveBytes(before[0], buffer_bytes + root_bytes, gradient_bytes)
        for run in range(self.boundary):
            for name in entered[run]:
                block_bytes = self.gathered[name]
                gather_bytes = buffer_bytes + 2 * block_bytes + live_bytes
                yield _LiveBytes(before[run], gather_bytes, gradient_bytes)
                buffer_bytes = block_bytes
                live_bytes += block_bytes
            yield _LiveBytes(during[run], live_bytes + buffer_bytes, gradient_bytes)
            if self.sharding.reshards_after_forward:
                live_bytes -= sum(self.gathered[name] for name in left[run])

    def backward_candidates(self) -> Iterator[_LiveBytes]:
        """Yield the live bytes of the backward that may be its peak. Blocks are reduced one by
        one."""
        before, after = self.timeline.before_bytes, self.timeline.after_bytes
        spans = self.blocks_in_backward
        entered, left = _names_by_run(spans)
        following = dict(zip(spans, [*list(spans)[1:], ROOT], strict=True))
        sizes = {**self.gathered, ROOT: 0}
        gathers = self.sharding.reshards_after_forward
        live_bytes = self.gathered[ROOT]
        prefetched_bytes = sizes[next(iter(spans), ROOT)] if gathers else 0
        if not gathers:
            live_bytes += sum(sizes.values())
        shards_bytes = self._first_gradient_bytes
        reducing_bytes = retained_bytes = 0  # what HSDP's all-reduce retains
        gradient_bytes: dict[str, int] = defaultdict(int)
        produced = self.gradients_by_run

        def live(activation_bytes: int, more_bytes: int = 0) -> _LiveBytes:
            return _LiveBytes(
                activation_bytes,
                live_bytes + prefetched_bytes,
                sum(gradient_bytes.values()) + shards_bytes,
                reducing_bytes + retained_bytes + more_bytes,
            )

        def reduce(unit: str, activation_bytes: int) -> Iterator[_LiveBytes]:
            nonlocal reducing_bytes, retained_bytes, shards_bytes
            reducing_bytes = self.reduced[unit]
            yield live(activation_bytes)  # while gradients are copied into the buffer
            gradient_bytes.pop(unit, None)
            output_bytes = self.reduced[unit] // self.sharding.shards
            is_cast = output_bytes != self.gradient_shards[unit]
            shard_bytes = self.gradient_shards[unit]
            yield live(activation_bytes, output_bytes + (shard_bytes if is_cast else 0))
            if not self.accumulates:
                shards_bytes += shard_bytes
            if self.sharding.replicas > 1 and (is_cast or self.accumulates):
                retained_bytes += output_bytes

        for run in range(self.boundary, len(self.schedule)):
            for name in entered[run] if gathers else ():
                live_bytes += sizes[name]
                yield live(before[run])  # with the buffer, which is then freed
                prefetched_bytes = sizes[following[name]]
                yield live(before[run], self._cast_bytes(following[name]))
            for value in produced.get(run, ()):
                gradient_bytes[self.gradients[value]] += self.graph.values[value].size_bytes
            yield live(self.timeline.during_bytes[run])
            for name in left[run]:
                live_bytes -= sizes[name]
                yield from reduce(name, after[run])
        live_bytes = 0
        yield from reduce(ROOT, after[-1])

    def _cast_bytes(self, unit: str) -> int:
        """Return the bytes of a unit's shard in the dtype of computation, which is gathered."""
        is_block = unit != ROOT and self.sharding.mixed_precision_param
        return self.gathered[unit] // self.sharding.shards if is_block else 0

    def at_optimizer_step(self, optimizer: OptimizerMemory) -> _LiveBytes:
        """Return the optimizer's step."""
        return _LiveBytes(
            self.timeline.after_bytes[-1],
            gradient_bytes=sum(self.gradient_shards.values()),
            optimizer_bytes=optimizer.temporary_bytes,
        )

    @cached_property
    def boundary(self) -> int:
        """The run that follows the last first run of an operation of the forward."""
        first_runs: dict[int, int] = {}
        for run, op in enumerate(self.schedule.runs):
            first_runs.setdefault(op, run)
        forward = (run for op, run in first_runs.items() if not self.graph.operations[op].backward)
        return 1 + max(forward, default=-1)

    def _block_spans(self, runs: range) -> dict[str, tuple[int, int]]:
        """Return the first and the last of these runs of each block; also of its gradients, which
        decide when it is reduced."""
        spans: dict[str, tuple[int, int]] = {}
        name = ROOT
        produced = self.gradients_by_run
        for run in runs:
            module = self.graph.operations[self.schedule.runs[run]].module
            name = _fsdp_unit(module) if module else name  # sums of gradients have no module
            for unit in {name, *(self.gradients[value] for value in produced.get(run, ()))}:
                if unit in self.gathered and unit != ROOT:
                    spans[unit] = spans.get(unit, (run, run))[0], run
        return spans

    @cached_property
    def gradients_by_run(self) -> dict[int, list[int]]:
        """The gradients' values by the run that produces them first, in the order of runs."""
        by_run: dict[int, list[int]] = defaultdict(list)
        values: set[int] = set()
        for copy in self.timeline.copies:
            if copy.value in self.gradients and copy.value not in values:
                values.add(copy.value)
                by_run[copy.start].append(copy.value)
        return dict(sorted(by_run.items()))


def _names_by_run(
    spans: dict[str, tuple[int, int]],
) -> tuple[defaultdict[int, list[str]], defaultdict[int, list[str]]]:
    """Return the blocks by their first run, and by their last run."""
    first: defaultdict[int, list[str]] = defaultdict(list)
    last: defaultdict[int, list[str]] = defaultdict(list)
    for name, (start, end) in spans.items():
        first[start].append(name)
        last[end].append(name)
    return first, last


def _fsdp_unit(path: str) -> str:
    """Return the block of a module or parameter: the path up to its first number; "" without a
    number."""
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return ROOT if number is None else ".".join(parts[: number + 1])


def _padded_bytes_by_unit(
    parameters: Iterable[Placeholder], shards: int, dtype: str = ""
) -> dict[str, int]:
    """Return the bytes of the parameters of each unit, padded so that each shard has an equal
    number of rows of the first dimension; in their dtype, or in `dtype`."""
    sizes: dict[str, int] = defaultdict(int)
    sizes[ROOT] = 0
    for parameter in parameters:
        rows, *others = parameter.tensor.shape or (1,)
        padded_rows = -(-rows // shards) * shards
        item = item_bytes(dtype or parameter.tensor.dtype)
        sizes[_fsdp_unit(parameter.target)] += padded_rows * prod(others) * item
    return sizes


def _units_of_gradients(trace: Trace, graph: Graph) -> dict[int, str]:
    """Return the unit of each trained parameter, by the value that is its gradient."""
    value_of = value_of_storage(trace, graph)
    targets = {p.name: p.target for p in trained_parameters(trace)}
    return {
        value: _fsdp_unit(targets[gradient.placeholder])
        for gradient in trace.gradients
        if gradient.placeholder in targets
        and (value := value_of.get(trace.storage_of[gradient.name])) is not None
    }


def _graph_without_parameters(trace: Trace, graph: Graph, gradients: Iterable[int]) -> Graph:
    """Return the graph of a step without its parameters and their gradients."""
    sizes = dict.fromkeys(gradients, 0)
    values = tuple(
        replace(value, size_bytes=sizes.get(v, value.size_bytes))
        for v, value in enumerate(graph.values)
    )
    storages = {p.storage for p in trace.placeholders if p.kind == "parameter"}
    constant_bytes = graph.constant_bytes - sum(map(trace.allocated_bytes, storages))
    if trace.accumulates_gradients:
        constant_bytes -= accumulated_gradient_bytes(trace)
    return replace(graph, values=values, constant_bytes=constant_bytes)
