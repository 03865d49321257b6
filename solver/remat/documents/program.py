"""`Program`: the rewritten training step as data, ready for `remat.lower(program, model)`.

Two straight-line lists of statements, forward and backward. A variable dies after the last
statement that reads it, so the order of the statements is the memory plan.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from remat.documents.arguments import Args, Kwargs, Ref, refs
from remat.documents.base import Document, Identifier, Path_, Record, Target, check_variable
from remat.documents.records import Environment, Gradient, Output, Placeholder
from remat.documents.structure import Structure
from remat.documents.trace import ACCUMULATE


class Bound(Record):
    """A variable bound to what a statement returns, or to element `position` of it."""

    name: Identifier
    position: int = Field(default=-1, ge=-1, le=1_000_000)


class Statement(Record):
    """One call. `state` names the variable of a generator's state, which a statement with
    `random="save"` records before it runs and one with "replay" runs under."""

    target: Target
    args: Args = ()
    kwargs: Kwargs = Field(default_factory=dict)
    results: tuple[Bound, ...] = ()
    random: Literal["", "save", "replay"] = ""
    state: str = Field(default="", max_length=200)
    device: str = Field(default="", max_length=40)
    module: Path_ = ""
    rerun: bool = False
    """A recomputation: the same operation ran before."""


class Program(Document):
    """A rewritten step.

    `saved` are the forward's variables that the backward reads, `states` the generator states that
    it replays; `gradients` name backward variables. `predicted_peak_bytes` is what the simulator
    says, parameters, buffers, gradients and batch included; outputs to the end of the backward, or,
    if they are dropped, until it starts.
    """

    FORMAT: ClassVar[str] = "remat.program"
    VERSION: ClassVar[int] = 1

    model: Annotated[Path_, Field(max_length=500)] = ""
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
    outputs_dropped: bool = False
    predicted_peak_bytes: int = Field(ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = {p.name: p.kind for p in self.placeholders}
        if len(kinds) != len(self.placeholders):
            raise ValueError("two placeholders have the same name")
        _check_inputs(self)
        before = {name for name, kind in kinds.items() if kind != "tangent"}
        inside = _check_statements("forward", self.forward, before)
        for output in self.outputs:
            if output.name not in inside:
                raise ValueError(f"the output {output.name} is not defined in the forward")
            if output.tangent and kinds.get(output.tangent) != "tangent":
                raise ValueError(f"{output.tangent} is no tangent")
        tangents = [output.tangent for output in self.outputs if output.tangent]
        passed = (*self.saved, *self.states, *tangents)
        if len(set(passed)) < len(passed):
            raise ValueError("a variable is passed to the backward twice")
        states = {s.state for s in self.forward if s.random == "save"}
        for name in (*self.saved, *self.states):
            if name not in inside or kinds.get(name) == "constant":
                raise ValueError(f"the saved {name} is not defined in the forward")
            if (name in states) != (name in self.states):
                raise ValueError(f"{name} is taken for a generator's state, or the reverse")
        constants = {name for name, kind in kinds.items() if kind == "constant"}
        inside = _check_statements("backward", self.backward, {*passed, *constants})
        for gradient in self.gradients:
            if gradient.placeholder not in kinds or gradient.name not in inside:
                raise ValueError(f"the gradient {gradient.name} is not defined in the backward")
        _check_accumulation(self, {name for name, kind in kinds.items() if kind == "parameter"})
        if sorted(set(self.result.leaves())) != list(range(len(self.outputs))):
            raise ValueError("the result's leaves are not the outputs")
        return self


def _check_inputs(program: Program) -> None:
    leaves = {str(leaf) for leaf in program.inputs.leaves()}
    inputs = [p.target for p in program.placeholders if p.kind == "input"]
    if set(inputs) != leaves or len(inputs) > len(leaves):
        raise ValueError("the placeholders of inputs are not the arguments' leaves")


def _check_accumulation(program: Program, parameters: set[str]) -> None:
    """`remat.accumulate` is known to the lowering, which needs to see its parameter."""
    if any(s.target == ACCUMULATE for s in program.forward):
        raise ValueError(f"{ACCUMULATE} is for the backward")
    for statement in program.backward:
        if statement.target != ACCUMULATE:
            continue
        match statement.args:
            case (Ref(name), Ref()) if name in parameters and program.accumulating:
                continue
        raise ValueError(f"{ACCUMULATE} needs a parameter and a gradient")


def _check_statements(where: str, statements: tuple[Statement, ...], defined: set[str]) -> set[str]:
    known = set(defined)

    def define(number: int, name: str) -> None:
        if name in known:
            raise ValueError(f"{where} statement {number} defines {name} again")
        known.add(name)

    for number, statement in enumerate(statements):
        used = {*refs((statement.args, *statement.kwargs.values()))}
        if statement.random == "replay":
            used.add(statement.state)
        if unknown := sorted(used - known):
            raise ValueError(f"{where} statement {number} reads {unknown[0]}, which is not there")
        if statement.random == "save":
            define(number, check_variable(statement.state))
        for bound in statement.results:
            define(number, bound.name)
    return known
