"""`fit`: will a training step fit a device, and what makes it fit?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from remat.allocator.prediction import is_on_cuda
from remat.costs.optimizer_memory import check_optimizer
from remat.costs.trace_costs import with_roofline_costs
from remat.documents.trace import Trace
from remat.errors import BudgetError, RematError, TraceError, wrong_type
from remat.fitting.answer import answer_question, convolution_notes, usable_bytes
from remat.fitting.eager import AS_WRITTEN, EagerStep
from remat.fitting.lengths import LengthDistribution, longest_fits
from remat.fitting.question import (
    DEFAULT_LIMIT_S,
    DEFAULT_STRATEGY,
    FitQuestion,
    LoopOptions,
    ScriptChanges,
    check_batch,
    check_time_limit,
    in_stage,
    parse_memory,
    report_stage,
)
from remat.frontend.api.adapters import meta_copy_with_adapters
from remat.frontend.api.estimate import roofline_for_trace
from remat.frontend.api.max_batch import ModelFnResult, parse_model_fn_result
from remat.frontend.capture.model.values import package_of
from remat.frontend.capture.model.wrapped_code import selective_policies_run
from remat.frontend.capture.trace import trace as capture
from remat.frontend.common.garbage_collection import older_objects_not_collected
from remat.frontend.common.target_gpu import DEFAULT_GPU, find_target_gpu, is_default_gpu
from remat.frontend.costs.operation_costs import with_measured_convolutions
from remat.frontend.memory.device_memory import free_bytes
from remat.frontend.memory.meter import unique_bytes
from remat.limits.limits import SEGMENTS_MARGIN
from remat.limits.options import OUTPUTS_HELD
from remat.passes.gradient_accumulation import with_gradient_accumulation
from remat.progress import Clock, ProgressCallback
from remat.report.fit import Fit
from remat.strategies import Strategy

_POLICY_NOTE = (
    "the policy of a selective checkpoint cannot run in a capture, so its checkpoints count as "
    "ordinary ones, which save less"
)


def fit(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    device: str | torch.device | None = None,
    optimizer: str = "adamw",
    memory: int | str | None = None,
    batch: int | None = None,
    with_batch: Callable[[int], ModelFnResult] | None = None,
    lengths: Sequence[int] | Mapping[int, float] | None = None,
    with_length: Callable[[int], ModelFnResult] | None = None,
    differentiate: str | Sequence[str] = "auto",
    outputs: str = OUTPUTS_HELD,
    checkpoint: str = AS_WRITTEN,
    accumulate: int = 1,
    keeps_gradients: bool = False,
    keeps_outputs: bool = False,
    strategy: Strategy | None = None,
    time_limit: float = DEFAULT_LIMIT_S,
    progress: ProgressCallback | None = None,
) -> Fit:
    """Predict whether a training loop fits a device; if not, return the options that make it fit.

    Nothing runs but convolutions on a GPU of this machine, one at a time, for their workspaces: the
    model may be on the "meta" device, and `device="h100"` is a GPU that this machine need not have.
    `optimizer` is one of `remat.costs.optimizer_memory.OPTIMIZERS`.
    `memory` is what torch's allocator may reserve ("75GiB"); by default the memory of the device's
    data sheet without 2% and a CUDA context, or 98% of what this machine's device has free, plus
    the model if it is there already. Other
    arguments are those of `remat.estimate`; `strategy` is that of `remat.solve` for a plan, by
    default with a gap of 2% and a limit of 2 s. The search for options that trace or solve (plans,
    smaller batches) ends `time_limit` seconds after tracing, and a note says so; each of `lengths`
    has as many. `progress` is called with a `Progress` at each stage of the answer, and by the
    solves for plans.

    `checkpoint` is what the loop recomputes: "as written", by the calls of `torch.utils.checkpoint`
    in the model's code, also where `gradient_checkpointing_enable()` switched them on; "none";
    "blocks", each repeated block; "every:2", blocks 2, 4, 6, ...; or "selective", where each block
    recomputes all but attention and every second matmul. `accumulate` is the number of batches
    before a step of the optimizer: gradients exist from the second one on, and with
    `keeps_gradients` (`zero_grad(set_to_none=False)`) always. With `keeps_outputs`, the outputs of
    a step are in memory until the next forward returns, as with `outputs = model(...)` in a loop
    without `del outputs`.

    `batch` is the batch size of the example inputs, and `with_batch(n)` returns the model and its
    call for another one, as the function of `remat.max_batch` does: with both, a smaller batch with
    accumulated gradients is an option, too.

    `lengths` are the lengths of the batches' sequences, after padding: a list, or a mapping from
    lengths to shares or counts. The example inputs are of the longest one, and `with_length(n)`
    returns the model and its call for another one. `Fit.lengths` then has the longest length that
    fits in eager mode, and with the best option, with the share of batches that fit.

    Raises `TraceError` where the model cannot be captured, `BudgetError` for a memory that is not a
    number of bytes, and `RematError` for another optimizer, batch or lengths.
    """
    if isinstance(model, Trace):
        raise wrong_type(
            "fit", "a torch.nn.Module", model, "a trace is what remat.Client.fit takes"
        )
    check_optimizer(optimizer)
    memory_bytes = None if memory is None else parse_memory(memory)
    check_batch(batch)
    loop = LoopOptions(checkpoint, accumulate, keeps_gradients, keeps_outputs)
    check_time_limit(time_limit)
    distribution = None if lengths is None else LengthDistribution.of(lengths)
    policy_notes: list[str] = []

    def traced(call: ModelFnResult, *, accumulates: bool = False) -> Trace:
        called_model, args, kwargs = parse_model_fn_result(call)
        options = {"differentiate": differentiate, "device": device, "outputs": outputs}
        with selective_policies_run() as context_functions:
            try:
                trace = capture(called_model, args, kwargs, **options)
            except TraceError:
                if not context_functions:
                    raise
                trace = None  # perhaps for a policy that counts its calls, or reads values
        if trace is None:
            trace = capture(called_model, args, kwargs, **options)
            policy_notes[:] = [_POLICY_NOTE] if checkpoint == AS_WRITTEN else []
        trace = with_gradient_accumulation(trace) if accumulates else loop.with_gradients(trace)
        trace = with_roofline_costs(trace, roofline_for_trace(trace))
        if _runs_on_local_gpu(trace, device):
            trace = with_measured_convolutions(trace)
        return loop.with_outputs(trace)

    report_stage(progress, "tracing", Clock.of(math.inf))
    trace = traced((model, example_inputs, example_kwargs or {}))
    clock = Clock.of(time_limit)
    if distribution is not None:
        with_length = _checked_with_length(distribution, with_length, trace)
    question = FitQuestion(
        EagerStep.of(trace, checkpoint),
        optimizer,
        _reservable_bytes(trace, model, device) if memory_bytes is None else memory_bytes,
        roofline_for_trace(trace),
        strategy or DEFAULT_STRATEGY,
        replace(_script_changes(model), outputs=outputs),
        batch,
        None if with_batch is None else lambda size: traced(with_batch(size), accumulates=True),
        loop,
        lambda lora, quantize: traced(
            (meta_copy_with_adapters(model, lora, quantize), example_inputs, example_kwargs or {})
        ),
        tuple(_library_versions(model)),
        clock,
        progress,
    )
    convolutions = convolution_notes(trace, are_measured=_runs_on_local_gpu(trace, device))
    with older_objects_not_collected():
        notes = [*_default_gpu_notes(device), *convolutions, *policy_notes]
        answer = replace(answer_question(question, notes), model=_model_name(model))
    if distribution is None or with_length is None:
        return answer

    def question_of_length(length: int) -> FitQuestion:
        stage = f"length {length:,}"
        report_stage(progress, stage, clock)
        step = EagerStep.of(traced(with_length(length)), checkpoint)
        return replace(
            question,
            step=step,
            batch=None,
            trace_of_batch=None,
            clock=Clock.of(time_limit),
            progress=in_stage(progress, stage),
        )

    with older_objects_not_collected():
        return replace(answer, lengths=longest_fits(distribution, answer, question_of_length))


def _checked_with_length(
    distribution: LengthDistribution,
    with_length: Callable[[int], ModelFnResult] | None,
    trace: Trace,
) -> Callable[[int], ModelFnResult]:
    """Return `with_length`. Raises `RematError` if it is None, or if no dimension of the example
    inputs has the longest length."""
    if with_length is None:
        raise RematError(
            "lengths need with_length, a function from a length to the model and its call"
        )
    inputs = [p.tensor.shape for p in trace.placeholders if p.kind == "input"]
    longest = distribution.longest
    if not any(longest in shape for shape in inputs):
        raise RematError(
            f"the longest length is {longest:,}, and no example input has a dimension of that size "
            f"(shapes: {', '.join(str(list(shape)) for shape in inputs[:4]) or 'none'}): pass "
            "example inputs of the longest length"
        )
    return with_length


def _runs_on_local_gpu(trace: Trace, device: str | torch.device | None) -> bool:
    """True if the step of a trace for `device` runs on a GPU of this machine."""
    return is_on_cuda(trace) and find_target_gpu(device) is None


def _default_gpu_notes(device: str | torch.device | None) -> list[str]:
    """Return the note that "cuda" stands for `DEFAULT_GPU`; none if `device` names a GPU or one is
    here."""
    if not is_default_gpu(device):
        return []
    return [f"this machine has no GPU: {str(device)!r} is taken as {DEFAULT_GPU}; name another GPU"]


def _reservable_bytes(trace: Trace, model: nn.Module, device: str | torch.device | None) -> int:
    """Return the bytes that torch's allocator may reserve. On a device of this machine, they are
    nearly all that is free, plus what the model already takes there; on another GPU, nearly all of
    its memory. Raises `BudgetError` if the free memory is unknown."""
    if find_target_gpu(device) is None:
        free = free_bytes(trace.device)
        if free is None:
            raise BudgetError(f'{trace.device} does not report its memory: pass memory="75GiB"')
        return int(free * (1 - SEGMENTS_MARGIN)) + _model_bytes_on_device(model, trace.device)
    return usable_bytes(roofline_for_trace(trace).device)


def _model_bytes_on_device(model: nn.Module, device: str) -> int:
    """Return the bytes of a model's parameters, gradients and buffers that are on a type of
    device."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    tensors = [*parameters, *gradients, *model.buffers()]
    return unique_bytes(t for t in tensors if t.device.type == torch.device(device).type)


