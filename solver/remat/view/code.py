"""`annotated_code`: a program as Python code to read, with the bytes and time of each line.

The code parses, but it is not meant to run: `remat.lower` makes the module that runs.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from remat.documents.arguments import Argument, Literal, Ref
from remat.documents.program import Program, Statement
from remat.documents.targets import WRITE_TARGET
from remat.documents.trace import Trace
from remat.documents.writes import OUT_VARIANTS
from remat.graph import Graph, Operation
from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.rewrite import tensor_of_variable
from remat.view.text import plain_text

_COMMENT_COLUMN = 76
"""The column at which comments begin, if the code is short enough."""

_LINE_LENGTH = 100


def annotated_code(
    program: Program, plan: PlanData | None = None, trace: Trace | None = None
) -> str:
    """Return the functions `forward` and `backward` of a program, with a comment on every line.

    The comment has the module path, "saved" if the backward reads the result, and "recomputed" for
    a recomputation. With the `plan` that the program was rewritten from, or its `trace` if that has
    costs, it also has the bytes of the output, the time, and the number of the run. A `plan` of
    another program is ignored. Long calls are wrapped. If consecutive statements belong to several
    pieces, the first piece is shown, and a comment says how many statements follow.
    """
    statements = [*program.forward, *program.backward]
    graph = plan.graph if plan is not None else _graph_with_costs(trace)
    views = _view_names(trace)
    operations = _operations_of_statements(statements, graph, views)
    if graph is not None and plan is not None and not _operations_follow_schedule(operations, plan):
        graph, operations = None, [None] * len(statements)
    run_counts = Counter(operations)
    runs_so_far = Counter[int]()
    saved_names = frozenset(program.saved)
    rows: list[list[str]] = []
    for statement, op in zip(statements, operations, strict=True):
        notes = [plain_text(statement.module)] if statement.module else []
        if graph is not None and op is not None:
            operation = graph.operations[op]
            size = sum(graph.values[v].size_bytes for v in operation.outputs)
            notes += [format_bytes(size), format_seconds(operation.cost_s)]
            runs_so_far[op] += 1
        if op is None and any(
            tensor_of_variable(b.name, views) in views for b in statement.results
        ):
            notes.append("view")
        if statement.recomputation:
            number = "" if op is None else f", run {runs_so_far[op]} of {run_counts[op]}"
            notes.append(f"recomputed{number}")
        elif op is not None and run_counts[op] > 1:
            notes.append(f"run 1 of {run_counts[op]}")
        if any(binding.name in saved_names for binding in statement.results):
            notes.append("saved")
        if statement.rng_action:
            verb = "saves" if statement.rng_action == "save" else "replays"
            notes.append(f"{verb} {plain_text(statement.rng_state)}")
        rows.append(_statement_lines(statement, ", ".join(notes)))
    calls = [
        _AnnotatedCall(
            row, None if op is None or graph is None else graph.operations[op], s.recomputation
        )
        for row, op, s in zip(rows, operations, statements, strict=True)
    ]
    forward = _lines_of_first_pieces(calls[: len(program.forward)])
    backward = _lines_of_first_pieces(calls[len(program.forward) :])
    kinds = {p.name: p.kind for p in program.placeholders}
    outputs = [output.name for output in program.outputs]
    saved = [*program.saved, *program.rng_states]
    tangents = [output.tangent for output in program.outputs if output.tangent]
    peak = format_bytes(program.predicted_peak_bytes)
    return "\n".join(
        [
            f"# {plain_text(program.model) or 'program'} on {plain_text(program.device)}, "
            f"peak {peak}; to be read, not run",
            "",
            "",
            *_signature_lines(
                "forward", [name for name, kind in kinds.items() if kind != "tangent"]
            ),
            *(line for row in forward for line in row),
            *_assignment_lines("outputs", outputs),
            *_assignment_lines("saved", saved),
            "    return outputs, saved",
            "",
            "",
            *_signature_lines("backward", list(dict.fromkeys((*saved, *tangents)))),
            *(line for row in backward for line in row),
            *_assignment_lines("gradients", [gradient.name for gradient in program.gradients]),
            "    return gradients",
            "",
        ]
    )


class _AnnotatedCall(NamedTuple):
    """The lines of a statement, its operation (None for a view, or if the operation is unknown),
    and whether it is a recomputation."""

    lines: list[str]
    operation: Operation | None
    is_recomputation: bool


def _lines_of_first_pieces(calls: Sequence[_AnnotatedCall]) -> list[list[str]]:
    """Return the lines of each statement. Where consecutive statements belong to several pieces, a
    comment replaces all pieces but the first."""
    shown: list[list[str]] = []
    hidden: list[_AnnotatedCall] = []  # statements of later pieces, and views that they may need
    views: list[_AnnotatedCall] = []
    first: int | None = None

    def end_block() -> None:
        if hidden:
            shown.append(_hidden_pieces_comment(hidden))
        shown.extend(view.lines for view in views)
        hidden.clear()
        views.clear()

    for call in calls:
        operation = call.operation
        if operation is None:
            views.append(call)
        elif operation.piece_of and first not in (None, operation.piece):
            hidden.extend([*views, call])
            views.clear()
        else:
            end_block()
            shown.append(call.lines)
            first = operation.piece if operation.piece_of else None
    end_block()
    return shown


def _hidden_pieces_comment(calls: Sequence[_AnnotatedCall]) -> list[str]:
    """Return the comment that replaces these statements: all pieces but the first."""
    operations = [call.operation for call in calls if call.operation is not None]
    names = ", ".join(dict.fromkeys(operation.piece_of for operation in operations))
    pieces = len({operation.piece for operation in operations}) + 1
    recomputations = sum(call.is_recomputation for call in calls if call.operation is not None)
    note = f"; {recomputations} recomputed" if recomputations else ""
    text = f"    # {len(calls)} more statements: {names} x {pieces}{note}"
    return textwrap.wrap(text, _LINE_LENGTH, subsequent_indent="    # ")


def _graph_with_costs(trace: Trace | None) -> Graph | None:
    """Return the graph of a trace; None without a trace, or if it has no costs."""
    return trace.graph() if trace is not None and trace.measured else None


def _view_names(trace: Trace | None) -> frozenset[str]:
    """Return the names of the tensors that are views; none without a trace."""
    if trace is None:
        return frozenset()
    return frozenset(r.name for node in trace.nodes if node.view for r in node.results)


def _operations_of_statements(
    statements: Sequence[Statement], graph: Graph | None, views: frozenset[str]
) -> list[int | None]:
    """Return the index of each statement's operation in the graph, found by the names of its
    results. None for views, for statements whose results have other names, and for all without a
    graph."""
    if graph is None:
        return [None] * len(statements)
    operation_of: dict[str, int] = {}
    for op, operation in enumerate(graph.operations):
        operation_of[operation.name] = op
        operation_of.update((graph.values[v].name, op) for v in operation.outputs)
    operations: list[int | None] = []
    for statement in statements:
        names = [tensor_of_variable(binding.name, operation_of) for binding in statement.results]
        if any(name in views for name in names):
            operations.append(None)
        else:
            operations.append(next((operation_of[n] for n in names if n in operation_of), None))
    return operations


def _operations_follow_schedule(operations: list[int | None], plan: PlanData) -> bool:
    """True if the operations, without the Nones, are a subsequence of the plan's runs."""
    runs = iter(plan.schedule.runs)
    return all(op in runs for op in operations if op is not None)


