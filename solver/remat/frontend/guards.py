"""What a plan assumed of a call, and a clear word on what differs.

There are no guards in a captured graph: another shape, dtype, autocast mode or training flag would
run silently wrong. A call's `Signature` is compared as a whole, which is cheap; only on a
difference is it taken apart for the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from remat.errors import GuardError
from remat.frontend.surroundings import autocast_modes, training_exceptions
from remat.program import Program
from remat.structure import Structure
from remat.trace import Placeholder


class TensorKey(NamedTuple):
    """What is compared of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device
    requires_grad: bool


class Signature(NamedTuple):
    """Everything that a plan depends on, of one call."""

    structure: Structure
    inputs: tuple[TensorKey, ...]
    parameters: tuple[TensorKey, ...]
    training: bool
    training_exceptions: tuple[str, ...]
    autocast: tuple[str, ...]
    accumulating: bool


def tensor_key(tensor: torch.Tensor) -> TensorKey:
    """Key of a real tensor."""
    return TensorKey(
        tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device, tensor.requires_grad
    )


def signature(
    model: nn.Module,
    structure: Structure,
    leaves: Sequence[torch.Tensor],
) -> Signature:
    """The signature of a call with these inputs, as things are now."""
    parameters = list(model.parameters())
    return Signature(
        structure=structure,
        inputs=tuple(tensor_key(t) for t in leaves),
        parameters=tuple(tensor_key(p) for p in parameters),
        training=model.training,
        training_exceptions=training_exceptions(model),
        autocast=autocast_modes(),
        accumulating=any(p.grad is not None for p in parameters if p.requires_grad),
    )


class Binding:
    """A program's placeholders found in a model: looked up at each call, so that parameters that
    were replaced (`load_state_dict(assign=True)`, `to`) are the ones that run.

    Raises `GuardError` at construction where the model does not fit the program.
    """

    def __init__(self, program: Program, model: nn.Module) -> None:
        self._owners: list[tuple[str, Mapping[str, torch.Tensor | None], str]] = []
        self._inputs: list[tuple[str, int]] = []
        for placeholder in program.placeholders:
            if placeholder.kind == "input":
                self._inputs.append((placeholder.name, int(placeholder.target)))
            elif placeholder.kind in ("parameter", "buffer"):
                self._owners.append(self._find(placeholder, model))

    @staticmethod
    def _find(
        placeholder: Placeholder, model: nn.Module
    ) -> tuple[str, Mapping[str, torch.Tensor | None], str]:
        path, _, name = placeholder.target.rpartition(".")
        try:
            owner = model.get_submodule(path)
        except AttributeError:
            owner = nn.Module()
        table = owner._parameters if placeholder.kind == "parameter" else owner._buffers
        tensor = table.get(name)
        if tensor is None:
            raise GuardError(
                f"the program was made for a model with a {placeholder.kind} "
                f"{placeholder.target!r}; this {type(model).__name__} has none. Trace this model"
            )
        check_tensor(f"{placeholder.kind} {placeholder.target}", tensor, placeholder)
        for alias in placeholder.aliases:
            if model.get_parameter(alias) is not tensor:
                raise GuardError(
                    f"the program was made for a model whose {alias} and {placeholder.target} are "
                    "tied (one tensor); in this model they are not. Tie them, or trace this model"
                )
        return placeholder.name, table, name

    def tensors(self, leaves: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Every placeholder's tensor for a call."""
        found: dict[str, torch.Tensor] = {}
        for placeholder, table, name in self._owners:
            tensor = table.get(name)
            if tensor is None:
                raise GuardError(f"the model's {name} is gone since it was planned; plan it anew")
            found[placeholder] = tensor
        for placeholder, index in self._inputs:
            found[placeholder] = leaves[index]
        return found


def check_tensor(what: str, tensor: torch.Tensor, placeholder: Placeholder) -> None:
    """Raise `GuardError` that says how a tensor differs from what the plan assumed."""
    planned = placeholder.tensor
    differences = [
        f"{field} {found} instead of {expected}"
        for field, found, expected in (
            ("dtype", str(tensor.dtype).removeprefix("torch."), planned.dtype),
            ("shape", tuple(tensor.shape), planned.shape),
            ("stride", tuple(tensor.stride()), planned.stride),
            ("device", str(tensor.device), planned.device),
        )
        if found != expected
    ]
    if placeholder.kind == "parameter" and tensor.requires_grad != placeholder.requires_grad:
        differences.append(
            f"requires_grad {tensor.requires_grad} instead of {placeholder.requires_grad}"
        )
    if differences:
        raise GuardError(
            f"{what} differs from what the plan was made for: {'; '.join(differences)}. "
            "Plan again for it"
        )


def check_call(
    program: Program, structure: Structure, leaves: Sequence[torch.Tensor], model: nn.Module
) -> None:
    """Raise `GuardError` where a call differs from what a program without its model's planner (one
    that was lowered from a file) was made for."""
    environment = program.environment
    if structure != program.inputs:
        raise GuardError(
            "the arguments differ in structure or in a Python value from those that the program "
            "was made for; trace the model with these arguments"
        )
    by_number = {p.target: p for p in program.placeholders if p.kind == "input"}
    for number, leaf in enumerate(leaves):
        placeholder = by_number[str(number)]
        check_tensor(f"input {structure.path_of(number)}", leaf, placeholder)
    if autocast_modes() != environment.autocast:
        raise GuardError(
            f"autocast is {autocast_modes() or 'off'}, the program was made with "
            f"{environment.autocast or 'autocast off'}; casts are part of the program"
        )
    if (model.training, training_exceptions(model)) != (
        environment.training,
        environment.training_exceptions,
    ):
        raise GuardError(
            "the model's training flags differ from those that the program was made with; "
            "call model.train() or model.eval() accordingly, or trace it anew"
        )
