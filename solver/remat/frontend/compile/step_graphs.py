"""The graphs that Dynamo compiles: their names, their breaks, the training step that they belong
to, and the memory that the rest of the step uses while one of them runs (external memory).

A graph only knows its own inputs. If the model is known (`remat.compile`), its other parameters
count, and their gradients, which a later graph of the step has computed when this one's backward
runs. On CUDA the allocator reports everything else that is allocated when the graph is compiled:
parameters, other modules, and an optimizer's state from its second step on.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn
from torch._guards import CompileContext

from remat.frontend.compile.compile_options import ModelBytes
from remat.frontend.compile.fx_utils import node_bytes
from remat.frontend.compile.joint_graph import CompiledJointGraph
from remat.frontend.compile.registry import compiled_plans

_RESUME_FUNCTION = re.compile(r"torch_dynamo_resume_in_(?P<function>.+)_at_(?P<line>\d+)$")

_LOCAL = "<locals>"
"""Part of the qualified name of a function that is defined in another function."""


def current_object_name() -> str:
    """Return the name of what Dynamo compiles in this thread: the class of an `nn.Module`, or a
    function.

    After a graph break the line at which it resumes is added. "" if torch does not report it.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        frame: Any = InstructionTranslator.current_tx()
        code, values = frame.f_code, frame.f_locals
    except (AttributeError, AssertionError):  # AOTAutograd without Dynamo
        return ""
    return _compiled_object_name(code, values)


def current_compile_id() -> str:
    """Return the id of the current compilation in torch's own logs, such as "0/1"; "" if there is
    none."""
    return str(CompileContext.current_compile_id() or "")


def _compiled_object_name(code: CodeType, values: Mapping[str, Any]) -> str:
    """Return the name of the object that runs this code with these local and free variables.

    Decorators replace a function by a wrapper with its own code. Then return the
    name of the module that the wrapper calls or gets as its first argument, or of the function that
    it calls.
    """
    owner, _, function = code.co_qualname.rpartition(".")
    resumed = _RESUME_FUNCTION.match(function)
    function = resumed["function"] if resumed else function
    name = f"{owner}.{function}" if owner else function
    is_local = _LOCAL in owner
    wrapped = _wrapped_callable(code, values)
    if isinstance(wrapped, nn.Module):
        name = type(wrapped).__name__
    elif function == "forward" or is_local or _has_args_and_kwargs(code):
        module = _first_argument_module(code, values, is_resumed=resumed is not None)
        if module is not None:
            name = type(module).__name__
        elif wrapped is not None:
            name = _callable_name(wrapped)
        elif not is_local:
            name = owner or name
    return f"{name} from line {resumed['line']}" if resumed else name


def _first_argument_module(
    code: CodeType, values: Mapping[str, Any], *, is_resumed: bool
) -> nn.Module | None:
    """Return the `nn.Module` that is the first argument, or the first item of `*args`; None if that
    is no module. `values` are the code's local variables. In code that resumes after a graph break
    (`is_resumed`), which has other arguments, it is `self` or the first item of `args`."""
    for name in ("self", "args") if is_resumed else code.co_varnames[:1]:
        value = values.get(name)
        first = value[0] if isinstance(value, tuple) and value else value
        if isinstance(first, nn.Module):
            return first
    return None


def _wrapped_callable(code: CodeType, values: Mapping[str, Any]) -> object:
    """Return the function or `nn.Module` that a wrapper calls; a module in place of its method.

    It is the only callable among the free variables. None if the code is not a wrapper (it lacks
    `*args` or `**kwargs`), or has several callables. If the code has further arguments, only a
    module counts: such a function may call another function without being its wrapper.
    """
    if not _has_args_and_kwargs(code):
        return None
    free_values = map(values.get, code.co_freevars)
    callables = [v for v in free_values if callable(v) and not isinstance(v, type)]
    if len(callables) != 1:
        return None
    wrapped = callables[0]
    while isinstance(wrapped, functools.partial):
        wrapped = wrapped.func
    if isinstance(wrapped, MethodType) and isinstance(wrapped.__self__, nn.Module):
        wrapped = wrapped.__self__
    has_own_arguments = _original_code(code).co_argcount > 0
    return None if has_own_arguments and not isinstance(wrapped, nn.Module) else wrapped


def _has_args_and_kwargs(code: CodeType) -> bool:
    """True if the code has `*args` and `**kwargs`, as a wrapper has."""
    flags = _original_code(code).co_flags
    return bool(flags & inspect.CO_VARARGS and flags & inspect.CO_VARKEYWORDS)


def _original_code(code: CodeType) -> CodeType:
    """Return the code of the whole function if `code` resumes it after a graph break; other code
    unchanged."""
    from torch._dynamo.resume_execution import ContinueExecutionCache

    resumed = ContinueExecutionCache.generated_code_metadata.get(code)
    return code if resumed is None else resumed.code


def _callable_name(function: object) -> str:
    """Return the name of a function without its decorators (`inspect.unwrap`), or the class name of
    another callable object."""
    if not isinstance(function, (FunctionType, MethodType)):
        return type(function).__name__
    return inspect.unwrap(function).__qualname__.removesuffix(".forward")


