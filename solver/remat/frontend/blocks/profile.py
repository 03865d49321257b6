"""Profiling of block calls in eager mode: the time and memory of a block that is not captured.

The block runs standalone, with a graph, on copies of its inputs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from remat.blockwise.block_step import BlockOption
from remat.costs.roofline import Roofline
from remat.errors import one_line
from remat.frontend.blocks.discovery import Submodule, trainable_parameters
from remat.frontend.blocks.fsdp2 import gathered_storages
from remat.frontend.blocks.module_state import BufferSnapshot, WriteJournal, run_checkpointed
from remat.frontend.capture.model.preserved_state import rng_state_preserved
from remat.frontend.common.pytree import flatten_objects, tensors_in, unflatten_objects
from remat.frontend.costs.timers import Stopwatch, stopwatch
from remat.frontend.memory.meter import MemoryGauge, storage_bytes, wait_for_autograd

logger = logging.getLogger("remat")

BackwardFunction = Callable[
    [Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]],
    Sequence[torch.Tensor | None],
]
"""Computes the gradients of a graph's inputs from its outputs, its inputs and the gradients of the
outputs, in this order."""


@dataclass(frozen=True)
class ModuleInvocation:
    """A call of a submodule: the forward to run, and its arguments."""

    submodule: Submodule
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Call the forward with the arguments and return its result."""
        return self.forward(*self.args, **self.kwargs)

    def with_forward(self, forward: Callable[..., Any]) -> ModuleInvocation:
        """Return the same call of another forward."""
        return replace(self, forward=forward)

    def with_leaf_inputs(self) -> ModuleInvocation:
        """Return the call with copies of its tensors that are leaves: a backward ends there."""
        return self._with_leaves(_leaf_copy_of_input)

    def with_non_leaf_inputs(self) -> ModuleInvocation:
        """Return the call with its tensors as results of an operation: unlike leaves that require a
        gradient, a block may modify them in place."""
        return self._with_leaves(non_leaf_alias)

    def _with_leaves(self, convert: Callable[[Any], Any]) -> ModuleInvocation:
        leaves, shape = flatten_objects((self.args, self.kwargs))
        args, kwargs = unflatten_objects([convert(leaf) for leaf in leaves], shape)
        return replace(self, args=args, kwargs=kwargs)


def measure_eager_options(
    gauge: MemoryGauge, call: ModuleInvocation, roofline: Roofline | None = None
) -> tuple[BlockOption, ...]:
    """Return the measured options of a block call: as it is and, if the block can be recomputed,
    checkpointed. With a `roofline`, times are estimated by it.

    A checkpointed block need not free everything: what an autograd function stores on its context
    without `save_for_backward` stays. RNG states and buffers are restored afterwards.
    """
    obstacle, written = recompute_obstacle(call)
    gauge.peak()
    buffers = BufferSnapshot(call.submodule.module, written)
    as_it_is, forward_s = measure_invocation(gauge, call, roofline=roofline)
    buffers.restore()
    checkpointed: BlockOption | None = None
    if not obstacle:
        try:
            checkpointed_call = call.with_forward(partial(_run_invocation_checkpointed, call))
            checkpointed, _ = measure_invocation(gauge, checkpointed_call, roofline=roofline)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # such as torch's: the recomputation saves other tensors
            obstacle = one_line(error)
        buffers.restore()
    if checkpointed is None:
        logger.info("%s is not recomputed: %s", call.submodule.path, obstacle)
        return (as_it_is,)
    return as_it_is, replace(checkpointed, time_s=as_it_is.time_s + forward_s)


def recompute_obstacle(call: ModuleInvocation) -> tuple[str, frozenset[int]]:
    """Return the reason why the block must not be recomputed ("" if it may be), and the addresses
    of the storages that it writes into. RNG states and buffers are restored."""
    module = call.submodule.module
    buffers = BufferSnapshot(module, ())
    standalone = call.with_leaf_inputs()
    inputs = tensors_in((standalone.args, standalone.kwargs))
    versions = [tensor._version for tensor in inputs]
    journal = WriteJournal(gathered_storages(module))
    with journal:
        first = _block_outputs_without_grad(standalone)
    # Checkpointing such a block would also make a reference cycle that torch never frees.
    if versions != [tensor._version for tensor in inputs]:
        journal.restore()
        buffers.restore()
        return "it modifies its inputs in place", journal.written_storages
    restored = {tensor.untyped_storage()._cdata for tensor in (*inputs, *module.buffers())}
    if journal.written_storages - restored:
        journal.restore()
        buffers.restore()
        return "it writes into a tensor that is not a buffer", journal.written_storages
    second = _block_outputs_without_grad(
        standalone
    )  # sees the state that the first run has changed
    journal.restore()
    buffers.restore()
    if len(first) != len(second) or not all(map(_are_results_equal, first, second)):
        return "a second run returns other results", journal.written_storages
    return "", journal.written_storages


