"""Attempts to record a model's step: as eager mode runs the model, or else as compiled code.

The model's code may ask `torch.compiler.is_compiling()`. Both answers compute the same; where the
answer False leads to a branch on data, or to an operation that torch cannot capture, True may not.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dis import opmap
from pathlib import Path

import torch
from torch import nn

from remat.errors import RematError, TraceError, one_line
from remat.frontend.capture.model.flat_model import FlatModel
from remat.frontend.capture.model.preserved_state import model_state_preserved
from remat.frontend.capture.model.stores import check_no_container_growth, check_steady_stores
from remat.frontend.capture.model.values import path_label
from remat.frontend.capture.operator_recorder import ForeignTensorError
from remat.frontend.capture.reading.constant_folding import ConstantFolding, ConstantQuery
from remat.frontend.capture.reading.reader import JointGraph
from remat.frontend.capture.recording import record_joint_graph, sparse_gradient_error
from remat.frontend.common.code_origin import failing_part, is_framework_code
from remat.frontend.common.garbage_collection import cycles_not_collected
from remat.frontend.common.torch_modes import attributes_set

log = logging.getLogger("remat")

_FOREIGN_TENSOR_ERRORS = ("convert all Tensors to FakeTensors", "Mixing fake modes")
"""Parts of torch's errors for a real tensor among fake ones, and for a fake one of another call."""


def capture_step(
    flat_model: FlatModel, leaves: Sequence[torch.Tensor]
) -> tuple[JointGraph, Sequence[ConstantQuery]]:
    """Return the joint graph of a step, and the constants that the capture read from tensors of
    symbolic sizes.

    It is recorded with `torch.compiler.is_compiling()` False, as in eager mode. If a branch depends
    on data, or torch refuses an operation, it is recorded once more with True: Hugging Face models
    then build an explicit attention mask instead of reading the data, and call no operation that
    lacks a fake kernel for the dtype.

    Raises `TraceError` with the line of the model and a remedy if neither succeeds."""
    model = flat_model.model
    try:
        with (
            model_state_preserved(model),
            _errors_of_fake_kernels_not_logged(),
            ConstantFolding() as folding,
        ):
            return _record_steady_call(flat_model, leaves), folding.queries
    except RematError:
        raise
    except Exception as error:
        is_data_dependent = _is_data_dependent_error(error)
        if is_data_dependent or _is_raised_by_framework(error):
            recorded = _record_as_compiled(flat_model, leaves)
            if not isinstance(recorded, Exception):
                log.info(
                    "%s is captured as compiled code: %s", type(model).__name__, one_line(error)
                )
                return recorded
            try:
                if is_data_dependent:  # the other branch says what remains to be done
                    if isinstance(recorded, RematError):
                        raise recorded from None
                    raise TraceError(_capture_error_message(model, recorded)) from recorded
            finally:
                del recorded  # its traceback has this frame: a reference cycle
        raise TraceError(_capture_error_message(model, error)) from error


def _record_as_compiled(
    flat_model: FlatModel, leaves: Sequence[torch.Tensor]
) -> tuple[JointGraph, Sequence[ConstantQuery]] | Exception:
    """Record as `capture_step` does, but with `torch.compiler.is_compiling()` True. Return the
    error if that fails."""
    try:
        with (
            _errors_of_fake_kernels_not_logged(),
            ConstantFolding() as folding,
            attributes_set((torch.compiler, "_is_compiling_flag", True)),
        ):
            return _record_steady_call(flat_model, leaves), folding.queries
    except Exception as error:
        return error


def _errors_of_fake_kernels_not_logged() -> AbstractContextManager[None]:
    """Return a context in which torch does not log errors of fake kernels: the other attempt may
    succeed, and if not, `TraceError` has the error."""
    return attributes_set((logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True))


def _is_raised_by_framework(error: BaseException) -> bool:
    """True if torch raised the error, and not the model's code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and is_framework_code(Path(frames[-1].filename))


def is_raised_by_model(error: BaseException) -> bool:
    """True if the cause of a capture's `error` is an exception that a `raise` or `assert` statement
    of the model's code raised, so that the call itself may be wrong."""
    cause = error.__cause__
    if cause is None or _is_raised_by_framework(cause) or _is_data_dependent_error(cause):
        return False
    trace = cause.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]


