"""Blocks that change themselves, as batch norm does: they are not to be run twice for nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat.frontend.blocks.patching import checkpointing_off
from remat.frontend.capture.model.checkpoints import checkpointing_disabled, checkpointing_enabled
from remat.frontend.common.pytree import tensors_in


class Buffers:
    """Those of a module with what is in them now."""

    def __init__(self, module: nn.Module) -> None:
        self._tables = [(m._buffers, dict(m._buffers)) for m in module.modules()]
        self._kept = [(b, b.detach().clone()) for b in module.buffers()]

    def changed(self) -> bool:
        """Whether other numbers are in them, or others have their names."""
        return any(map(_differ, self._tables)) or not all(
            torch.equal(own, kept) for own, kept in self._kept
        )

    def restore(self) -> None:
        """The numbers as they were. Whoever has saved a buffer for a backward need not mind: they
        are those of its forward."""
        for table, before in filter(_differ, self._tables):
            table.clear()
            table.update(before)
        for own, kept in self._kept:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(own):
                own.copy_(kept)


def checkpointed(
    module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The module's forward `own`, saving nothing but its inputs. When it runs again, its buffers
    stay as they are: a batch is counted once. What it checkpoints itself it does not then, either:
    layers of Transformers look whether to when they run."""

    given = [(t, t._version) for t in tensors_in((args, kwargs)) if not t.is_inference()]

    def plain(*args: Any, **kwargs: Any) -> Any:
        if any(tensor._version != version for tensor, version in given):
            raise RuntimeError(
                f"a tensor that this {type(module).__name__} was given was changed in place since, "
                "and the block runs again in the backward: give it a copy, or change a copy"
            )
        with checkpointing_disabled():
            return own(*args, **kwargs)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _Unchanged(module)

    with checkpointing_enabled():
        return checkpoint(plain, *args, use_reentrant=False, context_fn=contexts, **kwargs)


class _Unchanged(AbstractContextManager[None]):
    """Within it, each time: afterwards the buffers are as before."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._stack = ExitStack()

    def __enter__(self) -> None:
        self._stack.callback(Buffers(self._module).restore)
        self._stack.enter_context(checkpointing_off(self._module))

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _differ(pair: tuple[dict[str, Any], dict[str, Any]]) -> bool:
    now, before = pair
    return now.keys() != before.keys() or any(now[name] is not before[name] for name in now)


class Attributes:
    """What a module and those inside of it have in attributes: numbers, tensors, generators."""

    def __init__(self, module: nn.Module) -> None:
        tables = [m.__dict__ for m in module.modules()]
        self._numbers = [
            (table, name, item)
            for table in tables
            for name, item in table.items()
            if isinstance(item, int | float | torch.Tensor) and not isinstance(item, bool)
        ]
        tensors = [item for _, _, item in self._numbers if isinstance(item, torch.Tensor)]
        self._kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
        generators = {
            id(g): g for t in tables for g in t.values() if isinstance(g, torch.Generator)
        }
        self._states = [(generator, generator.get_state()) for generator in generators.values()]

    def restore(self) -> None:
        """What was there."""
        for table, name, item in self._numbers:
            if table.get(name) is not item:
                table[name] = item
        for own, kept in self._kept:
            if not torch.equal(own, kept):
                own.detach().copy_(kept)
        for generator, state in self._states:
            generator.set_state(state)


def tensors_left(module: nn.Module) -> dict[tuple[int, str, int], torch.Tensor]:
    """What it and those inside of it have in attributes that has a gradient: whoever reads that
    later reads what this call made, which a capture would not make again."""
    return {
        (id(m), name, id(item)): item
        for m in module.modules()
        for name, held in m.__dict__.items()
        if not name.startswith("_")
        for item in (held if isinstance(held, list | tuple) else (held,))
        if isinstance(item, torch.Tensor) and item.requires_grad
    }


@contextmanager
def python_restored(model: nn.Module) -> Iterator[None]:
    """Numbers in its attributes, and whatever draws random ones in Python, are as before then."""
    attributes = Attributes(model)
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        attributes.restore()
        random.setstate(drawn)
        np.random.set_state(drawn_by_numpy)
