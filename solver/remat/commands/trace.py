"""`remat trace`: captures a training step of a model as a document."""

from __future__ import annotations

from remat.commands.common import command_options, files
from remat.commands.common.interruptible_solve import hint_how_to_save
from remat.commands.common.summaries import describe_trace
from remat.limits.outputs import OUTPUTS_HELD


def trace(
    source: command_options.Source,
    output: command_options.Output = None,
    as_json: command_options.Json = False,
    batch: command_options.Batch = 2,
    tokens: command_options.Tokens = 128,
    image: command_options.Image = None,
    overrides: command_options.Overrides = None,
    seed: command_options.Seed = 0,
    device: command_options.TargetDevice = None,
    dtype: command_options.Dtype = None,
    autocast: command_options.Autocast = None,
    outputs: command_options.Outputs = OUTPUTS_HELD,
) -> None:
    """Capture one training step of a model.

    With --device h100, as that GPU would run it, even if this machine has none; nothing is
    allocated then.
    """
    command_options.check_autocast(autocast)
    command_options.check_outputs_option(outputs)
    command_options.check_target_device(device)
    files.check_outputs(output)
    from remat.commands.models.batches import BatchSizes
    from remat.commands.models.sources import load_training_step
    from remat.frontend.capture.trace import trace as capture
    from remat.frontend.common.target_gpu import find_target_gpu
    from remat.frontend.common.torch_modes import autocast_to

    is_absent_gpu = find_target_gpu(device) is not None
    model_device = "meta" if is_absent_gpu else device or "cpu"
    sizes = BatchSizes(batch, tokens, image)
    step = load_training_step(
        source, sizes, overrides=overrides or (), device=model_device, dtype=dtype, seed=seed
    )
    with autocast_to("cpu" if is_absent_gpu else device or "cpu", autocast):
        captured_trace = capture(
            step.model,
            step.args,
            step.kwargs,
            device=device if is_absent_gpu else None,
            outputs=outputs,
        )
    if output is not None:
        files.write_output(output, captured_trace.to_json())
    if as_json:
        files.print_json(captured_trace.to_json())
    else:
        files.print_text(describe_trace(captured_trace))
    hint_how_to_save(output, as_json, "trace", "trace.json.gz")
