"""Command-line options of several commands; builds the strategy and the limits from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from remat.choice.offloaded_forms import OffloadLimits
from remat.commands.common.exits import UsageError
from remat.costs.devices import DEVICES, find_device
from remat.costs.trace_costs import roofline_of, with_roofline_costs
from remat.documents.trace import Trace
from remat.limits.budget import Budget
from remat.limits.infeasible import INFEASIBLE, is_smallest_accepted
from remat.limits.limits import Limits
from remat.limits.options import (
    are_dropped,
    is_offload_allowed,
    parse_host_budget,
    parse_reserve,
    pieces_to_try,
)
from remat.plan_options import OffloadOptions
from remat.strategies.base import Strategy
from remat.strategies.registry import (
    COMPARED_AS,
    STRATEGIES,
    compared_by_default,
    from_data,
    to_data,
)


def check_offload_options(offload: str, host_budget: str | None) -> None:
    """Raise `UsageError` for an unknown value of `--offload`, or for `--host-budget` without it;
    `BudgetError` for a host budget that is no size."""
    try:
        is_allowed = is_offload_allowed(offload)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    if parse_host_budget(host_budget) is not None and not is_allowed:
        raise UsageError("--host-budget is for offloaded tensors: add --offload auto")


def offload_limits(
    offload: str, host_budget: str | None, trace: Trace, *, is_here: bool
) -> OffloadLimits | None:
    """Return the limits for a trace; None if nothing may be offloaded. The bandwidth comes from
    where the costs of the trace came from: a data sheet, or this machine. `is_here` says that the
    step runs on this machine."""
    if not is_offload_allowed(offload):
        return None
    from remat.frontend.planning.host_limits import host_limits

    options = OffloadOptions(parse_host_budget(host_budget))
    return host_limits(options, trace, roofline_of(trace), None, is_here=is_here)


def with_costs_of_pieces(trace: Trace) -> Trace:
    """Return a trace with costs of its pieces, from the source of the others' costs."""
    if (roofline := roofline_of(trace)) is not None:
        return with_roofline_costs(trace, roofline)
    from remat.frontend.costs.measure import measure_pieces

    return measure_pieces(trace)


GPUS = tuple(name for name, device in DEVICES.items() if device.capability)
AUTOCAST_DTYPES = ("bfloat16", "float16")


def _starting_with(names: Iterable[str], prefix: str) -> list[str]:
    return [name for name in names if name.startswith(prefix)]


def complete_strategy(incomplete: str) -> list[str]:
    """Complete the name of a strategy, for the shell."""
    return _starting_with(STRATEGIES, incomplete)


def complete_strategies(incomplete: str) -> list[str]:
    """Complete the last of several names separated by commas, for the shell."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _starting_with(STRATEGIES, last)]


def complete_device(incomplete: str) -> list[str]:
    """Complete the name of a device, for the shell."""
    return _starting_with(DEVICES, incomplete)


def _defaults_text(option: str) -> str:
    """Return the default of an option, for its help: each strategy has its own."""
    defaults = {name: getattr(kind(), option, None) for name, kind in STRATEGIES.items()}
    texts = [f"{value:g} for {name}" for name, value in defaults.items() if value is not None]
    return f"Default: {', '.join(texts)}."


TraceFile = Annotated[
    str, typer.Argument(metavar="TRACE", help="The file of a trace, .json or .json.gz; - is stdin.")
]
PlanFile = Annotated[
    str, typer.Argument(metavar="PLAN", help="The file of a plan, .json or .json.gz; - is stdin.")
]
Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="package.module:factory, path/to/script.py:factory, hf:gpt2, hf:org/name, or a "
        "config.json of Hugging Face. A factory returns (model, args), (model, kwargs) or "
        "(model, args, kwargs).",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Output file; gzipped if it ends in .gz."),
]
ProgramOutput = Annotated[
    Path | None,
    typer.Option("--program", metavar="FILE", help="Output file of the program, for remat.lower."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
BudgetText = Annotated[
    str,
    typer.Option(
        "--budget",
        "-b",
        metavar="BUDGET",
        help="Peak memory: 8GiB, 7.5GB, bytes, 60% of the peak without recomputation, or min.",
    ),
]
BudgetTexts = Annotated[
    list[str] | None,
    typer.Option("--budget", "-b", metavar="BUDGET", help="Peak memory, as for solve; repeatable."),
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
Roofline = Annotated[
    str | None,
    typer.Option(
        "--roofline",
        metavar="DEVICE",
        help=f"Estimate the costs from a data sheet: {', '.join(DEVICES)}.",
        autocompletion=complete_device,
    ),
]
PlotDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Show this device's memory in the picture, e.g. h200.",
        autocompletion=complete_device,
        show_default=False,
    ),
]
Image = Annotated[
    int | None,
    typer.Option(
        "--image",
        metavar="PIXELS",
        min=1,
        help="Height and width of an image, in pixels.",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Change the configuration, e.g. n_layer=4."),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="Random seed of weights and inputs.")
]
Reserve = Annotated[
    str | None,
    typer.Option(
        "--reserve",
        metavar="BYTES",
        help="Part of the budget to reserve for other users, such as an optimizer's state: 2GiB.",
        show_default=False,
    ),
]
LocalDevice = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu or cuda.")]
TargetDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help=f"cpu, cuda, or the name of an absent GPU: {', '.join(GPUS)}.",
        autocompletion=complete_device,
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="Cast the model: float32, bfloat16, float16.",
        show_default=False,
    ),
]
Autocast = Annotated[
    str | None,
    typer.Option(
        "--autocast",
        metavar="DTYPE",
        help="Run under autocast: bfloat16, float16.",
        show_default=False,
    ),
]

Outputs = Annotated[
    str,
    typer.Option(
        "--outputs",
        metavar="held|dropped|loss",
        help="Outputs are in memory to the end of the backward, or are released before it, or "
        "only the loss is returned.",
    ),
]


Split = Annotated[
    str,
    typer.Option(
        "--split",
        metavar="PIECES",
        help="Pieces of the operations that need the most memory: auto, off, or a number.",
    ),
]


Offload = Annotated[
    str,
    typer.Option(
        "--offload",
        metavar="auto|off",
        help="Offload tensors to the host between forward and backward where that pays.",
    ),
]
HostBudget = Annotated[
    str | None,
    typer.Option(
        "--host-budget",
        metavar="SIZE",
        help="The most bytes of offloaded tensors, e.g. 16GiB; by default half of what is free.",
        show_default=False,
    ),
]


Infeasible = Annotated[
    str,
    typer.Option(
        "--infeasible",
        metavar="|".join(INFEASIBLE),
        help="If no plan fits the budget: fail, or plan for the smallest peak, with a warning.",
    ),
]


def split_from_option(split: str) -> str | int:
    """Return the library's option `split` for `--split`."""
    return int(split) if split.isdecimal() else split


