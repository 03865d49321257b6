"""`trace`: capture the joint forward+backward graph of a training step.

Uses `aot_export_joint_with_descriptors`, which handles tied, frozen and unused parameters, mutated
buffers, keyword arguments and outputs without a gradient, and says of every placeholder and output
what it is. Nothing is computed: the capture runs on fake tensors.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from remat.documents.structure import Structure
from remat.documents.trace import Trace
from remat.errors import RematError, TraceError
from remat.frontend.capture.eager_kernels.fake_layouts import kernels_layouts
from remat.frontend.capture.eager_kernels.overrides import as_eager
from remat.frontend.capture.model.checkpoints import checkpointing_disabled
from remat.frontend.capture.model.compiled_modules import looked_through, uncompiled
from remat.frontend.capture.model.context import (
    attributes_of,
    nothing_drawn_in_python,
    observe,
    restored,
)
from remat.frontend.capture.model.flat_model import Flat
from remat.frontend.capture.model.hooks import own_hooks_away, watched
from remat.frontend.capture.model.meta_device import placed
from remat.frontend.capture.reading.constants import ConstantFolding, Question
from remat.frontend.capture.reading.joint_graph import Joint
from remat.frontend.common.frames import is_machinery
from remat.frontend.common.pytree import flatten
from remat.frontend.common.target import Target, device_here, find_target
from remat.limits.outputs import HELD, are_dropped

log = logging.getLogger("remat")

_ALONE = threading.RLock()
"""A capture changes what all threads share: how torch dispatches, its configuration, generators."""


def trace(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    differentiate: str | Sequence[str] = "auto",
    device: str | torch.device | None = None,
    outputs: str = HELD,
) -> Trace:
    """Capture one training step of `model` on inputs like these.

    `example_inputs` is a tuple of positional arguments (or one tensor, or a mapping, which is taken
    as keyword arguments). `differentiate` says which outputs a gradient will come from: "auto" (the
    scalar loss where the model returns one, else all), "all", or output names such as "loss".
    A model on the "meta" device is captured as if it were on CUDA where there is one, else on the
    CPU: nothing is allocated, and its plan is for a model that really is there. Of what was
    compiled by torch.compile, the module inside is captured. Hooks of the model itself are left
    out; those inside of it are captured, with a `HookWarning` where they compute nothing.
    `outputs` are "held" by the caller while the backward runs, or "dropped" before it (by a loop
    that keeps only the loss): their memory is then planned like any other.

    `device` captures the step as if model and inputs were there: "cpu", "cuda", or a GPU that is
    not here by its name, such as "h100" ("cuda" where there is no GPU is an H200). The trace then
    has the operations that torch runs on that GPU, and autocast that is on for CUDA, or else for
    the CPU, is the GPU's. What cannot be known without it: docs/decisions/0020.

    Raises `TraceError` with the place and the remedy where the model cannot be captured.
    """
    dropped = are_dropped(outputs)
    model = uncompiled(model)
    args, kwargs = normalise_inputs(model, example_inputs, example_kwargs)
    check_differentiable(model, args, kwargs)
    _refuse_wrong_captures(model)
    target = find_target(device)
    _refuse_several_gpus(model, args, kwargs, device)
    _tell_of_unrolled(model, target)
    with contextlib.ExitStack() as stack:
        place = _place_of(device, target)
        args, kwargs = stack.enter_context(placed(model, args, kwargs, place))
        leaves, inputs = flatten((args, kwargs), "the example inputs ")
        traced = joint_of(model, leaves, inputs, differentiate, target).trace()
    return traced.replace(outputs_dropped=True) if dropped else traced


def joint_of(
    model: nn.Module,
    leaves: Sequence[torch.Tensor],
    inputs: Structure,
    differentiate: str | Sequence[str] = "auto",
    target: Target | None = None,
    *,
    symbolic: bool = False,
) -> Joint:
    """The joint graph of a step with these tensors, real or fake, as the arguments' leaves. Where
    some of their sizes are `symbolic`, it was captured before, and its hooks were told of."""
    environment = observe(model, target)
    with _ALONE, attributes_of(model) as changed, contextlib.ExitStack() as stack:
        flat = Flat(model, inputs, differentiate)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(restored(model))
        stack.enter_context(nothing_drawn_in_python(model))
        stack.enter_context(checkpointing_disabled())
        stack.enter_context(looked_through())
        stack.enter_context(own_hooks_away(model))
        hooks = stack.enter_context(watched(model))
        stack.enter_context(as_eager(flat.casts, target, symbolic=symbolic))
        stack.enter_context(kernels_layouts())
        module, questions = _joint(stack, flat, leaves)
        joint = Joint(module, flat, inputs, environment, target, questions)
    if symbolic and changed:
        name, owner = next(iter(changed.items()))
        raise TraceError(f"{owner} changes its attribute {name!r} in the forward")
    if not symbolic:
        hooks.tell()
    return joint


def normalise_inputs(
    model: nn.Module, example_inputs: Any, example_kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for `model.forward`. Raises `TraceError` where they do not
    fit its signature."""
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
    """Raise `TraceError` where no parameter and no input needs a gradient."""
    leaves, _ = flatten((args, kwargs), "the example inputs ")
    if not any(t.requires_grad for t in (*model.parameters(), *leaves)):
        raise TraceError(
            f"no parameter of {type(model).__name__} and no input requires a gradient, so there is "
            "no backward pass to plan; call model.requires_grad_(True), or use the model as it is"
        )


