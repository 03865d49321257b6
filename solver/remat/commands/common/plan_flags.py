"""The options of a plan on the command line: `--budget`, the options of a strategy, and a flag for
each option that `remat.plan_options` declares for the command."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from remat.commands.common.command_options import dataclass_parameters, replace_command_parameter
from remat.commands.common.exits import UsageError
from remat.errors import BudgetError
from remat.limits.budget import Budget
from remat.plan_options import OPTIONS, CheckedOptions, Door, check_option, read_options
from remat.strategies.base import Strategy
from remat.strategies.registry import (
    COMPARED_AS,
    STRATEGIES,
    compared_by_default,
    from_data,
    to_data,
)


def complete_strategy(incomplete: str) -> list[str]:
    """Complete the name of a strategy, for the shell."""
    return [name for name in STRATEGIES if name.startswith(incomplete)]


def complete_strategies(incomplete: str) -> list[str]:
    """Complete the last of several names separated by commas, for the shell."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in complete_strategy(last)]


def _defaults_text(option: str) -> str:
    """Return the defaults of a strategy's option, for its help: each strategy has its own."""
    defaults = {name: getattr(kind(), option, None) for name, kind in STRATEGIES.items()}
    texts = [f"{value:g} for {name}" for name, value in defaults.items() if value is not None]
    return f"Default: {', '.join(texts)}."


BudgetText = Annotated[
    str,
    typer.Option(
        "--budget",
        "-b",
        metavar="BUDGET",
        help="Peak memory: 8GiB, 7.5GB, bytes, 60% of the peak without recomputation, or min.",
    ),
]
StrategyName = Annotated[
    str,
    typer.Option(
        "--strategy",
        metavar="NAME",
        help=f"One of {', '.join(STRATEGIES)}.",
        autocompletion=complete_strategy,
    ),
]
StrategyOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option", metavar="NAME=VALUE", help="An option of the strategy, e.g. k=4; repeatable."
    ),
]
Gap = Annotated[
    float | None,
    typer.Option(
        "--gap",
        metavar="FRACTION",
        help="Stop once the time is proved to be within this fraction of the best, e.g. 0.01. "
        + _defaults_text("gap"),
        show_default=False,
    ),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="Stop after this time. " + _defaults_text("time_limit"),
        show_default=False,
    ),
]
Solver = Annotated[
    str | None, typer.Option("--solver", metavar="NAME", help="HiGHS, CBC, Gurobi, SCIP, ...")
]


@dataclass(frozen=True, slots=True)
class StrategyFlags:
    """A strategy by name, and its options."""

    strategy: StrategyName = "auto"
    option: StrategyOptions = None
    gap: Gap = None
    time_limit: TimeLimit = None
    solver: Solver = None

    def build(self, time_limit: float | None = None) -> Strategy:
        """Return the strategy; `time_limit` is the default for `Auto`. Raises `UsageError` for an
        unknown option, with the valid ones."""
        data: dict[str, Any] = {"name": self.strategy}
        if self.strategy == "auto" and time_limit is not None:
            data["time_limit"] = time_limit
        for option in self.option or ():
            key, equals, text = option.partition("=")
            if not equals or not key:
                raise UsageError(f"--option {option!r} is not of the form NAME=VALUE, as in k=4")
            data[key.strip()] = _parse_option_value(text)
        return _build_strategy(data | _strategy_shortcuts(self.gap, self.time_limit, self.solver))


@dataclass(frozen=True)
class PlanFlags:
    """The options of a plan as a user wrote them for a command."""

    door: Door
    strategy: StrategyFlags
    values: Mapping[str, Any]
    budget: str | None

    def read(
        self, budget: str | Budget | None = None, time_limit: float | None = None
    ) -> CheckedOptions:
        """Return the options, checked. `budget` replaces the flag in commands without `--budget`
        for one budget; `time_limit` is the default for `Auto`. Raises `BudgetError` and
        `UsageError`."""
        options = {name: value for name, value in self.values.items() if value is not None}
        if str(options.get("split")).isdecimal():
            options["split"] = int(options["split"])
        options["strategy"] = self.strategy.build(time_limit)
        try:
            return read_options(self.door, budget or self.budget or "min", options)
        except BudgetError:
            raise
        except ValueError as error:
            raise UsageError(f"--{str(error).removeprefix('--')}") from None


