"""`StepRecorder`: stubs in place of blocks, to record the block calls and the memory of a dry run.

A stub is an autograd node that runs its block, saves nothing, and returns zero gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from itertools import compress
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from remat.blockwise.block_step import BlockOption, StepEvent
from remat.errors import TraceError
from remat.frontend.blocks.discovery import Submodule, trainable_parameters
from remat.frontend.blocks.module_state import differentiable_attributes
from remat.frontend.blocks.profile import ModuleInvocation, non_leaf_alias, requires_gradient
from remat.frontend.capture.model.hooks import hooks_inside
from remat.frontend.capture.model.python_state import PythonState
from remat.frontend.common.pytree import (
    ObjectTreeSpec,
    flatten,
    flatten_objects,
    tensors_in,
    unflatten_objects,
)
from remat.frontend.common.step_outputs import differentiated_tensors
from remat.frontend.common.torch_modes import autocast_cache_disabled
from remat.frontend.memory.meter import MemoryGauge, allocated_size_bytes, storage_bytes
from remat.frontend.runtime.dispatch import is_in_function_transform
from remat.frontend.runtime.guards import CallSignature, ModelCall, ModelTracker, call_signature


class StubBlock(torch.autograd.Function):
    """A block call whose graph exists only during its forward, to see which results require a
    gradient."""

    boxed_grads_call = True  # torch 2.13 then passes the tangents in a list that may be emptied

    @staticmethod
    def forward(
        ctx: Any,
        recorder: StepRecorder,
        call_index: int,
        run: Callable[..., tuple[torch.Tensor, ...]],
        input_count: int,
        anchor: torch.Tensor,
        *tensors: Any,
    ) -> Any:
        """Run the block on the first `input_count` tensors; the others are its parameters."""
        ctx.set_materialize_grads(False)
        ctx.recorder, ctx.call_index = recorder, call_index
        ctx.gradient_metas = [
            (t.shape, t.dtype, t.device) if requires_gradient(t) else None for t in tensors
        ]
        recorder.anchors.append(anchor)
        with torch.enable_grad():
            outputs = run(*map(_detached_alias, tensors[:input_count]))
        lacks_gradient = [not t.requires_grad for t in outputs]
        results = tuple(t.detach() for t in outputs)
        del outputs
        pairs = zip(results, lacks_gradient, strict=True)
        ctx.mark_non_differentiable(*(t for t, lacks in pairs if lacks))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tangents = grads[0] if isinstance(grads[0], list) else list(grads)
        del grads
        ctx.recorder.record_backward(ctx.call_index, tangents)
        zeros = [
            None if meta is None else torch.zeros(meta[0], dtype=meta[1], device=meta[2])
            for meta in ctx.gradient_metas
        ]
        ctx.recorder.gauge.peak()
        return None, None, None, None, None, *zeros


def outputs_in_separate_storages(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the outputs, with copies of those that share a storage with an input or with an
    earlier output, as planned blocks return them."""
    seen = {t.untyped_storage()._cdata for t in inputs}
    results: list[torch.Tensor] = []
    for output in outputs:
        storage = output.untyped_storage()._cdata
        results.append(output.clone() if storage in seen else output)
        seen.add(storage)
    return tuple(results)


def copy_argument_mutations(
    arguments: Any, stub_arguments: Any, leaves: Sequence[object], shape: ObjectTreeSpec
) -> bool:
    """Return True if the block modified a list, dict or dataclass among its arguments, and apply
    the changes to the caller's arguments.

    `stub_arguments` are the arguments that the block received, built from `leaves` in `shape`;
    `arguments` are the caller's, which get the same contents, with tensors detached.
    """
    leaves_after, shape_after = flatten_objects(stub_arguments)
    if shape_after == shape and all(map(operator.is_, leaves_after, leaves)):
        return False
    _copy_detached_contents(arguments, stub_arguments)
    return True


def _copy_detached_contents(target: Any, source: Any) -> None:
    """Give the lists, dicts and dataclasses in `target` the contents of those in `source`, without
    a graph."""
    detached = partial(tree_map_only, torch.Tensor, torch.Tensor.detach)
    if isinstance(target, list) and isinstance(source, list):
        target[:] = map(detached, source)
    elif isinstance(target, dict):
        items = {name: detached(item) for name, item in source.items()}
        for name in target.keys() & items.keys():
            if isinstance(target[name], list | dict | tuple):
                _copy_detached_contents(target[name], source[name])
                items[name] = target[name]
        target.clear()
        target.update(items)
    elif isinstance(target, tuple):
        for target_item, source_item in zip(target, source, strict=True):
            _copy_detached_contents(target_item, source_item)
    elif is_dataclass(target) and not isinstance(target, type):
        for name, item in vars(source).items():
            object.__setattr__(target, name, detached(item))


