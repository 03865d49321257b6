"""FSDP2 (`torch.distributed.fsdp.fully_shard`): modules whose parameters are sharded over processes
and gathered while they run.

FSDP2's hooks run around the forward of each module that it has sharded, so also around that of a
planned block. The functions here are for planning, which happens inside the model's own forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from remat.errors import TraceError


def is_sharded(model: nn.Module) -> bool:
    """True if FSDP2 has sharded the model or any of its submodules."""
    return any(_fsdp_state(module) is not None for module in model.modules())


def is_dtensor(tensor: torch.Tensor) -> bool:
    """True if the tensor is a DTensor, which holds one shard of a tensor in each process."""
    return type(tensor).__name__ == "DTensor"


def check_unsharded(model: nn.Module) -> None:
    """Raise `TraceError` if a parameter is a DTensor: a plan of the whole model needs unsharded
    parameters."""
    if any(map(is_dtensor, model.parameters())):
        raise TraceError(
            f"the parameters of this {type(model).__name__} are sharded already, and a plan needs "
            'unsharded ones; after fully_shard (FSDP2), pass scope="blocks", which plans each '
            "block with the parameters that FSDP2 gathers"
        )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a DTensor, and any other tensor unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def sharded_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that FSDP2 has sharded, as shards, also while they are gathered."""
    return [p.sharded_param for group in _fsdp_groups(model) for p in group.fsdp_params]


def gathered_storages(model: nn.Module) -> set[int]:
    """Return the addresses of the storages that FSDP2 all-gathers parameters into."""
    parameters = [p for group in _fsdp_groups(model) for p in group.fsdp_params]
    return {tensor.untyped_storage()._cdata for p in parameters for tensor in p.all_gather_outputs}


def unreduced_gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients that FSDP2 has accumulated without reduction."""
    tensors = [getattr(*place) for place in _unreduced_gradient_attributes(model)]
    return [tensor for tensor in tensors if tensor is not None]


@contextmanager
def inside_model_forward(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[frozenset[int]]:
    """Within the context, a forward and a backward can run inside the forward of a model that FSDP2
    has sharded.

    A backward ends FSDP2's forward state, so its pre-forward runs before this context and again
    after it. Gradients are removed before and restored after this context, also the unreduced
    gradients of earlier micro-batches (`set_requires_gradient_sync(False)`), which the backward
    would reduce. Yields the ids of the parameters, sharded or gathered, that had a `.grad` before.
    """
    places = [(p, "grad") for p in (*sharded_parameters(model), *model.parameters())]
    places += _unreduced_gradient_attributes(model)
    gradients = [(owner, name, getattr(owner, name)) for owner, name in places]
    for owner, name, _ in gradients:
        setattr(owner, name, None)
    _run_fsdp_pre_forward(model, args, kwargs)
    try:
        yield frozenset(
            id(owner) for owner, name, value in gradients if name == "grad" and value is not None
        )
    finally:
        for owner, name in _unreduced_gradient_attributes(
            model
        ):  # also of parameters gathered since
            setattr(owner, name, None)
        for owner, name, gradient in gradients:
            setattr(owner, name, gradient)
        _run_fsdp_pre_forward(model, args, kwargs)


def run_fsdp_post_forward(model: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
    """Run FSDP2's post-forward of the whole model, which registers its backward hooks, and return
    the outputs; return them unchanged if the model itself is not sharded."""
    state = _fsdp_state(model)
    return outputs if state is None else state._post_forward(model, args, outputs)


@contextmanager
def unsharded_parameters(module: nn.Module) -> Iterator[None]:
    """Gather a module's parameters inside this context, on all processes at once.

    Raises `TraceError` if parameters remain sharded: not by a `fully_shard` inside the module.
    """
    sharded: list[Any] = [m for m in module.modules() if _fsdp_state(m) is not None]
    try:
        for submodule in sharded:
            submodule.unshard()
        if any(map(is_dtensor, module.parameters())):
            raise TraceError(
                f"the parameters of this {type(module).__name__} are sharded, and not by a "
                "fully_shard of it or of its submodules; call fully_shard on each block"
            )
        yield
    finally:
        for submodule in sharded:
            submodule.reshard()


def _run_fsdp_pre_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run FSDP2's pre-forward of the whole model, which gathers the parameters outside of blocks;
    do nothing if the model itself is not sharded."""
    if (state := _fsdp_state(model)) is not None:
        state._pre_forward(model, args, kwargs)


def _fsdp_groups(model: nn.Module) -> list[Any]:
    states = [state for m in model.modules() if (state := _fsdp_state(m)) is not None]
    return [group for state in dict.fromkeys(states) for group in _parameter_groups_of_state(state)]


def _unreduced_gradient_attributes(model: nn.Module) -> list[tuple[Any, str]]:
    """Return the attributes in which FSDP2 accumulates unreduced gradients, as pairs of an owner
    and a name: of HSDP's parameter groups, of parameters in another dtype, of gathered ones."""
    places: list[tuple[Any, str]] = []
    for group in _fsdp_groups(model):
        places.append((group, "_partial_reduce_output"))
        for parameter in group.fsdp_params:
            places.append((parameter, "unsharded_accumulated_grad"))
            if hasattr(parameter, "_unsharded_param"):
                places.append((parameter._unsharded_param, "grad"))
    return places


def _fsdp_state(module: nn.Module) -> Any:
    get_state = getattr(module, "_get_fsdp_state", None)
    return None if get_state is None else get_state()


def _parameter_groups_of_state(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.11 has one at most
        group = state._fsdp_param_group
        groups = [] if group is None else [group]
    return list(groups)