def check_plan_flag(name: str, value: object) -> None:
    """Raise `UsageError` for a wrong value of an option of a plan, and `BudgetError` for a wrong
    number of bytes."""
    try:
        check_option(name, value)
    except BudgetError:
        raise
    except ValueError as error:
        raise UsageError(f"--{error}") from None


def plan_option_flag(name: str) -> Any:
    """Return typer's description of an option of a plan: its flag, help and default."""
    option = OPTIONS[name]
    return typer.Option(
        f"--{name.replace('_', '-')}",
        metavar=option.metavar,
        help=option.help,
        show_default=option.default is not None,
    )


def with_plan_options(door: Door) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces a command's parameter `flags`, a `PlanFlags`, by the options
    of a plan that the door takes. Options that the command declares itself are left out."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        declared = inspect.signature(command).parameters
        names = [name for name in door.options if OPTIONS[name].metavar is not None]
        if "step" in declared:
            names.remove("outputs")  # one of `StepOptions`
        parameters = dataclass_parameters(StrategyFlags)
        strategy_names = [parameter.name for parameter in parameters]
        if "budget" not in declared:
            required = inspect.Parameter("budget", inspect.Parameter.KEYWORD_ONLY)
            parameters.insert(0, required.replace(annotation=BudgetText))
        parameters += [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=door.default(name),
                annotation=Annotated[
                    str if door.default(name) is not None else str | None, plan_option_flag(name)
                ],
            )
            for name in names
        ]

        def build(**values: Any) -> PlanFlags:
            strategy = StrategyFlags(**{name: values.pop(name) for name in strategy_names})
            budget = values.pop("budget", None)
            return PlanFlags(door, strategy, values, budget)

        return replace_command_parameter(command, "flags", parameters, build)

    return decorate


def strategies_to_compare(
    names: str | None, gap: float | None, time_limit: float | None, solver: str | None
) -> list[Strategy]:
    """Return the strategies of these names, separated by commas, or the default ones for None. Gap,
    time limit and solver apply to the strategies that have such an option. Raises `UsageError` if
    none has."""
    strategies: list[Strategy] = []
    if names is None:
        strategies += compared_by_default()
    else:
        for name in (part.strip() for part in names.split(",") if part.strip()):
            strategies += COMPARED_AS.get(name) or (_build_strategy({"name": name}),)
    if not strategies:
        raise UsageError(f"--strategies is empty; there are {', '.join(STRATEGIES)}")
    shortcuts = _strategy_shortcuts(gap, time_limit, solver)
    configured: list[Strategy] = []
    for strategy in strategies:
        data = to_data(strategy)
        applicable = {key: value for key, value in shortcuts.items() if key in data}
        configured.append(_build_strategy(data | applicable) if applicable else strategy)
    if unused := [key for key in shortcuts if not any(key in to_data(s) for s in strategies)]:
        raise UsageError(f"none of these strategies has the option {unused[0]}")
    return configured


def _strategy_shortcuts(
    gap: float | None, time_limit: float | None, solver: str | None
) -> dict[str, Any]:
    """Return the options of a strategy that have flags of their own and were given."""
    shortcuts = {"gap": gap, "time_limit": time_limit, "solver": solver}
    return {key: value for key, value in shortcuts.items() if value is not None}


def _build_strategy(data: dict[str, Any]) -> Strategy:
    """Return the strategy in this data. Raises `UsageError` if it is invalid."""
    try:
        return from_data(data)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _parse_option_value(text: str) -> Any:
    """Return the value of a strategy's option: JSON, nan, inf, or else the text itself."""
    for parse in (json.loads, float):  # a float also parses nan and inf
        try:
            return parse(text)
        except ValueError:
            continue
    return text