def _call_code(statement: Statement) -> tuple[str, list[str], str]:
    """Return the code before the arguments of a call, the arguments, and the code after them."""
    arguments = [_argument_code(item) for item in statement.args]
    arguments += [f"{key}={_argument_code(item)}" for key, item in statement.kwargs.items()]
    if statement.overwrites and statement.target == WRITE_TARGET:
        arguments.append("in_place=True")
    elif statement.overwrites:
        arguments.append(f"{OUT_VARIANTS[statement.target].out_name}={statement.overwrites}")
    name_at = {binding.position: binding.name for binding in statement.results}
    if not name_at:
        return f"{statement.target}(", arguments, ")"
    if len(name_at) == 1:
        position, name = next(iter(name_at.items()))
        tail = f")[{position}]" if position >= 0 else ")"
        return f"{name} = {statement.target}(", arguments, tail
    names = [name_at.get(position, "_") for position in range(max(name_at) + 1)]
    return f"{', '.join(names)}, *_ = {statement.target}(", arguments, ")"


def _argument_code(argument: Argument) -> str:
    """Return an argument as Python code."""
    match argument:
        case Ref(name):
            return name
        case Literal("device", text):
            return f"torch.device({text!r})"
        case Literal(kind, text):
            return f"torch.{text}" if text.isidentifier() else f"torch.{kind}({text!r})"
        case tuple():
            items = ", ".join(_argument_code(item) for item in argument)
            return f"({items},)" if len(argument) == 1 else f"({items})"
        case float() if argument != argument or abs(argument) == float("inf"):
            return f"float({str(argument)!r})"
        case str():
            return ascii(argument)
        case _:
            return repr(argument)


def _statement_lines(statement: Statement, comment: str) -> list[str]:
    """Return the code of a statement with its comment: one line if it ends before the comments'
    column or has no arguments, otherwise several."""
    head, arguments, tail = _call_code(statement)
    lines = [f"    {head}{', '.join(arguments)}{tail}"]
    if len(lines[0]) > _COMMENT_COLUMN and arguments:
        lines = _wrap_code_line(f"    {head}", arguments, tail, indent="    ")
    if comment:
        lines[0] = f"{lines[0]:<{_COMMENT_COLUMN}}  # {comment}"
    return lines


def _signature_lines(name: str, parameters: list[str]) -> list[str]:
    """Return the lines of `def name(parameters):`."""
    return _fit_code_lines(f"def {name}(", parameters, "):", indent="")


def _assignment_lines(name: str, values: list[str]) -> list[str]:
    """Return the lines of `name = [values]`."""
    return _fit_code_lines(f"    {name} = [", values, "]", indent="    ")


def _fit_code_lines(head: str, names: list[str], tail: str, indent: str) -> list[str]:
    """Return head, names and tail in one line, or in several if they are too long for one."""
    line = f"{head}{', '.join(names)}{tail}"
    return [line] if len(line) <= _LINE_LENGTH else _wrap_code_line(head, names, tail, indent)


def _wrap_code_line(head: str, names: list[str], tail: str, indent: str) -> list[str]:
    """Return the head, the names in indented lines of up to 100 characters, and the tail."""
    lines = [head]
    line = f"{indent}    "
    for name in names:
        if len(line) + len(name) + 1 > _LINE_LENGTH:
            lines.append(line.rstrip())
            line = f"{indent}    "
        line += f"{name}, "
    return [*lines, line.rstrip(), f"{indent}{tail}"]
