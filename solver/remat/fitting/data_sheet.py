"""A question about a GPU with a data sheet, for a trace that may come from another machine."""

from __future__ import annotations

import math
from dataclasses import replace

from remat.allocator.prediction import is_on_cuda
from remat.costs.devices import DEVICES, DeviceSpec, find_device
from remat.costs.roofline import Roofline
from remat.costs.trace_costs import with_roofline_costs
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.fitting.answer import answer_question
from remat.fitting.plans import convolution_notes
from remat.fitting.question import DEFAULT_STRATEGY, EagerStep, FitQuestion
from remat.limits.limits import SEGMENTS_MARGIN
from remat.progress import Clock, ProgressCallback
from remat.report.fit import Fit
from remat.strategies import Strategy

CONTEXT_BYTES = 512 << 20
"""Memory of a CUDA context: 400 to 600 MiB, depending on the kernels that are loaded."""

GPUS = tuple(name for name, device in DEVICES.items() if device.capability)
"""The names of GPUs with a data sheet."""


def usable_bytes(device: DeviceSpec) -> int:
    """Return the bytes of a device that torch's allocator may reserve, if nothing else runs."""
    return int(device.memory_bytes * (1 - SEGMENTS_MARGIN)) - CONTEXT_BYTES


def gpu_name(trace: Trace, gpu: str | None) -> str:
    """Return the name of the GPU that a question is about, by default that of the trace. Raises
    `RematError`."""
    if not is_on_cuda(trace):
        raise RematError(
            f"the trace is of {trace.device[:40] or 'an unknown device'}, where torch saves other "
            "tensors than on a GPU: trace for one, which need not be here: remat.trace(..., "
            'device="h100")'
        )
    name = gpu or trace.gpu
    if name not in GPUS:
        what = f"the GPU {name[:40]!r} has no data sheet" if name else "the trace names no GPU"
        raise RematError(f"{what}; name one of {', '.join(GPUS)}")
    return name


def fit_trace(
    trace: Trace,
    optimizer: str,
    *,
    gpu: str | None = None,
    memory_bytes: int | None = None,
    batch: int | None = None,
    strategy: Strategy = DEFAULT_STRATEGY,
    time_limit_s: float = math.inf,
    progress: ProgressCallback | None = None,
) -> Fit:
    """Return the answer for a trace on a GPU with a data sheet, by default that of the trace.

    Costs are those of the data sheet. `memory_bytes` is what torch's allocator may reserve. The
    search for options ends after `time_limit_s`, whatever the limit of the `strategy`, which is
    that of one solve; `progress` reports the stages of the answer, and those solves. Raises
    `RematError` for a trace that is not of a GPU, or if the GPU is unknown.
    """
    clock = Clock.of(time_limit_s)
    name = gpu_name(trace, gpu)
    roofline = Roofline(name)
    costed = with_roofline_costs(trace, roofline)
    question = FitQuestion(
        EagerStep.of(costed),
        optimizer,
        usable_bytes(find_device(name)) if memory_bytes is None else memory_bytes,
        roofline,
        strategy,
        batch=batch,
        clock=clock,
        progress=progress,
    )
    notes = convolution_notes(costed, are_measured=False)
    if trace.gpu != name:
        traced = trace.gpu or "another GPU"
        notes.append(f"traced for {traced}: kernels, and what they save, may differ on {name}")
    return replace(answer_question(question, notes), device=name)
