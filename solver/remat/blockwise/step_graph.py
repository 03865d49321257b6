"""The graph and the schedule of a step that is planned block by block.

Each call of a block contributes the operations of its plan, without their constant memory. A block
in eager mode contributes two operations: its forward writes what it saves, its backward reads it,
and a checkpointed block runs its forward twice. So the simulated peak and time equal
`BlockStep.outcome`.

Some operations without cost are added. A phase outside of blocks is one, with its memory as
workspace. The first operation of a block's forward or backward produces what other code has
allocated: the memory outside of blocks, inputs that the block saves, handles, gradients of outputs.
The last one reads what that code frees or takes over. Offloaded tensors have the four operations of
`remat.passes.offload`; the seconds that the step waits are the costs of `release` and `arrive`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from remat.blockwise.block_step import CHECKPOINTED, BlockOption, BlockStep, StepOutcome, host_stays
from remat.blockwise.pareto_options import (
    NEVER_FREED,
    HeldInput,
    SavedTensor,
    boundary_of,
    live_tangents,
)
from remat.graph import Baseline, Graph, Operation, Value
from remat.plan import Plan
from remat.schedule import Schedule


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of a block in a training step, and the option that it runs in.

    `path` is the block's module path and `class_name` its class. `how` is "planned" (it follows
    `plan`), "as it is" (no recomputation) or "checkpointed" (recomputed as a whole). `option` has
    its time and memory, `baseline_option` those without recomputation. `unplanned_reason` says why
    the block could not be planned, if that was tried. `inputs` are the inputs that count as the
    option's memory. Of the tensors that it saves, `offloaded` are on the host between forward and
    backward.
    """

    path: str
    class_name: str
    how: str
    option: BlockOption
    baseline_option: BlockOption
    plan: Plan | None = None
    unplanned_reason: str = ""
    inputs: tuple[HeldInput, ...] = ()
    offloaded: tuple[SavedTensor, ...] = ()

    @property
    def offloaded_bytes(self) -> int:
        """The bytes of the offloaded tensors."""
        return sum(tensor.size_bytes for tensor in self.offloaded)

    @property
    def own_saved_bytes(self) -> int:
        """The bytes that the option saves, without inputs."""
        return self.option.saved_bytes - sum(item.size_bytes for item in self.inputs)


class StepSchedule(NamedTuple):
    """A graph of a step, and its schedule."""

    graph: Graph
    schedule: Schedule


def schedule_of_step(
    step: BlockStep,
    calls: Sequence[BlockCall],
    outcome: StepOutcome,
    baseline: Baseline,
    constant_bytes: int = 0,
    library_bytes: int = 0,
) -> StepSchedule:
    """Return the graph of a step whose block calls run like this, with its schedule.

    `outcome` is the step's. `baseline` is the step without recomputation. `constant_bytes` are
    allocated during the whole step, `library_bytes` of them by libraries.
    """
    writer = _StepGraphWriter(step, calls, outcome, constant_bytes)
    writer.write()
    graph = Graph(
        tuple(writer.operations),
        tuple(writer.values),
        results=frozenset(writer.results),
        constant_bytes=writer.constant_bytes,
        boundary=writer.boundary,
        library_bytes=min(library_bytes, writer.constant_bytes),
        unsplit=baseline,
    )
    return StepSchedule(graph, Schedule(tuple(writer.runs)))


