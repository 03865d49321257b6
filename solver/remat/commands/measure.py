"""`remat measure`: costs for a trace."""

from __future__ import annotations

from typing import Annotated

import typer

from remat.commands.common import files
from remat.commands.common.exits import UsageError
from remat.commands.common.figures import describe_costs, describe_trace
from remat.commands.common.options import Json, Output, Roofline, TraceFile, check_here
from remat.commands.common.progress_line import live
from remat.commands.common.solving import hint
from remat.costs.trace_costs import with_roofline_costs
from remat.costs.roofline import Roofline as Model
from remat.documents.trace import Trace
from remat.errors import RematError, TraceError


def measure(
    trace: TraceFile,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda; by default where the trace was made.", show_default=False),
    ] = None,
    roofline: Roofline = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time a trace's operations, or estimate them for a device that is not here."""
    if device is not None and roofline is not None:
        raise UsageError("give --device (to time) or --roofline (to estimate), not both")
    check_here(device, "measure", "--roofline {name} estimates for it by its data sheet")
    model = None if roofline is None else _roofline(roofline)
    files.check_outputs(output)
    traced = files.read_trace(trace)
    if device is None and roofline is None:
        _check_there(traced)
    if model is not None:
        priced = with_roofline_costs(traced, model)
    else:
        from remat.frontend.costs.measure import measure as run

        with live("measuring", 1) as line:
            priced = run(traced, device, progress=line.measuring)
    if output is not None:
        files.write(output, priced.to_json())
    if as_json:
        files.show_json(priced.to_json())
    else:
        files.show(f"{describe_trace(priced)}\n\n{describe_costs(priced)}")
    hint(output, as_json, "trace", "trace.json.gz")


def _check_there(traced: Trace) -> None:
    """Raises `RematError` where the trace's device is not here."""
    from remat.frontend.common.target_gpu import local_device

    try:
        local_device(traced.device)
    except TraceError as error:
        gpu = traced.gpu or "h200"
        raise RematError(
            f"{error}; `remat measure --roofline {gpu}` estimates by the data sheet of one"
        ) from None


def _roofline(name: str) -> Model:
    try:
        return Model(name)
    except ValueError as error:
        raise UsageError(str(error)) from None
