"""Blocks that change themselves, as batch norm does: they are not to be run twice for nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat.frontend.blocks.swapped import checkpointing_off


class Buffers:
    """Those of a module with what is in them now."""

    def __init__(self, module: nn.Module) -> None:
        self._kept = [(b, b.detach().clone()) for b in module.buffers()]

    def changed(self) -> bool:
        """Whether other numbers are in them."""
        return not all(torch.equal(own, kept) for own, kept in self._kept)

    def restore(self) -> None:
        """The numbers as they were. Whoever has saved a buffer for a backward need not mind: they
        are those of its forward."""
        for own, kept in self._kept:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(own):
                own.copy_(kept)


def checkpointed(
    module: nn.Module, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The module's forward `own`, saving nothing but its inputs. When it runs again, its buffers
    stay as they are: a batch is counted once. Layers of Transformers look whether to checkpoint
    themselves when they run: not then, either."""

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _unchanged(module)

    return checkpoint(own, *args, use_reentrant=False, context_fn=contexts, **kwargs)


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    kept = Buffers(module)
    try:
        with checkpointing_off(module):
            yield
    finally:
        kept.restore()
