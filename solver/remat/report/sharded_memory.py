"""The memory of a training step whose parameters, gradients and optimizer state are sharded over
several GPUs (FSDP2), by simulation of the step of one GPU.

As `torch.distributed.fsdp.fully_shard` does when it is applied to each block and to the model
(`_fsdp_param_group.py` and `_fsdp_collectives.py` of torch 2.13): every GPU has an equal shard of
everything, padded to the largest, and computes on its own batch. The parameters outside of blocks
are gathered during the whole step, those of a block while it runs.

- A gather allocates a flat buffer, then the parameters that are copied from it. In the forward, the
  buffer lives until the next block is gathered. In the backward, the next block is gathered into
  its buffer while a block runs.
- After the backward of a block, its gradients are copied into a flat buffer, which is reduced to a
  shard, and lives until the next reduction.

Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from remat.costs.layouts import item_bytes
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
from remat.simulate import Timeline, simulate

_ROOT = ""
"""The name of the unit of all parameters outside of blocks."""


def sharded_peak_bytes(
    trace: Trace, graph: Graph, schedule: Schedule, optimizer: OptimizerMemory, gpus: int
) -> int:
    """Return the peak in bytes of each of `gpus` GPUs. `graph` is the trace's, or eager
    mode's; `optimizer` is for one GPU."""
    parameters = {p.storage: p for p in trace.placeholders if p.kind == "parameter"}
    trained = {p.storage: p for p in trained_parameters(trace)}
    gathered = _padded_bytes_by_unit(parameters.values(), gpus)
    reduced = _padded_bytes_by_unit(trained.values(), gpus)
    gradients = _units_of_gradients(trace, graph)
    activations = _graph_without_parameters(trace, graph, gradients)
    step = _ShardedStep(
        graph, schedule, simulate(activations, schedule), gathered, reduced, gradients, gpus
    )
    reduced_shards_bytes = sum(reduced.values()) // gpus
    shards_bytes = sum(gathered.values()) // gpus - (-optimizer.state_bytes // gpus)
    if trace.accumulates_gradients:
        shards_bytes += reduced_shards_bytes
    optimizer_bytes = reduced_shards_bytes - (-optimizer.temporary_bytes // gpus)
    return shards_bytes + max(
        step.forward_peak_bytes(),
        step.backward_peak_bytes(),
        step.bytes_at_end + optimizer_bytes,
    )


def block_containers(trace: Trace) -> tuple[str, ...]:
    """Return the paths of the modules whose children are the blocks, in the order of the
    parameters; "" is the model."""
    units = (_fsdp_unit(p.target) for p in trace.placeholders if p.kind == "parameter")
    return tuple(dict.fromkeys(unit.rpartition(".")[0] for unit in units if unit != _ROOT))


@dataclass(frozen=True)
class _ShardedStep:
    """The runs of a step whose units, the blocks and all that is outside of them, are sharded.

    `timeline` has no parameters and gradients. `gathered` and `reduced` are the padded bytes of all
    and of the trained parameters of each unit, and `gradients` the units of the gradients' values.
    The peaks are without the shards of parameters.
    """

    graph: Graph
    schedule: Schedule
    timeline: Timeline
    gathered: dict[str, int]
    reduced: dict[str, int]
    gradients: dict[int, str]
    gpus: int

    @property
    def bytes_at_end(self) -> int:
        """The bytes after the last run."""
        return self.timeline.after_bytes[-1]

    def forward_peak_bytes(self) -> int:
        """Return the peak of the forward."""
        root_bytes = self.gathered[_ROOT]
        spans = self._block_spans(range(self._boundary))
        entered = {first: name for name, (first, _) in spans.items()}
        buffer_bytes = root_bytes  # that the latest gather was copied from
        peak_bytes = self.timeline.before_bytes[0] + buffer_bytes + root_bytes
        for run in range(self._boundary):
            if run in entered:
                block_bytes = self.gathered[entered[run]]
                gather_bytes = max(buffer_bytes, block_bytes) + block_bytes
                gather_bytes += self.timeline.before_bytes[run] + root_bytes
                peak_bytes = max(peak_bytes, gather_bytes)
                buffer_bytes = block_bytes
            live = (self.gathered[n] for n, (first, last) in spans.items() if first <= run <= last)
            sizes_bytes = root_bytes + buffer_bytes + sum(live)
            peak_bytes = max(peak_bytes, self.timeline.during_bytes[run] + sizes_bytes)
        return peak_bytes

    def backward_peak_bytes(self) -> int:
        """Return the peak of the backward, in which blocks are reduced one by one."""
        during, after = self.timeline.during_bytes, self.timeline.after_bytes
        spans = self._block_spans(range(self._boundary, len(self.schedule)))
        order = sorted(spans, key=lambda name: spans[name])
        entered = {spans[name][0]: name for name in order}
        left = {spans[name][1]: name for name in order}
        following = dict(zip(order, [*order[1:], None], strict=True))
        prefetched_bytes = self.gathered[order[0]] if order else 0
        root_bytes = self.gathered[_ROOT]
        reducing_bytes = shards_bytes = block_bytes = peak_bytes = 0
        gradient_bytes: dict[str, int] = defaultdict(int)
        produced = self._gradients_by_run()

        def live_bytes() -> int:
            live = root_bytes + block_bytes + prefetched_bytes + reducing_bytes + shards_bytes
            return live + sum(gradient_bytes.values())

        for run in range(self._boundary, len(self.schedule)):
            if run in entered:
                name = entered[run]
                block_bytes += self.gathered[name]
                gather_bytes = self.timeline.before_bytes[run] + live_bytes()
                peak_bytes = max(peak_bytes, gather_bytes)  # with the buffer, which is then freed
                after_name = following[name]
                prefetched_bytes = 0 if after_name is None else self.gathered[after_name]
            for value in produced[run]:
                gradient_bytes[self.gradients[value]] += self.graph.values[value].size_bytes
            peak_bytes = max(peak_bytes, during[run] + live_bytes())
            if run in left:
                name = left[run]
                block_bytes -= self.gathered[name]
                reducing_bytes = self.reduced[name]
                peak_bytes = max(peak_bytes, after[run] + live_bytes())
                gradient_bytes.pop(name, None)
                shards_bytes += self.reduced[name] // self.gpus
        root_bytes, reducing_bytes = 0, self.reduced[_ROOT]
        return max(peak_bytes, self.bytes_at_end + live_bytes())

    @property
    def _boundary(self) -> int:
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
        name = _ROOT
        produced = self._gradients_by_run()
        for run in runs:
            module = self.graph.operations[self.schedule.runs[run]].module
            name = _fsdp_unit(module) if module else name  # sums of gradients have no module
            for unit in {name, *(self.gradients[value] for value in produced[run])}:
                if unit in self.gathered and unit != _ROOT:
                    spans[unit] = spans.get(unit, (run, run))[0], run
        return spans

    def _gradients_by_run(self) -> dict[int, list[int]]:
        """Return the gradients' values by the run that produces them first."""
        by_run: dict[int, list[int]] = defaultdict(list)
        values: set[int] = set()
        for copy in self.timeline.copies:
            if copy.value in self.gradients and copy.value not in values:
                values.add(copy.value)
                by_run[copy.start].append(copy.value)
        return by_run


def _fsdp_unit(path: str) -> str:
    """Return the block of a module or parameter: the path up to its first number; "" without a
    number."""
    parts = path.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return _ROOT if number is None else ".".join(parts[: number + 1])


def _padded_bytes_by_unit(parameters: Iterable[Placeholder], gpus: int) -> dict[str, int]:
    """Return the bytes of the parameters of each unit, padded so that each GPU has an equal number
    of rows of the first dimension."""
    sizes: dict[str, int] = defaultdict(int)
    sizes[_ROOT] = 0
    for parameter in parameters:
        rows, *others = parameter.tensor.shape or (1,)
        padded_rows = -(-rows // gpus) * gpus
        item = item_bytes(parameter.tensor.dtype)
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
