"""`answer_question`: the memory of a training loop, and all options if it does not fit; and
`fit_trace`, for a trace on a GPU with a data sheet that this machine need not have.

An answer has notes about convolutions and mixtures of experts. A capture has fixed shapes, so its
memory cannot depend on the routing of experts: they compute all pairs of a token and one of its
experts, in grouped products or with gathered weights. A loop over experts, whose shapes depend on
the routing, cannot be captured. The workspaces of convolutions are selected by cuDNN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from remat.allocator.prediction import is_on_cuda
from remat.costs.devices import DEVICES, DeviceSpec, find_device
from remat.costs.roofline import Roofline
from remat.costs.trace_costs import with_roofline_costs
from remat.documents.arguments import Ref
from remat.documents.trace import Node, Trace, convolution_nodes
from remat.errors import RematError
from remat.fitting.combined import adapter_options, smaller_batch_options
from remat.fitting.eager import EagerStep
from remat.fitting.options import (
    checkpoint_options,
    optimizer_options,
    previous_output_options,
    released_output_options,
    segment_options,
)
from remat.fitting.plans import loss_only_options, plan_options
from remat.fitting.question import (
    DEFAULT_STRATEGY,
    PLAIN_LOOP,
    FitQuestion,
    LoopOptions,
    report_stage,
)
from remat.fitting.sharding import sharding_options
from remat.limits.limits import SEGMENTS_MARGIN
from remat.progress import Clock, ProgressCallback
from remat.report.fit import ExcludedOption, Fit, FitOption
from remat.strategies import Strategy

_OptionKind = Callable[[FitQuestion], Iterator[FitOption | ExcludedOption]]

_OPTION_KINDS: dict[_OptionKind, str] = {
    optimizer_options: "optimizers",
    segment_options: "settings of the allocator",
    previous_output_options: "outputs of the step before",
    released_output_options: "released outputs",
    plan_options: "plan",
    loss_only_options: "plan that returns the loss only",
    checkpoint_options: "checkpoints",
    smaller_batch_options: "smaller batches",
    sharding_options: "several GPUs",
    adapter_options: "adapters",
}
"""Kinds of options and their titles, the one that is simplest to apply first."""

_SLOW_OPTION_KINDS = (smaller_batch_options, plan_options, loss_only_options, adapter_options)
"""Kinds of options that trace or solve, and are the last, in this order."""

_DEADLINE_NOTE = (
    "the time limit of {:g} s ended the search: with a longer one, there may be other options"
)


def answer_question(question: FitQuestion, notes: Sequence[str] = ()) -> Fit:
    """Return the answer, with options if the loop does not fit. `notes` come before its own."""
    step = question.step
    report_stage(question.progress, "memory of the step", question.clock)
    memory = step.memory(question.optimizer)
    is_usable = question.is_usable(memory)
    options, excluded = ((), ()) if is_usable else find_options(question)
    deadline_notes = [_DEADLINE_NOTE.format(question.clock.limit_s)]
    return Fit(
        model=step.trace.model.rpartition(".")[2],
        device=step.trace.gpu or step.trace.device,
        optimizer=question.optimizer_name,
        batch=question.batch,
        checkpoint=step.checkpoint,
        checkpoint_count=step.checkpoint_count,
        accumulate=question.loop.accumulate,
        keeps_gradients=question.loop.keeps_gradients,
        keeps_outputs=question.loop.keeps_outputs,
        sharding=question.loop.sharding,
        communication_s=step.communication_s,
        usable_bytes=question.usable_bytes,
        memory=memory,
        reserved_range_bytes=step.reserved_range_bytes(question.optimizer),
        step_s=step.time_s,
        options=options,
        cost_source=step.trace.cost_source,
        notes=(
            *notes,
            *routing_notes(step.trace),
            *(deadline_notes if question.clock.is_set() and not is_usable else ()),
        ),
        excluded=excluded,
        assumptions=(*_device_assumptions(question), *question.assumptions),
    )


def _device_assumptions(question: FitQuestion) -> Iterator[str]:
    """Yield the source of the GPU's figures, and the version of torch; nothing for a CPU."""
    trace = question.step.trace
    if is_on_cuda(trace):
        device = question.roofline.device
        yield device.source or f"rates of {device.name}"
        if trace.environment.torch:
            yield f"torch {trace.environment.torch.partition('+')[0]}"


def search_options(
    question: FitQuestion,
) -> Iterator[tuple[_OptionKind, FitOption | ExcludedOption]]:
    """Yield options with their kinds; those that trace or solve are last, until the time limit."""
    kinds = [
        *(kind for kind in _OPTION_KINDS if kind not in _SLOW_OPTION_KINDS),
        *_SLOW_OPTION_KINDS,
    ]
    for number, kind in enumerate(kinds, 1):
        if kind in _SLOW_OPTION_KINDS and question.clock.is_set():
            return
        of_kind = question.at_stage(f"option {number} of {len(kinds)}: {_OPTION_KINDS[kind]}")
        yield from ((kind, option) for option in kind(of_kind))


