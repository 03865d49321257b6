"""Capture and solving of blocks: which calls can be planned, and their options with plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch

from remat.blockwise.block_step import BlockOption
from remat.blockwise.pareto_options import SavedInputs, SavedTensor, pareto_options
from remat.costs.roofline import Roofline
from remat.costs.trace_costs import roofline_source
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.errors import DocumentError, RematError, TraceError
from remat.frontend.blocks.fsdp2 import unsharded_parameters
from remat.frontend.blocks.profile import non_leaf_alias
from remat.frontend.blocks.step_recorder import DryRunCall
from remat.frontend.capture.model.attribute_guards import AttributeGuards
from remat.frontend.capture.trace import CapturedStep, capture
from remat.frontend.common.operators import check_namespaces_allowed
from remat.frontend.common.pytree import unflatten
from remat.frontend.common.quantized import QUANTIZED_NAMESPACE, quantized_operators
from remat.frontend.common.torch_modes import autocast_set_to
from remat.frontend.costs.measure import block_measurement_limit_bytes, measure
from remat.frontend.planning.schedule_reuse import BlockScheduleCache
from remat.frontend.runtime.guards import CallSignature
from remat.frontend.runtime.lower import LoweredProgram, lower_program
from remat.limits.options import OUTPUTS_DROPPED
from remat.passes.gradient_accumulation import with_gradient_accumulation
from remat.passes.offload.candidates import fills_storage
from remat.plan import Plan
from remat.plan_options import CheckedOptions
from remat.rewrite import rewrite, tensor_of_variable

_TIME_LIMIT_S = 30.0
"""Time limit of the solves of all blocks together."""

_MAX_REASON_LENGTH = 300


@dataclass(frozen=True)
class PlannedOption:
    """An option of a captured block with its plan. The program is generated on first access."""

    option: BlockOption
    plan: Plan
    trace: Trace
    namespaces: frozenset[str]

    @cached_property
    def program(self) -> Program:
        """The program of the plan, as data."""
        return rewrite(self.trace, self.plan.schedule)

    @cached_property
    def saved_inputs(self) -> SavedInputs:
        """The input tensors that the forward saves, and when the backward reads each last."""
        return SavedInputs.of(self.trace, self.plan.schedule, self.program)

    @cached_property
    def saved_tensors(self) -> tuple[SavedTensor, ...]:
        """The saved tensors that may be offloaded, if the calls that get them allow it."""
        return tuple(_offloadable_saved_tensors(self.trace, self.program))

    @cached_property
    def lowered(self) -> LoweredProgram:
        """The executable program of the plan."""
        return lower_program(self.program, self.namespaces)


def _offloadable_saved_tensors(trace: Trace, program: Program) -> Iterator[SavedTensor]:
    """Yield the saved tensors that are no parameters, buffers, constants or outputs, and that fill
    their storage alone."""
    placeholders = {p.name: p for p in trace.placeholders}
    metas = {r.name: r.tensor for node in trace.nodes for r in node.results}
    names = sorted(program.saved, key=lambda name: name not in placeholders)
    tensors = [tensor_of_variable(name, trace.storage_of) for name in names]
    counts = Counter(trace.storage_of[name] for name in tensors)
    outputs = {trace.storage_of[output.name] for output in trace.outputs}
    values = {trace.storage_of[v.name]: n for n, v in enumerate(trace.graph().values)}
    for position, name in enumerate(tensors):
        storage = trace.storage_of[name]
        placeholder = placeholders.get(name)
        size_bytes, input_index = trace.storage_bytes[storage], -1
        if placeholder is not None:
            if placeholder.kind != "input":
                continue
            input_index = int(placeholder.target)
        meta = metas[name] if placeholder is None else placeholder.tensor
        if counts[storage] == 1 and storage not in outputs and fills_storage(meta, size_bytes):
            yield SavedTensor(position, size_bytes, input_index, values.get(storage, -1))


@dataclass
class BlockSolver:
    """Captures the blocks of a model and solves for their options. Blocks with equal traces share
    plans and programs.

    `log_progress` receives a line before each capture and each solve. `is_all_reused` is True as
    long as every plan came from `schedule_cache` and none had to be solved.
    """

    optimize_options: CheckedOptions
    log_progress: Callable[[str], None]
    schedule_cache: BlockScheduleCache = field(default_factory=BlockScheduleCache)
    cost_source: str = "run once"
    is_all_reused: bool = True
    measuring_limit_bytes: int = 0
    """Bytes that measuring may use in addition to the step's constant memory. If a block needs more
    when it is checkpointed, measuring may use as much as the block."""
    _captured: dict[tuple[int, CallSignature, frozenset[str]], CapturedStep | str] = field(
        default_factory=dict
    )
    _failures_by_class: dict[tuple[type, object], str] = field(default_factory=dict)
    _distinct_traces: list[Trace] = field(default_factory=list)
    _options_by_trace: dict[int, list[PlannedOption]] = field(default_factory=dict)
    """Options by the index of the trace in `_distinct_traces`."""

    def __post_init__(self) -> None:
        if isinstance(costs := self.optimize_options.costs, Roofline):
            self.cost_source = roofline_source(costs)  # also for blocks that are not captured

    def trace_or_failure(self, call: DryRunCall) -> Trace | str:
        """Return the trace of the block in this call, or the reason why it cannot be captured."""
        captured = self._captured_or_failure(call)
        return captured if isinstance(captured, str) else captured.trace

    def guards_of(self, call: DryRunCall) -> AttributeGuards:
        """Return the guards of the block's plans; no guards if the block cannot be captured, and
        its own code runs."""
        captured = self._captured_or_failure(call)
        return AttributeGuards() if isinstance(captured, str) else captured.guards

    def _captured_or_failure(self, call: DryRunCall) -> CapturedStep | str:
        if call.signature is None:
            return call.uncapturable_reason
        key = id(call.submodule.module), call.signature, call.results_with_gradient
        if key not in self._captured:
            captured = self._capture(call, call.signature)
            if isinstance(captured, CapturedStep) and captured.trace not in self._distinct_traces:
                self._distinct_traces.append(captured.trace)
            self._captured[key] = captured
        return self._captured[key]

    def _capture(self, call: DryRunCall, signature: CallSignature) -> CapturedStep | str:
        """Capture the block of a call on empty inputs; return the reason if that fails."""
        self.log_progress(f"capturing {call.submodule.path}")
        # The inputs of a block are results of operations: autocast casts them at each use.
        leaves = [
            non_leaf_alias(
                torch.empty_strided(
                    t.shape, t.stride, dtype=t.dtype, device=t.device, requires_grad=t.requires_grad
                )
            )
            for t in signature.inputs
        ]
        # Results without a gradient are not differentiated: a zero tangent is not the same as none,
        # parameters would get gradients of zeros, or NaN.
        differentiate = sorted(call.results_with_gradient) or "all"
        module = call.submodule.module
        try:
            args, kwargs = unflatten(signature.structure, leaves)
            with unsharded_parameters(module), autocast_set_to(signature.autocast):
                trace, guards = capture(
                    module, args, kwargs, differentiate=differentiate, outputs=OUTPUTS_DROPPED
                )
            namespaces = self.optimize_options.namespaces | quantized_operators(module)
            check_namespaces_allowed((n.target for n in trace.nodes), namespaces)
        except (TraceError, DocumentError) as error:
            return short_failure_reason(error)
        if signature.accumulates_gradients:
            trace = with_gradient_accumulation(trace)
        return CapturedStep(trace, guards)

    def capture_failure(self, call: DryRunCall) -> str:
        """Return why the block of a call cannot be captured, or "" if it can. Blocks of the same
        class and input properties are captured once for this."""
        inputs = None if call.signature is None else call.signature.inputs
        key = type(call.submodule.module), inputs
        if key not in self._failures_by_class:
            result = self.trace_or_failure(call)
            self._failures_by_class[key] = result if isinstance(result, str) else ""
        return self._failures_by_class[key]

    def options_of(self, call: DryRunCall) -> list[PlannedOption]:
        """Return the options of a call whose block was captured, the fastest first."""
        trace = self.trace_or_failure(call)
        assert isinstance(trace, Trace)
        index = self._distinct_traces.index(trace)
        if index not in self._options_by_trace:
            count = len(self._distinct_traces)
            self.log_progress(f"block {index + 1} of {count}, with {len(trace.nodes)} operations")
            self._options_by_trace[index] = self._plan_options(trace, _TIME_LIMIT_S / count)
        return self._options_by_trace[index]

    def _plan_options(self, trace: Trace, time_limit_s: float) -> list[PlannedOption]:
        """Return the options of a trace from the schedule cache, else from the solver."""
        settings = self.optimize_options
        cached = self.schedule_cache.find(trace)
        if cached is None:
            self.is_all_reused = False
            costs = settings.costs or trace.device.split(":")[0]
            limit_bytes = max(self.measuring_limit_bytes, block_measurement_limit_bytes(trace))
            measured = measure(trace, device=costs, cache=settings.cache, limit_bytes=limit_bytes)
            options = pareto_options(
                measured.graph(), time_limit_s, settings.strategy, settings.progress_callback
            )
            self.schedule_cache.add(trace, measured, tuple(plan for _, plan in options))
        else:
            measured, options = cached
        self.cost_source = measured.cost_source
        # The capture has checked the operators of quantized weights.
        quantized = {n.target.partition(".")[0] for n in trace.nodes} & {QUANTIZED_NAMESPACE}
        namespaces = settings.namespaces | quantized
        return [PlannedOption(option, plan, measured, namespaces) for option, plan in options]


def short_failure_reason(error: RematError) -> str:
    """Return the error's text on one line, truncated, without the remedy."""
    return " ".join(str(error).split()).partition(" Remedy:")[0][:_MAX_REASON_LENGTH]
