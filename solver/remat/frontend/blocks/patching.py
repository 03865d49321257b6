"""Patches applied to a model for one step: other forwards, gradient checkpointing switched off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from remat.frontend.capture.model.attribute_guards import CHECKPOINTING_FLAG


@contextmanager
def patched_forwards(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the forward of each module that is a key of `forwards` inside this context."""
    originals = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, forward in originals.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


@contextmanager
def layer_checkpointing_disabled(model: nn.Module) -> Iterator[None]:
    """Switch the gradient checkpointing of the layers of Transformers off inside this context: the
    plan decides what is retained."""
    layers: list[Any] = [m for m in model.modules() if getattr(m, CHECKPOINTING_FLAG, False)]
    for layer in layers:
        setattr(layer, CHECKPOINTING_FLAG, False)
    try:
        yield
    finally:
        for layer in layers:
            setattr(layer, CHECKPOINTING_FLAG, True)