def _eager_block_schedule(call: BlockCall) -> StepSchedule:
    """Return the graph and the schedule of a block in eager mode, as it is or checkpointed.

    Recomputed, its forward needs no more memory than its backward: `first_run` has what it needs in
    addition when it runs first. `checkpoint` has what a checkpointed block saves.
    """
    option, is_checkpointed = call.option, call.how == CHECKPOINTED
    retained_bytes, output_bytes, cost_s = 0, call.own_saved_bytes, option.forward_s
    workspace_bytes = option.forward_bytes - output_bytes
    if is_checkpointed:
        retained_bytes = output_bytes
        cost_s = max(0.0, option.time_s - call.baseline_option.time_s)
        input_bytes = option.saved_bytes - retained_bytes
        limit_bytes = min(workspace_bytes, option.backward_bytes - option.saved_bytes)
        output_bytes = call.baseline_option.saved_bytes - input_bytes
        output_bytes = max(0, min(output_bytes, limit_bytes))
        workspace_bytes = limit_bytes - output_bytes
    backward_s = max(0.0, option.time_s - cost_s * (1 + is_checkpointed))
    backward_bytes = option.backward_bytes - option.saved_bytes - output_bytes * is_checkpointed
    peak_bytes = option.forward_bytes - retained_bytes if is_checkpointed else 0
    once = functools.partial(Operation, recomputable=False)
    operations = (
        once("checkpoint", (), (0,), 0.0),
        Operation(
            "forward", (), (1,), cost_s, max(0, workspace_bytes), recomputable=is_checkpointed
        ),
        once("first_run", (), (), 0.0, peak_bytes),
        once("boundary", (), (), 0.0, backward=True),
        once("backward", (0, 1), (), backward_s, max(0, backward_bytes), backward=True),
    )
    values = Value("checkpoint", retained_bytes), Value("saved", output_bytes)
    runs = (0, 1, 2, 3, 1, 4) if is_checkpointed else (0, 1, 2, 3, 4)
    return StepSchedule(Graph(operations, values, boundary=3), Schedule(runs))


class _StartedCopy(NamedTuple):
    """The operation that started to offload a value, and the value that stands for its copy."""

    offload: int
    memory: int


@dataclass
class _CallInStepGraph:
    """The operations and values of a call in the step's graph.

    `graph` and `runs` are the call's own. `values` and `operations` have the index of each value
    and operation of this graph in the step's, `inputs` the value of each held input, and `external`
    the memory outside of blocks while the call's forward or backward runs. `results` are held to
    the end of its backward. `copies` are the copies of offloaded values.
    """

    name: str
    graph: Graph
    runs: tuple[int, ...]
    values: dict[int, int] = field(default_factory=dict[int, int])
    operations: dict[int, int] = field(default_factory=dict[int, int])
    inputs: dict[int, int] = field(default_factory=dict[int, int])
    results: list[int] = field(default_factory=list[int])
    copies: dict[int, _StartedCopy] = field(default_factory=dict[int, "_StartedCopy"])
    external: int = -1

    @property
    def boundary(self) -> Operation:
        """The start of the call's backward."""
        return self.graph.operations[boundary_of(self.graph)]

    @property
    def boundary_run(self) -> int:
        """The place of the boundary in `runs`."""
        return self.runs.index(boundary_of(self.graph))


