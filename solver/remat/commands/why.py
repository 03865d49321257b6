"""`remat why`: explains a memory snapshot, or the text of an out-of-memory error."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from remat.commands.common import command_options, files
from remat.commands.common.exits import UsageError
from remat.commands.common.step_options import (
    Batch,
    StepOptions,
    Tokens,
    capture_device_type,
    check_step_device,
)
from remat.commands.fit import Optimizer
from remat.costs.optimizer_memory import check_optimizer
from remat.errors import DocumentError, RematError
from remat.snapshots.error_text import parse_error_text
from remat.snapshots.explain import explain_error, explain_snapshot
from remat.snapshots.read import read_snapshot
from remat.snapshots.unpickle import PICKLE_START
from remat.snapshots.why import ERROR_WORDS

if TYPE_CHECKING:
    from remat.report.fit import Fit

_MAX_TEXT_BYTES = 16 << 20

Snapshot = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="What torch.cuda.memory._dump_snapshot wrote, or a file with the text of an error "
        "(a log); - reads stdin.",
    ),
]
ErrorFile = Annotated[
    Path | None,
    typer.Option(
        "--error",
        metavar="FILE",
        help="The text of the error that belongs to the snapshot: it names the memory of the "
        "device and of other processes.",
        show_default=False,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a page with a picture.", show_default=False),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="SOURCE",
        help="The model of the loop, as for remat fit (hf:gpt2, config.json, train.py:step): adds "
        "the predicted peak and what would fit.",
        show_default=False,
    ),
]


def why(
    source: Snapshot,
    text: Annotated[
        bool, typer.Option("--text", help="FILE is the text of an error, also if it looks else.")
    ] = False,
    error: ErrorFile = None,
    as_json: command_options.Json = False,
    html: Html = None,
    model: Model = None,
    batch: Batch = None,
    tokens: Tokens = None,
    overrides: command_options.Overrides = None,
    dtype: command_options.Dtype = None,
    autocast: command_options.Autocast = None,
    device: command_options.TargetDevice = None,
    optimizer: Optimizer = "adamw",
) -> None:
    """Explain an out-of-memory error: a leak, a fragment or the peak.

    Names what took the memory, and what to do.

    The file is read as plain data: no code in it can run. Nothing is run or allocated.
    """
    files.check_outputs(html)
    data = _read_bytes(source)
    name = "stdin" if source == "-" else Path(source).name
    parsed = None if error is None else parse_error_text(_decode(_read_bytes(str(error))))
    if text or (data[:1] != PICKLE_START and ERROR_WORDS.encode() in data):
        explanation = explain_error(parse_error_text(_decode(data)), name)
    else:
        explanation = explain_snapshot(read_snapshot(data), source=name, error=parsed)
    if model is not None:
        step = StepOptions(
            model,
            batch=batch,
            tokens=tokens,
            overrides=overrides,
            dtype=dtype,
            autocast=autocast,
        )
        memory = explanation.total_bytes
        explanation = explanation.with_fit(_fit(step, device, optimizer, memory))
    if html is not None:
        files.write_output(html, explanation.html())
    if as_json:
        files.print_json(explanation.to_json())
    elif html is None:
        files.print_text(explanation.describe())


def _fit(step: StepOptions, device: str | None, optimizer: str, memory: int | None) -> Fit:
    """Return the prediction for the model of the loop."""
    step.check()
    try:
        check_optimizer(optimizer)
    except RematError as error:
        raise UsageError(str(error)) from error
    check_step_device(device)
    from remat.frontend.api.fit import fit
    from remat.frontend.common.torch_modes import autocast_to

    loaded = step.load("meta")
    with autocast_to(capture_device_type(device), step.autocast):
        return fit(
            loaded.model,
            loaded.args,
            loaded.kwargs,
            device=device,
            optimizer=optimizer,
            memory=memory if device is None else None,
            batch=step.batch_size if step.is_configuration else None,
        )


def _read_bytes(path: str) -> bytes:
    """Return the content of a file, or of stdin for "-". Raises `UsageError`."""
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def _decode(data: bytes) -> str:
    if len(data) > _MAX_TEXT_BYTES:
        raise DocumentError("the text of the error is over 16 MiB; pass the end of the log")
    return data.decode(errors="replace")
