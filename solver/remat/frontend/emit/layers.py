"""The layers of Transformers' models that would checkpoint themselves if they were asked to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from remat.frontend.blocks.discovery import Site

_FUNC, _FLAG = "_gradient_checkpointing_func", "gradient_checkpointing"


def layers_of(model: nn.Module) -> list[Site]:
    """The outermost of them."""
    found: list[Site] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{other.path}.") for other in found)
        kinds = {cls.__name__ for cls in type(module).__mro__}
        if "GradientCheckpointingLayer" in kinds and not inside:
            found.append(Site(path, module))
    return found


class CalledToCheckpoint:
    """The model as it is when it checkpoints (without a cache of keys, say), but for the
    checkpoints themselves; until `undo`."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (m, {n: m.__dict__[n] for n in (_FLAG, _FUNC) if n in m.__dict__})
            for m in model.modules()
            if hasattr(m, _FLAG)
        ]
        for module, _ in self._before:
            module.__dict__ |= {_FLAG: True, _FUNC: _called}

    def undo(self) -> None:
        """The model as it was."""
        for module, kept in self._before:
            for name in (_FLAG, _FUNC):
                module.__dict__.pop(name, None)
            module.__dict__ |= kept
        self._before.clear()


@contextmanager
def called_to_checkpoint(model: nn.Module) -> Iterator[None]:
    """For a while."""
    state = CalledToCheckpoint(model)
    try:
        yield
    finally:
        state.undo()


def module_of(function: Callable[..., Any]) -> nn.Module | None:
    """The layer that calls its `gradient_checkpointing_func` with this function: its forward, or
    that with some arguments (Transformers 4 binds the layer, Transformers 5 passes it)."""
    given: tuple[Any, ...] = getattr(function, "args", ())
    inner = getattr(function, "func", function)
    found = getattr(inner, "__self__", given[0] if given else None)
    return found if isinstance(found, nn.Module) else None


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("use_reentrant", None)
    return function(*args, **kwargs)
