"""The operations of remat that programs call, in addition to torch's.

Gradient accumulation: autograd receives all gradients of a node at once, so where parameters have a
`.grad` already, a second full set of gradients would be live at the same time. Adding each gradient
into its parameter's `.grad` as soon as it is computed frees it at once, as eager mode does.

RNG states are recorded when a random operation first runs, and restored when it is recomputed.
torch's own graph-safe scheme assumes one recomputation; a schedule may have any number. On CUDA a
state is two integers on the host, the Philox seed and offset, so recording one costs no tensor; on
the CPU it is a tensor of 5 KB. Inside a CUDA graph capture torch exposes neither integer (a replay
brings its own), so the plan of a step that is to be captured recomputes no random operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from remat.documents.targets import (
    ADD_INTO_TARGET,
    ADD_PRODUCT_TARGET,
    ADD_TARGET,
    WRITE_ROWS_TARGET,
)
from remat.errors import GuardError
from remat.frontend.common.operators import register_operator


def add_in_place(total: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add the gradient of a further use of a tied parameter to `total`, as autograd does."""
    total.add_(gradient)


def accumulate_grad(parameter: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor | None:
    """Add `gradient` into `parameter.grad` and return None. If `.grad` is None, set it to the
    gradient, so that the next call of the same step adds to it.

    Returns the gradient instead where autograd must process it: `parameter` is None, has hooks, or
    has a `.grad` of another dtype or a sparse one.
    """
    if (
        parameter is None
        or parameter._backward_hooks
        or getattr(parameter, "_post_accumulate_grad_hooks", None)
    ):
        return gradient
    existing = parameter.grad
    if existing is None:
        parameter.grad = gradient
        return None
    if existing.dtype != gradient.dtype or existing.layout is not torch.strided:
        return gradient
    existing.add_(gradient)
    return None


def accumulation_target(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter if the running backward will accumulate into its `.grad`, else None
    (for `torch.autograd.grad`, say). Must be called before the graph runs, which is below autograd.
    """
    with torch.enable_grad():
        node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return parameter if torch._C._will_engine_execute_node(node) else None
    except RuntimeError:
        return None


def add(total: torch.Tensor, summand: torch.Tensor) -> torch.Tensor:
    """Add a summand of the same shape to `total`, in place, and return `total`."""
    return total.add_(summand)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add the product of two matrices to `total`, in place, and return `total`."""
    return total.addmm_(left, right)


def write_rows(
    buffer: torch.Tensor | None,
    rows: torch.Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    first: int,
    count: int,
    start: int,
) -> torch.Tensor:
    """Write the rows of a piece into a buffer from row `start` on, in place, and return the buffer.
    If it is None, allocate it with this shape and stride. Its rows are the `count` dimensions from
    dimension `first` on, as one dimension."""
    if buffer is None:
        buffer = rows.new_empty_strided(shape, stride)
    last = first + count - 1
    flat = buffer.view(*shape[:first], -1, *shape[last + 1 :])  # raises if that would be a copy
    part = rows.flatten(first, last) if count > 1 else rows
    flat.narrow(first, start, part.shape[first]).copy_(part)
    return buffer


RngState = torch.Tensor | tuple[int, int]
"""The state tensor of the CPU's generator, or the Philox seed and offset of a CUDA generator."""


def generator_state(device: str) -> RngState:
    """Return the state of the default generator of `device`. Raises `GuardError` on a GPU inside a
    CUDA graph capture."""
    if not device.startswith("cuda"):
        return torch.get_rng_state()
    if torch.cuda.is_current_stream_capturing():
        raise GuardError(
            "this plan recomputes random operations, whose generator state cannot be recorded "
            "inside a CUDA graph capture; plan with optimize(..., cuda_graphs=True), which retains "
            "their results, or do not capture"
        )
    return philox_state(cuda_generator(device))


def set_generator_state(device: str, state: RngState) -> None:
    """Set the state of the default generator of `device`."""
    if isinstance(state, torch.Tensor):
        torch.set_rng_state(state)
    else:
        set_philox_state(cuda_generator(device), state)


def cuda_generator(device: str) -> torch.Generator:
    """Return the default generator of a CUDA device; "cuda" is the current device."""
    index = torch.device(device).index
    return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


def philox_state(generator: torch.Generator) -> tuple[int, int]:
    """Return the seed and offset of a CUDA generator, which are its whole state."""
    return generator.initial_seed(), generator.get_offset()


def set_philox_state(generator: torch.Generator, state: tuple[int, int]) -> None:
    """Set the seed and offset of a CUDA generator."""
    seed, offset = state
    if generator.initial_seed() != seed:  # it was reseeded in between
        generator.manual_seed(seed)
    generator.set_offset(offset)


def run_with_generator_state(
    state: RngState,
    device: str,
    operation: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Recompute a random operation under the RNG state of its first run, and return its results.

    The generator has its present state again afterwards."""
    present_state = generator_state(device)
    set_generator_state(device, state)
    try:
        return operation(*args, **kwargs)
    finally:
        set_generator_state(device, present_state)


register_operator(ADD_INTO_TARGET, add_in_place)
register_operator(ADD_TARGET, add)
register_operator(ADD_PRODUCT_TARGET, add_product)
register_operator(WRITE_ROWS_TARGET, write_rows)
