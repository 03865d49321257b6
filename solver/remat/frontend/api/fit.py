"""`fit`: will a training step fit a device, and what makes it fit?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from remat.costs.roofline import Roofline
from remat.costs.trace_costs import with_roofline_costs
from remat.documents.trace import Trace
from remat.errors import BudgetError
from remat.frontend.api.batch_search import ModelFnResult, parse_model_fn_result
from remat.frontend.api.estimate import roofline_for_trace
from remat.frontend.api.fit_options import EagerStep, FitOptions, ScriptChanges
from remat.frontend.capture.trace import trace as capture
from remat.frontend.common.target_gpu import find_target_gpu
from remat.frontend.memory.auto_budget import SEGMENTS_MARGIN
from remat.frontend.memory.device_memory import free_bytes
from remat.frontend.memory.meter import unique_bytes
from remat.limits.outputs import OUTPUTS_HELD
from remat.limits.reserve import parse_bytes
from remat.passes.gradient_accumulation import with_gradient_accumulation
from remat.report.fit import Fit
from remat.strategies import Auto, Strategy

CONTEXT_BYTES = 512 << 20
"""Memory of a CUDA context: 400 to 600 MiB, depending on the kernels that are loaded."""

_QUICK = Auto(gap=0.01, time_limit=3.0)


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
    differentiate: str | Sequence[str] = "auto",
    outputs: str = OUTPUTS_HELD,
    strategy: Strategy | None = None,
) -> Fit:
    """Predict whether a training loop fits a device; if not, return the options that make it fit.

    Nothing runs: the model may be on the "meta" device, and `device="h100"` is a GPU that this
    machine need not have. `optimizer` is one of `remat.costs.optimizer_memory.OPTIMIZERS`.
    `memory` is what torch's allocator may reserve ("75GiB"); by default the memory of the device's
    data sheet without 2% and a CUDA context, or 98% of what this machine's device has free, plus
    the model if it is there already. Other
    arguments are those of `remat.estimate`; `strategy` is that of `remat.solve` for the plan, by
    default with a gap of 1% and a limit of 3 s.

    `batch` is the batch size of the example inputs, and `with_batch(n)` returns the model and its
    call for another one, as the function of `remat.max_batch` does: with both, a smaller batch with
    accumulated gradients is an option, too.

    Raises `TraceError` where the model cannot be captured, `BudgetError` for a memory that is not a
    number of bytes, and `RematError` for another optimizer.
    """
    if memory is not None:
        parse_bytes(memory, "memory", "75GiB")

    def traced(call: ModelFnResult, *, accumulates: bool = False) -> Trace:
        called_model, args, kwargs = parse_model_fn_result(call)
        trace = capture(
            called_model,
            args,
            kwargs,
            differentiate=differentiate,
            device=device,
            outputs=outputs,
        )
        trace = with_gradient_accumulation(trace) if accumulates else trace
        return with_roofline_costs(trace, roofline_for_trace(trace))

    trace = traced((model, example_inputs, example_kwargs or {}))
    roofline = roofline_for_trace(trace)
    step = EagerStep.of(trace)
    optimizer_memory = step.optimizer(optimizer)
    is_here = find_target_gpu(device) is None
    allocated_bytes = _allocated_bytes(model, trace.device)
    usable_bytes = _usable_bytes(memory, trace, roofline, allocated_bytes, is_here=is_here)
    training = step.memory(optimizer_memory)
    search = FitOptions(
        step,
        optimizer,
        usable_bytes,
        roofline,
        strategy or _QUICK,
        _script_changes(model),
        batch,
        None if with_batch is None else lambda size: traced(with_batch(size), accumulates=True),
    )
    return Fit(
        model=type(model).__name__,
        device=trace.gpu or trace.device,
        optimizer=optimizer,
        batch=batch,
        usable_bytes=usable_bytes,
        memory=training,
        step_s=step.time_s,
        options=() if training.reserved_bytes <= usable_bytes else search.all(),
        cost_source=trace.cost_source,
    )


def _usable_bytes(
    memory: int | str | None,
    trace: Trace,
    roofline: Roofline,
    allocated_bytes: int,
    *,
    is_here: bool,
) -> int:
    """Return the bytes that torch's allocator may reserve. `is_here` says that the device is that
    of this machine, where the step has `allocated_bytes` already."""
    if memory is not None:
        return parse_bytes(memory, "memory", "75GiB")
    if is_here:
        free = free_bytes(trace.device)
        if free is None:
            raise BudgetError(f'{trace.device} does not report its memory: pass memory="75GiB"')
        return int(free * (1 - SEGMENTS_MARGIN)) + allocated_bytes
    return int(roofline.device.memory_bytes * (1 - SEGMENTS_MARGIN)) - CONTEXT_BYTES


def _allocated_bytes(model: nn.Module, device: str) -> int:
    """Return the bytes of a model's parameters, gradients and buffers that are on a device."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    tensors = [*parameters, *gradients, *model.buffers()]
    return unique_bytes(t for t in tensors if t.device.type == torch.device(device).type)


def _script_changes(model: nn.Module) -> ScriptChanges:
    """Return the code for a model: transformers' own method for checkpoints, if it has one, and its
    configuration without a cache, if it was captured without one."""
    checkpoints = ""
    for method in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        if callable(getattr(model, method, None)):
            checkpoints = f"model.{method}()"
            break
    has_no_cache = getattr(getattr(model, "config", None), "use_cache", None) is False
    return ScriptChanges(checkpoints, "model.config.use_cache = False; " if has_no_cache else "")
