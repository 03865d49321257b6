"""The option of several GPUs with a shard of everything each (FSDP)."""

from __future__ import annotations

from collections.abc import Iterator

from remat.allocator.prediction import is_on_cuda
from remat.fitting.checkpoints import checkpointed_step
from remat.fitting.question import FitQuestion
from remat.limits.units import format_bytes
from remat.report.fit import ExcludedOption, FitOption
from remat.report.sharded_memory import sharded_peak_bytes
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
                    "torch.distributed.fsdp.fully_shard of each block, then of the model",
                    "by arithmetic; a batch on each GPU; communication takes time as well",
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
