"""The autograd function of a planned step: one node that runs the forward and the backward graph.

Every choice here is about lifetimes: the backward graph receives the saved tensors in a list that
it empties, and no other reference to them survives. `StepMonitor` reports uses of the step that
keep memory which the plan counts as freed, or free memory which it counts as live.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.documents.program import Program
from remat.documents.records import TensorMeta
from remat.errors import GuardError
from remat.frontend.capture.reading.gradients import is_same_layout
from remat.frontend.common.torch_modes import autocast_disabled
from remat.frontend.runtime.absent_tangents import zeros_like_meta
from remat.frontend.runtime.lower import LoweredProgram
from remat.frontend.runtime.operations import accumulation_target
from remat.limits.units import format_bytes

_F = TypeVar("_F", bound=Callable[..., Any])


class SavedTensorCopies(Protocol):
    """Moves saved tensors of a step to the host and back; plans of blocks do that outside of their
    programs. Both methods change the list, which has the saved tensors in their order."""

    def start_offload(self, saved: list[torch.Tensor]) -> None:
        """Start copies of some tensors to the host, and put handles in their places in the list."""
        ...

    def restore(self, saved: list[torch.Tensor]) -> None:
        """Put the tensors in the places of their handles in the list, before the backward reads
        them."""
        ...


def exclude_from_compile(function: _F) -> _F:
    """Exclude a function from torch.compile, whose graph breaks once at the call.

    A compiler would reorder the statements, and their order is the memory plan."""
    return torch.compiler.disable(function, reason="remat runs its plan")  # type: ignore[return-value]


@exclude_from_compile
def run_step(
    lowered: LoweredProgram,
    tensors: Sequence[torch.Tensor],
    monitor: StepMonitor,
    copies: SavedTensorCopies | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run the forward and return its outputs, which require grad where the program differentiates.

    `tensors` are the parameters, buffers and inputs in the order of `lowered.input_names`. If the
    step computes no gradient for one, the outputs do not depend on its autograd graph, as in eager
    mode: another backward may have freed that graph.
    """
    tensors = [
        t.detach() if gradient is None and t.requires_grad else t
        for t, gradient in zip(tensors, lowered.gradient_of_input, strict=True)
    ]
    return _StepFunction.apply(  # type: ignore[no-any-return]
        lowered, monitor, copies, *tensors
    )


