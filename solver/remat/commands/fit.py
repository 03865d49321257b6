"""`remat fit`: whether a training loop fits a GPU, and what makes it fit."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from remat.commands.common import command_options, files
from remat.commands.common.capture_device import capture_device_type
from remat.commands.common.length_option import Lengths, parse_lengths
from remat.costs.optimizer_memory import OPTIMIZERS, check_optimizer
from remat.errors import RematError
from remat.limits.outputs import OUTPUTS_HELD
from remat.limits.reserve import parse_bytes

Optimizer = Annotated[
    str,
    typer.Option("--optimizer", metavar="NAME", help=f"One of {', '.join(OPTIMIZERS)}."),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="BYTES",
        help="What torch's allocator may reserve: 75GiB. Default: nearly all of the device's.",
        show_default=False,
    ),
]


def fit(
    source: command_options.Source,
    as_json: command_options.Json = False,
    batch: command_options.Batch = 2,
    tokens: command_options.Tokens = 128,
    lengths: Lengths = None,
    image: command_options.Image = None,
    overrides: command_options.Overrides = None,
    seed: command_options.Seed = 0,
    dtype: command_options.Dtype = None,
    autocast: command_options.Autocast = None,
    device: command_options.TargetDevice = None,
    optimizer: Optimizer = "adamw",
    memory: Memory = None,
    outputs: command_options.Outputs = OUTPUTS_HELD,
) -> None:
    """Predict whether a training loop fits a GPU, and what makes it fit.

    Nothing runs, and no weights are needed. If the loop does not fit, each option has its peak, its
    time and the code for it.
    """
    command_options.check_autocast(autocast)
    command_options.check_outputs_option(outputs)
    command_options.check_target_device(device)
    try:
        check_optimizer(optimizer)
    except RematError as error:
        raise command_options.UsageError(str(error)) from error
    if memory is not None:
        parse_bytes(memory, "memory", "75GiB")
    distribution = None if lengths is None else parse_lengths(lengths)
    from remat.commands.models.batches import BatchSizes
    from remat.commands.models.sources import is_configuration, load_training_step
    from remat.frontend.api.fit import fit as fit_step
    from remat.frontend.common.torch_modes import autocast_to

    longest = tokens if distribution is None else distribution.longest

    def step_of(batch_size: int, length: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        sizes = BatchSizes(batch_size, length, image)
        step = load_training_step(
            source, sizes, overrides=overrides or (), device="meta", dtype=dtype, seed=seed
        )
        return step.model, step.args, step.kwargs

    model, args, kwargs = step_of(batch, longest)
    has_batch = is_configuration(source)  # a factory chooses its own
    with autocast_to(capture_device_type(device), autocast):
        answer = fit_step(
            model,
            args,
            kwargs,
            device=device,
            optimizer=optimizer,
            memory=memory,
            batch=batch if has_batch else None,
            with_batch=(lambda size: step_of(size, longest)) if has_batch else None,
            lengths=None if distribution is None else distribution.weights,
            with_length=lambda length: step_of(batch, length),
            outputs=outputs,
        )
    if as_json:
        files.print_json(answer.to_json())
    else:
        files.print_text(answer.describe())
