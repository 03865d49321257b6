"""`remat estimate`: the peak of a training step and its parts, before anything runs."""

from __future__ import annotations

import dataclasses

from remat.commands.common import files, options
from remat.commands.common.figures import json_of
from remat.limits.reserve import parse_reserve


def estimate(
    source: options.Source,
    as_json: options.Json = False,
    batch: options.Batch = 2,
    tokens: options.Tokens = 128,
    image: options.Image = None,
    overrides: options.Overrides = None,
    seed: options.Seed = 0,
    dtype: options.Dtype = None,
    autocast: options.Autocast = None,
    device: options.ForDevice = None,
    reserve: options.Reserve = None,
    drop_outputs: options.DropOutputs = False,
) -> None:
    """Tell a training step's peak and its parts before anything runs.

    No tensor is allocated: the model may be far too large for this machine.
    """
    options.check_autocast(autocast)
    options.check_target(device)
    if reserve is not None:
        parse_reserve(reserve)
    from remat.commands.models.batches import Sizes
    from remat.commands.models.sources import load_step
    from remat.frontend.api.estimate import estimate as estimated
    from remat.frontend.capture.model.meta_device import default_capture_device
    from remat.frontend.common.torch_modes import autocast_to
    from remat.frontend.common.target_gpu import local_device, find_target_gpu

    if find_target_gpu(device) is not None:
        kind = "cpu"  # where the tensors of such a capture are
    else:
        kind = default_capture_device().type if device is None else local_device(device).type
    sizes = Sizes(batch, tokens, image)
    step = load_step(
        source, sizes, overrides=overrides or (), device="meta", dtype=dtype, seed=seed
    )
    with autocast_to(kind, autocast):
        found = estimated(
            step.model,
            step.args,
            step.kwargs,
            device=device,
            reserve=reserve,
            outputs=options.outputs_of(drop_outputs),
        )
    if as_json:
        files.show_json(json_of(dataclasses.asdict(found)))
    else:
        files.show(found.describe())
