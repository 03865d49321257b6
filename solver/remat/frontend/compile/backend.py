"""The backend "remat" of torch.compile, and `remat.compile`."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._guards import CompileContext

from remat.errors import InfeasibleBudget
from remat.frontend.compile import disk_cache, reporting
from remat.frontend.compile.external_memory import ModelBytes
from remat.frontend.compile.inductor.compat import (
    backward_at_once,
    kernel_by_kernel,
    raised_inside,
    reused_at_once,
)
from remat.frontend.compile.inductor.cpp_batching import several_to_a_file
from remat.frontend.compile.inductor.fusion_control import PlannedKernels
from remat.frontend.compile.inductor.peak_check import OverBudget
from remat.frontend.compile.joint.symbolic_sizes import Symbol
from remat.frontend.compile.naming import compiled_now, number_now
from remat.frontend.compile.options import NO_MODEL, CompileOptions, read_options
from remat.frontend.compile.partitioner import Partitioner
from remat.frontend.compile.registry import NOTHING, Lesson, compiled_plans, remember
from remat.limits.budget import format_bytes
from remat.report.holding import held_at_peak

logger = logging.getLogger("remat")

_ROUNDS = 3


def remat_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """What `torch.compile(model, backend="remat", mode=..., options={"budget": ...})` calls.

    Raises `BudgetError` and ValueError for options that are none, `InfeasibleBudget` with the
    smallest feasible budget, and `TraceError` for a graph that cannot be planned.
    """
    return _backend(gm, example_inputs, NO_MODEL, mode, options)


def _backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    model: ModelBytes,
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> Any:
    own, patches = read_options(options or {}, model)
    if mode is not None and mode != "default":
        from torch._inductor import list_mode_options

        patches = {**list_mode_options(mode), **patches}
    if not torch.is_grad_enabled() and not compiled_plans():
        # A model that is trained, too, is evaluated without gradients: that is no mistake.
        warnings.warn(
            f"the budget {own.budget.given!r} plans nothing for {compiled_now() or 'this graph'}: "
            "without gradients nothing is kept for a backward, and nothing is run again",
            stacklevel=2,
        )
    asked = _Asked(gm, example_inputs, own, patches, _group_of(options))
    if own.inductor:
        return _with_inductor(asked)
    if patches:
        raise ValueError(f"{next(iter(patches))} is Inductor's, and the option inductor is False")
    return _without_inductor(asked)


def compile(
    model: Callable[..., Any],
    budget: int | str,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **options: Any,
) -> Any:
    """The model compiled, with a training step that takes no more memory than `budget`.

    `budget` is the peak of bytes during forward and backward, parameters, gradients and batch
    included: bytes, "8GiB", "60%" of what the same step takes under plain torch.compile, or "min".
    The same as `torch.compile(model, backend="remat", options={"budget": budget, ...})`; other
    options are `strategy` or its `gap`, `time_limit` (8 s by default), `threads`, `solver` and
    `seed`; `reserve`, bytes to leave of the budget; `inductor=False`, which plans the same way and
    runs the graphs as they are; `fallback`; and any option of Inductor. Errors in options are
    raised at once, all others when the model is first called.
    """
    options = {"budget": budget, **options}
    read_options(options)
    held = ModelBytes.of(model)

    def remat_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return _backend(gm, example_inputs, held, mode, options)

    return torch.compile(model, backend=remat_backend, dynamic=dynamic, fullgraph=fullgraph)


@dataclass(eq=False)
class _Group:
    """The graphs of one step: torch.compile hands the same options to all of them. Each is a frame,
    or, under DDP, a part of one. A frame that is compiled again, for other inputs, begins another
    step, in which the frames before it are as they were until they are compiled again, too."""

    options: object
    frames: dict[int, object] = field(default_factory=dict[int, object])
    """The compilation of each frame."""


_MOST_STEPS = 64
_steps: list[_Group] = []
"""The latest step of each set of options, that of the latest compilation at the end."""


def _group_of(options: object) -> _Group:
    compiling = CompileContext.try_get()  # the object: its number begins anew after a reset
    frame = getattr(compiling and compiling.compile_id, "frame_id", None) or 0
    if not torch.is_grad_enabled():
        return _Group(options)  # no step of a training
    step = next((s for s in _steps if s.options is options), None) or _Group(options)
    others = [s for s in _steps if s is not step]
    if step.frames.get(frame, compiling) is not compiling:
        step = _since(step, frame)
    step.frames[frame] = compiling
    _steps[:] = [*others[1 - _MOST_STEPS :], step]
    return step


def _since(before: _Group, frame: int) -> _Group:
    """Another step, with the same graphs as far as this frame."""
    frames = list(before.frames)
    same = frames[: frames.index(frame)]
    found = _Group(before.options, {number: before.frames[number] for number in same})
    for plan in compiled_plans():
        if plan.group is before and plan.frame in same:
            plan.group = found
    return found


@dataclass(frozen=True, eq=False)
class _Asked:
    """One graph to compile: `patches` are Inductor's options, `group` its step's graphs."""

    gm: fx.GraphModule
    inputs: Sequence[Any]
    options: CompileOptions
    patches: Mapping[str, Any]
    group: _Group


def _with_inductor(asked: _Asked) -> Any:
    """Plans, unless torch has the code of it on disk: then the plan is there as well."""
    if not disk_cache.torch_keeps():
        return _in_rounds(asked)[0]
    uuid = Partitioner.of_backend(asked.options, asked.group).uuid()
    key = disk_cache.key_of(asked.gm, asked.inputs, f"{uuid} {sorted(asked.patches.items())!r}")
    known = disk_cache.find(key)
    before = disk_cache.hits()
    code, partitioner = _in_rounds(asked, known.lesson if known else NOTHING)
    if partitioner.made is None and disk_cache.hits() > before:
        if known is not None:
            if known.compiled is not None:
                named = {"module": compiled_now(), "compile_id": number_now()}
                remember(found := replace(known.compiled, group=asked.group, **named))
                reporting.taken(found)
            return code
        with disk_cache.nothing_kept():  # the plan's file is gone
            code, partitioner = _in_rounds(asked)
    disk_cache.keep(key, disk_cache.Kept(partitioner.made, partitioner.lesson))
    return code


def _in_rounds(asked: _Asked, lesson: Lesson = NOTHING) -> tuple[Any, Partitioner]:
    """Plans, and plans again with what Inductor's kernels show, where they take too much. The code,
    and who made the plan, if one was made."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.virtualized import V

    def inner(*args: Any, **kwargs: Any) -> Any:
        with V.set_choices_handler(PlannedKernels()), kernel_by_kernel(), reused_at_once():
            return compile_fx_inner(*args, **kwargs)

    over, made = None, 0
    bounded: list[Symbol] = []
    while made < _ROUNDS:
        partitioner = Partitioner.of_backend(asked.options, asked.group, lesson, made + 1)
        partitioner.bounded = bounded  # by the first round
        try:
            with backward_at_once(), several_to_a_file():
                code = compile_fx(
                    fx.GraphModule(asked.gm, copy.deepcopy(asked.gm.graph)),
                    asked.inputs,
                    inner_compile=inner,
                    config_patches={
                        **partitioner.settings(),
                        "allow_buffer_reuse": True,
                        **asked.patches,
                    },
                )
        except Exception as error:
            partitioner.forget()
            if over is not None and raised_inside(error, InfeasibleBudget):
                break  # there is no plan for so much less
            over = raised_inside(error, OverBudget)
            if over is None:
                raise
            made += 1
            lesson = _learned(lesson, over)
            logger.info("planned again: %s", over)
        else:
            return code, partitioner
    assert over is not None
    raise _too_small(over, made, asked.options)


