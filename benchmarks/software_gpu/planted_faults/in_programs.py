"""Faults in the program that a plan is rewritten to: order, variables, gradients, buffers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection

from benchmarks.software_gpu.planted_faults.fault import Fault, Plant, changed_program, patched
from remat.documents.arguments import Ref
from remat.documents.program import Program, Statement
from remat.frontend.common import operators
from remat.rewrite import BATCH_NORM, BATCH_NORM_CUDA, BatchNormRecompute

rewrite_module = importlib.import_module("remat.rewrite")  # `remat.rewrite` is the function

IN_PLACE = {
    "aten.silu.default": "aten.silu_.default",
    "aten.mul.Tensor": "aten.mul_.Tensor",
}
"""Operations with a version that overwrites its first argument."""


def faults() -> list[Fault]:
    """Return the faults of this module."""
    return [
        Fault("two halves of a split exchanged", changed_program(_with_exchanged_halves)),
        Fault("RNG states of two dropouts exchanged", changed_program(_with_exchanged_states)),
        Fault("two gradients exchanged", changed_program(_with_exchanged_gradients)),
        Fault("a gradient left out", changed_program(_without_a_gradient)),
        Fault(
            "recomputations all at the start of the backward",
            changed_program(_recomputing_at_start),
        ),
        Fault("an operation of the backward twice in the sum", changed_program(_doubled_sum)),
        Fault(
            "an output written over a live buffer",
            _with_mutations(lambda program: _in_place(program, "backward")),
        ),
        Fault(
            "an output written over a saved tensor",
            _with_mutations(lambda program: _in_place(program, "forward")),
            is_saving=True,
        ),
        Fault(
            "a saved tensor read in place of another",
            changed_program(_with_wrong_saved_tensor),
            is_saving=True,
        ),
        Fault("batch norm statistics updated by recomputations", _updating_statistics()),
    ]


def _changed(program: Program, phase: str, statements: Collection[Statement]) -> Program:
    return program.model_copy(update={phase: tuple(statements)})


def _replaced(program: Program, phase: str, index: int, statement: Statement) -> Program:
    statements = list(getattr(program, phase))
    statements[index] = statement
    return _changed(program, phase, statements)


def _with_exchanged_halves(program: Program) -> Program:
    for index, statement in enumerate(program.backward):
        if statement.target == "aten.split.Tensor" and len(statement.results) == 2:
            first, second = statement.results
            exchanged = (
                first.model_copy(update={"position": second.position}),
                second.model_copy(update={"position": first.position}),
            )
            new = statement.model_copy(update={"results": exchanged})
            return _replaced(program, "backward", index, new)
    return program


def _with_exchanged_states(program: Program) -> Program:
    first, second, *_ = program.rng_states
    exchanged = {first: second, second: first}
    return _changed(
        program,
        "backward",
        [
            s.model_copy(update={"rng_state": exchanged[s.rng_state]}) if s.rng_state else s
            for s in program.backward
        ],
    )


def _with_exchanged_gradients(program: Program) -> Program:
    """Exchange the gradients of the weight and bias of the batch norm."""
    placeholders = {p.target: p.name for p in program.placeholders}
    weight, bias = placeholders["norm.weight"], placeholders["norm.bias"]
    names = {g.placeholder: g.name for g in program.gradients}
    exchanged = {weight: names[bias], bias: names[weight]}
    gradients = (
        g.model_copy(update={"name": exchanged.get(g.placeholder, g.name)})
        for g in program.gradients
    )
    return program.model_copy(update={"gradients": tuple(gradients)})


def _without_a_gradient(program: Program) -> Program:
    return program.model_copy(update={"gradients": program.gradients[1:]})


def _recomputing_at_start(program: Program) -> Program:
    """Move all statements that need no gradient to the start of the backward."""
    dependent = {p.name for p in program.placeholders if p.kind == "tangent"}
    early: list[Statement] = []
    late: list[Statement] = []
    for statement in program.backward:
        is_late = not dependent.isdisjoint(_read_by(statement))
        (late if is_late else early).append(statement)
        if is_late:
            dependent.update(binding.name for binding in statement.results)
    return _changed(program, "backward", [*early, *late])


def _doubled_sum(program: Program) -> Program:
    """Add one of two summed gradients to itself."""
    for index, statement in enumerate(program.backward):
        if statement.target == "aten.add.Tensor" and not statement.recomputation:
            new = statement.model_copy(update={"args": (statement.args[0], statement.args[0])})
            return _replaced(program, "backward", index, new)
    return program


def _read_by(statement: Statement) -> set[str]:
    return {*statement.operand_names}


def _in_place(program: Program, phase: str) -> Program:
    """Let an operation overwrite its first argument, which is read later."""
    statements: tuple[Statement, ...] = getattr(program, phase)
    inputs = {p.name for p in program.placeholders}
    for index, statement in enumerate(statements):
        match statement.args:
            case (Ref(name), *others) if statement.target in IN_PLACE and name not in inputs:
                later = {n for s in statements[index + 1 :] for n in _read_by(s)}
                is_read_later = name in later if phase == "backward" else name in program.saved
                if is_read_later and all(isinstance(o, Ref) for o in others):
                    target = IN_PLACE[statement.target]
                    new = statement.model_copy(update={"target": target})
                    return _replaced(program, phase, index, new)
            case _:
                pass
    return program


def _with_wrong_saved_tensor(program: Program) -> Program:
    """Let the backward of an activation read the input of another one."""
    activations: list[tuple[int, Statement, str]] = []
    for index, statement in enumerate(program.backward):
        match statement.target, statement.args:
            case "aten.silu_backward.default", (_, Ref(name)) if name in program.saved:
                activations.append((index, statement, name))
            case _:
                pass
    if len(activations) < 2:
        return program
    (index, first, _), (_, _, other), *_ = activations
    args = (first.args[0], Ref(other))
    return _replaced(program, "backward", index, first.model_copy(update={"args": args}))


def _with_mutations(change: Callable[[Program], Program]) -> Plant:
    """Return the plant of a program with an operation that mutates its argument, which remat
    refuses to run."""
    return changed_program(change, (operators, "_check_operator_functional", lambda *_: None))


def _updating_statistics() -> Plant:
    """Return the plant of recomputed batch norms that update the running statistics, too."""
    recomputes = {
        BATCH_NORM: BatchNormRecompute("aten._native_batch_norm_legit.default", tuple(range(8)), 3),
        BATCH_NORM_CUDA: BatchNormRecompute(
            "aten._batch_norm_with_update.default", tuple(range(7)), 4
        ),
    }
    return patched(
        (rewrite_module, "BATCH_NORM_RECOMPUTES", recomputes),
        (operators, "_check_operator_functional", lambda *_: None),
    )
