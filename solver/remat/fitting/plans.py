"""The options of a plan: recomputation, and operations in pieces; also for a step that returns its
loss only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from remat.choice.plan_request import PlanRequest, TracePlan
from remat.choice.step import plan_step
from remat.costs.optimizer_memory import OptimizerMemory
from remat.costs.trace_costs import with_roofline_costs
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, RematError, SolverTimeout
from remat.fitting.question import RELEASE_CODE, FitQuestion
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.limits.options import OUTPUTS_HELD, OUTPUTS_LOSS, pieces_to_try
from remat.limits.reductions import Verdict, lower_until_accepted
from remat.passes.outputs import returns_loss, unreturned_bytes, with_outputs
from remat.plan import Plan
from remat.report.fit import ExcludedOption, FitOption
from remat.report.training_memory import TrainingMemory
from remat.schedule import Schedule
from remat.solve import solve
from remat.strategies.base import Strategy

_EXCESS_MARGIN = 0.002
"""The share of the usable memory by which a budget is lowered in addition to its excess: the
fragments of another plan differ."""

_PLAN = "plan of remat"
_LOSS_ONLY_PLAN = "plan that returns the loss only"
_LOSS_ONLY_NOTE = "in training, the model does not return its other outputs; using one is an error"

_LARGE_OUTPUTS = 0.01
"""The share of the step's peak from which on outputs other than the loss are worth an option."""


def plan_options(question: FitQuestion) -> Iterator[FitOption | ExcludedOption]:
    """Yield the fastest plan that fits, with the largest optimizer that leaves room for one; if
    none fits, the one with the smallest peak; an excluded option if no optimizer's step fits, or
    the solver reached nothing. Nothing once the time limit has passed."""
    return _fitting_plan_options(question, _PLAN)


def loss_only_options(question: FitQuestion) -> Iterator[FitOption]:
    """Yield a plan for the option `outputs="loss"`, if the step returns large outputs, such as
    logits, in addition to its loss: those need not exist as a whole."""
    question = question.with_outputs_released()
    step = question.step
    is_large = unreturned_bytes(step.trace) >= _LARGE_OUTPUTS * step.peak_bytes
    if not returns_loss(step.trace) or not is_large:
        return
    script = replace(question.script, outputs=OUTPUTS_LOSS)
    loss_only = step.with_trace(with_outputs(step.trace, OUTPUTS_LOSS))
    question = replace(question, step=loss_only, script=script)
    options = _fitting_plan_options(question, _LOSS_ONLY_PLAN)
    yield from (
        replace(option, note="; ".join(filter(None, (_LOSS_ONLY_NOTE, option.note))))
        for option in options
        if isinstance(option, FitOption)
    )


def _fitting_plan_options(question: FitQuestion, name: str) -> Iterator[FitOption | ExcludedOption]:
    """Yield what `plan_options` does, under the name of the option."""
    if question.loop.keeps_outputs:
        # A plan knows its step only.
        for option in _fitting_plan_options(question.with_outputs_released(), name):
            if isinstance(option, FitOption):
                option = replace(option, code=f"{option.code}; {RELEASE_CODE}")
            yield option
        return
    if question.loop.gpus > 1:
        yield ExcludedOption(name, _shards_reason(question))
        return
    smallest: FitOption | None = None
    optimizers = list(question.optimizers_to_combine())
    if not optimizers:
        yield ExcludedOption(name, question.reason_of_optimizers())
        return
    solves = _PlanSolves(question)
    for optimizer in optimizers:
        if question.clock.is_set():
            break
        option = _fitting_plan_option(solves, optimizer, name)
        if option is None:
            continue
        if option.fits:
            yield option
            return
        if smallest is None or option.peak_bytes < smallest.peak_bytes:
            smallest = option
    if smallest is not None:
        yield smallest
    elif not question.clock.is_set():  # a note says that it ended the search
        yield ExcludedOption(name, "the solver reached no schedule in its time")


def _shards_reason(question: FitQuestion) -> str:
    """Return why a loop of several GPUs has no option of a plan."""
    if question.loop.is_fsdp:
        return (
            'no plan is predicted with fully_shard: remat.enable(..., scope="blocks") plans each '
            "block in the first step, from its gathered parameters"
        )
    return "plans of a loop with DDP are not predicted: remat.enable plans the model inside DDP"


def _fitting_plan_option(
    solves: _PlanSolves, optimizer: OptimizerMemory, name: str
) -> FitOption | None:
    """Return the option of a plan with an optimizer; if none fits, an option with the smallest peak
    reached. None if the solver reached no answer in its time, or none better than eager mode."""
    question = solves.question
    name = question.name_with_optimizer(name, optimizer)
    try:
        chosen = _accepted_plan(solves, optimizer)
    except SolverTimeout:
        return None
    except InfeasibleBudget as error:
        if error.min_feasible_bytes is None:
            return None
        peak_bytes = error.min_feasible_bytes + optimizer.state_bytes
        if peak_bytes >= question.step.memory(optimizer).peak_bytes:  # the solve ended early
            return None
        reserved_bytes = int(peak_bytes * question.fragmentation_ratio(optimizer))
        code = _enable_code(question, optimizer, peak_bytes)
        note = "the smallest peak that was reached; reserved bytes are a guess"
        return FitOption(name, peak_bytes, reserved_bytes, False, None, code, note)
    except RematError:
        if question.clock.is_set():  # which cancelled the solve
            return None
        raise
    budget_bytes = chosen.plan.budget_bytes + optimizer.state_bytes
    code = _enable_code(question, optimizer, budget_bytes)
    return question.option(
        name, _training_memory_of_plan(chosen, optimizer), chosen.plan.time_s, code
    )