def _detached_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that requires a gradient as one outside of the caller's graph, in the same
    storage and no leaf; any other tensor unchanged."""
    if not requires_gradient(tensor):
        return tensor
    return non_leaf_alias(tensor.detach().requires_grad_())


MeasureOptions = Callable[[MemoryGauge, ModuleInvocation], tuple[BlockOption, ...]]
"""Measures the options of a call of a module's original forward."""

_MUTATES_ARGUMENT = "it modifies a list or a dict among its arguments"


class DryRunTooLarge(Exception):
    """The dry run may exceed its memory limit."""


@dataclass(frozen=True)
class DryRunCall:
    """A call of a block, as the dry run recorded it.

    `signature` is None if the block cannot be captured, and `uncapturable_reason` says why: its
    arguments cannot be described, or it has side effects. `input_storages` are the storages of its
    input tensors, with their sizes. `measured_options` are the options that were measured, if that
    was requested; by default as it is, and checkpointed. `results_with_gradient` are the paths of
    the results that received a gradient, empty if unknown. `changes_values` is True if the forward
    changed Python values, such as a counter.
    """

    submodule: Submodule
    signature: CallSignature | None
    input_storages: tuple[StorageWeakRef, ...]
    input_sizes_bytes: tuple[int, ...]
    uncapturable_reason: str = ""
    measured_options: tuple[BlockOption, ...] = ()
    results_with_gradient: frozenset[str] = frozenset()
    changes_values: bool = False


