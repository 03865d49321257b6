"""The backend "remat" of torch.compile, and `remat.compile`."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import _BoxedCodeGen

from remat.errors import InfeasibleBudget
from remat.frontend.common.planning_line import planning_line
from remat.frontend.common.pytree import DroppedOutput
from remat.frontend.common.step_outputs import (
    drop_graph_outputs,
    droppable_graph_outputs,
    with_dropped_outputs,
)
from remat.frontend.compile import disk_cache
from remat.frontend.compile.candidates import prepare_host_for_plan
from remat.frontend.compile.compat import cause_of_type, without_frames
from remat.frontend.compile.compile_options import (
    UNKNOWN_MODEL,
    CompileOptions,
    ModelBytes,
    check_no_cuda_graphs,
    read_options,
)
from remat.frontend.compile.fx_utils import device_of, storage_bytes
from remat.frontend.compile.inductor.cpp_batching import batched_cpp_files
from remat.frontend.compile.inductor.fusion_control import (
    PlannedFusionChoices,
    immediate_buffer_reuse,
    non_lazy_backward,
    separate_cpu_kernel_calls,
)
from remat.frontend.compile.partitioner import Partitioner, PlanRound
from remat.frontend.compile.registry import (
    CompiledPlan,
    compiled_plans,
    graph_title,
    register_plan,
)
from remat.frontend.compile.session import PlanSession
from remat.frontend.compile.step_graphs import (
    StepGraphs,
    current_compile_id,
    current_object_name,
    current_step_graphs,
    graph_breaks_hint,
)
from remat.frontend.runtime.dispatch import CallsInFlight
from remat.limits.budget import Budget
from remat.limits.limits import plan_or_smallest
from remat.limits.options import OUTPUTS_LOSS
from remat.limits.units import format_bytes

logger = logging.getLogger("remat")

_DYNAMO_ATTRIBUTES = ("_param_name_to_source", "_dynamo_source")
"""Attributes that Dynamo sets on its graph and on the graph's inputs; a copy does not have them."""

_DEFAULT_LOSS_TYPE = "ForCausalLM"
"""The loss type of those models of Transformers whose class has none."""