class _StepFunction(torch.autograd.Function):
    """The autograd function whose forward and backward are the two graphs of a program."""

    # torch 2.13's engine then passes the tangents in a list that may be emptied; 2.11 ignores it,
    # and the tangents live through the backward.
    boxed_grads_call = True

    @staticmethod
    def forward(
        ctx: Any,
        lowered: LoweredProgram,
        monitor: StepMonitor,
        copies: SavedTensorCopies | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Run the forward graph, save tensors for the backward, and return the outputs."""
        ctx.set_materialize_grads(False)
        ctx.lowered = lowered
        ctx.monitor = monitor
        ctx.copies = copies
        ctx.accumulated_parameters = [tensors[index] for index in lowered.accumulated_inputs]
        boxed = [*tensors, *lowered.constants]
        with autocast_disabled():
            results = lowered.launch_forward(boxed)
        program = lowered.program
        outputs = tuple(map(_detached_if_view, results[: len(program.outputs)]))
        ctx.output_refs = monitor.weak_refs(outputs)
        ctx.outputs = [weakref.ref(output) for output in outputs]
        first_state = len(results) - len(program.rng_states)
        ctx.rng_states = results[first_state:]
        output_ids = {id(output) for output in outputs}
        saved = [tensors[index] for index in lowered.saved_inputs]
        saved += [
            _detached_unless_output(tensor, output_ids)
            for tensor in results[len(outputs) : first_state]
        ]
        if copies is not None:
            copies.start_offload(saved)
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(
            *(t for t, o in zip(outputs, program.outputs, strict=True) if not o.differentiable)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        """Run the backward graph for the gradients of the outputs, and return the gradients of the
        arguments of `forward`. Raises `GuardError` for a use that the plan does not support."""
        match grads:
            case (list(boxed_grads),):
                pass
            case _:
                boxed_grads = list(grads)
        if torch.is_grad_enabled():
            raise GuardError(
                "create_graph=True (double backward) through a remat module is not supported: its "
                "backward is a fixed schedule. Run this step on the original model: the one that "
                "was passed to remat.optimize; or, with remat.enable, call remat.disable(model) "
                "before the step and remat.enable(model, budget) after it"
            )
        lowered: LoweredProgram = ctx.lowered
        ctx.monitor.check_released(ctx.output_refs)
        _check_observed_outputs(lowered, ctx.outputs, boxed_grads)
        tangents = _tangents_by_name(lowered, boxed_grads)
        boxed_grads.clear()
        del grads
        boxed = [*ctx.saved_tensors]
        ctx.monitor.check_graph(boxed[len(lowered.saved_inputs) :])
        ctx.maybe_clear_saved_tensors()
        if ctx.copies is not None:
            ctx.copies.restore(boxed)
        boxed += ctx.rng_states
        first_tangent = len(boxed)
        boxed += tangents.values()
        absent = frozenset(name for name, tangent in tangents.items() if tangent is None)
        tangents.clear()
        boxed += lowered.constants
        boxed += map(accumulation_target, ctx.accumulated_parameters)
        with autocast_disabled():
            computed = _launch_backward(lowered, boxed, first_tangent, absent)
        gradients = [None if i is None else computed[i] for i in lowered.gradient_of_input]
        computed.clear()
        return None, None, None, *gradients


def _launch_backward(
    lowered: LoweredProgram, boxed: list[Any], first_tangent: int, absent: frozenset[str]
) -> list[torch.Tensor | None]:
    """Run the backward and return the gradients; None for a gradient that depends on absent
    tangents only. `boxed` has the inputs, with the tangents from index `first_tangent` on. The
    backward empties `boxed`."""
    if not absent:
        return lowered.launch_backward(boxed)
    if (launch := lowered.backward_without(absent, boxed)) is not None:
        return launch(boxed)
    for index, (name, meta) in enumerate(lowered.tangent_metas.items(), start=first_tangent):
        if name in absent:
            boxed[index] = zeros_like_meta(meta)
    is_reached = lowered.has_gradient_without(absent)
    first_target = len(boxed) - len(lowered.accumulated_inputs)
    for number, index in enumerate(lowered.accumulated_inputs, start=first_target):
        gradient = lowered.gradient_of_input[index]
        if gradient is not None and not is_reached[gradient]:
            boxed[number] = None  # its `.grad` stays as it is
    computed = lowered.launch_backward(boxed)
    return [g if reached else None for g, reached in zip(computed, is_reached, strict=True)]


def _detached_if_view(output: torch.Tensor) -> torch.Tensor:
    """Return an output, detached if it is a view: autograd forbids the caller to write into a view
    that a function returns."""
    return output.detach() if output._is_view() else output


def _detached_unless_output(tensor: torch.Tensor, output_ids: Container[int]) -> torch.Tensor:
    """Return the tensor to save for the backward: an output unchanged, since autograd tracks it
    already; another view detached, so that autograd does not track it; other tensors, and None,
    unchanged. `output_ids` are the ids of the outputs."""
    if id(tensor) in output_ids:
        return tensor
    # A kernel may return None where its fake kernel returned a tensor (an unused workspace).
    return tensor.detach() if tensor is not None and tensor._is_view() else tensor


def _check_observed_outputs(
    lowered: LoweredProgram,
    outputs: Sequence[weakref.ref[torch.Tensor]],
    grads: Sequence[torch.Tensor | None],
) -> None:
    """Raise `GuardError` for an output without a tangent that has `retain_grad()` or a hook. In
    eager mode, it may get a gradient from other outputs that are computed from it."""
    for number, (ref, grad) in enumerate(zip(outputs, grads, strict=True)):
        output = ref() if grad is None else None
        if output is not None and (output.retains_grad or output._backward_hooks):
            observer = "retain_grad()" if output.retains_grad else "register_hook()"
            raise GuardError(
                f"{observer} was called for {lowered.program.output_label(number)}, but no "
                "gradient reaches it: a planned step has gradients only of outputs that the loss "
                "uses directly. Compute the loss from this output, or run this step with the "
                "original model"
            )


def _tangents_by_name(
    lowered: LoweredProgram, grads: list[torch.Tensor | None]
) -> dict[str, torch.Tensor | None]:
    """Return the tangents by name, in the layout that the backward graph expects; None for the
    tangent of an output that the loss does not use.

    Empties `grads`. Raises `GuardError` for the gradient of an output that is not differentiated.
    """
    program = lowered.program
    tangents: dict[str, torch.Tensor | None] = {}
    for index, output in enumerate(program.outputs):
        grad = grads[index]
        grads[index] = None
        if not output.tangent:
            if grad is not None:
                path = "" if output.is_stored else f"{program.result.path_of(index)!r}, or "
                raise GuardError(
                    f"a gradient arrived at {program.output_label(index)}, but the plan "
                    f'differentiates other outputs only. Pass differentiate={path}"all" to '
                    "remat.enable or remat.optimize"
                )
            continue
        tangent = None
        if grad is not None:
            tangent = _with_planned_layout(grad, lowered.tangent_metas[output.tangent])
        tangents[output.tangent] = tangent
    return tangents


def _with_planned_layout(grad: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return the gradient with the strides of `meta`, in a storage of its own size: a copy if its
    layout differs. Autograd ensures its shape and dtype. Raises `GuardError` for batched
    gradients."""
    dtype = getattr(torch, meta.dtype)
    try:
        grad.untyped_storage()
    except NotImplementedError:
        raise GuardError(
            "batched gradients (is_grads_batched=True) through a remat module are not supported: "
            "its backward is a fixed schedule. Call torch.autograd.grad once for each gradient, "
            "with retain_graph=True, or run this step on the original model"
        ) from None
    same_layout = is_same_layout(meta.shape, grad.stride(), meta.stride)
    if same_layout and grad.untyped_storage().nbytes() == grad.numel() * grad.element_size():
        return grad
    planned = torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device=meta.device)
    return planned.copy_(grad)


