"""One autograd node for the whole step: the forward graph, then, from what it saved, the backward
graph.

Every choice here is about lifetimes: a saved tensor is handed to the backward graph in a list that
the graph empties, and no other reference to it survives.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, TypeVar

import torch

from remat.documents.records import TensorMeta
from remat.errors import GuardError
from remat.frontend.capture.model.context import without_autocast
from remat.frontend.capture.reading.gradients import same_layout
from remat.frontend.runtime.accumulate import destination
from remat.frontend.runtime.lower import Compiled
from remat.frontend.runtime.output_tracking import ReturnedOutputs

_F = TypeVar("_F", bound=Callable[..., Any])


def left_alone(function: _F) -> _F:
    """Not compiled: torch.compile of what calls it breaks its graph there, once. A compiler would
    order the statements anew, and they are the memory plan."""
    return torch.compiler.disable(function, reason="remat runs its plan")  # type: ignore[return-value]


@left_alone
def run_step(
    compiled: Compiled, tensors: Sequence[torch.Tensor], returned: ReturnedOutputs
) -> tuple[torch.Tensor, ...]:
    """Run the forward; the returned tensors carry a gradient where the program has one.

    `tensors` are the parameters, buffers and inputs in the order of `compiled.inputs`.
    """
    return _Step.apply(compiled, returned, *tensors)  # type: ignore[no-any-return]


class _Step(torch.autograd.Function):
    # torch 2.13's engine then passes the tangents in a list that may be emptied; 2.11 ignores it,
    # and the tangents live through the backward.
    boxed_grads_call = True

    @staticmethod
    def forward(
        ctx: Any, compiled: Compiled, returned: ReturnedOutputs, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.compiled = compiled
        ctx.returned = returned
        ctx.parameters = [tensors[position] for position in compiled.accumulated]
        boxed = [*tensors, *compiled.constants]
        with without_autocast():
            results = compiled.launch_forward(boxed)
        program = compiled.program
        outputs = tuple(map(_writable, results[: len(program.outputs)]))
        ctx.noted = returned.note(outputs)
        last = len(results) - len(program.states)
        ctx.states = results[last:]
        own = {id(output) for output in outputs}
        ctx.save_for_backward(
            *[tensors[position] for position in compiled.saved],
            *[_base(t, own) for t in results[len(outputs) : last]],
        )
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
                "backward is a fixed schedule. Use the original model for this step"
            )
        compiled: Compiled = ctx.compiled
        ctx.returned.look(ctx.noted)
        tangents = _tangents(compiled, boxed_grads)
        boxed_grads.clear()
        del grads
        boxed = [*ctx.saved_tensors]
        ctx.maybe_clear_saved_tensors()
        boxed += ctx.states
        boxed += tangents
        tangents.clear()
        boxed += compiled.constants
        boxed += map(destination, ctx.parameters)
        with without_autocast():
            found = compiled.launch_backward(boxed)
        gradients = [None if i is None else found[i] for i in compiled.gradients]
        found.clear()
        return None, None, *gradients


def _writable(output: torch.Tensor) -> torch.Tensor:
    """No view for autograd, which would not let anybody write into it."""
    return output.detach() if output is not None and output._is_view() else output


def _base(tensor: torch.Tensor, outputs: Container[int]) -> torch.Tensor:
    """What to save of a variable: outputs as they are (autograd knows them), others detached, for a
    view that some kernels return would otherwise be tracked as one."""
    if id(tensor) in outputs:
        return tensor
    # A kernel may return nothing where its fake said a tensor (an unused workspace).
    return tensor.detach() if tensor is not None and tensor._is_view() else tensor


def _tangents(compiled: Compiled, grads: list[torch.Tensor | None]) -> list[torch.Tensor]:
    """The gradients of the outputs, as the backward graph expects them."""
    program = compiled.program
    tangents: list[torch.Tensor] = []
    for index, output in enumerate(program.outputs):
        grad = grads[index]
        grads[index] = None
        if not output.tangent:
            if grad is not None:
                path = program.result.path_of(index)
                raise GuardError(
                    f"a gradient arrived at the output {path!r}, but the plan differentiates other "
                    f'outputs only. Pass differentiate={path!r}, or "all", to what plans: '
                    "remat.enable, remat.optimize"
                )
            continue
        tangents.append(_as_planned(grad, compiled.tangents[output.tangent]))
    return tangents


def _as_planned(grad: torch.Tensor | None, meta: TensorMeta) -> torch.Tensor:
    """The gradient in the planned strides, and in a storage of its own size; autograd has seen to
    its shape and dtype."""
    dtype = getattr(torch, meta.dtype)
    if grad is None:
        zero = torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device=meta.device)
        return zero.zero_()
    same = same_layout(meta.shape, grad.stride(), meta.stride)
    if same and grad.untyped_storage().nbytes() == grad.numel() * grad.element_size():
        return grad
    planned = torch.empty_strided(meta.shape, meta.stride, dtype=dtype, device=meta.device)
    return planned.copy_(grad)
