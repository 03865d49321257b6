"""`remat estimate`: the predicted peak of a training step and its parts."""

from __future__ import annotations

import dataclasses

from remat.commands.common import command_options, files
from remat.commands.common.capture_device import capture_device_type
from remat.commands.common.summaries import to_json_text
from remat.limits.outputs import OUTPUTS_HELD
from remat.limits.reserve import parse_reserve


def estimate(
    source: command_options.Source,
    as_json: command_options.Json = False,
    batch: command_options.Batch = 2,
    tokens: command_options.Tokens = 128,
    image: command_options.Image = None,
    overrides: command_options.Overrides = None,
    seed: command_options.Seed = 0,
    dtype: command_options.Dtype = None,
    autocast: command_options.Autocast = None,
    device: command_options.TargetDevice = None,
    reserve: command_options.Reserve = None,
    outputs: command_options.Outputs = OUTPUTS_HELD,
) -> None:
    """Predict the peak of a training step, and its parts, without running it.

    No tensor is allocated: the model may be far too large for this machine.
    """
    command_options.check_autocast(autocast)
    command_options.check_outputs_option(outputs)
    command_options.check_target_device(device)
    if reserve is not None:
        parse_reserve(reserve)
    from remat.commands.models.batches import BatchSizes
    from remat.commands.models.sources import load_training_step
    from remat.frontend.api.estimate import estimate as estimate_step
    from remat.frontend.common.torch_modes import autocast_to

    sizes = BatchSizes(batch, tokens, image)
    step = load_training_step(
        source, sizes, overrides=overrides or (), device="meta", dtype=dtype, seed=seed
    )
    with autocast_to(capture_device_type(device), autocast):
        memory_estimate = estimate_step(
            step.model,
            step.args,
            step.kwargs,
            device=device,
            reserve=reserve,
            outputs=outputs,
        )
    if as_json:
        files.print_json(to_json_text(dataclasses.asdict(memory_estimate)))
    else:
        files.print_text(memory_estimate.describe())
