"""Solving a captured step: in this process, with operations split, or by a service."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from remat.allocator.budget_fitting import plan_within_allocator_budget
from remat.choice.step import plan_step
from remat.costs.roofline import Roofline
from remat.costs.trace_costs import OperationCost, with_costs
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.frontend.costs.measure import measure, measure_pieces, step_measurement_limit_bytes
from remat.frontend.planning.host_limits import host_limits
from remat.limits.budget import Budget
from remat.limits.limits import Limits, plan_or_smallest
from remat.passes.split.splits import with_recorded_splits
from remat.plan import Plan
from remat.plan_options import MEASURED_BY_SERVICE, CheckedOptions
from remat.schedule import Schedule
from remat.simulate import baseline_of


class PlanningResult(NamedTuple):
    """A plan and the trace with costs that it is for. `program` is None unless a service rewrote
    the trace. `is_reused` is True if the solver did not run."""

    trace: Trace
    plan: Plan
    program: Program | None = None
    is_reused: bool = False


def with_measured_costs(options: CheckedOptions, trace: Trace, budget: Budget) -> Trace:
    """Return the trace with costs from the source in the options. Measuring is limited to the
    memory of the step (`step_measurement_limit_bytes`)."""
    return measure(
        trace,
        device=_cost_source_of_options(options, trace),
        cache=options.cache,
        limit_bytes=_measuring_limit_bytes(trace, budget),
    )


def _measuring_limit_bytes(trace: Trace, budget: Budget) -> int:
    """Return the bytes that measuring a step's operations may take (`step_limit_bytes`)."""
    baseline_bytes = baseline_of(trace.graph_of_sizes).peak_bytes
    return step_measurement_limit_bytes(trace, budget.in_bytes(baseline_bytes, trace.library_bytes))


def plan_trace(options: CheckedOptions, trace: Trace, limits: Limits) -> PlanningResult:
    """Return the plan of a measured trace within `limits`, and the trace with its operations split
    and tensors offloaded as the options allow.

    Raises `InfeasibleBudget`, `SolverTimeout` and the errors of the service.
    """
    if options.costs == MEASURED_BY_SERVICE:
        return _plan_from_measuring_service(options, trace, limits)
    programs: dict[tuple[tuple[str, ...], Schedule], Program] = {}

    def plan_by_service(step: Trace, budget: Budget, *_: object) -> Plan:
        def plan_once(budget: Budget) -> Plan:
            plan, program = _plan_from_service(options, step, budget)
            programs[_trace_node_names(step), plan.schedule] = program
            return plan

        return _within_allocator_budget(step, budget, plan_once, limits)

    limit_bytes = _measuring_limit_bytes(trace, limits.budget_after_reserve)
    offload = host_limits(options.offload, trace, options.costs, options.cache)
    trace, plan = plan_step(
        trace,
        options.request(limits, offload),
        measure=lambda split: _with_costs_of_pieces(options, split, limit_bytes),
        plan_form=None if options.service is None else plan_by_service,
        progress=options.progress_callback,
    )
    return PlanningResult(trace, plan, programs.get((_trace_node_names(trace), plan.schedule)))


def _trace_node_names(trace: Trace) -> tuple[str, ...]:
    """Return the names of a trace's operations, which differ between its forms."""
    return tuple(node.name for node in trace.nodes)


def _cost_source_of_options(options: CheckedOptions, trace: Trace) -> str | torch.device | Roofline:
    """Return the source of costs in the options; by default the type of the trace's device, on
    which operations are measured."""
    return options.costs or trace.device.split(":")[0]


def _with_costs_of_pieces(options: CheckedOptions, trace: Trace, limit_bytes: int) -> Trace:
    """Return a split trace with costs of its pieces. Measuring may take `limit_bytes`."""
    source = _cost_source_of_options(options, trace)
    return measure_pieces(trace, device=source, cache=options.cache, limit_bytes=limit_bytes)


def _plan_from_measuring_service(
    options: CheckedOptions, trace: Trace, limits: Limits
) -> PlanningResult:
    """Return the plan and the program of a trace that the service measures and splits."""

    def plan_within(budget: Budget) -> PlanningResult:
        first_plan, first_program = _plan_from_service(options, trace, budget)
        programs = {first_plan.schedule: first_program}
        split = with_recorded_splits(trace, first_plan.graph.splits)

        def plan_once(lower: Budget) -> Plan:
            if lower == budget:
                return first_plan
            plan, programs[plan.schedule] = _plan_from_service(options, split, lower)
            return plan

        measured = _with_costs_of_plan(split, first_plan)
        plan = _within_allocator_budget(measured, budget, plan_once, limits)
        return PlanningResult(measured, plan, programs.get(plan.schedule))

    with limits.infeasible_with_reserve():
        return plan_or_smallest(
            plan_within,
            limits.budget_after_reserve,
            options.infeasible,
            peak_bytes=lambda result: result.plan.peak_bytes + limits.reserve_bytes,
            requested=limits.budget,
        )


def _plan_from_service(
    options: CheckedOptions, trace: Trace, budget: Budget
) -> tuple[Plan, Program]:
    """Return the plan of a trace and the rewritten program, from the service in the options."""
    assert options.service is not None
    assert not isinstance(budget.requested, float)
    return options.service(trace, budget.requested)


def _within_allocator_budget(
    trace: Trace, budget: Budget, plan_once: Callable[[Budget], Plan], limits: Limits
) -> Plan:
    """Return a plan by `plan_once` whose peak in torch's allocator is within `budget`."""
    return plan_within_allocator_budget(
        trace, budget, plan_once, reserved_bytes=limits.segments_bytes
    )


def _with_costs_of_plan(traced: Trace, plan: Plan) -> Trace:
    """Return the trace with the costs of the plan's graph, which the service measured."""
    source = plan.terms.cost_source or "as given"
    return with_costs(
        traced,
        {o.name: OperationCost(o.cost_s, o.workspace_bytes, source) for o in plan.graph.operations},
    )
