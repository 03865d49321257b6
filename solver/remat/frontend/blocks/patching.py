"""What of a model is another for the length of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def replaced(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """With other forwards of modules."""
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


@contextmanager
def checkpointing_off(model: nn.Module) -> Iterator[None]:
    """Layers of transformers would checkpoint themselves: the plan says what is kept."""
    layers: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True
