"""`remat measure`: a trace with the time and workspace of each operation."""

from __future__ import annotations

from typing import Annotated

import typer

from remat.commands.common import files
from remat.commands.common.command_options import (
    Json,
    Output,
    Roofline,
    TraceFile,
    check_local_device,
)
from remat.commands.common.exits import UsageError
from remat.commands.common.interruptible_solve import hint_how_to_save
from remat.commands.common.progress_line import show_progress
from remat.commands.common.summaries import describe_costs, describe_trace
from remat.costs.roofline import Roofline as RooflineModel
from remat.costs.trace_costs import with_roofline_costs
from remat.documents.trace import Trace
from remat.errors import RematError, TraceError


def measure(
    trace: TraceFile,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="cpu or cuda; by default the device of the trace.",
            show_default=False,
        ),
    ] = None,
    roofline: Roofline = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Time the operations of a trace, or estimate them for a device."""
    if device is not None and roofline is not None:
        raise UsageError("give --device (to time) or --roofline (to estimate), not both")
    check_local_device(
        device, "measure", "--roofline {name} estimates the costs from its data sheet"
    )
    roofline_model = None if roofline is None else _roofline_model(roofline)
    files.check_outputs(output)
    traced = files.read_trace(trace)
    if device is None and roofline is None:
        _check_trace_device(traced)
    if roofline_model is not None:
        measured_trace = with_roofline_costs(traced, roofline_model)
    else:
        from remat.frontend.costs.measure import measure as measure_trace

        with show_progress("measuring", 1) as line:
            measured_trace = measure_trace(traced, device, progress=line.on_measure_progress)
    if output is not None:
        files.write_output(output, measured_trace.to_json())
    if as_json:
        files.print_json(measured_trace.to_json())
    else:
        files.print_text(f"{describe_trace(measured_trace)}\n\n{describe_costs(measured_trace)}")
    hint_how_to_save(output, as_json, "trace", "trace.json.gz")


def _check_trace_device(traced: Trace) -> None:
    """Raise `RematError` if this machine does not have the trace's device."""
    from remat.frontend.common.target_gpu import local_device

    try:
        local_device(traced.device)
    except TraceError as error:
        gpu = traced.gpu or "h200"
        raise RematError(
            f"{error}; `remat measure --roofline {gpu}` estimates the costs from a data sheet"
        ) from None


def _roofline_model(name: str) -> RooflineModel:
    try:
        return RooflineModel(name)
    except ValueError as error:
        raise UsageError(str(error)) from None