def _learned(before: Lesson, over: OverBudget) -> Lesson:
    """What to plan again with: first what is not in place, which says which schedules take more;
    then a budget so much smaller, and a little more, as the next kernels are others again."""
    if not over.apart <= before.apart:
        return before._replace(apart=before.apart | over.apart)
    return before._replace(less_bytes=before.less_bytes + over.excess_bytes * 17 // 16)


def _too_small(over: OverBudget, rounds: int, options: CompileOptions) -> InfeasibleBudget:
    compiled = over.compiled
    beside_bytes = compiled.others_bytes + options.reserve_bytes
    peak_bytes = (compiled.verified_bytes or 0) + beside_bytes
    beside = f", with {format_bytes(beside_bytes)} beside this graph" if beside_bytes else ""
    held = held_at_peak(compiled.plan.graph, compiled.plan.schedule)
    return InfeasibleBudget(
        f"{compiled.title}: {over}, after {rounds} plans; raise the budget to "
        f"{peak_bytes:,} bytes{beside}. As planned, {held}.",
        min_feasible_bytes=peak_bytes,
    )


def _without_inductor(asked: _Asked) -> Any:
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def run(module: fx.GraphModule, _: Sequence[Any]) -> Any:
        return make_boxed_func(module.forward)

    compiled = aot_autograd(
        fw_compiler=run,
        partition_fn=Partitioner.of_backend(asked.options, asked.group),
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,  # in the graph, where a plan sees them
    )
    return compiled(asked.gm, asked.inputs)