def remat_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Compile one graph for `torch.compile(model, backend="remat", mode=..., options=...)`.

    Raises `BudgetError` and ValueError for invalid options, `InfeasibleBudget` with the smallest
    feasible budget, and `TraceError` for a graph that cannot be planned.
    """
    return _compile_dynamo_graph(gm, example_inputs, UNKNOWN_MODEL, mode, options)


def compile(
    model: Callable[..., Any],
    budget: int | str,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **options: Any,
) -> Any:
    """Compile a model so that a training step needs no more memory than `budget`.

    `budget` is the peak in bytes of forward and backward, including parameters, gradients and
    batch: bytes, "8GiB", "60%" of the peak of the same step under plain torch.compile, or "min".
    This is `torch.compile(model, backend="remat", options={"budget": budget, ...})`. Other options
    are `strategy`, or its `gap`, `time_limit` (8 s by default), `threads`, `solver` and `seed`;
    `reserve`, bytes of the budget for other users of the memory; `outputs`, "dropped" if the caller
    releases the outputs before the backward, "loss" if a training step is to return no tensor with
    a gradient but the loss; `split`, "auto" to run the largest operations in pieces where no plan
    without that fits, "off", or the number of pieces; `offload`, "auto" to copy tensors to the host
    where that pays, with `host_budget` and `link` as in `remat.optimize`; `inductor=False`, to run
    the planned graphs without Inductor; `fallback`; `progress`; `infeasible`, "smallest" to
    plan for the smallest peak, with a warning, if no plan fits the budget; and any option of
    Inductor. Errors in options are raised at once, all others at the first call of the model.

    A model of Transformers without a loss type, such as GPT-2, gets the one that it uses then,
    "ForCausalLM": Dynamo would break its graph at a warning about it.
    """
    options = {"budget": budget, **options}
    compile_options, inductor_options = read_options(options)
    check_no_cuda_graphs(compile_options, _with_mode_options(inductor_options, mode))
    model_bytes = ModelBytes.of(model)
    _set_default_loss_types(model)

    def remat_backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        return _compile_dynamo_graph(gm, example_inputs, model_bytes, mode, options)

    return torch.compile(model, backend=remat_backend, dynamic=dynamic, fullgraph=fullgraph)


def _set_default_loss_types(model: object) -> None:
    """Set the default loss type in models of Transformers that have none. Does nothing for other
    models, and where Transformers is not imported.

    They warn about it, and Dynamo breaks the graph at the warning: between the logits and the loss,
    so that both have to exist as a whole.
    """
    transformers = sys.modules.get("transformers.modeling_utils")
    if not isinstance(model, nn.Module) or transformers is None:
        return
    pretrained_model: Any = getattr(transformers, "PreTrainedModel", None)
    for module in model.modules():
        if (
            pretrained_model is not None
            and isinstance(module, pretrained_model)
            and getattr(module, "loss_type", "") is None
        ):
            module.loss_type = _DEFAULT_LOSS_TYPE  # type: ignore[assignment]


def _compile_dynamo_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    model: ModelBytes,
    mode: str | None,
    options: Mapping[str, Any] | None,
) -> Any:
    """Plan and compile one graph of Dynamo, and return its code. `model` has the bytes of the whole
    model. Raises the errors of `remat_backend`."""
    compile_options, config_patches = read_options(options or {}, model)
    config_patches = _with_mode_options(config_patches, mode)
    if not torch.is_grad_enabled() and not compiled_plans():
        # No warning where the process trains, too: such a model may be evaluated without gradients.
        budget = compile_options.limits.budget.requested
        warnings.warn(
            f"the budget {budget!r} plans nothing for {current_object_name() or 'this graph'}: "
            "gradients are disabled, so no tensors are saved for a backward. Compile the training "
            "step with gradients enabled",
            stacklevel=2,
        )
    check_no_cuda_graphs(compile_options, config_patches)
    if config_patches and not compile_options.inductor:
        raise ValueError(
            f"{next(iter(config_patches))} is an option of Inductor, and the option inductor is "
            "False"
        )
    dropped: dict[int, DroppedOutput] | None = None
    dynamo_graph = gm
    if compile_options.outputs == OUTPUTS_LOSS and torch.is_grad_enabled():
        gm = _copy_dynamo_graph(gm)
        dropped = drop_graph_outputs(gm)
        if dropped is None:
            logger.warning(
                '%s: outputs="loss" has no effect on this graph, none of whose outputs is a loss: '
                "either the model returns none, or Dynamo breaks its graph before (see "
                "torch._dynamo.explain)",
                graph_title(current_object_name(), current_compile_id()),
            )
    step = current_step_graphs(options, dynamo_graph)
    request = _CompileRequest(gm, example_inputs, compile_options, config_patches, step)
    breaks_hint = graph_breaks_hint(list(step.breaks.values()))
    limits = compile_options.limits

    def compile_within(budget: Budget) -> tuple[Any, CompiledPlan | None]:
        """Return the code and the plan for a budget, or raise its error with hints."""
        options = replace(
            compile_options, limits=limits.with_budget(budget), progress=callback or False
        )
        try:
            return _compile_or_load_graph(replace(request, options=options))
        except Exception as error:
            infeasible = cause_of_type(error, InfeasibleBudget)
            if infeasible is None:
                raise
        for hint in filter(None, (breaks_hint, _loss_only_hint(gm, options.outputs))):
            infeasible = infeasible.with_hint(hint)
        raise without_frames(infeasible)

    def peak_bytes(result: tuple[Any, CompiledPlan | None]) -> int:
        _, compiled = result
        return 0 if compiled is None else compiled.planned_bytes + limits.reserve_bytes

    with planning_line(compile_options.progress) as callback:
        code, compiled = plan_or_smallest(
            compile_within, limits.budget, compile_options.infeasible, peak_bytes=peak_bytes
        )
    if compiled is not None:
        prepare_host_for_plan(compiled.plan, device_of(example_inputs))
        code = _with_calls_counted(code, compiled.title)
    return with_dropped_outputs(code, dropped)


def _loss_only_hint(gm: fx.GraphModule, outputs: str) -> str:
    """Return a sentence without its full stop that recommends `outputs="loss"`; "" where `outputs`
    is "loss" already, or Dynamo's graph has no loss, or no other outputs with a gradient that can
    be left out."""
    others = droppable_graph_outputs(gm)
    if outputs == OUTPUTS_LOSS or not others:
        return ""
    others_bytes = sum(storage_bytes(node.meta["example_value"]) for node in others.values())
    return (
        f'With outputs="loss" the graph returns only its loss: {format_bytes(others_bytes)} of '
        "other outputs, and as much for their gradients, need not be in memory as a whole"
    )


def _with_calls_counted(
    code: Callable[..., Sequence[Any]], title: str
) -> Callable[..., Sequence[Any]]:
    """Return a function that calls the code of a planned graph, and warns once about a call before
    the backward of the last one, because the plan is for one call at a time."""
    calls = CallsInFlight()
    has_warned = False

    def run(*inputs: Any) -> Sequence[Any]:
        nonlocal has_warned
        if calls.pending and not has_warned:
            has_warned = True
            logger.warning(
                "%s is called again before the backward of its last call. The saved tensors of all "
                "calls are in memory, and the plan is for one call, so the step may exceed the "
                "budget. Pass a smaller budget, call the model once with all inputs concatenated, "
                "or use remat.enable, which plans for several calls (in_flight=)",
                title,
            )
        outputs = code(*inputs)
        calls.add(outputs)
        return outputs

    return run


def _with_mode_options(inductor_options: dict[str, Any], mode: str | None) -> dict[str, Any]:
    """Return the options of Inductor, and those that a mode of torch.compile stands for unless they
    are set. The options unchanged without a mode."""
    if mode is None or mode == "default":
        return inductor_options
    from torch._inductor import list_mode_options

    return {**list_mode_options(mode), **inductor_options}


@dataclass(frozen=True, eq=False)
class _CompileRequest:
    """One graph to compile. `config_patches` are options of Inductor, `step` the graphs that share
    its budget."""

    gm: fx.GraphModule
    inputs: Sequence[Any]
    options: CompileOptions
    config_patches: Mapping[str, Any]
    step: StepGraphs


def _compile_or_load_graph(request: _CompileRequest) -> tuple[Any, CompiledPlan | None]:
    """Return the code of a graph and its plan, None if it needs none. If torch's cache has the code
    and ours the plan, load both; else plan the graph."""
    options, step = request.options, request.step
    if not options.inductor or not disk_cache.is_torch_cache_enabled():
        code, partitioner = _compile_in_session(request, PlanSession(options, step))
        return code, partitioner.compiled
    uuid = Partitioner.of_backend(options, PlanRound(step)).uuid()
    patches = sorted(request.config_patches.items())
    key = disk_cache.compiled_plan_key(request.gm, request.inputs, f"{uuid} {patches!r}")
    cached = disk_cache.load_compiled_plan(key)
    hits_before = disk_cache.torch_cache_hits()
    earlier = cached or disk_cache.CachedPlan(None)
    session = PlanSession(options, step, earlier.feedback, earlier.split)
    code, partitioner = _compile_in_session(request, session)
    if partitioner.compiled is None and disk_cache.torch_cache_hits() > hits_before:
        if cached is not None:
            if cached.compiled is None:
                return code, None
            names = {"module": current_object_name(), "compile_id": current_compile_id()}
            compiled = replace(cached.compiled, group=step, **names)
            register_plan(compiled)
            logger.info(
                "%s: plan and code are from torch's cache; planned peak %s",
                compiled.title,
                format_bytes(compiled.plan.peak_bytes),
            )
            return code, compiled
        with disk_cache.autograd_cache_disabled():  # torch has the code, but the plan is missing
            code, partitioner = _compile_in_session(request, PlanSession(options, step))
        # Not stored: the next process would get this plan with the code that torch has.
        return code, partitioner.compiled
    planned = disk_cache.CachedPlan(
        partitioner.compiled, partitioner.round.feedback, partitioner.planned_split()
    )
    disk_cache.save_compiled_plan(key, planned)
    return code, partitioner.compiled


def _compile_in_session(request: _CompileRequest, session: PlanSession) -> tuple[Any, Partitioner]:
    """Compile a graph with one plan of the session after the other until Inductor's kernels fit the
    budget. Return the code, and the partitioner that planned it."""
    compile_once = _compile_with_inductor if request.options.inductor else _compile_without_inductor
    while True:
        partitioner = session.next_partitioner()
        try:
            return compile_once(request, partitioner), partitioner
        except Exception as error:
            if not session.has_next_plan(error):
                raise


def _compile_with_inductor(request: _CompileRequest, partitioner: Partitioner) -> Any:
    """Compile a graph with Inductor, the backward together with the forward, and return the code.
    The kernels of both are verified against the partitioner's plan."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.virtualized import V

    def compile_inner(*args: Any, **kwargs: Any) -> Any:
        with (
            V.set_choices_handler(PlannedFusionChoices()),
            separate_cpu_kernel_calls(),
            immediate_buffer_reuse(),
        ):
            return compile_fx_inner(*args, **kwargs)

    with non_lazy_backward(), batched_cpp_files():
        return compile_fx(
            _copy_dynamo_graph(request.gm),
            request.inputs,
            inner_compile=compile_inner,
            config_patches={
                **partitioner.settings(),
                "allow_buffer_reuse": True,
                **request.config_patches,
            },
        )