def _run_invocation_checkpointed(call: ModuleInvocation, *args: Any, **kwargs: Any) -> Any:
    return run_checkpointed(call.submodule.module, call.forward, args, kwargs)


def gradients_by_autograd(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor | None]:
    """Return the gradients of the inputs by `torch.autograd.grad`, which leaves `.grad` alone."""
    return torch.autograd.grad(outputs, inputs, tangents, allow_unused=True)


def measure_invocation(
    gauge: MemoryGauge,
    call: ModuleInvocation,
    compute_gradients: BackwardFunction = gradients_by_autograd,
    roofline: Roofline | None = None,
) -> tuple[BlockOption, float]:
    """Run a block call and its backward, by `compute_gradients`. Return its time and memory as an
    option, and the seconds of its forward; with a `roofline`, times are estimated by it. RNG states
    and gradients are restored afterwards."""
    # Casts of weights count as this block's memory, and not as that of the code around it.
    torch.clear_autocast_cache()
    standalone = call.with_leaf_inputs()
    tensors = tensors_in((standalone.args, standalone.kwargs))
    parameters = trainable_parameters([call.submodule])
    differentiable = [t for t in (*tensors, *parameters) if requires_gradient(t)]
    try:
        with (
            rng_state_preserved(),
            _gradients_preserved(parameters),
            stopwatch(roofline, {t.device for t in differentiable}) as time,
        ):
            measured = _measure_block_run(
                gauge,
                time,
                lambda: standalone.with_non_leaf_inputs().run(),
                tensors,
                differentiable,
                compute_gradients,
            )
    finally:
        torch.clear_autocast_cache()
    for device in {t.device for t in differentiable}:
        wait_for_autograd(device)
    return measured


@contextmanager
def _gradients_preserved(parameters: Sequence[torch.Tensor]) -> Iterator[None]:
    """Restore the gradients of parameters at the end of the context: the block's autograd functions
    may call backward(), which accumulates into `.grad`."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _measure_block_run(
    gauge: MemoryGauge,
    clock: Stopwatch,
    run: Callable[[], Any],
    inputs: Sequence[torch.Tensor],
    differentiable: Sequence[torch.Tensor],
    compute_gradients: BackwardFunction,
) -> tuple[BlockOption, float]:
    """Return time and memory of `run` and of its backward, and the seconds of `run`. `inputs` are
    its input tensors, `differentiable` the tensors that get gradients."""
    input_storages = {t.untyped_storage()._cdata for t in inputs}
    gauge.peak()
    bytes_before = gauge.live()
    start_s = clock.seconds()
    outputs = tensors_in(run())
    forward_s = clock.seconds() - start_s
    forward_bytes = gauge.peak() - bytes_before
    sizes = {t.untyped_storage()._cdata: storage_bytes(t.untyped_storage()) for t in outputs}
    output_bytes = sum(size for key, size in sizes.items() if key not in input_storages)
    saved_bytes = max(0, gauge.live() - bytes_before - output_bytes)
    differentiated = [t for t in outputs if t.requires_grad]
    start_s = clock.seconds()
    gradients: object = None
    if differentiated and differentiable:
        tangents = [torch.ones_like(t) for t in differentiated]
        gradients = compute_gradients(differentiated, differentiable, tangents)
        del tangents
    backward_s = clock.seconds() - start_s
    backward_bytes = gauge.peak() - bytes_before
    del gradients, differentiated, outputs
    time_s = forward_s + backward_s
    option = BlockOption(time_s, saved_bytes, forward_bytes, backward_bytes, forward_s)
    return option, forward_s


def _block_outputs_without_grad(call: ModuleInvocation) -> list[torch.Tensor]:
    with rng_state_preserved(), torch.no_grad():
        return tensors_in(call.run())


def _are_results_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if two results are equal, where NaN equals itself; on a GPU within the rounding of sums
    in another order."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    rtol, atol = (1e-3, 1e-5) if a.is_cuda else (0.0, 0.0)
    return torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)


def synchronized_time_s(tensors: object) -> float:
    """Return the clock's seconds after the GPUs of these tensors have finished their work."""
    for device in {t.device for t in tensors_in(tensors) if t.is_cuda}:
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _leaf_copy_of_input(item: Any) -> Any:
    """Return a copy of a tensor that is a leaf of autograd; anything else unchanged."""
    if not isinstance(item, torch.Tensor):
        return item
    return item.detach().clone().requires_grad_(item.requires_grad)


def non_leaf_alias(item: Any) -> Any:
    """Return a tensor that requires a gradient as the result of an operation, in the same storage;
    anything else unchanged."""
    return NonLeafAlias.apply(item) if requires_gradient(item) else item


class NonLeafAlias(torch.autograd.Function):
    """Identity whose result shares the input's storage without being a view or a leaf, so that a
    block may modify it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        shape, stride = tensor.shape, tensor.stride()
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), shape, stride)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads


def requires_gradient(item: Any) -> bool:
    """True if the item is a tensor that requires a gradient."""
    return isinstance(item, torch.Tensor) and item.requires_grad
