"""State that a forward changes, such as the statistics of batch norm, counters and lists.

Planning and recomputation run a block more often than the user's step does: its tensors, attributes
and random number generators are restored afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat.frontend.blocks.fsdp2 import gathered_storages, is_dtensor
from remat.frontend.blocks.patching import layer_checkpointing_disabled
from remat.frontend.blocks.write_journal import WriteJournal
from remat.frontend.capture.model.checkpointing import checkpointing_disabled, checkpointing_enabled
from remat.frontend.capture.model.hooks import hooks_inside
from remat.frontend.capture.model.preserved_state import model_state_preserved
from remat.frontend.capture.model.python_state import PythonState
from remat.frontend.common.pytree import tensors_in


class BufferSnapshot:
    """A copy of a module's buffers, to detect and to undo changes.

    `written` are addresses of storages. If given, it limits the copy to buffers in these storages
    and to buffers that may be running statistics, since the schema of batch norm does not declare
    its writes. So quantized weights are not copied.
    """

    def __init__(self, module: nn.Module, written: Container[int] | None = None) -> None:
        self._tables = [(m._buffers, dict(m._buffers)) for m in module.modules()]
        self._copies = [
            (b, b.detach().clone())
            for b in module.buffers()
            if written is None or _may_be_statistics(b) or _address(b) in written
        ]

    def has_changed(self) -> bool:
        """True if a buffer has other elements, or its name refers to another tensor."""
        return any(map(_is_modified, self._tables)) or not all(
            torch.equal(buffer, copy) for buffer, copy in self._copies
        )

    def restore(self) -> None:
        """Restore the buffers and their elements. Version counters stay: a graph that saved a
        buffer remains valid, because the elements are those of its forward."""
        for table, original in filter(_is_modified, self._tables):
            table.clear()
            table.update(original)
        for buffer, copy in self._copies:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(buffer):
                buffer.copy_(copy)


def run_checkpointed(
    module: nn.Module,
    original_forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    changes_values: bool = True,
) -> Any:
    """Call the module's forward under `torch.utils.checkpoint`, which saves only its inputs.

    The recomputation restores buffers, so that batch norm counts a batch once. It also restores
    Python values; pass `changes_values=False` if the forward changes none. The module's own
    checkpointing is off, in the recomputation too: layers of Transformers decide at each call
    whether to checkpoint.
    """

    versions = [(t, t._version) for t in tensors_in((args, kwargs)) if not t.is_inference()]
    buffer_versions = [(b, b._version) for b in module.buffers() if not b.is_inference()]
    written = {_address(b) for b in module.buffers() if b.is_inference()}

    def forward(*args: Any, **kwargs: Any) -> Any:
        if any(tensor._version != version for tensor, version in versions):
            raise RuntimeError(
                f"an input tensor of this {type(module).__name__} was modified in place after its "
                "forward, and the block is recomputed in the backward: pass a copy of the tensor, "
                "or modify a copy"
            )
        with checkpointing_disabled():
            return original_forward(*args, **kwargs)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _RecomputeContext(module, written, changes_values)

    with checkpointing_enabled():
        result = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    # The recomputation writes into the same buffers as the forward.
    written.update(_address(b) for b, version in buffer_versions if b._version != version)
    return result


class _RecomputeContext(AbstractContextManager[None]):
    """Reusable context of a recomputation: buffers and Python values are restored, and layers do
    not checkpoint."""

    def __init__(self, module: nn.Module, written: Container[int], changes_values: bool) -> None:
        self._module = module
        self._written = written
        self._changes_values = changes_values
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.callback(BufferSnapshot(self._module, self._written).restore)
        if self._changes_values:
            state = PythonState(self._module, hooks=hooks_inside(self._module))
            self._stack.callback(state.restore)
        self._stack.enter_context(layer_checkpointing_disabled(self._module))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _may_be_statistics(buffer: torch.Tensor) -> bool:
    """True if a buffer may be running statistics of batch norm."""
    return is_dtensor(buffer) or (buffer.dtype.is_floating_point and buffer.element_size() > 1)


def _is_modified(pair: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    """True if a dict has other keys or other objects than its copy."""
    current, copy = pair
    return current.keys() != copy.keys() or any(current[k] is not copy[k] for k in current)


def differentiable_attributes(module: nn.Module) -> dict[tuple[int, str, int], torch.Tensor]:
    """Return the tensors that require a gradient in attributes of the module and its submodules.

    If a call leaves such a tensor (an auxiliary loss, say), code outside the block may read it
    later, which a capture of the block would miss.
    """
    return {
        (id(m), name, id(item)): item
        for m in module.modules()
        for name, value in m.__dict__.items()
        if not name.startswith("_")
        for item in (value if isinstance(value, list | tuple) else (value,))
        if isinstance(item, torch.Tensor) and item.requires_grad
    }


@contextmanager
def state_restored(model: nn.Module, arguments: Any = ()) -> Iterator[None]:
    """Restore the state that a run of the model inside this context changes.

    State is: parameters, their gradients, buffers, and other tensors that existed before the
    context; Python values of the model, and containers in `arguments`; RNG states of torch, Python
    and NumPy.
    """
    python_state = PythonState(model, arguments, hooks_inside(model))
    random_state, numpy_state = random.getstate(), np.random.get_state()
    tensors = [*model.parameters(), *model.buffers()]
    memory = [(t, t.detach(), _address(t)) for t in tensors if not is_dtensor(t)]
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = BufferSnapshot(model, ())  # the journal copies the other buffers
    journal = WriteJournal(gathered_storages(model))
    try:
        with model_state_preserved(model), journal:
            yield
    finally:
        for tensor, alias, address in memory:
            if _address(tensor) != address:  # by `tensor.data = ...`
                tensor.data = alias
        journal.restore()
        for parameter, gradient in gradients:
            if parameter.grad is not gradient:  # an autograd function has called backward()
                parameter.grad = gradient
        if buffers.has_changed():
            buffers.restore()
        python_state.restore()
        random.setstate(random_state)
        np.random.set_state(numpy_state)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
