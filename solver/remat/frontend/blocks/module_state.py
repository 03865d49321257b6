"""State of modules that their forward changes, such as the statistics of batch norm.

Planning and recomputation run a block more often than the user's step does: its buffers, attributes
and random number generators are restored afterwards.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat.frontend.blocks.patching import layer_checkpointing_disabled
from remat.frontend.capture.model.checkpointing import checkpointing_disabled, checkpointing_enabled
from remat.frontend.common.pytree import tensors_in


class BufferSnapshot:
    """A copy of a module's buffers, to detect and to undo changes."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [(m._buffers, dict(m._buffers)) for m in module.modules()]
        self._copies = [(b, b.detach().clone()) for b in module.buffers()]

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
) -> Any:
    """Call the module's forward under `torch.utils.checkpoint`, which saves only its inputs.

    The recomputation leaves the buffers unchanged, so that batch norm counts a batch once. The
    module's own checkpointing is off, in the recomputation too: layers of Transformers decide
    whether to checkpoint each time they run.
    """

    versions = [(t, t._version) for t in tensors_in((args, kwargs)) if not t.is_inference()]

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
        return nullcontext(), _RecomputeContext(module)

    with checkpointing_enabled():
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _RecomputeContext(AbstractContextManager[None]):
    """Reusable context of a recomputation: buffers are restored, and layers do not checkpoint."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.callback(BufferSnapshot(self._module).restore)
        self._stack.enter_context(layer_checkpointing_disabled(self._module))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _is_modified(pair: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    """True if a dict has other keys or other objects than its copy."""
    current, copy = pair
    return current.keys() != copy.keys() or any(current[k] is not copy[k] for k in current)


class AttributeSnapshot:
    """A copy of the numbers, tensors and generators in the attributes of a module and its
    submodules."""

    def __init__(self, module: nn.Module) -> None:
        tables = [m.__dict__ for m in module.modules()]
        self._values = [
            (table, name, value)
            for table in tables
            for name, value in table.items()
            if isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
        ]
        tensors = [value for _, _, value in self._values if isinstance(value, torch.Tensor)]
        self._copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
        generators = {
            id(g): g for t in tables for g in t.values() if isinstance(g, torch.Generator)
        }
        self._states = [(generator, generator.get_state()) for generator in generators.values()]

    def restore(self) -> None:
        """Restore the attributes, the elements of tensors and the states of generators."""
        for table, name, value in self._values:
            if table.get(name) is not value:
                table[name] = value
        for tensor, copy in self._copies:
            if not torch.equal(tensor, copy):
                tensor.detach().copy_(copy)
        for generator, state in self._states:
            generator.set_state(state)


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
def python_state_restored(model: nn.Module) -> Iterator[None]:
    """Restore the model's attributes and the RNG states of Python and NumPy after this context."""
    attributes = AttributeSnapshot(model)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        attributes.restore()
        random.setstate(python_state)
        np.random.set_state(numpy_state)
