"""`remat run`: a model's own step beside remat's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from remat.commands.common import files, options
from remat.commands.common.exits import UsageError
from remat.commands.common.figures import compiled_figures, json_of, plan_figures
from remat.commands.common.progress_line import live
from remat.commands.common.solving import best_so_far, finish, solved
from remat.limits.units import format_bytes
from remat.plan_data import with_reserve_stat
from remat.report.estimate import eager_peak_bytes
from remat.rewrite import rewrite
from remat.strategies.base import Strategy

if TYPE_CHECKING:
    from remat.commands.models.sources import Step


def run(
    source: options.Source,
    budget: options.BudgetText,
    strategy: options.StrategyName = "auto",
    option: options.StrategyOptions = None,
    gap: options.Gap = None,
    time_limit: options.TimeLimit = None,
    solver: options.Solver = None,
    program: options.ProgramOutput = None,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each.")] = 5,
    compiled: Annotated[
        bool, typer.Option("--compile", help="Under torch.compile, plain and with remat.")
    ] = False,
    as_json: options.Json = False,
    batch: options.Batch = 2,
    tokens: options.Tokens = 128,
    image: options.Image = None,
    overrides: options.Overrides = None,
    seed: options.Seed = 0,
    device: options.OnDevice = "cpu",
    dtype: options.Dtype = None,
    autocast: options.Autocast = None,
    reserve: options.Reserve = None,
    drop_outputs: options.DropOutputs = False,
) -> None:
    """Train a step of a model as it is and with remat: the plan, peak, time, loss, gradients."""
    limits = options.limits_of(budget, reserve)
    options.check_here(device, "run", "remat trace SOURCE --device {name} plans for it")
    if compiled and time_limit is None and strategy == "auto" and not _limits(option):
        from remat.frontend.compile.options import TIME_LIMIT_S

        time_limit = TIME_LIMIT_S
    chosen = options.strategy_of(strategy, option, gap, time_limit, solver)
    options.check_autocast(autocast)
    if compiled and program is not None:
        raise UsageError("--program: what torch.compile makes is no program; leave one of both out")
    files.check_outputs(program)
    from remat.commands.models.batches import Sizes
    from remat.commands.models.sources import load_step
    from remat.frontend.api.trial import run_eager_trial
    from remat.frontend.capture.trace import trace as capture
    from remat.frontend.common.torch_modes import autocast_to
    from remat.frontend.costs.measure import measure
    from remat.frontend.runtime.module import lower

    sizes = Sizes(batch, tokens, image)
    step = load_step(
        source, sizes, overrides=overrides or (), device=device, dtype=dtype, seed=seed
    )
    outputs = options.outputs_of(drop_outputs)
    if compiled:
        with autocast_to(device, autocast):
            _compiled(step, budget, reserve, chosen, rounds, as_json, outputs)
        return
    began = time.perf_counter()
    with autocast_to(device, autocast):
        traced = capture(step.model, step.args, step.kwargs, outputs=outputs)
        with live("measuring", 1) as line:
            traced = measure(traced, progress=line.measuring)
        with limits.infeasible_with_reserve():
            plan, signum = solved(traced, limits.budget_after_reserve, chosen)
        plan = with_reserve_stat(plan, limits.reserve_bytes)
        made = rewrite(traced, plan.schedule)
        if program is not None:
            files.write(program, made.to_json())
        if signum is not None:
            files.show(json_of({"plan": plan_figures(plan)}) if as_json else plan.describe())
            finish(signum, best_so_far(plan))
        module = lower(made, step.model, plan=plan)
        ready_s = time.perf_counter() - began
        with live("running"):
            trial = run_eager_trial(
                step.model,
                module,
                step.args,
                step.kwargs,
                rounds=rounds,
                predicted_eager_bytes=eager_peak_bytes(traced),
            )
    if as_json:
        figures = {"model": step.name, **trial.to_data(), "plan": plan_figures(plan)}
        files.show_json(json_of(figures))
    else:
        budget = format_bytes(plan.budget_bytes)
        reserved = (
            f" ({format_bytes(limits.reserve_bytes)} reserved)" if limits.reserve_bytes else ""
        )
        parts = (
            f"{step.name} within {budget}{reserved}",
            plan.describe(),
            f"ready after {ready_s:.1f} s",
            trial.describe(),
        )
        files.show("\n\n".join(parts))


def _limits(option: Sequence[str] | None) -> bool:
    return any(each.partition("=")[0].strip() == "time_limit" for each in option or ())


def _compiled(
    step: Step,
    budget: str,
    reserve: str | None,
    strategy: Strategy,
    rounds: int,
    as_json: bool,
    outputs: str,
) -> None:
    """Plain torch.compile and the backend, side by side."""
    from remat.frontend.api.trial import run_compiled_trial

    with live("compiling") as line:
        trial = run_compiled_trial(
            step.model,
            budget,
            step.args,
            step.kwargs,
            rounds=rounds,
            strategy=strategy,
            reserve=reserve or 0,
            outputs=outputs,
            progress=line.solving,
        )
    if as_json:
        plans = [compiled_figures(plan) for plan in trial.compiled_plans]
        files.show_json(json_of({"model": step.name, **trial.to_data(), "plans": plans}))
        return
    recomputing = [plan for plan in trial.plans if plan.schedule.recomputed(plan.graph)]
    title = f"{step.name} under torch.compile within {budget}"
    files.show("\n\n".join((title, *(plan.describe() for plan in recomputing), trial.describe())))
