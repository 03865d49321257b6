"""`Program`: the rewritten training step as data, ready for `remat.lower(program, model)`.

Two straight-line lists of statements, forward and backward. A variable dies after the last
statement that reads it, so the order of the statements is the memory plan.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from remat.arguments import Args, Kwargs, refs
from remat.documents import Document, Identifier, Path_, Record, Target
from remat.structure import Structure
from remat.trace import Environment, Gradient, Output, Placeholder


class Bound(Record):
    """A variable bound to what a statement returns, or to element `position` of it."""

    name: Identifier
    position: int = -1


class Statement(Record):
    """One call. `state` names the variable of a generator's state, which a statement with
    `random="save"` records before it runs and one with "replay" runs under."""

    target: Target
    args: Args = ()
    kwargs: Kwargs = Field(default_factory=dict)
    results: tuple[Bound, ...] = ()
    random: Literal["", "save", "replay"] = ""
    state: str = ""
    device: str = Field(default="", max_length=40)
    module: Path_ = ""
    rerun: bool = False
    """A recomputation: the same operation ran before."""


class Program(Document):
    """A rewritten step.

    `saved` are the forward's variables that the backward reads, `states` the generator states that
    it replays; `gradients` name backward variables. `predicted_peak_bytes` is what the simulator
    says, parameters, buffers, gradients and batch included.
    """

    FORMAT: ClassVar[str] = "remat.program"
    VERSION: ClassVar[int] = 1

    model: str = Field(default="", max_length=500)
    device: str = Field(max_length=40)
    placeholders: tuple[Placeholder, ...]
    forward: tuple[Statement, ...]
    backward: tuple[Statement, ...]
    saved: tuple[Identifier, ...]
    states: tuple[Identifier, ...]
    outputs: tuple[Output, ...]
    gradients: tuple[Gradient, ...]
    inputs: Structure
    result: Structure
    environment: Environment
    accumulating: bool = False
    predicted_peak_bytes: int = Field(ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        known = {p.name: p for p in self.placeholders}
        if len(known) != len(self.placeholders):
            raise ValueError("two placeholders have the same name")
        before = {name for name, p in known.items() if p.kind != "tangent"}
        inside = _check_statements("forward", self.forward, before)
        for output in self.outputs:
            if output.name not in inside:
                raise ValueError(f"the output {output.name} is not defined in the forward")
        for name in (*self.saved, *self.states):
            if name not in inside:
                raise ValueError(f"the saved {name} is not defined in the forward")
        start = {*self.saved, *self.states}
        start |= {n for n, p in known.items() if p.kind in ("tangent", "constant")}
        if self.accumulating:
            start |= {n for n, p in known.items() if p.kind == "parameter"}
        inside = _check_statements("backward", self.backward, start)
        for gradient in self.gradients:
            if gradient.placeholder not in known or gradient.name not in inside:
                raise ValueError(f"the gradient {gradient.name} is not defined in the backward")
        for output in self.outputs:
            if output.tangent and getattr(known.get(output.tangent), "kind", "") != "tangent":
                raise ValueError(f"{output.tangent} is no tangent")
        if sorted(set(self.result.leaves())) != list(range(len(self.outputs))):
            raise ValueError("the result's leaves are not the outputs")
        return self


def _check_statements(
    where: str, statements: tuple[Statement, ...], defined: set[str]
) -> set[str]:
    known = set(defined)
    for number, statement in enumerate(statements):
        used = {*refs((statement.args, *statement.kwargs.values()))}
        if statement.random == "replay":
            used.add(statement.state)
        if unknown := sorted(used - known):
            raise ValueError(f"{where} statement {number} reads {unknown[0]}, which is not there")
        if statement.random == "save":
            known.add(statement.state)
        for bound in statement.results:
            if bound.name in known:
                raise ValueError(f"{where} statement {number} defines {bound.name} again")
            known.add(bound.name)
    return known
