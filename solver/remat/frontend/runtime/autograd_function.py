"""The autograd function of a planned step: one node that runs the forward and the backward graph.

Every choice here is about lifetimes: the backward graph receives the saved tensors in a list that
it empties, and no other reference to them survives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol, TypeVar

import torch

from remat.documents.records import TensorMeta
from remat.errors import GuardError
from remat.frontend.capture.model.environment import autocast_disabled
from remat.frontend.capture.reading.gradients import is_same_layout
from remat.frontend.runtime.absent_tangents import zeros_like_meta
from remat.frontend.runtime.gradient_accumulation import accumulation_target
from remat.frontend.runtime.lower import LoweredProgram
from remat.frontend.runtime.step_monitor import StepMonitor

_F = TypeVar("_F", bound=Callable[..., Any])


class SavedTensorCopies(Protocol):
    """Moves saved tensors of a step to the host and back; plans of blocks do that outside of their
    programs. Both methods change the list, which has the saved tensors in their order."""

    def start_offload(self, saved: list[torch.Tensor]) -> None:
        """Start copies to the host, and put handles in place of the tensors."""
        ...

    def restore(self, saved: list[torch.Tensor]) -> None:
        """Put tensors in place of their handles, before the backward reads them."""
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
        ctx.set_materialize_grads(False)
        ctx.lowered = lowered
        ctx.monitor = monitor
        ctx.copies = copies
        ctx.accumulated_parameters = [tensors[index] for index in lowered.accumulated_inputs]
        boxed = [*tensors, *lowered.constants]
        with autocast_disabled():
            results = lowered.launch_forward(boxed)
        program = lowered.program
        outputs = tuple(map(_without_view, results[: len(program.outputs)]))
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
        _check_observed(lowered, ctx.outputs, boxed_grads)
        tangents = _tangents(lowered, boxed_grads)
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


def _without_view(output: torch.Tensor) -> torch.Tensor:
    """Detach a view: autograd forbids the caller to write into a view that a function returns."""
    return output.detach() if output is not None and output._is_view() else output


def _detached_unless_output(tensor: torch.Tensor, output_ids: Container[int]) -> torch.Tensor:
    """Return the tensor to save for the backward: an output unchanged, since autograd tracks it
    already; another view detached, so that autograd does not track it."""
    if id(tensor) in output_ids:
        return tensor
    # A kernel may return None where its fake kernel returned a tensor (an unused workspace).
    return tensor.detach() if tensor is not None and tensor._is_view() else tensor


def _check_observed(
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


def _tangents(
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
    """Return the gradient with the planned strides, in a storage of its size: a copy if the layout
    differs. Autograd ensures its shape and dtype."""
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
