"""The choice of the tensors of a compiled step that are offloaded, and the limits of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch._inductor import config

from remat.choice.offload import choose_offloading
from remat.choice.offloadable_step import StepPlan
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.split import CHOICE_LIMIT_S
from remat.frontend.common.torch_modes import isolated_modes
from remat.frontend.compile.compile_options import OffloadOptions
from remat.frontend.compile.joint.fx_utils import node_bytes, output_tensors
from remat.frontend.compile.joint.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.offloading import OffloadableProblem
from remat.frontend.compile.kernels.to_solver import CompileProblem, TensorCopy
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
    device = _device(joint)
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
        assert budget.size_bytes is not None
        return solver.solve(step.graph(), budget.size_bytes)

    def solve_step_without() -> StepPlan[OffloadableProblem]:
        problem, plan = solve_without()
        return StepPlan(OffloadableProblem(problem), plan)

    chosen = choose_offloading(
        [OffloadableProblem(problem) for problem in problems],
        budget,
        limits,
        solve_in_full=solve_in_full,
        solve_without=solve_step_without,
        limit_s=solver.planning_s or CHOICE_LIMIT_S,
    )
    return PlannedProblem(chosen.step.problem, chosen.plan)


def prepare_host(problem: CompileProblem, plan: Plan) -> None:
    """Pin memory for the offloaded tensors of a plan before its first step."""
    copies = [group for group in problem.groups if isinstance(group, TensorCopy)]
    sizes_bytes = [node_bytes(copy.node) for copy in copies if copy.kind == "offload"]
    if sizes_bytes:
        device = _device(problem.joint)
        with isolated_modes(device):
            reserve_host(device, sizes_bytes, int(plan.stats.get(HOST_BYTES_STAT, 0)))


def _device(joint: CompiledJointGraph) -> torch.device:
    """Return the device of a step: a GPU, if one of its tensors is there."""
    nodes = (*joint.placeholders, *joint.operations)
    devices = [tensor.device for node in nodes for tensor in output_tensors(node)]
    on_gpu = (device for device in devices if device.type != "cpu")
    return next(on_gpu, torch.device("cpu"))
