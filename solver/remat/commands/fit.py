"""`remat fit`: whether a training loop fits a GPU, and what makes it fit."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from remat.commands.common import command_options, files
from remat.commands.common.exits import UsageError
from remat.commands.common.running import show_progress
from remat.commands.common.step_options import (
    Lengths,
    StepOptions,
    capture_device_type,
    check_step_device,
    parse_lengths,
    with_step_options,
)
from remat.costs.optimizer_memory import OPTIMIZERS, check_optimizer
from remat.errors import RematError
from remat.fitting.eager import AS_WRITTEN
from remat.fitting.lengths import LengthDistribution
from remat.fitting.question import (
    DEFAULT_LIMIT_S,
    LoopOptions,
    check_time_limit,
    parse_memory,
)

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
TimeLimit = Annotated[
    float,
    typer.Option(
        "--time-limit",
        metavar="SECONDS",
        help="Time for the search for plans and smaller batches, from the end of tracing; "
        "each of --lengths has as much.",
    ),
]


Checkpoint = Annotated[
    str,
    typer.Option(
        "--checkpoint",
        metavar="WHAT",
        help="Checkpoints of the loop: 'as written' in the model's code, none, blocks, every:2 "
        "(blocks 2, 4, 6, ...), or selective (each block recomputes all but attention and every "
        "second matmul).",
    ),
]
Accumulate = Annotated[
    int,
    typer.Option(
        "--accumulate",
        metavar="N",
        help="Batches before a step of the optimizer, whose gradients are accumulated.",
    ),
]
KeepGradients = Annotated[
    bool,
    typer.Option(
        "--keep-gradients",
        help="The loop never frees gradients: zero_grad(set_to_none=False).",
    ),
]
KeepOutputs = Annotated[
    bool,
    typer.Option(
        "--keep-outputs",
        help="Variables of the loop hold the outputs of a step until the next forward returns.",
    ),
]

Gpus = Annotated[
    int,
    typer.Option("--gpus", metavar="N", help="GPUs that share the loop, each with its own batch."),
]
Shard = Annotated[
    str,
    typer.Option(
        "--shard",
        metavar="WHAT",
        help="Sharding over several GPUs: full (FSDP2, the default), grad-op (FSDP2 with "
        "reshard_after_forward=False), hybrid:4 (HSDP, over groups of 4 GPUs), optimizer (DDP "
        "with ZeRO-1), or none (DDP).",
        show_default=False,
    ),
]
MixedPrecisionParam = Annotated[
    str,
    typer.Option(
        "--mixed-precision-param",
        metavar="DTYPE",
        help="With fully_shard: the dtype of gathered parameters and computation, bfloat16 or "
        "float16; shards are float32.",
        show_default=False,
    ),
]
MixedPrecisionReduce = Annotated[
    str,
    typer.Option(
        "--mixed-precision-reduce",
        metavar="DTYPE",
        help="The dtype of the reduction of gradients. Default: float32.",
        show_default=False,
    ),
]
BucketViews = Annotated[
    bool,
    typer.Option(
        "--gradient-as-bucket-view",
        help="With DDP: gradients are views of its buckets.",
    ),
]
NodeGpus = Annotated[
    int, typer.Option("--node-gpus", metavar="N", help="GPUs of a node, for the time of --gpus.")
]
Network = Annotated[
    float | None,
    typer.Option(
        "--network",
        metavar="BYTES/S",
        help="Each GPU's share of its node's network: 50e9 for 400 Gbit/s. Default: by the GPU.",
        show_default=False,
    ),
]


@with_step_options
def fit(
    step: StepOptions,
    lengths: Lengths = None,
    device: command_options.TargetDevice = None,
    optimizer: Optimizer = "adamw",
    memory: Memory = None,
    checkpoint: Checkpoint = AS_WRITTEN,
    accumulate: Accumulate = 1,
    keep_gradients: KeepGradients = False,
    keep_outputs: KeepOutputs = False,
    gpus: Gpus = 1,
    shard: Shard = "",
    mixed_precision_param: MixedPrecisionParam = "",
    mixed_precision_reduce: MixedPrecisionReduce = "",
    gradient_as_bucket_view: BucketViews = False,
    node_gpus: NodeGpus = 8,
    network: Network = None,
    time_limit: TimeLimit = DEFAULT_LIMIT_S,
) -> None:
    """Predict whether training fits a GPU, and what makes it fit.

    No weights are needed, and nothing runs but convolutions, one at a time, where the GPU is in
    this machine. If the loop does not fit, each option has its peak, its time and the code for it.
    """
    step.check()
    distribution = _length_distribution(step, lengths)
    try:
        check_optimizer(optimizer)
        loop = LoopOptions(
            checkpoint,
            accumulate,
            keep_gradients,
            keep_outputs,
            gpus=gpus,
            shard=shard,
            mixed_precision_param=mixed_precision_param,
            mixed_precision_reduce=mixed_precision_reduce,
            gradient_as_bucket_view=gradient_as_bucket_view,
            node_gpus=node_gpus,
            network=network,
        )
        check_time_limit(time_limit)
    except RematError as error:
        raise UsageError(str(error)) from error
    if memory is not None:
        parse_memory(memory)
    check_step_device(device)
    from remat.frontend.api.fit import fit as fit_step
    from remat.frontend.common.torch_modes import autocast_to

    longest = step.length if distribution is None else distribution.longest

    def step_of(batch: int, length: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        option = "--tokens" if distribution is None else "the longest of --lengths"
        sizes = replace(step.sizes, batch=batch, tokens=length, tokens_option=option)
        loaded = step.load("meta", sizes)
        return loaded.model, loaded.args, loaded.kwargs

    model, args, kwargs = step_of(step.batch_size, longest)
    is_sized = step.is_configuration
    with (
        autocast_to(capture_device_type(device), step.autocast),
        show_progress("fit") as line,
    ):
        answer = fit_step(
            model,
            args,
            kwargs,
            device=device,
            optimizer=optimizer,
            memory=memory,
            batch=step.batch_size if is_sized else None,
            with_batch=(lambda size: step_of(size, longest)) if is_sized else None,
            lengths=None if distribution is None else distribution.weights,
            with_length=lambda length: step_of(step.batch_size, length),
            outputs=step.outputs,
            **asdict(loop),
            time_limit=time_limit,
            progress=line.on_solve_progress,
        )
    if step.as_json:
        files.print_json(answer.to_json())
    else:
        files.print_text(answer.describe())


def _length_distribution(step: StepOptions, lengths: str | None) -> LengthDistribution | None:
    """Return the distribution that `--lengths` describes; None without it. Raises `UsageError` for
    a step of fixed size, and if `--tokens` is given, too."""
    if lengths is None:
        return None
    step.check_has_sizes("--lengths", lengths)
    if step.tokens is not None:
        raise UsageError("give --tokens (one length) or --lengths (several), not both")
    return parse_lengths(lengths)
