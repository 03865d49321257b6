"""`trace`: capture the joint forward and backward graph of a training step.

Supports tied, frozen and unused parameters, mutated buffers, keyword arguments and outputs without
a gradient. Nothing is computed: the capture runs on fake tensors.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from remat.documents.records import Environment
from remat.documents.structure import Structure
from remat.documents.trace import Trace
from remat.errors import TraceError
from remat.frontend.capture.attempts import capture_step
from remat.frontend.capture.eager_kernels.autocast import target_autocast_dtype
from remat.frontend.capture.eager_kernels.cuda_kernels import cudnn_convolution_layouts
from remat.frontend.capture.eager_kernels.fake_results import fakes_with_kernel_layouts
from remat.frontend.capture.eager_kernels.overrides import eager_kernel_overrides
from remat.frontend.capture.model.attribute_guards import AttributeGuards
from remat.frontend.capture.model.flat_model import FlatModel
from remat.frontend.capture.model.forward_checks import rng_changes_forbidden, text_output_reported
from remat.frontend.capture.model.hooks import root_hooks_removed, submodule_hooks_observed
from remat.frontend.capture.model.preserved_state import (
    model_state_preserved,
    tensors_replaced_by_fakes,
)
from remat.frontend.capture.model.reached_code import results_of_capture_not_cached
from remat.frontend.capture.model.wrapped_code import (
    checkpointing_disabled,
    compiled_code_run_eagerly,
    unwrap_compiled,
)
from remat.frontend.capture.reading.captured_joint_graph import CapturedJointGraph
from remat.frontend.common.pytree import flatten
from remat.frontend.common.quantized import int8_matmul_as_on_cuda
from remat.frontend.common.target_gpu import TargetGpu, find_target_gpu, local_device
from remat.frontend.common.torch_modes import autocast_modes, dtype_name
from remat.limits.options import OUTPUTS_HELD, are_dropped, differentiated_with
from remat.passes.outputs import with_outputs

log = logging.getLogger("remat")

_capture_lock = threading.RLock()
"""Captures run one at a time: they change torch's dispatcher, configuration and generators, which
all threads share."""


def trace(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    differentiate: str | Sequence[str] = "auto",
    device: str | torch.device | None = None,
    outputs: str = OUTPUTS_HELD,
) -> Trace:
    """Capture one training step of `model` on inputs like these.

    `example_inputs` is a tuple of positional arguments (or one tensor, or a mapping, which is taken
    as keyword arguments). `differentiate` selects the outputs that gradients come from: "auto" (the
    scalar loss if the model returns one, else all), "all", or output names such as "loss".

    A model on the "meta" device is captured as if it were on CUDA if available, else on the CPU:
    nothing is allocated, and the plan is for a model that is really there. If torch.compile has
    wrapped the model or a part of it, the original module is captured. Hooks of the model itself
    are left out. Hooks of submodules are captured, with a `HookWarning` if they compute nothing.

    `outputs` are "held" by the caller while the backward runs, or "dropped" before it (by a loop
    that keeps only the loss): their memory is then planned like any other. With "loss", the step
    returns only what gradients come from, and tensors of one element: using another output raises
    `OutputNotComputed`, and `differentiate="auto"` is every output of one element that requires a
    gradient.

    `device` captures the step as if model and inputs were on it: "cpu", "cuda", or an absent GPU by
    its name, such as "h100" ("cuda" on a machine without a GPU is an H200). The trace then has the
    operators that torch runs on that GPU. Autocast is the GPU's if it is enabled for CUDA, or else
    for the CPU. What cannot be determined without the GPU: docs/decisions/0006.

    Raises `TraceError` with the place and a remedy if the model cannot be captured.
    """
    return capture(
        model,
        example_inputs,
        example_kwargs,
        differentiate=differentiate,
        device=device,
        outputs=outputs,
    ).trace


class CapturedStep(NamedTuple):
    """A captured step, and the guards for the Python values that it depends on."""

    trace: Trace
    guards: AttributeGuards


def capture(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    differentiate: str | Sequence[str] = "auto",
    device: str | torch.device | None = None,
    outputs: str = OUTPUTS_HELD,
) -> CapturedStep:
    """Capture a step as `trace` does, with guards for the Python values that the code read."""
    are_dropped(outputs)  # raises for an unknown value
    model = unwrap_compiled(model)
    args, kwargs = normalise_inputs(model, example_inputs, example_kwargs)
    check_differentiable(model, args, kwargs)
    target = find_target_gpu(device)
    _reject_multiple_gpus(model, args, kwargs, device)
    _warn_about_unrolled_rnns(model, target)
    capture_device = _capture_device(device, target)
    with tensors_replaced_by_fakes(model, args, kwargs, capture_device) as (args, kwargs):
        leaves, inputs = flatten((args, kwargs), "the example inputs ")
        selected = differentiated_with(outputs, differentiate)
        joint = capture_joint_graph(model, leaves, inputs, selected, target)
        traced = joint.trace()
    return CapturedStep(with_outputs(traced, outputs), joint.guards)


def capture_joint_graph(
    model: nn.Module,
    leaves: Sequence[torch.Tensor],
    inputs: Structure,
    differentiate: str | Sequence[str] = "auto",
    target: TargetGpu | None = None,
    *,
    symbolic: bool = False,
) -> CapturedJointGraph:
    """Capture the joint graph of a step, on the absent GPU `target` or on its tensors' devices.

    `leaves` are the real or fake tensors of its arguments, whose structure is `inputs`. A leaf that
    is no leaf of autograd counts as the result of an operation before the step. Use `symbolic` if
    some of their sizes are SymInts: then no warnings are issued, since an earlier capture has
    issued them.
    """
    environment = _current_environment(model, target)
    with _capture_lock, contextlib.ExitStack() as stack:
        are_leaves = [leaf.is_leaf for leaf in leaves]
        # The fake tensor of a tensor with a history would have a copy of that history.
        leaves = [t if t.is_leaf else t.detach().requires_grad_() for t in leaves]
        flat_model = FlatModel(model, inputs, differentiate, are_leaves)
        stack.enter_context(torch.enable_grad())
        # It checks for NaN, which fake tensors do not have, and names the lines of a forward.
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(model_state_preserved(model))
        stack.enter_context(results_of_capture_not_cached(model))
        stack.enter_context(rng_changes_forbidden(model))
        stack.enter_context(checkpointing_disabled())
        stack.enter_context(compiled_code_run_eagerly())
        stack.enter_context(root_hooks_removed(model))
        hooks = stack.enter_context(submodule_hooks_observed(model))
        stack.enter_context(
            eager_kernel_overrides(flat_model.autocast_cache, target, symbolic=symbolic)
        )
        stack.enter_context(fakes_with_kernel_layouts())
        if target is not None:
            stack.enter_context(cudnn_convolution_layouts())
            stack.enter_context(int8_matmul_as_on_cuda())
        if not symbolic:
            stack.enter_context(text_output_reported(model))
        graph, queries = capture_step(flat_model, leaves)
        joint = CapturedJointGraph(graph, flat_model, inputs, environment, target, queries)
    if not symbolic:
        hooks.warn_about_observers()
    return joint


def _current_environment(model: nn.Module, target: TargetGpu | None = None) -> Environment:
    """Return the model's training flags, the enabled autocast modes and torch's version. With a
    `target`, the autocast mode is the one that the step has on this absent GPU."""
    autocast = autocast_modes()
    if target is not None:
        dtype = target_autocast_dtype()
        autocast = () if dtype is None else (f"cuda:{dtype_name(dtype)}",)
    exceptions = (name for name, m in model.named_modules() if m.training != model.training)
    return Environment(
        torch=torch.__version__,
        training=model.training,
        training_exceptions=tuple(exceptions),
        autocast=autocast,
        frees_tangents=hasattr(torch.autograd.Function, "boxed_grads_call"),
    )


def normalise_inputs(
    model: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for `model.forward`. Raises `TraceError` if they do
    not fit its signature, or `model` is no module."""
    if not isinstance(model, nn.Module):
        raise TraceError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(example_inputs, Mapping) and example_kwargs is None:
        example_inputs, example_kwargs = (), example_inputs
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    if not isinstance(example_inputs, (tuple, list)):
        raise TraceError(
            f"example_inputs must be a tuple of the model's positional arguments, got "
            f"{type(example_inputs).__name__}; wrap a single argument: (x,)"
        )
    args, kwargs = tuple(example_inputs), dict(example_kwargs or {})
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise TraceError(
            f"the example inputs do not fit {type(model).__name__}.forward"
            f"{inspect.signature(model.forward)}: {error}"
        ) from None
    return args, kwargs


