"""`Program`: the rewritten training step as data, ready for `remat.lower(program, model)`.

Two lists of statements without control flow, forward and backward. A variable is freed after the
last statement that reads it, so the order of the statements decides the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from remat.documents.arguments import Args, Kwargs, Ref, referenced_names
from remat.documents.base import Document, DottedPath, Identifier, Record, Target
from remat.documents.names import check_variable
from remat.documents.records import Environment, Gradient, Output, Placeholder, Store
from remat.documents.structure import Structure, check_output_leaves
from remat.documents.targets import (
    ACCUMULATE_TARGET,
    ADD_INTO_TARGET,
    ARRIVE_TARGET,
    COPY_TARGET,
    OFFLOAD_TARGET,
    OVERWRITING_TARGETS,
    RELEASE_TARGET,
    RELOAD_TARGET,
    WRITE_TARGET,
)
from remat.documents.writes import OUT_VARIANTS
from remat.limits.units import format_bytes


class Binding(Record):
    """A variable that is assigned the tensor that a statement returns, or element `position` of its
    tuple."""

    name: Identifier
    position: int = Field(default=-1, ge=-1, le=1_000_000)


class Statement(Record):
    """One call of an operation.

    `rng_state` names the variable with a generator's state: with `rng_action="save"` the statement
    saves the state before it runs, with "replay" it runs under the saved state.
    """

    target: Target
    args: Args = ()
    kwargs: Kwargs = Field(default_factory=dict)
    results: tuple[Binding, ...] = ()
    rng_action: Literal["", "save", "replay"] = ""
    rng_state: str = Field(default="", max_length=200)
    device: str = Field(default="", max_length=40)
    overwrites: str = Field(default="", max_length=200)
    """The name of the first argument if the result is written into its memory (by `out=`, or by
    `remat.write`); no later statement reads this argument. "" if the result has its own memory."""
    module: DottedPath = ""
    recomputation: bool = False
    """True if the same operation ran before in this step."""

    @property
    def operand_names(self) -> tuple[str, ...]:
        """The names of the variables among its arguments."""
        return tuple(referenced_names((self.args, *self.kwargs.values())))


class Program(Document):
    """The training step of a schedule, as two lists of statements.

    `saved` are the forward's variables that the backward reads, `rng_states` the generator states
    that the backward replays; `gradients` name backward variables. `predicted_peak_bytes` is the
    simulator's peak with parameters, buffers, gradients and batch. It counts outputs to the end of
    the backward, or, if they are dropped, until the backward starts.
    """

    FORMAT: ClassVar[str] = "remat.program"
    VERSION: ClassVar[int] = 2

    model: Annotated[DottedPath, Field(max_length=500)] = ""
    device: str = Field(max_length=40)
    placeholders: tuple[Placeholder, ...]
    forward: tuple[Statement, ...]
    backward: tuple[Statement, ...]
    saved: tuple[Identifier, ...]
    rng_states: tuple[Identifier, ...]
    outputs: tuple[Output, ...]
    gradients: tuple[Gradient, ...]
    inputs: Structure
    result: Structure
    stores: tuple[Store, ...] = ()
    environment: Environment
    accumulates_gradients: bool = False
    outputs_dropped: bool = False
    predicted_peak_bytes: int = Field(ge=0)

    def __repr_args__(self) -> Iterator[tuple[str | None, object]]:
        """Yield what `repr` shows of the program."""
        yield "model", self.model
        yield "device", self.device
        yield "forward_statements", len(self.forward)
        yield "backward_statements", len(self.backward)
        yield "saved", len(self.saved)
        yield "predicted_peak", format_bytes(self.predicted_peak_bytes)

    def output_label(self, number: int) -> str:
        """Return text for messages that names an output, such as "the output 'loss'"."""
        for store in self.stores:
            if self.outputs[number].is_stored and number in store.value.leaves():
                place = ".".join(str(step) for step in store.place if step != "")
                return f"the tensor {place!r}"
        return f"the output {self.result.path_of(number)!r}"

    @model_validator(mode="after")
    def _check(self) -> Self:
        kinds = {p.name: p.kind for p in self.placeholders}
        if len(kinds) != len(self.placeholders):
            raise ValueError("two placeholders have the same name")
        _check_input_placeholders(self)
        inputs = {name for name, kind in kinds.items() if kind != "tangent"}
        defined = _check_statements("forward", self.forward, inputs)
        for output in self.outputs:
            if output.name not in defined:
                raise ValueError(f"the output {output.name} is not defined in the forward")
            if output.tangent and kinds.get(output.tangent) != "tangent":
                raise ValueError(f"{output.tangent} is no tangent")
        tangents = [output.tangent for output in self.outputs if output.tangent]
        backward_inputs = (*self.saved, *self.rng_states, *tangents)
        if len(set(backward_inputs)) < len(backward_inputs):
            raise ValueError("a variable is passed to the backward twice")
        saved_states = {s.rng_state for s in self.forward if s.rng_action == "save"}
        for name in (*self.saved, *self.rng_states):
            if name not in defined or kinds.get(name) == "constant":
                raise ValueError(f"the saved {name} is not defined in the forward")
            if (name in saved_states) != (name in self.rng_states):
                raise ValueError(f"{name} is taken for a generator's state, or the reverse")
        constants = {name for name, kind in kinds.items() if kind == "constant"}
        defined = _check_statements("backward", self.backward, {*backward_inputs, *constants})
        for gradient in self.gradients:
            if gradient.placeholder not in kinds or gradient.name not in defined:
                raise ValueError(f"the gradient {gradient.name} is not defined in the backward")
        _check_offload_copies(self)
        _check_accumulation(self, {name for name, kind in kinds.items() if kind == "parameter"})
        check_output_leaves(self.result, [store.value for store in self.stores], len(self.outputs))
        return self


def _check_input_placeholders(program: Program) -> None:
    """Raise ValueError unless each leaf of the arguments has exactly one placeholder."""
    leaves = {str(leaf) for leaf in program.inputs.leaves()}
    inputs = [p.target for p in program.placeholders if p.kind == "input"]
    if set(inputs) != leaves or len(inputs) > len(leaves):
        raise ValueError("the placeholders of inputs are not the arguments' leaves")


def _check_accumulation(program: Program, parameters: set[str]) -> None:
    """Raise ValueError unless each `remat.accumulate` is in the backward of a program that
    accumulates gradients, and has a parameter and a gradient, as lowering requires."""
    if any(s.target == ACCUMULATE_TARGET for s in program.forward):
        raise ValueError(f"{ACCUMULATE_TARGET} is for the backward")
    for statement in program.backward:
        if statement.target != ACCUMULATE_TARGET:
            continue
        match statement.args:
            case (Ref(name), Ref()) if name in parameters and program.accumulates_gradients:
                continue
        raise ValueError(f"{ACCUMULATE_TARGET} needs a parameter and a gradient")


def _may_overwrite(statement: Statement, inputs: set[str]) -> bool:
    """True if the statement's one result may be written over the argument that it names: the first
    one, if it is not among the `inputs` of the phase, and if the operator can do that."""
    match statement.args, statement.results:
        case (Ref(name), *_), ((Binding(position=-1),) | ()):  # none if nothing reads it
            is_temporary = name == statement.overwrites and name not in inputs
            return is_temporary and statement.target in (*OUT_VARIANTS, WRITE_TARGET)
    return False


def _check_statements(phase: str, statements: tuple[Statement, ...], inputs: set[str]) -> set[str]:
    """Return all variables that can be read at the end, `inputs` included. Raises ValueError for a
    variable that is read before it is defined or after it was overwritten, or defined twice."""
    defined = set(inputs)
    overwritten: set[str] = set()

    def define(number: int, name: str) -> None:
        if name in defined:
            raise ValueError(f"{phase} statement {number} defines {name} a second time")
        defined.add(name)

    for number, statement in enumerate(statements):
        used = set(statement.operand_names)
        if statement.rng_action == "replay":
            used.add(statement.rng_state)
        if undefined := sorted(used - defined):
            raise ValueError(
                f"{phase} statement {number} reads {undefined[0]}, which is not defined"
            )
        if lost := sorted(used & overwritten):
            raise ValueError(f"{phase} statement {number} reads {lost[0]} after it was overwritten")
        if statement.overwrites:
            if not _may_overwrite(statement, inputs):
                raise ValueError(
                    f"{phase} statement {number} must not overwrite {statement.overwrites}: only "
                    "an elementwise operation or remat.write may overwrite an argument, namely its "
                    "first one, if a statement of the same phase produced it"
                )
            overwritten.add(statement.overwrites)
        if statement.rng_action == "save":
            define(number, check_variable(statement.rng_state))
        for binding in statement.results:
            define(number, binding.name)
    return defined - overwritten


# -- copies -------------------------------------------------------------------------------------

# A copy to the host reads a tensor from `offload` on, until `release` returns. A copy to the device
# writes a buffer from `reload` on, until `arrive` returns. So `release` needs the very tensor that
# `offload` read, nothing writes over it in between, and nothing but `arrive` reads a buffer.


def _check_offload_copies(program: Program) -> None:
    """Raise ValueError unless every copy to the host or back has ended before its tensors are
    freed, read or written over."""
    sent: dict[str, str] = {}  # the tensor of each handle, until it is released
    stored: set[str] = set()
    buffers: set[str] = set()
    for statement in (*program.forward, *program.backward):
        operands = statement.operand_names
        if statement.target != ARRIVE_TARGET and not buffers.isdisjoint(operands):
            raise ValueError(f"{statement.target} reads a buffer before its copy has ended")
        if written := set(_overwritten_variables(statement)) & set(sent.values()):
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


def _overwritten_variables(statement: Statement) -> Iterator[str]:
    """Yield the variables that a statement writes over."""
    if statement.overwrites:
        yield statement.overwrites
    # Of ATen's operators that write over an argument, lowering accepts only `copy_`.
    targets = (*OVERWRITING_TARGETS, ADD_INTO_TARGET, COPY_TARGET)
    match statement.args:
        case (Ref(name), *_) if statement.target in targets:
            yield name
