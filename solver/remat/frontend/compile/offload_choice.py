"""The choice of the tensors of a compiled step that are offloaded, and the limits of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch._inductor import config

from remat.choice.offload import choose_offloading
from remat.choice.offloadable_step import StepPlan
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.split import CHOICE_LIMIT_S
from remat.frontend.common.torch_modes import isolated_modes
from remat.frontend.compile.compile_options import OffloadOptions
from remat.frontend.compile.joint.fx_utils import output_tensors
from remat.frontend.compile.joint.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.offloading import OffloadableProblem
from remat.frontend.compile.kernels.to_solver import CompileProblem
from remat.frontend.compile.solving import GraphSolver
from remat.frontend.planning.host_limits import limits_here, reserve_host
from remat.limits.budget import Budget
from remat.plan import Plan
from remat.plan_data import HOST_BYTES_STAT


class PlannedProblem(NamedTuple):
    """A plan and the problem that it is for, in which tensors may be offloaded."""

    problem: CompileProblem
    plan: Plan


def offload_limits(
    options: OffloadOptions, joint: CompiledJointGraph, other_host_bytes: int
) -> OffloadLimits | None:
    """Return the limits of offloading for a graph; None if nothing may be offloaded.

    The step's other graphs have `other_host_bytes` on the host. Raises `BudgetError` for a host
    budget above what is free.
    """
    if not options.is_allowed or options.host_bytes == 0 or config.triton.cudagraphs:
        return None
    device = step_device(joint)
    if device.type not in ("cpu", "cuda"):
        return None
    with isolated_modes(device):
        limits = limits_here(options.host_bytes, options.link, device)
    if limits.host_bytes is None:
        return limits
    host_bytes = max(0, limits.host_bytes - other_host_bytes)
    return OffloadLimits(limits.link, host_bytes) if host_bytes else None


def choose_offloaded(
    problems: Sequence[CompileProblem],
    budget: Budget,
    limits: OffloadLimits,
    solver: GraphSolver,
    solve_without: Callable[[], PlannedProblem],
) -> PlannedProblem:
    """Return the fastest plan of these variants of a step, with offloaded tensors or that of
    `solve_without`. Raises the errors of `solve_without` if there is none."""

    def solve_in_full(step: OffloadableProblem, budget: Budget) -> Plan:
        size_bytes = budget.size_bytes
        return solver.solve(step.graph(), "min" if size_bytes is None else size_bytes)

    def solve_step_without() -> StepPlan[OffloadableProblem]:
        problem, plan = solve_without()
        return StepPlan(OffloadableProblem(problem), plan)

    steps = [OffloadableProblem(problem) for problem in problems]
    if budget.is_min:  # only one of the variants is solved
        steps = [solve_step_without().step]
    chosen = choose_offloading(
        steps,
        budget,
        limits,
        solve_in_full=solve_in_full,
        solve_without=solve_step_without,
        limit_s=solver.planning_s or CHOICE_LIMIT_S,
    )
    return PlannedProblem(chosen.step.problem, chosen.plan)


def prepare_host(plan: Plan, device: torch.device) -> None:
    """Pin memory for the offloaded tensors of a final plan before its first step: plans of earlier
    rounds do not run."""
    sizes_bytes = [plan.graph.values[value].size_bytes for value in plan.graph.renewal]
    if sizes_bytes:
        with isolated_modes(device):
            reserve_host(device, sizes_bytes, int(plan.stats.get(HOST_BYTES_STAT, 0)))


def step_device(joint: CompiledJointGraph) -> torch.device:
    """Return the device of a step: a GPU, if one of its tensors is there."""
    nodes = (*joint.placeholders, *joint.operations)
    return device_of(tensor for node in nodes for tensor in output_tensors(node))


def device_of(items: Iterable[object]) -> torch.device:
    """Return the GPU of the first tensor that is on one; else the CPU."""
    devices = (item.device for item in items if isinstance(item, torch.Tensor))
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
