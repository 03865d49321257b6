"""Checks of a `Program` that offloads: what a copy reads or writes is not touched before it ends.

A copy to the host reads a tensor from `offload` on, until `release` returns. A copy to the device
writes a buffer from `reload` on, until `arrive` returns. So `release` needs the very tensor that
`offload` read, nothing writes over it in between, and nothing but `arrive` reads a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from remat.documents.arguments import Ref
from remat.documents.targets import (
    ARRIVE_TARGET,
    OFFLOAD_TARGET,
    OVERWRITING_TARGETS,
    RELEASE_TARGET,
    RELOAD_TARGET,
)

if TYPE_CHECKING:
    from remat.documents.program import Program, Statement


def check_copies(program: Program) -> None:
    """Raise ValueError unless every copy has ended before its tensors are freed, read or written
    over."""
    sent: dict[str, str] = {}  # the tensor of each handle, until it is released
    stored: set[str] = set()
    buffers: set[str] = set()
    for statement in (*program.forward, *program.backward):
        operands = statement.operand_names
        if statement.target != ARRIVE_TARGET and not buffers.isdisjoint(operands):
            raise ValueError(f"{statement.target} reads a buffer before its copy has ended")
        if written := set(_written_over(statement)) & set(sent.values()):
            raise ValueError(
                f"{statement.target} writes over {min(written)}, which is copied to the host"
            )
        results = [binding.name for binding in statement.results]
        if statement.target == OFFLOAD_TARGET:
            if len(operands) != 1 or len(results) != 1:
                raise ValueError("an offload without a handle is never released")
            sent[results[0]] = operands[0]
        elif statement.target == RELEASE_TARGET:
            if len(operands) != 2 or sent.pop(operands[0], None) != operands[1]:
                raise ValueError("a release needs a handle and the tensor that was offloaded")
            stored.update(results)
        elif statement.target == RELOAD_TARGET:
            if len(operands) != 1 or operands[0] not in stored:
                raise ValueError("a reload needs the handle of a copy that has ended")
            buffers.update(results)
        elif statement.target == ARRIVE_TARGET:
            if len(operands) != 1 or operands[0] not in buffers:
                raise ValueError("an arrival needs the buffer of one reload")
            buffers.discard(operands[0])
    if sent:
        raise ValueError(f"{min(sent.values())} is offloaded and never released")
    if buffers:
        raise ValueError(f"{min(buffers)} is reloaded and never arrives")


def _written_over(statement: Statement) -> Iterator[str]:
    """Yield the variables that a statement writes over."""
    if statement.overwrites:
        yield statement.overwrites
    match statement.args:
        case (Ref(name), *_) if statement.target in OVERWRITING_TARGETS:
            yield name
