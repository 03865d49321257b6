"""`remat run`: compares a training step without and with a plan, eager or compiled."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from remat.commands.common import command_options, files
from remat.commands.common.exits import UsageError
from remat.commands.common.plan_flags import PlanFlags, with_plan_options
from remat.commands.common.running import (
    describe_incumbent,
    exit_if_interrupted,
    plan_interruptibly,
    show_progress,
    warnings_as_messages,
)
from remat.commands.common.step_options import StepOptions, with_step_options
from remat.commands.common.summaries import compiled_plan_summary, plan_summary, to_json_text
from remat.limits.units import format_bytes
from remat.plan_options import COMMAND_RUN, COMPILE, CheckedOptions
from remat.report.eager_step import eager_peak_bytes
from remat.rewrite import rewrite

if TYPE_CHECKING:
    from remat.commands.models.sources import TrainingStep

_COMPILED_TIME_LIMIT_S = 8.0
"""The default time limit with `--compile`, as for `remat.compile`."""


@with_step_options
@with_plan_options(COMMAND_RUN)
def run(
    step: StepOptions,
    flags: PlanFlags,
    program: command_options.ProgramOutput = None,
    rounds: Annotated[
        int, typer.Option(metavar="N", min=1, help="Timed steps of each variant.")
    ] = 5,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Compare under torch.compile, without and with remat.")
    ] = False,
    device: command_options.LocalDevice = "cpu",
) -> None:
    """Run a training step without and with remat, and compare."""
    options = flags.read(time_limit=_COMPILED_TIME_LIMIT_S if compiled else None)
    command_options.check_local_device(
        device, "run", "remat trace SOURCE --device {name} plans for it"
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
    from remat.frontend.costs.measure import measure
    from remat.frontend.runtime.module import lower

    loaded = step.load(device)
    if compiled:
        with autocast_to(device, step.autocast):
            _run_compiled(loaded, replace(options, outputs=step.outputs), rounds, step.as_json)
        return
    started_at_s = time.perf_counter()
    with autocast_to(device, step.autocast):
        traced = capture(loaded.model, loaded.args, loaded.kwargs, outputs=step.outputs)
        with show_progress("measuring", 1) as line:
            traced = measure(traced, progress=line.on_measure_progress)
        predicted_eager_bytes = eager_peak_bytes(traced)
        (traced, plan), signum = plan_interruptibly(traced, options, is_here=True)
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
        budget = format_bytes(plan.requested_budget_bytes)
        reserve_bytes = options.fixed_limits.reserve_bytes
        reserved = f" ({format_bytes(reserve_bytes)} reserved)" if reserve_bytes else ""
        parts = (
            f"{loaded.name} within {budget}{reserved}",
            plan.describe(),
            f"ready after {ready_s:.1f} s",
            trial.describe(),
        )
        files.print_text("\n\n".join(parts))


def _run_compiled(step: TrainingStep, options: CheckedOptions, rounds: int, as_json: bool) -> None:
    """Compare plain torch.compile with remat's backend in `rounds` timed steps, and print the
    result."""
    assert options.budget is not None
    budget: Any = options.budget.requested
    from remat.frontend.api.trial import run_compiled_trial

    with warnings_as_messages(), show_progress("compiling") as line:
        compile_options: dict[str, Any] = options.for_door(COMPILE)
        compile_options["progress"] = line.on_solve_progress
        trial = run_compiled_trial(
            step.model,
            budget,
            step.args,
            step.kwargs,
            rounds=rounds,
            **compile_options,
        )
    if as_json:
        plans = [compiled_plan_summary(plan) for plan in trial.compiled_plans]
        files.print_json(to_json_text({"model": step.name, **trial.to_data(), "plans": plans}))
        return
    changed = [p for p in trial.plans if p.schedule.recomputed(p.graph) or p.graph.renewal]
    title = f"{step.name} under torch.compile within {budget}"
    files.print_text("\n\n".join((title, *(plan.describe() for plan in changed), trial.describe())))
