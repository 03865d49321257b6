"""FSDP2 (`torch.distributed.fsdp.fully_shard`): parameters that are there in parts, and as a whole
while their module runs.

Its hooks run around the forward of each module that it has sharded, so also around that of a block
as it was planned. What is here is for planning, which happens inside of the model's own forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from remat.errors import TraceError


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP2 has any part of it."""
    return any(_state(module) is not None for module in model.modules())


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether it is a part of one that is spread over processes."""
    return type(tensor).__name__ == "DTensor"


def check_whole(model: nn.Module) -> None:
    """Raises `TraceError` where parameters are sharded: a plan of the whole needs them whole."""
    if any(map(is_shard, model.parameters())):
        raise TraceError(
            f"the parameters of this {type(model).__name__} are sharded already, and a plan needs "
            'whole ones; after fully_shard (FSDP2), scope="blocks" plans what it gathers'
        )


def here(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor is in this process."""
    return tensor.to_local() if is_shard(tensor) else tensor  # type: ignore[attr-defined]


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The sharded ones, also of modules that have whole ones in their place now."""
    states = [found for m in model.modules() if (found := _state(m)) is not None]
    groups = [group for state in states for group in _groups(state)]
    return [p.sharded_param for group in groups for p in group.fsdp_params]


@contextmanager
def in_a_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """Within the forward of a model that FSDP2 has sharded, and afterwards still so: a backward
    inside of it ends what a forward begins. Gradients are as before afterwards."""
    own = {id(p): p for p in (*sharded_parameters(model), *model.parameters())}
    before = [(p, p.grad) for p in own.values()]
    for parameter, _ in before:
        parameter.grad = None
    _begin_forward(model, args, kwargs)
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient
        _begin_forward(model, args, kwargs)


def end_forward(model: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
    """What FSDP2 does behind a forward of the whole model: sees to it that its backward is
    noticed."""
    state = _state(model)
    return outputs if state is None else state._post_forward(model, args, outputs)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """With the whole parameters of a module, on all processes at once. Raises `TraceError`."""
    parts: list[Any] = [m for m in module.modules() if _state(m) is not None]
    for part in parts:
        part.unshard()
    try:
        if any(map(is_shard, module.parameters())):
            raise TraceError(
                f"the parameters of this {type(module).__name__} are sharded, and not by a "
                "fully_shard of it or of what is inside; shard each block by itself"
            )
        yield
    finally:
        for part in parts:
            part.reshard()


def _begin_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What FSDP2 does before it: gathers what is outside of blocks."""
    if (state := _state(model)) is not None:
        state._pre_forward(model, args, kwargs)


def _state(module: nn.Module) -> Any:
    find = getattr(module, "_get_fsdp_state", None)
    return None if find is None else find()


def _groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one at most
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    return list(groups)