logger = logging.getLogger("remat")

_CONSECUTIVE_BACKWARDS = 3
"""The number of consecutive backward passes after which a release is no coincidence."""

_MIN_PEAK_FRACTION = 0.01
"""The fraction of the plan's peak from which released bytes are worth a report."""


_reported: WeakSet[nn.Module] = WeakSet()
"""The models with a warning about released outputs, so that each has one for all lengths."""

_reported_graphs: WeakSet[type[nn.Module]] = WeakSet()
"""The classes of models with a warning about a retained graph: the blocks of a model have one."""


def _is_graph_retained() -> bool:
    """Return True in a backward with `retain_graph=True`. torch has no public function for this;
    its own AOTAutograd calls this one."""
    is_retained = getattr(
        getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None
    )
    return is_retained is not None and bool(is_retained())


class StepMonitor:
    """Checks at each backward whether the plan counts the memory of this use of the step.

    Warns of released outputs once for a model, after several backward passes in a row, and only if
    the plan recomputes anything. Warns of a retained graph once for a class of models.
    """

    def __init__(self, program: Program, model: nn.Module) -> None:
        self._model = model
        has_recomputation = any(statement.recomputation for statement in program.backward)
        self._is_active = has_recomputation and not program.outputs_dropped
        self._unsaved_outputs = [
            index
            for index, o in enumerate(program.outputs)
            if o.name not in program.saved and not o.is_stored
        ]
        self._min_bytes = program.predicted_peak_bytes * _MIN_PEAK_FRACTION
        self._consecutive_releases = 0

    def weak_refs(self, outputs: Sequence[torch.Tensor]) -> dict[StorageWeakRef, int]:
        """Return weak references to the storages of the outputs that the backward does not read, so
        that only the caller references them, with their bytes. Empty if released outputs are not
        checked any more, or never were."""
        if not self._is_active:
            return {}
        storages = [outputs[index].untyped_storage() for index in self._unsaved_outputs]
        return {StorageWeakRef(storage): storage.nbytes() for storage in storages}

    def check_graph(self, saved: Sequence[torch.Tensor]) -> None:
        """Warn if the backward that starts retains its graph, and with it the saved tensors, if
        they take much memory. `saved` must not contain inputs of the step."""
        if not _is_graph_retained() or type(self._model) in _reported_graphs:
            return
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in saved
            if t is not None
        }
        saved_bytes = sum(storages.values())
        if saved_bytes > self._min_bytes:
            _reported_graphs.add(type(self._model))
            logger.warning(
                "a backward of this %s has retain_graph=True: its saved tensors, %s, stay in "
                "memory, which the plan counts as freed, so the step may exceed the budget. Add "
                "the losses and call backward once, or lower the budget",
                type(self._model).__name__,
                format_bytes(saved_bytes),
            )

    def check_released(self, refs: dict[StorageWeakRef, int]) -> None:
        """Count a backward that starts after outputs of `weak_refs` were freed, and warn after
        three such backwards in a row."""
        released_bytes = sum(size_bytes for ref, size_bytes in refs.items() if ref.expired())
        if released_bytes > self._min_bytes:
            self._consecutive_releases += 1
        else:
            self._consecutive_releases = 0
        if self._consecutive_releases == _CONSECUTIVE_BACKWARDS:
            self._is_active = False
            if self._model in _reported:
                return
            _reported.add(self._model)
            logger.warning(
                "the model's outputs are released before each backward, but the plan counts their "
                '%s as held: pass outputs="dropped" to recompute less within the same budget, or '
                'outputs="loss" for a step that does not return them at all',
                format_bytes(released_bytes),
            )
