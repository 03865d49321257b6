"""Options of several GPUs: parameters, gradients and optimizer state in shards (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator

from remat.allocator.prediction import is_on_cuda
from remat.costs.sharding import FULL, Sharding
from remat.fitting.options import CHECKPOINTS_IN_WORDS
from remat.fitting.question import FitQuestion
from remat.limits.units import format_bytes
from remat.report.fit import ExcludedOption, FitOption
from remat.report.sharded_memory import block_containers

_MAX_GPUS = 1024


def sharding_options(question: FitQuestion) -> Iterator[FitOption | ExcludedOption]:
    """Yield full shards over the smallest number of GPUs over which the step fits, the loop's or
    double, four times, ... that, as it is or else with a checkpoint for each block; an excluded
    option if there are not enough GPUs. Nothing if the loop's GPUs are enough, and for a CPU."""
    step, optimizer = question.step, question.optimizer
    if not is_on_cuda(step.trace):
        return
    with_checkpoints = None if step.checkpoint_count else step.with_blocks_checkpointed()
    smallest_bytes: list[int] = []
    for suffix, variant in (("", step), (", checkpoint each block", with_checkpoints)):
        if variant is None or question.is_usable(variant.memory(optimizer)):
            continue  # the loop's GPUs are enough
        for sharding in _full_shards(question.loop.sharding):
            sharded = variant.with_sharding(sharding)
            memory = sharded.memory(sharded.optimizer(optimizer.name))
            if question.is_usable(memory):
                yield FitOption(
                    f"FSDP over {sharding.gpus:,} GPUs{suffix}",
                    memory.peak_bytes,
                    memory.reserved_bytes,
                    True,
                    sharded.time_s,
                    _sharding_code(question, has_checkpoints=bool(suffix)),
                    "before the optimizer is created; a batch on each GPU; communication by a "
                    "model",
                    sharding.gpus,
                )
                return
            smallest_bytes.append(memory.reserved_bytes)
    if smallest_bytes:
        yield ExcludedOption(
            "FSDP",
            f"each of {_MAX_GPUS:,} GPUs would reserve {format_bytes(min(smallest_bytes))}: "
            "activations are not sharded, nor the parameters of the block that runs",
        )


def _full_shards(sharding: Sharding) -> Iterator[Sharding]:
    """Yield full shards over the GPUs of a loop that is not fully sharded yet, then over more."""
    gpus = sharding.gpus
    if gpus == 1 or (sharding.is_fsdp and sharding.shards == gpus and sharding.shard in ("", FULL)):
        gpus *= 2
    while gpus <= _MAX_GPUS:
        yield Sharding(
            gpus=gpus,
            shard=FULL,
            mixed_precision_param=sharding.mixed_precision_param,
            mixed_precision_reduce=sharding.mixed_precision_reduce,
            node_gpus=sharding.node_gpus,
            network=sharding.network,
        )
        gpus *= 2


def _sharding_code(question: FitQuestion, *, has_checkpoints: bool) -> str:
    """Return the code that shards each block, then the model; `has_checkpoints` puts a checkpoint
    around each block before."""
    sharding = question.loop
    lines, arguments = ["from torch.distributed.fsdp import fully_shard"], ""
    if sharding.mixed_precision_param:
        lines = ["from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"]
        reduce = sharding.mixed_precision_reduce or "float32"
        lines.append(
            f"policy = MixedPrecisionPolicy(torch.{sharding.mixed_precision_param}, torch.{reduce})"
        )
        arguments = ", mp_policy=policy"
    if has_checkpoints:
        lines.insert(0, question.script.checkpoints or CHECKPOINTS_IN_WORDS)
    for path in block_containers(question.step.trace):
        container = f"model.{path}" if path else "model"
        lines.append(f"[fully_shard(block{arguments}) for block in {container}]")
    return "; ".join([*lines, f"fully_shard(model{arguments})"])