def pieces_from_option(split: str) -> tuple[int, ...]:
    """Return the numbers of pieces to try for `--split`. Raises `UsageError`."""
    try:
        return pieces_to_try(split_from_option(split))
    except ValueError as error:
        raise UsageError(f"--{error}") from None


def check_outputs_option(outputs: str) -> None:
    """Raise `UsageError` for an unknown value of `--outputs`."""
    try:
        are_dropped(outputs)
    except ValueError as error:
        raise UsageError(f"--{error}") from None


def check_infeasible(infeasible: str) -> None:
    """Raise `UsageError` for an unknown value of `--infeasible`."""
    try:
        is_smallest_accepted(infeasible)
    except ValueError as error:
        raise UsageError(f"--{error}") from None


def limits_from_options(budget: str, reserve: str | None) -> Limits:
    """Return the limits that `--budget` and `--reserve` set. Raises `BudgetError`."""
    limits = Limits(Budget.parse(budget), parse_reserve(reserve or 0))
    if limits.reserve_bytes:
        limits.check_reserve()
    return limits


def check_autocast(dtype: str | None) -> None:
    """Raise `UsageError` for a dtype that autocast does not support."""
    if dtype not in (None, *AUTOCAST_DTYPES):
        raise UsageError(f"--autocast {dtype!r}: it must be {' or '.join(AUTOCAST_DTYPES)}")


def strategy_from_options(
    name: str,
    options: Sequence[str] | None,
    gap: float | None,
    time_limit: float | None,
    solver: str | None,
) -> Strategy:
    """Return the strategy with its options. Raises `UsageError`, which lists the valid ones."""
    options_data: dict[str, Any] = {}
    for option in options or ():
        key, equals, text = option.partition("=")
        if not equals or not key:
            raise UsageError(f"--option {option!r} is not of the form NAME=VALUE, as in k=4")
        options_data[key.strip()] = _parse_value(text)
    return _build_strategy(
        {"name": name} | options_data | _strategy_shortcuts(gap, time_limit, solver)
    )


def strategies_to_compare(
    names: str | None, gap: float | None, time_limit: float | None, solver: str | None
) -> list[Strategy]:
    """Return the strategies to compare. Gap, time limit and solver apply to those that have such an
    option."""
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
    shortcuts = {"gap": gap, "time_limit": time_limit, "solver": solver}
    return {key: value for key, value in shortcuts.items() if value is not None}


def _build_strategy(data: dict[str, Any]) -> Strategy:
    try:
        return from_data(data)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _parse_value(text: str) -> Any:
    for parse in (json.loads, float):  # a float also parses nan and inf
        try:
            return parse(text)
        except ValueError:
            continue
    return text


def check_device(name: str | None) -> None:
    """Raise `UsageError` for a device without a data sheet."""
    try:
        if name is not None:
            find_device(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_target_device(device: str | None) -> None:
    """Raise `UsageError` for a name that is neither a torch device nor a GPU with a data sheet."""
    if device is None or device.partition(":")[0] in ("cpu", "cuda"):
        return
    try:
        is_gpu = find_device(device).capability is not None
    except ValueError:
        is_gpu = False
    if not is_gpu:
        raise UsageError(f"--device {device!r}: use cpu, cuda, or a GPU: {', '.join(GPUS)}")


def check_local_device(device: str | None, command: str, instead: str) -> None:
    """Raise `UsageError` for a device other than the local cpu or cuda.

    `instead` is the command to suggest for a device with a data sheet; it may contain "{name}".
    """
    if device is None or device.partition(":")[0] in ("cpu", "cuda"):
        return
    try:
        name = find_device(device).name
    except ValueError:
        raise UsageError(
            f"--device {device!r} is not a device of this machine; use cpu or cuda"
        ) from None
    raise UsageError(
        f"--device {device}: `remat {command}` runs operations on this machine's cpu or cuda; "
        + instead.format(name=name)
    )