def _model_name(model: nn.Module) -> str:
    """Return the name of a model's class; of the model in PEFT's wrapper, with its adapters."""
    get_base_model = getattr(model, "get_base_model", None)
    if not callable(get_base_model):
        return type(model).__name__
    return f"{type(get_base_model()).__name__} with adapters"


_LIBRARIES = ("transformers", "diffusers", "peft", "bitsandbytes", "timm", "torchtune", "trl")


def _library_versions(model: nn.Module) -> Iterator[str]:
    """Yield the versions of the libraries whose code the model consists of, and transformers'
    implementation of attention."""
    packages = {package_of(type(module).__module__) for module in model.modules()}
    for name in filter(packages.__contains__, _LIBRARIES):
        attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
        is_named = name == "transformers" and isinstance(attention, str)
        suffix = f" ({attention} attention)" if is_named else ""
        yield f"{name} {version(name)}{suffix}"


def _script_changes(model: nn.Module) -> ScriptChanges:
    """Return the code to add to a training script: transformers' own method for checkpoints if the
    model has one, and a configuration without a cache if it was captured without one."""
    checkpoints = ""
    for method in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if callable(getattr(model, method, None)):
            checkpoints = f"model.{method}()"
            break
    has_no_cache = getattr(getattr(model, "config", None), "use_cache", None) is False
    return ScriptChanges(checkpoints, "model.config.use_cache = False; " if has_no_cache else "")
