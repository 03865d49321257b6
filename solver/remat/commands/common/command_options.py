"""Arguments and options of several commands, and their checks. Options of a plan: `plan_flags`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from remat.commands.common.exits import UsageError
from remat.costs.devices import DEVICES, find_device

GPUS = tuple(name for name, device in DEVICES.items() if device.capability)
AUTOCAST_DTYPES = ("bfloat16", "float16")


def complete_device(incomplete: str) -> list[str]:
    """Complete the name of a device, for the shell."""
    return [name for name in DEVICES if name.startswith(incomplete)]


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
BudgetTexts = Annotated[
    list[str] | None,
    typer.Option("--budget", "-b", metavar="BUDGET", help="Peak memory, as for solve; repeatable."),
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


def check_autocast(dtype: str | None) -> None:
    """Raise `UsageError` for a dtype that autocast does not support."""
    if dtype not in (None, *AUTOCAST_DTYPES):
        raise UsageError(f"--autocast {dtype!r}: it must be {' or '.join(AUTOCAST_DTYPES)}")


def check_data_sheet_device(name: str | None) -> None:
    """Raise `UsageError` for a device without a data sheet; nothing for None."""
    try:
        if name is not None:
            find_device(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


def check_target_device(device: str | None) -> None:
    """Raise `UsageError` for a name that is neither a torch device nor a GPU with a data sheet;
    nothing for None."""
    if device is None or device.partition(":")[0] in ("cpu", "cuda"):
        return
    try:
        is_gpu = find_device(device).capability is not None
    except ValueError:
        is_gpu = False
    if not is_gpu:
        raise UsageError(f"--device {device!r}: use cpu, cuda, or a GPU: {', '.join(GPUS)}")


def check_local_device(device: str | None, command: str, instead: str) -> None:
    """Raise `UsageError` for a device other than the local cpu or cuda; nothing for None.

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


def dataclass_parameters(group: type) -> list[inspect.Parameter]:
    """Return the parameters of a command for the fields of a dataclass whose annotations are
    typer's."""
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def replace_command_parameter(
    command: Callable[..., None],
    name: str,
    parameters: Sequence[inspect.Parameter],
    build: Callable[..., object],
) -> Callable[..., None]:
    """Return a command in which `parameters` replace the parameter `name`. `build` returns the
    value for it from their values."""
    expanded: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.name == name:
            expanded += parameters
        else:
            expanded.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def with_options(**options: Any) -> None:
        values = {parameter.name: options.pop(parameter.name) for parameter in parameters}
        command(**{name: build(**values)}, **options)

    del with_options.__wrapped__  # typer would read its signature
    with_options.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in expanded}
    return with_options