def _refuse_wrong_captures(model: nn.Module) -> None:
    """What torch captures without an error, but wrongly: dropout between the layers of a recurrent
    network, which its decomposition leaves out (seen in torch 2.13, `_rnn_helper`)."""
    for name, module in model.named_modules():
        if not (isinstance(module, nn.RNNBase) and module.training):
            continue
        if module.dropout > 0 and module.num_layers > 1:
            raise TraceError(
                f"{name or type(model).__name__} is a {type(module).__name__} with dropout between "
                "its layers, which torch's capture loses; use one module per layer with nn.Dropout "
                "between them, or set its dropout to 0"
            )


def _place_of(device: str | torch.device | None, target: Target | None) -> torch.device | None:
    """Where the tensors of the capture are."""
    if device is None:
        return None
    if target is not None:
        return torch.device("cpu")
    here = device_here(device)
    return torch.device("cuda", torch.cuda.current_device()) if str(here) == "cuda" else here


def _refuse_several_gpus(
    model: nn.Module, args: object, kwargs: object, device: str | torch.device | None
) -> None:
    """A plan has one budget for one device."""
    if device is not None:
        return
    leaves, _ = flatten((args, kwargs), "the example inputs ")
    tensors = (*model.parameters(), *model.buffers(), *leaves)
    used = sorted({str(t.device) for t in tensors if t.device.type not in ("cpu", "meta")})
    if len(used) > 1:
        raise TraceError(
            f"{type(model).__name__} and its inputs are on {', '.join(used)}, and a plan is for "
            "one device: put all on one, or optimise the parts on each device by themselves"
        )


def _tell_of_unrolled(model: nn.Module, target: Target | None) -> None:
    """torch captures a recurrent network step by step; on CUDA eager mode calls cuDNN once."""
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


def _joint(
    stack: contextlib.ExitStack, flat: Flat, leaves: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, Sequence[Question]]:
    """First as eager mode would run it; if a branch depends on data, as `torch.compile` would
    (Hugging Face models then build an explicit attention mask instead of looking at the data)."""
    try:
        try:
            with ConstantFolding() as folding:
                return _export(stack, flat, leaves), folding.questions
        except Exception as error:
            if not _is_data_dependent(error):
                raise
            with ConstantFolding() as folding, _compiling():
                return _export(stack, flat, leaves), folding.questions
    except RematError:
        raise
    except Exception as error:
        raise TraceError(_diagnose(flat.model, error)) from error


def _export(
    stack: contextlib.ExitStack, flat: Flat, leaves: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    return aot_export_joint_with_descriptors(stack, flat, tuple(leaves)).graph_module


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _is_data_dependent(error: BaseException) -> bool:
    return any(
        word in type(error).__name__
        for word in ("DataDependent", "GuardOnDataDependent", "DynamicOutputShape")
    )


def _diagnose(model: nn.Module, error: Exception) -> str:
    """One message: what failed, where in the user's code, and what to do."""
    what = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    if _is_data_dependent(error):
        remedy = (
            "a branch, index or shape depends on tensor values. Decide it outside of the model and "
            "pass the result as a Python value, or replace it by torch.where or a mask"
        )
    elif "convert all Tensors to FakeTensors" in str(error):
        what = "a tensor is used that is no parameter, buffer or input of the model"
        remedy = "register it as a buffer of its module: self.register_buffer(name, tensor)"
    else:
        remedy = (
            "first check that model(*inputs) and its backward run in eager mode; if they do, wrap "
            "the part that fails in a module of its own and optimise the modules around it"
        )
    return f"{type(model).__name__} cannot be captured at {_place(error)}: {what}. Remedy: {remedy}"


def _place(error: Exception) -> str:
    """The innermost line of the traceback that is the model's."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_machinery(Path(frame.filename))]
    if not own:
        return "an unknown line"
    frame = own[-1]
    return f"{frame.filename}:{frame.lineno} (in {frame.name}: {(frame.line or '').strip()})"