@dataclass
class StepRecorder:
    """Records the calls and events of a dry run while it runs. `run_dry` has the context."""

    gauge: MemoryGauge
    constant_bytes: int
    measured_modules: set[int]
    measure_options: MeasureOptions
    is_sharded: bool = False
    """True with FSDP2, which reduces gradients: those of blocks exist too, with zeros."""
    limit_bytes: int | None = None
    """The largest number of bytes that the dry run may use, constant memory included."""
    largest_growth_bytes: int = 0
    """The largest growth of memory so far, from the bytes live at one event to the peak before the
    next."""
    accumulating_parameters: frozenset[int] = frozenset()
    """The ids of the parameters whose gradients the dry run has removed and will restore."""
    calls: list[DryRunCall] = field(default_factory=list)
    events: list[StepEvent] = field(default_factory=list)
    externally_held_storages: set[StorageWeakRef] = field(default_factory=set)
    anchors: list[torch.Tensor] = field(default_factory=list)
    """One for each call, so that its backward runs even if no input requires a gradient."""
    _trackers: dict[int, ModelTracker] = field(default_factory=dict)
    non_block_bytes: int = 0
    """Bytes in use when the backward started, without constant memory."""
    _result_paths: dict[int, list[str]] = field(default_factory=dict)
    """For each call until its backward: the path of each tensor in its result."""
    _gradient_bytes: dict[int, int] = field(default_factory=dict)
    """For each parameter of a block whose backward has run: the bytes of its gradient."""
    _summing_bytes: int = 0
    """Temporary bytes of summing the gradients of shared parameters, until the next event."""
    _released_bytes: int = 0
    """Bytes of the inputs that code outside of blocks held when the backward started and has
    released since, while a block whose backward is still to come may hold them."""
    _last_live_bytes: int = 0
    _pending_calls: set[int] = field(default_factory=set)
    """Calls whose backward is still to come, once the backward has started."""

    def stub_forward(self, block: Submodule) -> Callable[..., Any]:
        """Return a forward that runs the block as a stub and records the call."""
        original_forward = block.module.forward
        is_trainable = bool(trainable_parameters([block]))

        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_in_function_transform():
                return original_forward(*args, **kwargs)
            input_leaves, input_shape = flatten_objects((args, kwargs))
            has_backward = is_trainable or any(map(requires_gradient, input_leaves))
            if not torch.is_grad_enabled() or not has_backward:
                return original_forward(*args, **kwargs)  # without a backward it saves nothing
            index = len(self.calls)
            self._record_non_block_phase()
            self._check_limit()
            is_planned = id(block.module) not in self.measured_modules
            invocation = ModuleInvocation(block, original_forward, args, kwargs)
            self.calls.append(self._recorded_call(invocation))
            self._record_event("forward", index, self.gauge.live())
            anchor = torch.zeros((), requires_grad=True, device=_first_tensor_device(input_leaves))
            parameters = trainable_parameters([block]) if self.is_sharded else []
            result_parts: list[Any] = []

            def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                replacements = iter(tensors)
                leaves = [
                    next(replacements) if isinstance(x, torch.Tensor) else x for x in input_leaves
                ]
                stub_args, stub_kwargs = unflatten_objects(leaves, input_shape)
                attributes_before = differentiable_attributes(block.module)
                values_before = PythonState(block.module, hooks=hooks_inside(block.module))
                # Weights that autocast casts within a block are part of the block's memory.
                with autocast_cache_disabled():
                    result = original_forward(*stub_args, **stub_kwargs)
                if values_before.changes():
                    self.calls[index] = replace(self.calls[index], changes_values=True)
                attributes = differentiable_attributes(block.module)
                if new := attributes.keys() - attributes_before.keys():
                    name = min(name for _, name, _ in new)
                    self._mark_uncapturable(index, f"it leaves a tensor in its attribute {name!r}")
                del attributes, attributes_before
                if copy_argument_mutations(
                    (args, kwargs), (stub_args, stub_kwargs), leaves, input_shape
                ):
                    self._mark_uncapturable(index, _MUTATES_ARGUMENT)
                self._result_paths[index] = _result_tensor_paths(result)
                leaves, shape = flatten_objects(result)
                result_parts[:] = [
                    [x.detach() if requires_gradient(x) else x for x in leaves],
                    shape,
                ]
                outputs = tuple(x for x in leaves if isinstance(x, torch.Tensor))
                del result, leaves
                return outputs_in_separate_storages(outputs, tensors) if is_planned else outputs

            tensors = [x for x in input_leaves if isinstance(x, torch.Tensor)]
            results = iter(
                StubBlock.apply(self, index, run, len(tensors), anchor, *tensors, *parameters)
            )
            leaves, shape = result_parts
            self.gauge.peak()
            leaves = [next(results) if isinstance(x, torch.Tensor) else x for x in leaves]
            return unflatten_objects(leaves, shape)

        return forward

    def limited_forward(self, module: nn.Module) -> Callable[..., Any]:
        """Return a forward for a module that is no block: the original one, after a check of the
        memory limit until the first call of a block. The step may call no block at all."""
        original_forward = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.calls and torch.is_grad_enabled():
                if self._last_live_bytes:
                    self._add_growth(self.constant_bytes + self.gauge.live())
                self._check_limit()
            return original_forward(*args, **kwargs)

        return forward

    def _check_limit(self) -> None:
        """Raise `DryRunTooLarge` if memory exceeds the limit before the next event, assuming the
        largest growth so far."""
        live_bytes = self.constant_bytes + self.gauge.live()
        self._last_live_bytes = live_bytes
        next_bytes = live_bytes + self.largest_growth_bytes
        if self.limit_bytes is not None and next_bytes > self.limit_bytes:
            raise DryRunTooLarge

    def _add_growth(self, peak_bytes: int) -> None:
        growth_bytes = peak_bytes - self._last_live_bytes
        self.largest_growth_bytes = max(self.largest_growth_bytes, growth_bytes)

    def _mark_uncapturable(self, index: int, reason: str) -> None:
        self.calls[index] = replace(self.calls[index], signature=None, uncapturable_reason=reason)

    def _recorded_call(self, invocation: ModuleInvocation) -> DryRunCall:
        """Return the record of a block call, with its options if they are to be measured."""
        block = invocation.submodule
        options = self._measured_options(invocation)
        try:
            call = ModelCall.of(invocation.args, invocation.kwargs, "its argument ")
        except TraceError as error:
            tensors = tensors_in((invocation.args, invocation.kwargs))
            return DryRunCall(block, None, *_storages_and_sizes(tensors), str(error), options)
        tracker = self._trackers.setdefault(id(block.module), ModelTracker(block.module))
        signature = call_signature(tracker, call.structure, call.leaves)
        if any(id(p) in self.accumulating_parameters for p in block.module.parameters()):
            signature = signature._replace(accumulates_gradients=True)
        return DryRunCall(block, signature, *_storages_and_sizes(call.leaves), "", options)

    def _measured_options(self, invocation: ModuleInvocation) -> tuple[BlockOption, ...]:
        if id(invocation.submodule.module) not in self.measured_modules:
            return ()
        options = self.measure_options(self.gauge, invocation)
        tensors = tensors_in((invocation.args, invocation.kwargs))
        copies_bytes = sum(_storages_and_sizes(tensors)[1])
        own_bytes = max(max(o.forward_bytes, o.backward_bytes) for o in options)
        self._add_growth(self._last_live_bytes + copies_bytes + own_bytes)
        self.gauge.peak()
        return options

    def run_backward(
        self,
        non_block_leaves: Sequence[torch.Tensor],
        outputs: list[Any],
        differentiate: str | Sequence[str],
        outputs_dropped: bool,
    ) -> None:
        """Run the backward from the model's outputs, which are the only item of `outputs`; with
        `outputs_dropped`, empty the list first. `non_block_leaves` are the leaves of autograd that
        get a gradient outside of blocks."""
        differentiated = differentiated_tensors(outputs[0], differentiate)
        if outputs_dropped:
            outputs.clear()
        # Inputs of blocks that are still alive are held by code outside of blocks.
        storages = {ref for call in self.calls for ref in call.input_storages}
        self.externally_held_storages = {ref for ref in storages if not ref.expired()}
        self._pending_calls = set(range(len(self.calls)))
        self.non_block_bytes = self.gauge.live()
        tangents = [torch.ones_like(t) for t in differentiated]
        self._record_non_block_phase()
        if self.is_sharded:
            torch.autograd.backward(differentiated, tangents)
            self._record_non_block_phase()
            return
        # The gradients live to the end of the step, as those in `.grad` do.
        leaves = [*non_block_leaves, *self.anchors]
        gradients = torch.autograd.grad(differentiated, leaves, tangents, allow_unused=True)
        self._record_non_block_phase()
        del gradients

    def record_backward(self, call_index: int, tangents: list[torch.Tensor | None]) -> None:
        """Record the start of the backward of a call; `tangents` is emptied to free them."""
        paths = self._result_paths.pop(call_index, ())
        if len(paths) == len(tangents):
            # Not a zip over the tangents: its loop variable would keep the last one alive.
            has_gradient = [tangent is not None for tangent in tangents]
            self.calls[call_index] = replace(
                self.calls[call_index],
                results_with_gradient=frozenset(compress(paths, has_gradient)),
            )
        self._record_non_block_phase()
        live_bytes = self.gauge.live()
        storages = [t.untyped_storage() for t in tangents if t is not None]
        sizes = {StorageWeakRef(s): storage_bytes(s) for s in storages}
        storages.clear()
        tangents.clear()
        # Tangents that nothing else holds count as the block's memory, until it has read them.
        tangent_bytes = sum(size for ref, size in sizes.items() if ref.expired())
        self._update_released_bytes()
        self._record_event("backward", call_index, live_bytes - tangent_bytes)
        self._pending_calls.discard(call_index)
        self._update_released_bytes()
        if self.is_sharded:
            return
        parameters = trainable_parameters([self.calls[call_index].submodule])
        without_grad = [p for p in parameters if p.grad is None]
        # Autograd sums two gradients of a shared parameter into a third tensor.
        sizes_bytes = {id(p): allocated_size_bytes(p.nbytes, p.device) for p in without_grad}
        self._summing_bytes = 2 * sum(
            size for key, size in sizes_bytes.items() if key in self._gradient_bytes
        )
        self._gradient_bytes |= sizes_bytes

    def _update_released_bytes(self) -> None:
        sizes = {
            ref: size
            for index in self._pending_calls
            for ref, size in zip(
                self.calls[index].input_storages, self.calls[index].input_sizes_bytes, strict=True
            )
        }
        self._released_bytes = sum(
            size
            for ref, size in sizes.items()
            if ref in self.externally_held_storages and ref.expired()
        )

    def _record_non_block_phase(self) -> None:
        peak_bytes = self._with_constant_bytes(self.gauge.peak()) + self._summing_bytes
        if self._last_live_bytes:
            self._add_growth(peak_bytes)
        self._summing_bytes = 0
        self.events.append(StepEvent("outside", peak_bytes))

    def _record_event(
        self, kind: Literal["forward", "backward"], call_index: int, live_bytes: int
    ) -> None:
        self.events.append(StepEvent(kind, self._with_constant_bytes(live_bytes), call_index))

    def _with_constant_bytes(self, live_bytes: int) -> int:
        """Add constant memory, the gradients of the blocks' parameters and released inputs to the
        measured bytes."""
        gradient_bytes = sum(self._gradient_bytes.values())
        return self.constant_bytes + live_bytes + gradient_bytes + self._released_bytes


def _result_tensor_paths(result: object) -> list[str]:
    """Return the path of each tensor in a block's result; an empty list if that cannot be
    described."""
    try:
        leaves, structure = flatten(result, "the result ")
    except TraceError:
        return []
    path = {id(leaf): structure.path_of(number) for number, leaf in enumerate(leaves)}
    paths = [path.get(id(tensor), "") for tensor in tensors_in(result)]
    return paths if all(paths) else []


def _storages_and_sizes(
    tensors: Sequence[torch.Tensor],
) -> tuple[tuple[StorageWeakRef, ...], tuple[int, ...]]:
    """Return weak references to the tensors' storages, and the storages' sizes in bytes."""
    storages = [t.untyped_storage() for t in tensors]
    return tuple(map(StorageWeakRef, storages)), tuple(map(storage_bytes, storages))


def _first_tensor_device(items: Iterable[Any]) -> torch.device:
    """Return the device of the first tensor among the items, else the CPU."""
    return next((x.device for x in items if isinstance(x, torch.Tensor)), torch.device("cpu"))
