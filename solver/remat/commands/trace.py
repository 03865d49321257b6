"""`remat trace`: captures a training step of a model as a document."""

from __future__ import annotations

from remat.commands.common import command_options, files
from remat.commands.common.interruptible_solve import hint_how_to_save
from remat.commands.common.step_options import StepOptions, check_step_device, with_step_options
from remat.commands.common.summaries import describe_trace


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
        files.print_text(describe_trace(captured_trace))
    hint_how_to_save(output, step.as_json, "trace", "trace.json.gz")
