"""Options that several commands have, and how a strategy is put together from them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from remat.commands.common.exits import UsageError
from remat.costs.devices import DEVICES, find_device
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.limits.outputs import OUTPUTS_DROPPED, OUTPUTS_HELD
from remat.limits.reserve import parse_reserve
from remat.strategies.base import Strategy
from remat.strategies.registry import (
    COMPARED_AS,
    STRATEGIES,
    compared_by_default,
    from_data,
    to_data,
)

GPUS = tuple(name for name, device in DEVICES.items() if device.capability)
AUTOCAST = ("bfloat16", "float16")


def _beginning(names: Iterable[str], typed: str) -> list[str]:
    return [name for name in names if name.startswith(typed)]


def complete_strategy(incomplete: str) -> list[str]:
    """For the shell."""
    return _beginning(STRATEGIES, incomplete)


def complete_strategies(incomplete: str) -> list[str]:
    """For the shell: the last of names with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in _beginning(STRATEGIES, last)]


def complete_device(incomplete: str) -> list[str]:
    """For the shell."""
    return _beginning(DEVICES, incomplete)


TraceFile = Annotated[
    str, typer.Argument(metavar="TRACE", help="A trace's file, .json or .json.gz; - is stdin.")
]
PlanFile = Annotated[
    str, typer.Argument(metavar="PLAN", help="A plan's file, .json or .json.gz; - is stdin.")
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
    typer.Option("--output", "-o", metavar="FILE", help="Write here; gzipped if it ends in .gz."),
]
ProgramOutput = Annotated[
    Path | None,
    typer.Option("--program", metavar="FILE", help="Write the program for remat.lower here."),
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
    typer.Option("--budget", "-b", metavar="BUDGET", help="As for solve; may be repeated."),
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
    typer.Option("--gap", help="End once the time is proved within this share of the best."),
]
TimeLimit = Annotated[
    float | None, typer.Option("--time-limit", metavar="SECONDS", help="End after this time.")
]
Solver = Annotated[
    str | None, typer.Option("--solver", metavar="NAME", help="HiGHS, CBC, Gurobi, SCIP, ...")
]
Roofline = Annotated[
    str | None,
    typer.Option(
        "--roofline",
        metavar="DEVICE",
        help=f"Estimate for a device by its data sheet: {', '.join(DEVICES)}.",
        autocompletion=complete_device,
    ),
]
PictureDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="Show this device's memory in the picture, e.g. h200.",
        autocompletion=complete_device,
        show_default=False,
    ),
]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Batch size, for hf: and config.json.")]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Tokens of a sequence.")]
Image = Annotated[
    int | None,
    typer.Option("--image", min=1, help="Pixels of an image's side.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Change the configuration, e.g. n_layer=4."),
]
Seed = Annotated[int, typer.Option("--seed", help="For weights and inputs.")]
Reserve = Annotated[
    str | None,
    typer.Option(
        "--reserve",
        metavar="BYTES",
        help="Leave this of the budget to others, such as an optimizer's state: 2GiB.",
        show_default=False,
    ),
]
OnDevice = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
ForDevice = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help=f"cpu, cuda, or a GPU that is not here: {', '.join(GPUS)}.",
        autocompletion=complete_device,
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Cast the model: float32, bfloat16, float16.", show_default=False),
]
Autocast = Annotated[
    str | None,
    typer.Option("--autocast", help="Run under autocast: bfloat16, float16.", show_default=False),
]

DropOutputs = Annotated[
    bool,
    typer.Option(
        "--drop-outputs",
        help="Of what the model returns only the loss is held during the backward.",
    ),
]


def outputs_of(drop: bool) -> str:
    """What the library is told of `--drop-outputs`."""
    return OUTPUTS_DROPPED if drop else OUTPUTS_HELD


def limits_of(budget: str, reserve: str | None) -> Limits:
    """Return the limits that `--budget` and `--reserve` ask for. Raises `BudgetError`."""
    limits = Limits(Budget.parse(budget), parse_reserve(reserve or 0))
    if limits.reserve_bytes:
        limits.check_reserve()
    return limits


def check_autocast(dtype: str | None) -> None:
    """Raises `UsageError` for what autocast has not."""
    if dtype not in (None, *AUTOCAST):
        raise UsageError(f"--autocast {dtype!r}: it is {' or '.join(AUTOCAST)}")


def strategy_of(
    name: str,
    options: Sequence[str] | None,
    gap: float | None,
    time_limit: float | None,
    solver: str | None,
) -> Strategy:
    """The strategy with its options. Raises `UsageError` that says which there are."""
    given: dict[str, Any] = {}
    for option in options or ():
        key, equals, text = option.partition("=")
        if not equals or not key:
            raise UsageError(f"--option {option!r} is not of the form name=value")
        given[key.strip()] = _value(text)
    return _checked({"name": name} | given | _shortcuts(gap, time_limit, solver))


def compared(
    names: str | None, gap: float | None, time_limit: float | None, solver: str | None
) -> list[Strategy]:
    """The strategies to compare; a shortcut goes to those that have such an option."""
    found: list[Strategy] = []
    if names is None:
        found += compared_by_default()
    else:
        for name in (part.strip() for part in names.split(",") if part.strip()):
            found += COMPARED_AS.get(name) or (_checked({"name": name}),)
    if not found:
        raise UsageError(f"--strategies names none; there are {', '.join(STRATEGIES)}")
    shortcuts = _shortcuts(gap, time_limit, solver)
    changed: list[Strategy] = []
    for strategy in found:
        data = to_data(strategy)
        own = {key: value for key, value in shortcuts.items() if key in data}
        changed.append(_checked(data | own) if own else strategy)
    if unused := [key for key in shortcuts if not any(key in to_data(s) for s in found)]:
        raise UsageError(f"none of these strategies has the option {unused[0]}")
    return changed


def _shortcuts(gap: float | None, time_limit: float | None, solver: str | None) -> dict[str, Any]:
    every = {"gap": gap, "time_limit": time_limit, "solver": solver}
    return {key: value for key, value in every.items() if value is not None}


def _checked(data: dict[str, Any]) -> Strategy:
    try:
        return from_data(data)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _value(text: str) -> Any:
    for read in (json.loads, float):  # a float also reads nan and inf
        try:
            return read(text)
        except ValueError:
            continue
    return text


def check_device(name: str | None) -> None:
    """Raises `UsageError` for a device of which there is no data sheet."""
    try:
        if name is not None:
            find_device(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_target(device: str | None) -> None:
    """Raises `UsageError` for what is neither a device of torch nor a GPU known by name."""
    if device is None or device.partition(":")[0] in ("cpu", "cuda"):
        return
    try:
        known = find_device(device).capability is not None
    except ValueError:
        known = False
    if not known:
        raise UsageError(f"--device {device!r}: use cpu, cuda, or a GPU: {', '.join(GPUS)}")


def check_here(device: str | None, verb: str, instead: str) -> None:
    """Raises `UsageError` for a device that is known by name only; `instead` says what to use."""
    if device is None or device.partition(":")[0] in ("cpu", "cuda"):
        return
    try:
        name = find_device(device).name
    except ValueError:
        raise UsageError(
            f"--device {device!r} is no device of this machine; use cpu or cuda"
        ) from None
    raise UsageError(
        f"--device {device}: `remat {verb}` runs operations on this machine's cpu or cuda; "
        + instead.format(name=name)
    )
