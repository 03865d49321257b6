"""Layers of Transformers' models that have gradient checkpointing built in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from remat.frontend.blocks.discovery import Submodule

_FUNCTION_NAME, _FLAG_NAME = "_gradient_checkpointing_func", "gradient_checkpointing"


def checkpointable_layers(model: nn.Module) -> list[Submodule]:
    """Return the outermost submodules that are a `GradientCheckpointingLayer` of Transformers."""
    layers: list[Submodule] = []
    for path, module in model.named_modules():
        is_nested = any(path.startswith(f"{layer.path}.") for layer in layers)
        class_names = {cls.__name__ for cls in type(module).__mro__}
        if "GradientCheckpointingLayer" in class_names and not is_nested:
            layers.append(Submodule(path, module))
    return layers


class CheckpointingFlags:
    """Switches a model of Transformers to gradient checkpointing, with a function that only calls
    the layer, until `restore`.

    So the model behaves as while checkpointing (without a key-value cache, for example), but saves
    everything.
    """

    def __init__(self, model: nn.Module) -> None:
        names = (_FLAG_NAME, _FUNCTION_NAME)
        self._original = [
            (module, {name: module.__dict__[name] for name in names if name in module.__dict__})
            for module in model.modules()
            if hasattr(module, _FLAG_NAME)
        ]
        for module, _ in self._original:
            module.__dict__ |= {_FLAG_NAME: True, _FUNCTION_NAME: _call_without_checkpoint}

    def restore(self) -> None:
        """Restore the attributes of the model's modules."""
        for module, attributes in self._original:
            for name in (_FLAG_NAME, _FUNCTION_NAME):
                module.__dict__.pop(name, None)
            module.__dict__ |= attributes
        self._original.clear()


@contextmanager
def temporary_checkpointing_flags(model: nn.Module) -> Iterator[None]:
    """Inside this context, run the model with `CheckpointingFlags`."""
    flags = CheckpointingFlags(model)
    try:
        yield
    finally:
        flags.restore()


def checkpointed_layer(function: Callable[..., Any]) -> nn.Module | None:
    """Return the layer that passes `function` to its `gradient_checkpointing_func`; None if no
    module does. Transformers 4 binds the layer's forward, Transformers 5 also its arguments."""
    arguments: tuple[Any, ...] = getattr(function, "args", ())
    inner = getattr(function, "func", function)
    layer = getattr(inner, "__self__", arguments[0] if arguments else None)
    return layer if isinstance(layer, nn.Module) else None


def _call_without_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a layer's function without a checkpoint, in place of `gradient_checkpointing_func`."""
    kwargs.pop("use_reentrant", None)
    return function(*args, **kwargs)