_MAX_NAMED_BREAKS = 3


@dataclass(frozen=True)
class GraphBreak:
    """A line of Python code that Dynamo could not trace: its graph ends there."""

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}, `{self.code}`"


def graph_break_after(gm: fx.GraphModule) -> GraphBreak | None:
    """Return the break that ends Dynamo's graph; None if it ends with the function, or torch does
    not report it (the parts of a graph under DDP)."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return None
    frame = reason.user_stack[-1]
    return GraphBreak(frame.filename, frame.lineno or 0, (frame.line or "").strip())


def graph_breaks_hint(breaks: Sequence[GraphBreak]) -> str:
    """Return a sentence without its full stop about the breaks of a model; "" without any."""
    if not breaks:
        return ""
    places = ", ".join(str(place) for place in breaks[:_MAX_NAMED_BREAKS])
    if len(breaks) > _MAX_NAMED_BREAKS:
        places += f" and {len(breaks) - _MAX_NAMED_BREAKS} more"
    return (
        f"Dynamo broke the model's graph at {places}: its parts are planned one by one, and what "
        "passes from one to the next is neither split nor recomputed. Without the break a smaller "
        "budget may be feasible; TORCH_LOGS=graph_breaks says why it is there"
    )


@dataclass(eq=False)
class StepGraphs:
    """The graphs of one training step: torch.compile passes the same options object to all of them.

    Each graph is a frame of Dynamo or, under DDP, a part of one. If a frame is recompiled for other
    inputs, another step begins; the frames before it belong to that step, too, with the code that
    they have until they are recompiled.
    """

    options: object
    compilations: dict[int, object] = field(default_factory=dict[int, object])
    """The compile context of each frame, by frame id, in the order of compilation."""
    breaks: dict[int, GraphBreak] = field(default_factory=dict[int, GraphBreak])
    """The graph break after each frame that ends in one, by frame id."""


_MAX_STEPS = 64
_steps: list[StepGraphs] = []
"""The latest step of each options object; the one that was compiled last is at the end."""


def current_step_graphs(options: object, gm: fx.GraphModule) -> StepGraphs:
    """Return the graphs of the step that Dynamo's graph `gm`, which is now compiled, belongs to.
    Add `gm` to them. With gradients disabled, return a new step that is not retained."""
    context = CompileContext.try_get()  # compared by identity: ids repeat after a reset of Dynamo
    frame_id = getattr(context and context.compile_id, "frame_id", None) or 0
    if not torch.is_grad_enabled():
        return StepGraphs(options)  # not a training step
    step = next((s for s in _steps if s.options is options), None) or StepGraphs(options)
    others = [s for s in _steps if s is not step]
    if step.compilations.get(frame_id, context) is not context:
        step = _step_from_frame(step, frame_id)
    step.compilations[frame_id] = context
    if place := graph_break_after(gm):
        step.breaks[frame_id] = place
    _steps[:] = [*others[1 - _MAX_STEPS :], step]
    return step


def _step_from_frame(old_step: StepGraphs, frame_id: int) -> StepGraphs:
    """Return a new step with the old step's frames before `frame_id`, which is recompiled. Move
    their plans to the new step."""
    frame_ids = list(old_step.compilations)
    unchanged = frame_ids[: frame_ids.index(frame_id)]
    step = StepGraphs(
        old_step.options,
        {f: old_step.compilations[f] for f in unchanged},
        {f: old_step.breaks[f] for f in unchanged if f in old_step.breaks},
    )
    for plan in compiled_plans():
        if plan.group is old_step and plan.frame_id in unchanged:
            plan.group = step
    return step


def external_memory_bytes(
    joint: CompiledJointGraph, model: ModelBytes, saved_by_others_bytes: int
) -> int:
    """Return the external memory of a graph in bytes: the model's other parameters and their
    gradients; on CUDA, all other allocated memory. `saved_by_others_bytes` are saved tensors of the
    step's other graphs, which do not count here."""
    own_gradients_bytes = sum(map(node_bytes, joint.parameter_gradients))
    gradients_bytes = max(0, model.trainable_bytes - own_gradients_bytes)
    other_bytes = max(0, model.resident_bytes - sum(map(node_bytes, joint.parameters)))
    if joint.device.type == "cuda":
        allocated_bytes = torch.cuda.memory_allocated(joint.device) - saved_by_others_bytes
        other_bytes = max(other_bytes, allocated_bytes - joint.primals_bytes)
    return other_bytes + gradients_bytes


def allocated_share(budget_bytes: int | None) -> float:
    """Return the bytes that are allocated on CUDA as a share of the budget, for the key of torch's
    caches. It is rounded, so that small changes find the same plan. 0 if no plan depends on it:
    for budgets that are not in bytes, and before CUDA is initialized."""
    if budget_bytes is None or not torch.cuda.is_initialized():
        return 0.0
    return round(torch.cuda.memory_allocated() / budget_bytes, 2)