def _copy_dynamo_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of Dynamo's graph, which a compilation modifies. It keeps what Dynamo attaches
    to the graph: with it, AOTAutograd knows which inputs are parameters, and torch's partitioner
    saves these instead of views of them."""
    graph_copy = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    graph_copy.meta = dict(gm.meta)
    placeholders = (module.graph.find_nodes(op="placeholder") for module in (gm, graph_copy))
    for original, copied in [(gm, graph_copy), *zip(*placeholders, strict=True)]:
        for name in _DYNAMO_ATTRIBUTES:
            if hasattr(original, name):
                setattr(copied, name, getattr(original, name))
    return graph_copy


def _compile_without_inductor(request: _CompileRequest, partitioner: Partitioner) -> Any:
    """Compile a graph with AOTAutograd alone, and return the code: the planned graphs run one
    operation at a time."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def run_as_is(module: fx.GraphModule, _: Sequence[Any]) -> Any:
        # The generated code empties the list of its arguments, so that a saved tensor is freed
        # after its last use.
        module.graph.set_codegen(_BoxedCodeGen())
        module.recompile()

        def run(arguments: list[Any]) -> Any:
            return module(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    compiled = aot_autograd(
        fw_compiler=run_as_is,
        partition_fn=partitioner,
        decompositions=select_decomp_table,
        keep_inference_input_mutations=True,  # in the graph, where a plan includes them
    )
    return compiled(_copy_dynamo_graph(request.gm), request.inputs)