def _accepted_plan(solves: _PlanSolves, optimizer: OptimizerMemory) -> TracePlan:
    """Return the plan for what the optimizer's state and the allocator's fragments leave. If more
    would be reserved than is usable, the budget is lowered by the excess, without its share of
    fragments, and a margin."""
    question = solves.question
    usable_bytes = question.usable_bytes
    budget_bytes = (
        int(usable_bytes / question.fragmentation_ratio(optimizer)) - optimizer.state_bytes
    )

    def judge(chosen: TracePlan) -> Verdict:
        memory, plan = _training_memory_of_plan(chosen, optimizer), chosen.plan
        excess = memory.reserved_bytes - usable_bytes
        if excess <= 0 or memory.is_in_optimizer:  # no plan reduces the optimizer's step
            return Verdict(excess, 0)
        lower_by = excess * memory.peak_bytes / memory.reserved_bytes
        lower_by += _EXCESS_MARGIN * usable_bytes
        return Verdict(excess, max(0, plan.budget_bytes - plan.peak_bytes) + int(lower_by))

    chosen = solves.within(budget_bytes)
    return lower_until_accepted(chosen, budget_bytes, solves.within, judge, question.clock)


@dataclass
class _PlanSolves:
    """The solves for the plans of a question. One that an earlier solve answers is left out, as
    optimizers with the same state have the same budget."""

    question: FitQuestion
    _plans: dict[tuple[int, tuple[int, ...]], TracePlan] = field(default_factory=dict)
    _infeasible: dict[tuple[int, ...], tuple[int, InfeasibleBudget]] = field(default_factory=dict)
    """The largest infeasible budget, with its error, by the pieces that were tried."""

    def within(self, budget_bytes: int) -> TracePlan:
        """Return a plan without splitting, which takes less time to choose, if there is one."""
        try:
            return self._in_pieces(budget_bytes, ())
        except InfeasibleBudget as error:
            infeasible = error
        try:
            return self._in_pieces(budget_bytes, pieces_to_try("auto"))
        except InfeasibleBudget:
            raise
        except RematError:
            if self.question.clock.is_set():  # the smallest peak so far is part of the answer
                raise infeasible from None
            raise

    def _in_pieces(self, budget_bytes: int, pieces: tuple[int, ...]) -> TracePlan:
        infeasible_bytes, error = self._infeasible.get(pieces, (-1, None))
        if error is not None and budget_bytes <= infeasible_bytes:
            raise error
        key = budget_bytes, pieces
        try:
            if key not in self._plans:
                self._plans[key] = _plan_in_pieces(self.question, budget_bytes, pieces)
        except InfeasibleBudget as error:
            self._infeasible[pieces] = budget_bytes, error
            raise
        return self._plans[key]


def _plan_in_pieces(question: FitQuestion, budget_bytes: int, pieces: tuple[int, ...]) -> TracePlan:
    def plan_graph(
        trace: Trace, budget: Budget, strategy: Strategy, start: Schedule | None
    ) -> Plan:
        # Not of the trace: the allocator's bytes are those with the optimizer.
        graph, clock = trace.graph(), question.clock
        progress = question.progress
        return solve(graph, budget, strategy, progress=progress, cancel=clock, start=start)

    return plan_step(
        question.step.trace,
        PlanRequest(Limits(Budget.parse(max(1, budget_bytes))), question.strategy, pieces),
        measure=lambda trace: with_roofline_costs(trace, question.roofline),
        plan_form=plan_graph,
        clock=question.clock,
    )


def _training_memory_of_plan(chosen: TracePlan, optimizer: OptimizerMemory) -> TrainingMemory:
    trace, plan = chosen
    return TrainingMemory.of(trace, trace.graph(), plan.schedule, optimizer)


def _enable_code(question: FitQuestion, optimizer: OptimizerMemory, budget_bytes: int) -> str:
    """Return the code that calls `remat.enable` with a budget and an optimizer."""
    script = question.script
    arguments = f"model, {budget_bytes:_}"
    if optimizer.code:
        reserve = "optimizer" if optimizer.is_reservable else f"{optimizer.state_bytes:_}"
        arguments += f", reserve={reserve}"
    if script.outputs != OUTPUTS_HELD:
        arguments += f', outputs="{script.outputs}"'
    optimizer_line = f"optimizer = {optimizer.code}; " if optimizer.code else ""
    return f"{script.before_plan}{optimizer_line}remat.enable({arguments})"
