"""Export of a model's joint graph: as eager mode runs the model, or else as compiled code.

The model's code may ask `torch.compiler.is_compiling()`. Both answers compute the same; where the
answer False leads to a branch on data, or to an operation that torch cannot capture, True may not.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

from remat.errors import RematError, TraceError, one_line
from remat.frontend.capture.model.flat_model import FlatModel
from remat.frontend.capture.model.preserved_state import model_state_preserved
from remat.frontend.capture.reading.constant_folding import ConstantFolding, ConstantQuery
from remat.frontend.capture.tracing_speed import fast_tracing
from remat.frontend.common.code_origin import is_framework_code
from remat.frontend.common.failing_part import failing_part

log = logging.getLogger("remat")

_EXPORT_OPTIONS = inspect.signature(aot_export_joint_with_descriptors).parameters
_WITHOUT_FUNCTION_NAMES: dict[str, Any] = (
    {"_disable_torch_fn_metadata_mode": True}
    if "_disable_torch_fn_metadata_mode" in _EXPORT_OPTIONS
    else {}
)
"""The option that leaves out the Python function of each node, which nothing reads; older versions
of torch lack it."""


def export_joint_graph(
    stack: contextlib.ExitStack, flat_model: FlatModel, leaves: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, Sequence[ConstantQuery]]:
    """Export the joint graph with `torch.compiler.is_compiling()` False, as in eager mode. If a
    branch depends on data, or torch refuses an operation, export it once more with True: Hugging
    Face models then build an explicit attention mask instead of reading the data, and call no
    operation that lacks a fake kernel for the dtype.

    Raises `TraceError` with the line of the model and a remedy if neither succeeds."""
    model = flat_model.model
    try:
        with (
            model_state_preserved(model),
            _errors_of_fake_kernels_not_logged(),
            ConstantFolding() as folding,
        ):
            return _export(stack, flat_model, leaves), folding.queries
    except RematError:
        raise
    except Exception as error:
        is_data_dependent = _is_data_dependent(error)
        if is_data_dependent or _is_raised_by_framework(error):
            exported = _export_as_compiled(stack, flat_model, leaves)
            if not isinstance(exported, Exception):
                log.info(
                    "%s is captured as compiled code: %s", type(model).__name__, one_line(error)
                )
                return exported
            try:
                if is_data_dependent:  # the other branch says what remains to be done
                    if isinstance(exported, RematError):
                        raise exported from None
                    raise TraceError(_error_message(model, exported)) from exported
            finally:
                del exported  # its traceback has this frame: a reference cycle
        raise TraceError(_error_message(model, error)) from error


def _export_as_compiled(
    stack: contextlib.ExitStack, flat_model: FlatModel, leaves: Sequence[torch.Tensor]
) -> tuple[torch.fx.GraphModule, Sequence[ConstantQuery]] | Exception:
    """Export with `torch.compiler.is_compiling()` True. Return the error if that fails."""
    try:
        with (
            _errors_of_fake_kernels_not_logged(),
            ConstantFolding() as folding,
            _is_compiling_set(),
        ):
            return _export(stack, flat_model, leaves), folding.queries
    except Exception as error:
        return error


@contextlib.contextmanager
def _errors_of_fake_kernels_not_logged() -> Iterator[None]:
    """Within the context, torch does not log errors of fake kernels: the other export may succeed,
    and if not, `TraceError` has the error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _is_raised_by_framework(error: BaseException) -> bool:
    """True if torch raised the error, and not the model's code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and is_framework_code(Path(frames[-1].filename))


def _export(
    stack: contextlib.ExitStack, flat_model: FlatModel, leaves: Sequence[torch.Tensor]
) -> torch.fx.GraphModule:
    with fast_tracing():
        exported = aot_export_joint_with_descriptors(
            stack, flat_model, tuple(leaves), **_WITHOUT_FUNCTION_NAMES
        )
    return exported.graph_module


@contextlib.contextmanager
def _is_compiling_set() -> Iterator[None]:
    """Within the context, `torch.compiler.is_compiling()` returns True."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _is_data_dependent(error: BaseException) -> bool:
    return any(
        name in type(error).__name__
        for name in ("DataDependent", "GuardOnDataDependent", "DynamicOutputShape")
    )


def _error_message(model: nn.Module, error: Exception) -> str:
    """Return one message for a failed capture: what failed, the line of its code, the remedy."""
    part = failing_part(error)
    cause = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    if _is_data_dependent(error) and _loops_over_experts(model):
        remedy = (
            "the model loops over the experts that have tokens. "
            'model.set_experts_implementation("grouped_mm") computes the same with fixed shapes'
        )
    elif _is_data_dependent(error):
        remedy = (
            "a branch, index or shape depends on tensor values. Decide it before the step and pass "
            "the result as a Python value, or replace it by torch.where or a mask"
        )
    elif "convert all Tensors to FakeTensors" in str(error):
        cause = "a tensor is used that is no parameter, buffer or input of the model"
        remedy = "register it as a buffer of its module: self.register_buffer(name, tensor)"
    else:
        remedy = (
            "first check that the call and its backward run in eager mode; if they do, wrap the "
            "part that fails in a module of its own and optimise the modules around it"
        )
    return (
        f"{part or type(model).__name__} cannot be captured at {_model_line(error)}: {cause}. "
        f"Remedy: {remedy}"
    )


def _loops_over_experts(model: nn.Module) -> bool:
    """True if a mixture of experts of transformers computes one expert after the other."""
    experts = (m for m in model.modules() if hasattr(m, "_is_expert_parallel"))
    configs = (getattr(m, "config", None) for m in experts)
    return any(getattr(c, "_experts_implementation", None) == "eager" for c in configs)


def _model_line(error: Exception) -> str:
    """Return the innermost line of the traceback that is the model's code."""
    frames = traceback.extract_tb(error.__traceback__)
    model_frames = [frame for frame in frames if not is_framework_code(Path(frame.filename))]
    if not model_frames:
        return "an unknown line"
    frame = model_frames[-1]
    return f"{frame.filename}:{frame.lineno} (in {frame.name}: {(frame.line or '').strip()})"
