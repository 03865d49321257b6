"""`remat run`: compares a training step without and with a plan, eager or compiled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat.choice.plan_request import PlanRequest
from remat.commands.common import command_options, files
from remat.commands.common.command_options import check_offload_options, offload_limits
from remat.commands.common.exits import UsageError
from remat.commands.common.interruptible_solve import (
    describe_incumbent,
    exit_if_interrupted,
    plan_interruptibly,
    warnings_as_messages,
)
from remat.commands.common.progress_line import show_progress
from remat.commands.common.step_options import StepOptions, with_step_options
from remat.commands.common.summaries import compiled_plan_summary, plan_summary, to_json_text
from remat.limits.infeasible import INFEASIBLE_ERROR
from remat.limits.options import OFFLOAD_OFF, SPLIT_AUTO
from remat.limits.units import format_bytes
from remat.report.eager_step import eager_peak_bytes
from remat.rewrite import rewrite
from remat.strategies.base import Strategy

if TYPE_CHECKING:
    from remat.commands.models.sources import TrainingStep


@with_step_options
def run(
    step: StepOptions,
    budget: command_options.BudgetText,
    strategy: command_options.StrategyName = "auto",
    option: command_options.StrategyOptions = None,
    gap: command_options.Gap = None,
    time_limit: command_options.TimeLimit = None,
    solver: command_options.Solver = None,
    program: command_options.ProgramOutput = None,
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Timed steps of each variant.")
    ] = 5,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compare under torch.compile, without and with remat.")
    ] = False,
    device: command_options.LocalDevice = "cpu",
    reserve: command_options.Reserve = None,
    split: command_options.Split = SPLIT_AUTO,
    offload: command_options.Offload = OFFLOAD_OFF,
    host_budget: command_options.HostBudget = None,
    infeasible: command_options.Infeasible = INFEASIBLE_ERROR,
) -> None:
    """Run a training step without and with remat, and compare."""
    limits = command_options.limits_from_options(budget, reserve)
    pieces = command_options.pieces_from_option(split)
    check_offload_options(offload, host_budget)
    command_options.check_infeasible(infeasible)
    command_options.check_local_device(
        device, "run", "remat trace SOURCE --device {name} plans for it"
    )
    if compiled and time_limit is None and strategy == "auto" and not _has_time_limit(option):
        from remat.frontend.compile.compile_options import TIME_LIMIT_S

        time_limit = TIME_LIMIT_S
    selected_strategy = command_options.strategy_from_options(
        strategy, option, gap, time_limit, solver
    )
    step.check()
    if compiled and program is not None:
        raise UsageError(
            "--program cannot be combined with --compile, which makes no program; leave one out"
        )
    files.check_outputs(program)
    from remat.frontend.api.trial import run_eager_trial
    from remat.frontend.capture.trace import trace as capture
    from remat.frontend.common.torch_modes import autocast_to
    from remat.frontend.costs.measure import measure, measure_pieces
    from remat.frontend.runtime.module import lower

    loaded = step.load(device)
    if compiled:
        with autocast_to(device, step.autocast):
            _run_compiled(
                loaded,
                budget,
                selected_strategy,
                rounds,
                step.as_json,
                reserve=reserve or 0,
                outputs=step.outputs,
                split=command_options.split_from_option(split),
                offload=offload,
                host_budget=host_budget,
                infeasible=infeasible,
            )
        return
    started_at_s = time.perf_counter()
    with autocast_to(device, step.autocast):
        traced = capture(loaded.model, loaded.args, loaded.kwargs, outputs=step.outputs)
        with show_progress("measuring", 1) as line:
            traced = measure(traced, progress=line.on_measure_progress)
        predicted_eager_bytes = eager_peak_bytes(traced)
        host_limits = offload_limits(offload, host_budget, traced, is_here=True)
        request = PlanRequest(limits, selected_strategy, pieces, host_limits, infeasible)
        (traced, plan), signum = plan_interruptibly(traced, request, measure_pieces)
        rewritten_program = rewrite(traced, plan.schedule)
        if program is not None:
            files.write_output(program, rewritten_program.to_json())
        if signum is not None:
            files.print_text(
                to_json_text({"plan": plan_summary(plan)}) if step.as_json else plan.describe()
            )
            exit_if_interrupted(signum, describe_incumbent(plan))
        module = lower(rewritten_program, loaded.model, plan=plan)
        ready_s = time.perf_counter() - started_at_s
        with show_progress("running"):
            trial = run_eager_trial(
                loaded.model,
                module,
                loaded.args,
                loaded.kwargs,
                rounds=rounds,
                predicted_eager_bytes=predicted_eager_bytes,
            )
    if step.as_json:
        summary = {"model": loaded.name, **trial.to_data(), "plan": plan_summary(plan)}
        files.print_json(to_json_text(summary))
    else:
        budget = format_bytes(plan.budget_bytes)
        reserved = (
            f" ({format_bytes(limits.reserve_bytes)} reserved)" if limits.reserve_bytes else ""
        )
        parts = (
            f"{loaded.name} within {budget}{reserved}",
            plan.describe(),
            f"ready after {ready_s:.1f} s",
            trial.describe(),
        )
        files.print_text("\n\n".join(parts))


def _has_time_limit(option: Sequence[str] | None) -> bool:
    return any(text.partition("=")[0].strip() == "time_limit" for text in option or ())


def _run_compiled(
    step: TrainingStep,
    budget: str,
    strategy: Strategy,
    rounds: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare plain torch.compile with remat's backend, and print the result. `options` are those
    of `remat.compile`."""
    from remat.frontend.api.trial import run_compiled_trial

    with warnings_as_messages(), show_progress("compiling") as line:
        trial = run_compiled_trial(
            step.model,
            budget,
            step.args,
            step.kwargs,
            rounds=rounds,
            strategy=strategy,
            progress=line.on_solve_progress,
            **options,
        )
    if as_json:
        plans = [compiled_plan_summary(plan) for plan in trial.compiled_plans]
        files.print_json(to_json_text({"model": step.name, **trial.to_data(), "plans": plans}))
        return
    changed = [p for p in trial.plans if p.schedule.recomputed(p.graph) or p.graph.renewal]
    title = f"{step.name} under torch.compile within {budget}"
    files.print_text("\n\n".join((title, *(plan.describe() for plan in changed), trial.describe())))