class _StepGraphWriter:
    """Writes the operations of a step and their schedule, event by event."""

    def __init__(
        self,
        step: BlockStep,
        calls: Sequence[BlockCall],
        outcome: StepOutcome,
        constant_bytes: int,
    ) -> None:
        self._step, self._calls, self._outcome = step, calls, outcome
        self.operations: list[Operation] = []
        self.values: list[Value] = []
        self.runs: list[int] = []
        self.results: list[int] = []
        self.boundary: int | None = None
        backwards = {e.call: n for n, e in enumerate(step.events) if e.kind == "backward"}
        self._first_backward = min(backwards.values(), default=-1)
        self._without_backward = set(range(len(calls))) - backwards.keys()
        # The inputs that a call holds are values of their own while it runs.
        outside_bytes = [
            event.non_block_bytes
            - (sum(i.size_bytes for i in calls[event.call].inputs) if has_inputs else 0)
            for event in step.events
            for has_inputs in [event.kind == "forward" and event.call in backwards]
        ]
        common_bytes = max(0, min([constant_bytes, *outside_bytes]))
        self._outside_bytes = [max(0, size - common_bytes) for size in outside_bytes]
        handle_bytes = 0 if step.host is None else step.host.handle_bytes
        self._handles_bytes = [handle_bytes * len(call.offloaded) for call in calls]
        remaining_bytes = sum(call.option.saved_bytes - call.offloaded_bytes for call in calls)
        remaining_bytes += sum(self._handles_bytes)
        other_batches_bytes = step.other_batches_bytes + (step.in_flight - 1) * remaining_bytes
        self.constant_bytes = common_bytes + other_batches_bytes
        offloading = [number for number, call in enumerate(calls) if call.offloaded]
        stays = host_stays(step) if offloading else {}
        self._released = {stays[number].released_after: number for number in offloading}
        self._reloaded = {stays[number].reloaded_before: number for number in offloading}
        counts = Counter(call.path for call in calls)
        numbers: Counter[str] = Counter()
        self._written: list[_CallInStepGraph] = []
        for call in calls:
            numbers[call.path] += 1
            suffix = f"#{numbers[call.path]}" if counts[call.path] > 1 else ""
            planned = _eager_block_schedule(call) if call.plan is None else call.plan
            name = f"{call.path}{suffix}"
            self._written.append(_CallInStepGraph(name, planned.graph, planned.schedule.runs))

    def write(self) -> None:
        """Write all events of the step."""
        for number, event in enumerate(self._step.events):
            if number + 1 == self._first_backward:
                self.boundary = len(self.operations)
            outside_bytes = self._outside_bytes[number]
            if event.kind == "outside":
                self._add_operation(f"outside_{number}", "", workspace_bytes=outside_bytes)
                continue
            written = self._written[event.call]
            if event.call in self._without_backward:
                self._add_call_without_backward(event.call, outside_bytes)
                continue
            written.external = self._add_value(
                f"{written.name}.outside_{event.kind}", outside_bytes
            )
            if event.kind == "forward":
                self._add_forward(event.call)
            else:
                self._add_backward(event.call)

    def _add_value(self, name: str, size_bytes: int) -> int:
        self.values.append(Value(name, size_bytes))
        return len(self.values) - 1

    def _add_operation(
        self,
        name: str,
        module: str,
        inputs: Iterable[int] = (),
        outputs: Iterable[int] = (),
        cost_s: float = 0.0,
        workspace_bytes: int = 0,
        overwrites: Iterable[int] = (),
        renews: Iterable[int] = (),
        same_copy_as: int = -1,
    ) -> int:
        """Add an operation that runs once, here, and return its number."""
        return self._add_run_of(
            Operation(
                name,
                tuple(inputs),
                tuple(outputs),
                cost_s,
                workspace_bytes,
                overwrites=tuple(overwrites),
                backward=self.boundary is not None,
                recomputable=False,
                module=module,
                renews=tuple(renews),
                same_copy_as=same_copy_as,
            )
        )

    def _add_run_of(self, operation: Operation) -> int:
        self.operations.append(operation)
        self.runs.append(len(self.operations) - 1)
        return self.runs[-1]

    def _add_forward(self, number: int) -> None:
        call, written = self._calls[number], self._written[number]
        for item in call.inputs:
            name = f"{written.name}.input_{item.index}"
            written.inputs[item.index] = self._add_value(name, item.size_bytes)
        held_to_end = [written.inputs[i.index] for i in call.inputs if i.last_read == NEVER_FREED]
        if call.offloaded:
            held_to_end.append(
                self._add_value(f"{written.name}.handles", self._handles_bytes[number])
            )
        produced = dict.fromkeys([written.external, *written.inputs.values(), *held_to_end])
        self._add_operation(f"{written.name}.enter", call.path, outputs=produced)
        written.results += held_to_end
        self._add_runs(number, written.runs[: written.boundary_run])
        outputs = written.boundary.inputs
        returned = [written.external, *(written.values[v] for v in outputs)]
        self._add_operation(f"{written.name}.return", call.path, inputs=returned)
        for tensor in call.offloaded:
            is_input = tensor.value < 0
            v = written.inputs[tensor.input_index] if is_input else written.values[tensor.value]
            written.copies[v] = _StartedCopy(-1, -1)
            self._add_copy_operation(number, "offload", v)
        if number in self._released:
            self._add_copy_operations(self._released[number], "release")

    def _add_call_without_backward(self, number: int, outside_bytes: int) -> None:
        """Add a call whose backward never runs, as one operation: what it saves stays in memory."""
        call, name = self._calls[number], self._written[number].name
        forward_bytes = outside_bytes + call.option.forward_bytes
        self._add_operation(
            f"{name}.forward",
            call.path,
            cost_s=call.option.time_s,
            workspace_bytes=forward_bytes,
        )
        self.results.append(self._add_value(f"{name}.saved", call.option.saved_bytes))
        self._add_operation(f"{name}.hold", call.path, outputs=self.results[-1:])

    def _add_runs(self, number: int, runs: Iterable[int]) -> None:
        """Add these runs of a call's plan to the step, and the operations that they run first."""
        call, written = self._calls[number], self._written[number]
        graph = written.graph
        repeated = {op for op, count in Counter(written.runs).items() if count > 1}
        last_inputs = self._inputs_read_last(number)
        for op in runs:
            if op in written.operations:
                self.runs.append(written.operations[op])
                continue
            old = graph.operations[op]
            module = f"{call.path}.{old.module}" if old.module else call.path
            for v in old.outputs:
                name = f"{written.name}.{graph.values[v].name}"
                written.values[v] = self._add_value(name, graph.values[v].size_bytes)
            new = replace(
                old,
                name=f"{written.name}.{old.name}",
                inputs=(*(written.values[v] for v in old.inputs), *last_inputs.get(op, ())),
                outputs=tuple(written.values[v] for v in old.outputs),
                overwrites=tuple(written.values[v] for v in old.overwrites),
                backward=self.boundary is not None,
                module=module,
            )
            written.operations[op] = self._add_run_of(new)
            for v in graph.results.intersection(old.outputs):
                if op in repeated:  # later copies of a result are not read
                    name = f"{written.name}.{graph.values[v].name}.first"
                    written.values[v] = self._add_value(name, graph.values[v].size_bytes)
                    self._add_operation(name, module, outputs=[written.values[v]])
                written.results.append(written.values[v])

    def _inputs_read_last(self, number: int) -> dict[int, tuple[int, ...]]:
        """Return the held inputs that each operation of a call's plan is the last to read;
        operations without any are left out."""
        call, written = self._calls[number], self._written[number]
        inputs: dict[int, tuple[int, ...]] = {}
        for item in call.inputs:
            if item.last_read != NEVER_FREED:
                op = written.runs[written.boundary_run + 1 + item.last_read]
                inputs[op] = (*inputs.get(op, ()), written.inputs[item.index])
        return inputs

    def _add_backward(self, number: int) -> None:
        call, written = self._calls[number], self._written[number]
        if number in self._reloaded:
            self._add_copy_operations(self._reloaded[number], "reload")
        self._add_copy_operations(number, "arrive")
        produced = [written.external]
        for v in live_tangents(written.graph):
            tangent = written.graph.values[v]
            name = f"{written.name}.{tangent.name}"
            written.values[v] = self._add_value(name, tangent.size_bytes)
            produced.append(written.values[v])
            written.results += [written.values[v]] if v in written.graph.results else []
        self._add_operation(
            f"{written.name}.start", call.path, (), produced, written.boundary.cost_s
        )
        self._add_runs(number, written.runs[written.boundary_run + 1 :])
        results = dict.fromkeys([written.external, *written.results])
        self._add_operation(f"{written.name}.end", call.path, inputs=results)

    def _add_copy_operations(self, number: int, kind: str) -> None:
        """Add an operation of this kind ("release", "reload", "arrive") for each offloaded value of
        a call. The first one waits."""
        direction = "to_host" if kind == "release" else "to_device"
        wait_s = 0.0 if kind == "reload" else self._outcome.waits_s.get((direction, number), 0.0)
        for v in self._written[number].copies:
            self._add_copy_operation(number, kind, v, wait_s)
            wait_s = 0.0

    def _add_copy_operation(self, number: int, kind: str, v: int, wait_s: float = 0.0) -> None:
        """Add an operation of this kind, which starts or awaits a copy of the value `v`, and waits
        for `wait_s`."""
        path, copies = self._calls[number].path, self._written[number].copies
        size_bytes = self.values[v].size_bytes if kind == "reload" else 0
        name = f"{kind}_{self.values[v].name}"
        if kind == "arrive":
            host = [copies[v].memory]
            self._add_operation(name, path, host, [v], wait_s, overwrites=host, renews=[v])
            return
        inputs = {"offload": [v], "release": [v, copies[v].memory], "reload": [copies[v].memory]}
        memory = self._add_value(f"{self.values[v].name}_{kind}", size_bytes)
        offload = copies[v].offload if kind == "release" else -1
        index = self._add_operation(
            name, path, inputs[kind], [memory], wait_s, same_copy_as=offload
        )
        copies[v] = _StartedCopy(index if kind == "offload" else copies[v].offload, memory)
