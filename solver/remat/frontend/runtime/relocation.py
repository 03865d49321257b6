"""A program on the device where its model is."""

from __future__ import annotations

from torch import nn

from remat.documents.program import Program
from remat.errors import GuardError
from remat.passes.relocate import kind_of, relocated_program


def at_home(program: Program, model: nn.Module) -> Program:
    """The program for the GPU that `model` is on, whichever GPU it was made for: "cuda:0" in a
    program is the device of the step, not the first of a machine.

    Raises `GuardError` where the model is on another kind of device, or on several GPUs.
    """
    made_for, kind = program.device, kind_of(program.device)
    places = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    homes = sorted(place for place in places if kind_of(place) == kind)
    if places and not homes:
        found = ", ".join(sorted(places))
        raise GuardError(
            f"the program was made for {made_for}, with the operations that torch runs there, and "
            f"this {type(model).__name__} is on {found}: move it with model.to({kind!r}), or trace "
            f"it for {found}"
        )
    if len(homes) > 1:
        raise GuardError(
            f"the program is for one device, and this {type(model).__name__} is on "
            f"{', '.join(homes)}: put it on one"
        )
    return relocated_program(program, homes[0]) if homes else program