def find_options(
    question: FitQuestion,
) -> tuple[tuple[FitOption, ...], tuple[ExcludedOption, ...]]:
    """Return all options that apply, and the impossible ones. Those that fit come first, the
    fastest of them first, but more GPUs last; then the others, the one that exceeds the memory
    least first. Of options that are equally fast (to 0.1%), the one that is simpler to apply is
    first. After the time limit, options that trace or solve are left out."""
    options: dict[_OptionKind, list[FitOption | ExcludedOption]] = {
        kind: [] for kind in _OPTION_KINDS
    }
    for kind, option in search_options(question):
        options[kind].append(option)
    step_s = question.step.time_s or 1.0

    def sort_key(option: FitOption) -> tuple[bool, bool, float]:
        needs_more_gpus = option.gpus > question.loop.gpus
        if not option.fits:
            return True, needs_more_gpus, option.reserved_bytes
        relative = math.inf if option.step_s is None else round(option.step_s / step_s, 3)
        return False, needs_more_gpus, relative

    in_order = [option for kind in _OPTION_KINDS for option in options[kind]]
    possible = [option for option in in_order if isinstance(option, FitOption)]
    excluded = [option for option in in_order if isinstance(option, ExcludedOption)]
    return tuple(sorted(possible, key=sort_key)), tuple(excluded)


def convolution_notes(trace: Trace, *, are_measured: bool) -> list[str]:
    """Return a list with a sentence about the workspaces of a step's convolutions; empty without
    convolutions, and for a CPU. `are_measured` is True if the peak contains them."""
    count = len(convolution_nodes(trace))
    if not count or not is_on_cuda(trace):
        return []
    if are_measured:
        return [f"workspaces of {count:,} convolutions, forward and backward, measured on this GPU"]
    return [
        f"the workspaces that cuDNN takes for {count:,} convolutions, forward and backward, are "
        "unknown without the GPU, and not part of the peak"
    ]


_GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
"""Products whose rows are sorted by expert."""

_GATHER = "aten.index.Tensor"
_EXPERT_WEIGHT_DIMENSIONS = 3
"""The dimensions of a parameter with a matrix for each expert."""


def routing_notes(trace: Trace) -> list[str]:
    """Return a list with a sentence about the memory of a mixture of experts, which no routing
    changes; empty for other models."""
    weights = {
        p.name
        for p in trace.placeholders
        if p.kind == "parameter" and len(p.tensor.shape) == _EXPERT_WEIGHT_DIMENSIONS
    }
    for node in trace.nodes:
        if node.backward or not node.results or not node.results[0].tensor.shape:
            continue
        if node.target in _GROUPED:
            how = "grouped products"
        elif node.target == _GATHER and _first_argument_name(node) in weights:
            how = "products with gathered weights"
        else:
            continue
        rows = node.results[0].tensor.shape[0]
        return [
            "balanced and worst-case routing of experts need the same memory: their "
            f"{how} have {rows:,} rows (tokens times experts per token), whatever the experts"
        ]
    return []


def _first_argument_name(node: Node) -> str:
    """Return the name of the tensor that is the first argument; "" if that is no tensor."""
    return node.args[0].name if node.args and isinstance(node.args[0], Ref) else ""


CONTEXT_BYTES = 512 << 20
"""Memory of a CUDA context: 400 to 600 MiB, depending on the kernels that are loaded."""

GPUS = tuple(name for name, device in DEVICES.items() if device.capability)
"""The names of GPUs with a data sheet."""


def usable_bytes(device: DeviceSpec) -> int:
    """Return the bytes of a device that torch's allocator may reserve, if nothing else runs."""
    return int(device.memory_bytes * (1 - SEGMENTS_MARGIN)) - CONTEXT_BYTES


def gpu_name(trace: Trace, gpu: str | None) -> str:
    """Return the name of the GPU that a question is about, by default the trace's GPU. Raises
    `RematError` if the trace is not of a GPU, or if the GPU has no data sheet."""
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
    loop: LoopOptions = PLAIN_LOOP,
    strategy: Strategy = DEFAULT_STRATEGY,
    time_limit_s: float = math.inf,
    progress: ProgressCallback | None = None,
) -> Fit:
    """Return the answer for a trace on a GPU with a data sheet, by default the trace's GPU.

    Costs are from the data sheet. `memory_bytes` is what torch's allocator may reserve.
    The search for plans ends after `time_limit_s`, whatever the limit of the `strategy`, which is
    for one solve; other options are always there. `progress` reports the stages of the answer, and
    its solves. Raises
    `RematError` for a trace that is not of a GPU, or if the GPU is unknown.
    """
    clock = Clock.of(time_limit_s)
    name = gpu_name(trace, gpu)
    roofline = Roofline(name)
    if not trace.accumulates_gradients:
        trace = loop.with_gradients(trace)
    costed = loop.with_outputs(with_roofline_costs(trace, roofline))
    question = FitQuestion(
        EagerStep.of(costed, loop.checkpoint, loop, name),
        optimizer,
        usable_bytes(find_device(name)) if memory_bytes is None else memory_bytes,
        roofline,
        strategy,
        batch=batch,
        loop=loop,
        clock=clock,
        progress=progress,
    )
    notes = convolution_notes(costed, are_measured=False)
    if trace.gpu != name:
        traced = trace.gpu or "another GPU"
        notes.append(f"traced for {traced}: kernels, and what they save, may differ on {name}")
    return replace(answer_question(question, notes), device=name)
