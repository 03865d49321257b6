"""`remat trace` captures a training step of a model, `remat measure` adds the time and workspace of
each operation, and `remat estimate` predicts its peak and the parts of it."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from remat.commands.common import command_options, files
from remat.commands.common.command_options import (
    Json,
    Output,
    Roofline,
    TraceFile,
    check_local_device,
)
from remat.commands.common.exits import UsageError
from remat.commands.common.plan_flags import check_plan_flag, plan_option_flag
from remat.commands.common.running import hint_how_to_save, show_progress
from remat.commands.common.step_options import (
    StepOptions,
    capture_device_type,
    check_step_device,
    with_step_options,
)
from remat.commands.common.summaries import measured_report, to_json_text, trace_report
from remat.costs.roofline import Roofline as RooflineModel
from remat.costs.trace_costs import with_roofline_costs
from remat.documents.trace import Trace
from remat.errors import RematError, TraceError


@with_step_options
def trace(
    step: StepOptions,
    output: command_options.Output = None,
    device: command_options.TargetDevice = None,
) -> None:
    """Capture one training step of a model.

    With --device h100, as that GPU would run it, even if this machine has none; nothing is
    allocated then.
    """
    step.check()
    files.check_outputs(output)
    check_step_device(device)
    from remat.frontend.capture.trace import trace as capture
    from remat.frontend.common.target_gpu import find_target_gpu
    from remat.frontend.common.torch_modes import autocast_to

    is_absent_gpu = find_target_gpu(device) is not None
    loaded = step.load("meta" if is_absent_gpu else device or "cpu")
    with autocast_to("cpu" if is_absent_gpu else device or "cpu", step.autocast):
        captured_trace = capture(
            loaded.model,
            loaded.args,
            loaded.kwargs,
            device=device if is_absent_gpu else None,
            outputs=step.outputs,
        )
    if output is not None:
        files.write_output(output, captured_trace.to_json())
    if step.as_json:
        files.print_json(captured_trace.to_json())
    else:
        files.print_text(str(trace_report(captured_trace)))
    hint_how_to_save(output, step.as_json, "trace", "trace.json.gz")


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
        files.print_text(str(measured_report(measured_trace)))
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
    """Return the roofline of a device. Raises `UsageError` if it has no data sheet."""
    try:
        return RooflineModel(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


@with_step_options
def estimate(
    step: StepOptions,
    device: command_options.TargetDevice = None,
    reserve: Annotated[str | None, plan_option_flag("reserve")] = None,
) -> None:
    """Predict the peak of a training step, without running it.

    No tensor is allocated: the model may be far too large for this machine.
    """
    step.check()
    check_plan_flag("reserve", reserve)
    check_step_device(device)
    from remat.frontend.api.estimate import estimate as estimate_step
    from remat.frontend.common.torch_modes import autocast_to

    loaded = step.load("meta")
    with autocast_to(capture_device_type(device), step.autocast):
        memory_estimate = estimate_step(
            loaded.model,
            loaded.args,
            loaded.kwargs,
            device=device,
            reserve=reserve,
            outputs=step.outputs,
        )
    if step.as_json:
        files.print_json(to_json_text(dataclasses.asdict(memory_estimate)))
    else:
        files.print_text(memory_estimate.describe())
