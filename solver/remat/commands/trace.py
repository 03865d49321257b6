"""`remat trace`: a model's training step as a document."""

from __future__ import annotations

from remat.commands.common import files, options
from remat.commands.common.figures import describe_trace
from remat.commands.common.solving import hint


def trace(
    source: options.Source,
    output: options.Output = None,
    as_json: options.Json = False,
    batch: options.Batch = 2,
    tokens: options.Tokens = 128,
    image: options.Image = None,
    overrides: options.Overrides = None,
    seed: options.Seed = 0,
    device: options.ForDevice = None,
    dtype: options.Dtype = None,
    autocast: options.Autocast = None,
    drop_outputs: options.DropOutputs = False,
) -> None:
    """Capture one training step of a model.

    With --device h100, as that GPU would run it, though it is not here; nothing is allocated then.
    """
    options.check_autocast(autocast)
    options.check_target(device)
    files.check_outputs(output)
    from remat.commands.models.batches import Sizes
    from remat.commands.models.sources import load_step
    from remat.frontend.capture.trace import trace as capture
    from remat.frontend.common.torch_modes import autocast_to
    from remat.frontend.common.target_gpu import find_target_gpu

    absent = find_target_gpu(device) is not None
    place = "meta" if absent else device or "cpu"
    sizes = Sizes(batch, tokens, image)
    step = load_step(source, sizes, overrides=overrides or (), device=place, dtype=dtype, seed=seed)
    with autocast_to("cpu" if absent else device or "cpu", autocast):
        found = capture(
            step.model,
            step.args,
            step.kwargs,
            device=device if absent else None,
            outputs=options.outputs_of(drop_outputs),
        )
    if output is not None:
        files.write(output, found.to_json())
    if as_json:
        files.show_json(found.to_json())
    else:
        files.show(describe_trace(found))
    hint(output, as_json, "trace", "trace.json.gz")