def _record_steady_call(flat_model: FlatModel, leaves: Sequence[torch.Tensor]) -> JointGraph:
    """Return the recording of one call of the model; of a second call if the first changes Python
    values of the model, because later calls run like the second. If a recording fails, restore
    these values.

    Raises `TraceError` if the second call changes values in another way than the first, if it reads
    a tensor that an earlier call stored in an attribute, or if only the first call writes into some
    tensor. Raises `ForeignTensorError` if the second call uses another tensor of the first.
    """
    model = flat_model.model
    before = flat_model.start_call()
    try:
        with cycles_not_collected():
            joint = first = record_joint_graph(flat_model, leaves)
            if changes := flat_model.changes:
                flat_model.start_call()
                try:
                    joint = record_joint_graph(flat_model, leaves)
                except Exception as error:
                    if _is_about_foreign_tensor(error):
                        check_no_container_growth(model, changes)
                    raise
                check_steady_stores(model, changes, flat_model.changes)
        if read := flat_model.access.reads_of_earlier_call:
            raise TraceError(
                f"the forward of {type(model).__name__} reads {path_label(read)}, in which an "
                "earlier call has stored a tensor. Remedy: make it a buffer of its module "
                "(self.register_buffer), and write into it in place; or compute it in each call"
            )
        if initialised := sorted(_written_inputs(first) - _written_inputs(joint)):
            raise TraceError(
                f"only the first call of {type(model).__name__} writes into {initialised[0]}, and "
                "a plan runs like later calls. Remedy: call the model once before it is planned"
            )
    except BaseException:
        before.restore()
        raise
    before.remove_tensors_of_capture()
    return joint


def _written_inputs(joint: JointGraph) -> set[str]:
    """Return the graph inputs that a step writes into, as texts: "buffer norm.running_mean"."""
    inputs = (joint.inputs[node] for node, _ in joint.writes)
    return {f"{graph_input.kind} {graph_input.target}" for graph_input in inputs}


def _is_data_dependent_error(error: BaseException) -> bool:
    return any(
        name in type(error).__name__
        for name in ("DataDependent", "GuardOnDataDependent", "DynamicOutputShape")
    )


def _capture_error_message(model: nn.Module, error: Exception) -> str:
    """Return one message for a failed capture: what failed, the line of its code, the remedy."""
    part = failing_part(error)
    cause = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    if _is_data_dependent_error(error) and _loops_over_experts(model):
        remedy = (
            "the model loops over the experts that have tokens. "
            'model.set_experts_implementation("grouped_mm") computes the same with fixed shapes'
        )
    elif _is_data_dependent_error(error) and (sparse := _sparse_embedding_paths(model)):
        return sparse_gradient_error(sparse[0] or type(model).__name__)
    elif _is_data_dependent_error(error):
        remedy = (
            "a branch, index or shape depends on tensor values. Decide it before the step and pass "
            "the result as a Python value, or replace it by torch.where or a mask"
        )
    elif "_to_functional_tensor" in str(error):
        remedy = (
            "the model uses a higher-order operator, such as torch.cond or flex_attention, or "
            "captures a step itself; run that part outside of the model"
        )
    elif _is_about_foreign_tensor(error):
        cause = "a tensor is used that is no parameter, buffer or input of the model"
        remedy = (
            "register it as a buffer of its module: self.register_buffer(name, tensor); if the "
            "forward itself stores it for later calls, compute it in each call"
        )
        if part and part.startswith("the criterion "):  # of `optimize(loss=)`
            remedy = "pass the tensor as an argument of the loss, or compute it inside the loss"
    else:
        remedy = (
            "first check that the call and its backward run in eager mode; if they do, wrap the "
            "part that fails in a module of its own and optimise the modules around it"
        )
    return (
        f"{part or type(model).__name__} cannot be captured at {_failing_model_line(error)}: "
        f"{cause}. Remedy: {remedy}"
    )


def _is_about_foreign_tensor(error: Exception) -> bool:
    """True if an error says that the model uses a tensor that is neither an input of the step nor a
    result of the recorded call."""
    is_of_torch = any(part in str(error) for part in _FOREIGN_TENSOR_ERRORS)
    return is_of_torch or isinstance(error, ForeignTensorError)


def _loops_over_experts(model: nn.Module) -> bool:
    """True if a mixture of experts of transformers computes one expert after the other."""
    experts = (m for m in model.modules() if hasattr(m, "_is_expert_parallel"))
    configs = (getattr(m, "config", None) for m in experts)
    return any(getattr(c, "_experts_implementation", None) == "eager" for c in configs)


def _sparse_embedding_paths(model: nn.Module) -> list[str]:
    """Return the paths of the embeddings whose gradients are sparse."""
    embeddings = nn.Embedding, nn.EmbeddingBag
    return [n for n, m in model.named_modules() if isinstance(m, embeddings) and m.sparse]


def _failing_model_line(error: Exception) -> str:
    """Return the innermost line of an error's traceback that is the model's code; "an unknown line"
    if none is."""
    frames = traceback.extract_tb(error.__traceback__)
    model_frames = [frame for frame in frames if not is_framework_code(Path(frame.filename))]
    if not model_frames:
        return "an unknown line"
    frame = model_frames[-1]
    return f"{frame.filename}:{frame.lineno} (in {frame.name}: {(frame.line or '').strip()})"