def check_differentiable(model: nn.Module, args: object, kwargs: object) -> None:
    """Raise `TraceError` if no parameter and no input requires a gradient, or if parameters do not
    have their shapes yet."""
    lazy = [name for name, p in model.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise TraceError(
            f"the parameter {lazy[0]} of {type(model).__name__} gets its shape in the first call "
            "(a lazy module): first call the model with a batch under torch.no_grad()"
        )
    leaves, _ = flatten((args, kwargs), "the example inputs ")
    if not any(t.requires_grad for t in (*model.parameters(), *leaves)):
        raise TraceError(
            f"no parameter of {type(model).__name__} and no input requires a gradient, so there is "
            "no backward pass to plan; call model.requires_grad_(True), or use the model as it is"
        )


def _capture_device(
    device: str | torch.device | None, target: TargetGpu | None
) -> torch.device | None:
    """Return the device to capture the step on: the requested one, or the CPU if that is an absent
    GPU (`target`). None if none was requested: each tensor stays on its own device."""
    if device is None:
        return None
    if target is not None:
        return torch.device("cpu")
    local = local_device(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(local) == "cuda" else local


def _reject_multiple_gpus(
    model: nn.Module, args: object, kwargs: object, device: str | torch.device | None
) -> None:
    """Raise `TraceError` if the tensors are on several GPUs, unless a capture for one `device` is
    requested: a plan is for one device."""
    if device is not None:
        return
    leaves, _ = flatten((args, kwargs), "the example inputs ")
    tensors = (*model.parameters(), *model.buffers(), *leaves)
    used = sorted({str(t.device) for t in tensors if t.device.type not in ("cpu", "meta")})
    if len(used) > 1:
        raise TraceError(
            f"{type(model).__name__} and its inputs are on {', '.join(used)}, and a plan is for "
            "one device: put all on one, or optimise the parts on each device separately"
        )


def _warn_about_unrolled_rnns(model: nn.Module, target: TargetGpu | None) -> None:
    """Log a warning if recurrent networks run on CUDA, or on the absent GPU `target`: torch
    captures them time step by time step, where eager mode calls cuDNN once."""
    names = [
        name or type(model).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.RNNBase)
        and (target is not None or any(p.is_cuda for p in module.parameters()))
    ]
    if names:
        log.warning(
            "%s: a recurrent network is captured step by step; eager mode on CUDA runs one kernel "
            "of cuDNN instead, which is several times faster: optimise the modules around it",
            ", ".join(names[:3]) + (", ..." if names[3:] else ""),
        )
