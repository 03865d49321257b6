"""The ways to make a training step fit a device, each with its peak and its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from remat.allocator.prediction import is_on_cuda
from remat.choice.step import solve_step
from remat.choice.trace_plan import TracePlan
from remat.costs.optimizer_memory import OptimizerMemory, optimizer_memory, smaller_optimizers
from remat.costs.roofline import Roofline
from remat.costs.trace_costs import with_roofline_costs
from remat.documents.trace import Trace, trained_parameters
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.graph import Graph
from remat.limits.budget import Budget
from remat.limits.pieces import pieces_to_try
from remat.report.eager_step import eager_graph, with_eager_masks
from remat.report.fit import FitOption
from remat.report.sharded_memory import sharded_peak_bytes
from remat.report.training_memory import TrainingMemory, optimizer_step_bytes
from remat.schedule import Schedule
from remat.simulate import baseline_of, peak_and_time
from remat.solve import solve
from remat.strategies import Strategy
from remat.strategies.baselines.module_blocks import find_blocks
from remat.strategies.baselines.schedule_builder import checkpoint_segments

_MAX_GPUS = 1024
_MAX_SOLVES = 3
_MAX_SMALLER_BATCHES = 3


@dataclass(frozen=True)
class EagerStep:
    """A training step in eager mode: its trace with costs, and its graph as autograd frees."""

    trace: Trace
    eager_trace: Trace
    graph: Graph

    @classmethod
    def of(cls, trace: Trace) -> EagerStep:
        """Return the step of a trace with costs."""
        eager_trace = with_eager_masks(trace)
        return cls(trace, eager_trace, eager_graph(eager_trace))

    @property
    def time_s(self) -> float:
        """The time of all operations."""
        return sum(operation.cost_s for operation in self.graph.operations)

    def optimizer(self, name: str) -> OptimizerMemory:
        """Return the memory of an optimizer of the trained parameters."""
        tensors = {p.storage: p.tensor for p in trained_parameters(self.trace)}
        return optimizer_memory(name, list(tensors.values()), is_cuda=is_on_cuda(self.trace))

    def memory(
        self, optimizer: OptimizerMemory, schedule: Schedule | None = None
    ) -> TrainingMemory:
        """Return the memory of a training loop in eager mode, by default without recomputation."""
        schedule = schedule or Schedule.keep_all(self.graph)
        return TrainingMemory.of(self.eager_trace, self.graph, schedule, optimizer)


@dataclass(frozen=True, slots=True)
class ScriptChanges:
    """The code that a model's training script needs: `checkpoints` to checkpoint each block, or ""
    if the model has no method for that, and `before_plan` what precedes a plan."""

    checkpoints: str = ""
    before_plan: str = ""


@dataclass(frozen=True)
class FitOptions:
    """The search for options of one step. `optimizer` is the name of the user's optimizer.

    `trace_of_batch` returns the trace with costs of another batch size, which accumulates its
    gradients; `batch` is the present size. They may be unknown.
    """

    step: EagerStep
    optimizer: str
    usable_bytes: int
    roofline: Roofline
    strategy: Strategy
    script: ScriptChanges = ScriptChanges()
    batch: int | None = None
    trace_of_batch: Callable[[int], Trace] | None = None

    def all(self) -> tuple[FitOption, ...]:
        """Return all options that apply: those that fit first, the fastest first. Of options that
        are equally fast (to 0.1%), the one that is simpler to apply is first."""
        options = [
            *self._optimizers(),
            *self._segments(),
            *self._plan(),
            *self._checkpointing(),
            *self._accumulation(),
            *self._sharding(),
        ]
        return tuple(sorted(options, key=self._sort_key))

    def _sort_key(self, option: FitOption) -> tuple[bool, float]:
        if option.step_s is None:
            return not option.fits, math.inf
        return not option.fits, round(option.step_s / (self.step.time_s or 1.0), 3)

    def _option(
        self, name: str, memory: TrainingMemory, step_s: float, code: str, note: str = ""
    ) -> FitOption:
        fits = memory.reserved_bytes <= self.usable_bytes
        return FitOption(name, memory.peak_bytes, memory.reserved_bytes, fits, step_s, code, note)

    def _optimizers(self) -> Iterator[FitOption]:
        """Yield the same update rule with less memory."""
        present = self.step.memory(self.step.optimizer(self.optimizer))
        for name in smaller_optimizers(self.optimizer):
            optimizer = self.step.optimizer(name)
            memory = self.step.memory(optimizer)
            if memory.reserved_bytes < present.reserved_bytes:
                note = "its moments are rounded to 8 bits" if name.endswith("8bit") else ""
                code = f"optimizer = {optimizer.code}"
                yield self._option(f"optimizer {name}", memory, self.step.time_s, code, note)

    def _segments(self) -> Iterator[FitOption]:
        """Yield expandable segments, if less is reserved with them."""
        memory = self.step.memory(self.step.optimizer(self.optimizer))
        if is_on_cuda(self.step.trace) and memory.expandable_bytes < memory.reserved_bytes:
            yield FitOption(
                "expandable segments",
                memory.peak_bytes,
                memory.expandable_bytes,
                memory.expandable_bytes <= self.usable_bytes,
                self.step.time_s,
                "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
                "before Python starts",
            )

    def _optimizers_to_combine(self) -> Iterator[OptimizerMemory]:
        """Yield the user's optimizer and smaller ones, as far as their own step fits."""
        for name in (self.optimizer, *smaller_optimizers(self.optimizer)):
            optimizer = self.step.optimizer(name)
            step_bytes = optimizer_step_bytes(self.step.graph, optimizer)
            if step_bytes * self._fragments(optimizer) <= self.usable_bytes:
                yield optimizer
            if self.step.memory(optimizer).reserved_bytes <= self.usable_bytes:
                return  # that optimizer is an option on its own

    def _plan(self) -> Iterator[FitOption]:
        """Yield the fastest plan that fits, with the largest optimizer that leaves room for one."""
        smallest: FitOption | None = None
        for optimizer in self._optimizers_to_combine():
            name = self._with_optimizer("plan of remat", optimizer)
            try:
                chosen = self._solved(optimizer)
            except InfeasibleBudget as error:
                if error.min_feasible_bytes is not None:
                    peak_bytes = error.min_feasible_bytes + optimizer.state_bytes
                    reserved_bytes = int(peak_bytes * self._fragments(optimizer))
                    code = self._plan_code(optimizer, peak_bytes)
                    note = "the smallest peak that was reached; reserved bytes are a guess"
                    option = FitOption(name, peak_bytes, reserved_bytes, False, None, code, note)
                    smallest = _smaller(smallest, option)
                continue
            except SolverTimeout:
                continue
            memory = self._memory_of_plan(chosen, optimizer)
            code = self._plan_code(optimizer, chosen.plan.budget_bytes + optimizer.state_bytes)
            option = self._option(name, memory, chosen.plan.time_s, code)
            if option.fits:
                yield option
                return
            smallest = _smaller(smallest, option)
        if smallest is not None:
            yield smallest

    def _solved(self, optimizer: OptimizerMemory) -> TracePlan:
        """Return the plan for what the optimizer's state and the allocator's fragments leave. If
        more would be reserved than is usable, the budget is lowered by the excess."""
        budget_bytes = int(self.usable_bytes / self._fragments(optimizer)) - optimizer.state_bytes
        chosen = self._solved_within(budget_bytes)
        for _ in range(_MAX_SOLVES - 1):
            memory = self._memory_of_plan(chosen, optimizer)
            excess = memory.reserved_bytes - self.usable_bytes
            if excess <= 0 or memory.is_in_optimizer:  # no plan reduces the optimizer's step
                break
            budget_bytes = min(budget_bytes, chosen.plan.peak_bytes) - excess
            try:
                chosen = self._solved_within(budget_bytes)
            except InfeasibleBudget:
                break
        return chosen

    def _fragments(self, optimizer: OptimizerMemory) -> float:
        """Return what torch's allocator reserves in eager mode, relative to the peak."""
        memory = self.step.memory(optimizer)
        return memory.reserved_bytes / max(1, memory.peak_bytes)

    def _solved_within(self, budget_bytes: int) -> TracePlan:
        """Return a plan without splitting, which takes less time to choose, if there is one."""
        try:
            return self._solved_in_pieces(budget_bytes, ())
        except InfeasibleBudget:
            return self._solved_in_pieces(budget_bytes, pieces_to_try("auto"))

    def _solved_in_pieces(self, budget_bytes: int, pieces: tuple[int, ...]) -> TracePlan:
        return solve_step(
            self.step.trace,
            Budget.parse(max(1, budget_bytes)),
            pieces=pieces,
            offload=None,
            solve_in_full=lambda trace, budget: solve(trace, budget, self.strategy),
            measure=lambda trace: with_roofline_costs(trace, self.roofline),
        )

    def _memory_of_plan(self, chosen: TracePlan, optimizer: OptimizerMemory) -> TrainingMemory:
        trace, plan = chosen
        return TrainingMemory.of(trace, trace.graph(), plan.schedule, optimizer)

    def _plan_code(self, optimizer: OptimizerMemory, budget_bytes: int) -> str:
        before = self.script.before_plan
        if not optimizer.code:
            return f"{before}remat.enable(model, {budget_bytes:_})"
        return (
            f"{before}optimizer = {optimizer.code}; "
            f"remat.enable(model, {budget_bytes:_}, reserve=optimizer)"
        )

    def _with_optimizer(self, name: str, optimizer: OptimizerMemory) -> str:
        return name if optimizer.name == self.optimizer else f"{name}, {optimizer.name}"

    def _checkpoint_schedule(self) -> Schedule | None:
        blocks = find_blocks(self.step.trace.graph())
        return checkpoint_segments(self.step.graph, blocks) if blocks else None

    def _checkpointing(self) -> Iterator[FitOption]:
        """Yield torch.utils.checkpoint around each block."""
        schedule = self._checkpoint_schedule()
        if schedule is None:
            return
        graph = self.step.graph
        if peak_and_time(graph, schedule)[0] >= baseline_of(graph).peak_bytes:
            return  # blocks whose recomputation saves nothing
        step_s = sum(self.step.graph.operations[op].cost_s for op in schedule.runs)
        options = []
        for optimizer in self._optimizers_to_combine():
            memory = self.step.memory(optimizer, schedule)
            code = self.script.checkpoints or "torch.utils.checkpoint.checkpoint around each block"
            if optimizer.name != self.optimizer:
                code = f"optimizer = {optimizer.code}; {code}"
            name = self._with_optimizer("checkpoint each block", optimizer)
            options.append(self._option(name, memory, step_s, code))
        fitting = [option for option in options if option.fits]
        yield from (fitting or options)[:1]

    def _accumulation(self) -> Iterator[FitOption]:
        """Yield the largest of some smaller batches that fits, whose gradients are accumulated."""
        if self.trace_of_batch is None or self.batch is None or self.batch < 2:
            return
        optimizer = self.step.optimizer(self.optimizer)
        smaller = [b for b in range(self.batch - 1, 0, -1) if self.batch % b == 0]
        option: FitOption | None = None
        for batch in self._promising_batches(smaller, optimizer)[:_MAX_SMALLER_BATCHES]:
            count = self.batch // batch
            step = EagerStep.of(self.trace_of_batch(batch))
            option = self._option(
                f"{count} batches of {batch}",
                step.memory(optimizer),
                count * step.time_s,
                f"(loss / {count}).backward() for {count} batches, then optimizer.step()",
            )
            if option.fits:
                break
        if option is not None:
            yield option

    def _promising_batches(self, smaller: list[int], optimizer: OptimizerMemory) -> list[int]:
        """Return the batches that may fit, the largest first, if activations are proportional to
        the batch."""
        step, batch = self.step, self.batch or 1
        parameters = {p.storage for p in trained_parameters(step.trace)}
        gradient_bytes = sum(map(step.trace.allocated_bytes, parameters))
        constant_bytes = step.graph.constant_bytes + gradient_bytes + optimizer.state_bytes
        memory = step.memory(optimizer)
        activation_bytes = max(0, memory.reserved_bytes - constant_bytes)
        room_bytes = self.usable_bytes - constant_bytes
        return [b for b in smaller if activation_bytes * b <= room_bytes * batch]

    def _sharding(self) -> Iterator[FitOption]:
        """Yield the smallest power of two of GPUs over which the step fits, without recomputation
        or with a checkpoint for each block."""
        if not is_on_cuda(self.step.trace):
            return
        optimizer = self.step.optimizer(self.optimizer)
        fragments = self._fragments(optimizer)
        keep_all = Schedule.keep_all(self.step.graph)
        schedules = [("", keep_all), (", checkpoint each block", self._checkpoint_schedule())]
        for suffix, schedule in schedules:
            if schedule is None or self.step.memory(optimizer, schedule).reserved_bytes <= (
                self.usable_bytes
            ):
                continue  # one GPU is enough
            gpus = 2
            while gpus <= _MAX_GPUS:
                peak_bytes = sharded_peak_bytes(
                    self.step.eager_trace, self.step.graph, schedule, optimizer, gpus
                )
                reserved_bytes = int(peak_bytes * fragments)
                if reserved_bytes <= self.usable_bytes:
                    yield FitOption(
                        f"FSDP over {gpus} GPUs{suffix}",
                        peak_bytes,
                        reserved_bytes,
                        True,
                        None,
                        "torch.distributed.fsdp.fully_shard of each block, then of the model",
                        "by arithmetic; a batch on each GPU; communication takes time as well",
                    )
                    return
                gpus *= 2


def _smaller(option: FitOption | None, other: FitOption) -> FitOption:
    """Return the one of two options with the smaller peak."""
    return other if option is None or other.peak_bytes < option.peak_bytes else option
