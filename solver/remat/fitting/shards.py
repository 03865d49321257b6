"""The option of several GPUs with a shard of everything each (FSDP)."""

from __future__ import annotations

from collections.abc import Iterator

from remat.allocator.prediction import is_on_cuda
from remat.fitting.checkpoints import CHECKPOINTS_IN_WORDS, checkpointed_step
from remat.fitting.question import FitQuestion
from remat.limits.units import format_bytes
from remat.report.fit import ExcludedOption, FitOption
from remat.report.sharded_memory import block_containers, sharded_peak_bytes
from remat.schedule import Schedule

_MAX_GPUS = 1024


def sharding_options(question: FitQuestion) -> Iterator[FitOption | ExcludedOption]:
    """Yield the smallest power of two of GPUs over which the step fits, without recomputation or
    with a checkpoint for each block."""
    step, optimizer = question.step, question.optimizer
    if not is_on_cuda(step.trace):
        return
    fragments = question.fragments(optimizer)
    without = step, Schedule.keep_all(step.graph)
    smallest_bytes: list[int] = []
    for suffix, variant in (("", without), (", checkpoint each block", checkpointed_step(step))):
        if variant is None:
            continue
        variant_step, schedule = variant
        if question.is_usable(variant_step.memory(optimizer, schedule)):
            continue  # one GPU is enough
        gpus = 2
        while gpus <= _MAX_GPUS:
            peak_bytes = sharded_peak_bytes(
                step.eager_trace, variant_step.graph, schedule, optimizer, gpus
            )
            reserved_bytes = int(peak_bytes * fragments)
            if reserved_bytes <= question.usable_bytes:
                yield FitOption(
                    f"FSDP over {gpus} GPUs{suffix}",
                    peak_bytes,
                    reserved_bytes,
                    True,
                    None,
                    _code(question, has_checkpoints=bool(suffix)),
                    "before the optimizer is created; a batch on each GPU; communication takes "
                    "time as well",
                    gpus,
                )
                return
            smallest_bytes.append(reserved_bytes)
            gpus *= 2
    if smallest_bytes:
        yield ExcludedOption(
            "FSDP",
            f"each of {_MAX_GPUS:,} GPUs would reserve {format_bytes(min(smallest_bytes))}: "
            "activations are not sharded, nor the parameters of the block that runs",
        )


def _code(question: FitQuestion, *, has_checkpoints: bool) -> str:
    """Return the code that shards each block, then the model."""
    lines = ["from torch.distributed.fsdp import fully_shard"]
    if has_checkpoints:
        lines.insert(0, question.script.checkpoints or CHECKPOINTS_IN_WORDS)
    for path in block_containers(question.step.trace):
        container = f"model.{path}" if path else "model"
        lines.append(f"[fully_shard(block) for block in {container}]")
    return "; ".join([*lines, "fully_shard(model)"])
