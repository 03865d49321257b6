"""Dry run: one training step with stubbed blocks, to see when blocks run and what others allocate.

The model runs with its real data, but each block frees its graph once it has run, and its backward
returns zeros. So the step takes little more memory than the code outside of blocks and one block,
whatever the model. The dry run records the order of the blocks' forwards and backwards and the
bytes in use at each of them. RNG states and buffers are restored afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.blockwise.block_step import StepEvent
from remat.errors import TraceError
from remat.frontend.blocks.discovery import Submodule, trainable_parameters
from remat.frontend.blocks.fsdp2 import (
    inside_model_forward,
    is_sharded,
    local_tensor,
    run_fsdp_post_forward,
    sharded_parameters,
    unreduced_gradients,
)
from remat.frontend.blocks.module_state import patched_forwards, state_restored
from remat.frontend.blocks.profile import (
    measure_eager_options,
)
from remat.frontend.blocks.step_recorder import DryRunCall, MeasureOptions, StepRecorder
from remat.frontend.memory.device_memory import allocated_workspace_bytes
from remat.frontend.memory.meter import memory_gauge, unique_bytes
from remat.frontend.runtime.guards import ModelCall


@dataclass(frozen=True)
class DryRun:
    """The record of a dry run: block calls in the order of the forward, and events of the step.

    `externally_held_storages` are those inputs of blocks that code outside of blocks still holds
    when the backward starts. `non_block_bytes` were in use at that time, without constant memory.
    `constant_bytes` is the size of the parameters, buffers, batch, gradients that existed before
    the step, and the workspaces of libraries (`library_bytes`).
    """

    calls: tuple[DryRunCall, ...]
    events: tuple[StepEvent, ...]
    externally_held_storages: frozenset[StorageWeakRef]
    non_block_bytes: int = 0
    constant_bytes: int = 0
    library_bytes: int = 0


class NoBackwardOfBlocks(TraceError):
    """No block of the step has a backward: their parameters are frozen, or the forward calls none.
    `modules` are the blocks."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__(f"none of the {len(modules)} blocks has a backward in this step")
        self.modules = modules


def head_growth_bytes(events: Sequence[StepEvent]) -> int:
    """Return the bytes that the code between the last block's forward and the first backward of a
    block, such as a head and a loss, needs in addition to the bytes that are live before it; 0 if
    no block has run."""
    last = max((n for n, event in enumerate(events) if event.kind == "forward"), default=None)
    if last is None:
        return 0
    rest = events[last + 1 :]
    head = list(takewhile(lambda event: event.kind == "outside", rest))
    return max((event.non_block_bytes - events[last].non_block_bytes for event in head), default=0)


def run_dry(
    model: nn.Module,
    call: ModelCall,
    blocks: Sequence[Submodule],
    *,
    measured_submodules: Iterable[Submodule] = (),
    measure_options: MeasureOptions = measure_eager_options,
    differentiate: str | Sequence[str] = "auto",
    outputs_dropped: bool = False,
    limit_bytes: int | None = None,
    growth_bytes: int = 0,
) -> DryRun:
    """Run one step with stubs in place of the blocks, and return its record.

    Each call of the `measured_submodules` also runs standalone, with a graph, in
    `measure_options`, which returns its options. With `outputs_dropped`, the outputs are freed
    before the backward.

    `growth_bytes` is how much memory is expected to grow until the next event: by as much as the
    head of the model took in an earlier dry run. Raises `NoBackwardOfBlocks` if the forward calls
    no block that has a backward, and `DryRunTooLarge` if the dry run may need more than
    `limit_bytes`.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    library_bytes = allocated_workspace_bytes(device)
    torch.clear_autocast_cache()  # else it already holds weights in lower precision
    with ExitStack() as stack:
        stack.enter_context(state_restored(model, (call.args, call.kwargs)))
        stack.enter_context(torch.enable_grad())
        recorder = StepRecorder(
            stack.enter_context(memory_gauge(device)),
            library_bytes + _constant_memory_bytes(model, call),
            {id(s.module) for s in measured_submodules},
            measure_options,
            is_sharded(model),
            limit_bytes,
            growth_bytes,
        )
        if recorder.is_sharded:
            recorder.accumulating_parameters = stack.enter_context(
                inside_model_forward(model, call.args, call.kwargs)
            )
        limited = [] if limit_bytes is None else _leaf_modules(model)
        forwards = {module: recorder.limited_forward(module) for module in limited}
        forwards |= {s.module: recorder.stub_forward(s) for s in blocks}
        with patched_forwards(forwards):
            outputs = [
                run_fsdp_post_forward(model, call.args, model.forward(*call.args, **call.kwargs))
            ]
        if not recorder.calls:
            raise NoBackwardOfBlocks([block.module for block in blocks])
        non_block_leaves = _non_block_leaves(model, blocks, call)
        with nullcontext() if recorder.is_sharded else _tensor_hooks_removed(non_block_leaves):
            recorder.run_backward(non_block_leaves, outputs, differentiate, outputs_dropped)
    return DryRun(
        tuple(recorder.calls),
        tuple(recorder.events),
        frozenset(recorder.externally_held_storages),
        recorder.non_block_bytes,
        recorder.constant_bytes,
        library_bytes,
    )


def _leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that have no submodules, except for modules of TorchScript."""
    modules = (m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule))
    return [module for module in modules if next(module.children(), None) is None]


@contextmanager
def _tensor_hooks_removed(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """Remove the user's hooks of these leaves (`Tensor.register_hook`) within the context: they
    run in the step itself."""
    tables = [t._backward_hooks for t in leaves if t._backward_hooks]
    hooks = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, before in zip(tables, hooks, strict=True):
            table.update(before)


def _non_block_leaves(
    model: nn.Module, blocks: Sequence[Submodule], call: ModelCall
) -> list[torch.Tensor]:
    """Return the leaves of autograd that get a gradient outside of blocks: parameters that no block
    has, and model inputs."""
    block_parameters = {id(p) for p in trainable_parameters(blocks)}
    parameters = [
        p for p in model.parameters() if p.requires_grad and id(p) not in block_parameters
    ]
    return [*parameters, *(t for t in call.leaves if t.requires_grad)]


def _constant_memory_bytes(model: nn.Module, call: ModelCall) -> int:
    """Return the bytes of this process's shards of parameters and buffers, of the batch, and of
    gradients that already exist."""
    tensors = [*model.parameters(), *model.buffers(), *call.leaves, *unreduced_gradients(model)]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    return unique_bytes(map(local_tensor, (*tensors, *sharded_parameters(model))))
