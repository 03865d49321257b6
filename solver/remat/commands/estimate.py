"""`remat estimate`: the predicted peak of a training step and its parts."""

from __future__ import annotations

import dataclasses

from remat.commands.common import command_options, files
from remat.commands.common.capture_device import capture_device_type
from remat.commands.common.step_options import StepOptions, check_step_device, with_step_options
from remat.commands.common.summaries import to_json_text
from remat.limits.options import parse_reserve


@with_step_options
def estimate(
    step: StepOptions,
    device: command_options.TargetDevice = None,
    reserve: command_options.Reserve = None,
) -> None:
    """Predict the peak of a training step, without running it.

    No tensor is allocated: the model may be far too large for this machine.
    """
    step.check()
    if reserve is not None:
        parse_reserve(reserve)
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
