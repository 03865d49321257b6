"""`annotated_code`: a program as Python to read, each line with what it costs.

It parses, but is not meant to be run: `remat.lower` makes the module that runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from remat.documents.arguments import Argument, Literal, Ref
from remat.documents.program import Program, Statement
from remat.documents.trace import Trace
from remat.graph import Graph
from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.view.drawing.text import plain

_COLUMN = 76
"""Where comments begin, if the code leaves room."""

_WIDTH = 100


def annotated_code(
    program: Program, plan: PlanData | None = None, trace: Trace | None = None
) -> str:
    """Two functions, `forward` and `backward`; every line ends in a comment.

    The comment has the module path, whether the backward pass finds the result kept or it is a
    recomputation and, with the `plan` that the program was rewritten from, or its `trace`, the
    bytes of the output, the time, and which of how many runs it is. What does not fit together (a
    plan of another program) is left out. Long calls go on below their first line.
    """
    statements = [*program.forward, *program.backward]
    graph = plan.graph if plan is not None else _graph(trace)
    views = _views(trace)
    notes = _notes(statements, graph, views)
    if graph is not None and plan is not None and not _fits(notes, plan):
        graph, notes = None, [None] * len(statements)
    times = Counter(notes)
    seen = Counter[int]()
    kept = frozenset(program.saved)
    rows: list[list[str]] = []
    for statement, op in zip(statements, notes, strict=True):
        words = [plain(statement.module)] if statement.module else []
        if graph is not None and op is not None:
            operation = graph.operations[op]
            size = sum(graph.values[v].size_bytes for v in operation.outputs)
            words += [format_bytes(size), format_seconds(operation.cost_s)]
            seen[op] += 1
        if op is None and any(_original(bound.name, views) in views for bound in statement.results):
            words.append("view")
        if statement.rerun:
            words.append(
                "recomputed" if op is None else f"recomputed, run {seen[op]} of {times[op]}"
            )
        elif op is not None and times[op] > 1:
            words.append(f"run 1 of {times[op]}")
        if any(bound.name in kept for bound in statement.results):
            words.append("kept")
        if statement.random:
            verb = "saves" if statement.random == "save" else "replays"
            words.append(f"{verb} {plain(statement.state)}")
        rows.append(_lines(statement, ", ".join(words)))
    forward = rows[: len(program.forward)]
    backward = rows[len(program.forward) :]
    kinds = {p.name: p.kind for p in program.placeholders}
    outputs = [output.name for output in program.outputs]
    passed = [*program.saved, *program.states]
    tangents = [output.tangent for output in program.outputs if output.tangent]
    peak = format_bytes(program.predicted_peak_bytes)
    return "\n".join(
        [
            f"# {plain(program.model) or 'program'} on {plain(program.device)}, peak {peak}; "
            "to be read, not run",
            "",
            "",
            *_signature("forward", [name for name, kind in kinds.items() if kind != "tangent"]),
            *(line for row in forward for line in row),
            *_return("outputs", outputs),
            *_return("saved", passed),
            "    return outputs, saved",
            "",
            "",
            *_signature("backward", list(dict.fromkeys((*passed, *tangents)))),
            *(line for row in backward for line in row),
            *_return("gradients", [gradient.name for gradient in program.gradients]),
            "    return gradients",
            "",
        ]
    )


def _graph(trace: Trace | None) -> Graph | None:
    return trace.graph() if trace is not None and trace.measured else None


def _views(trace: Trace | None) -> frozenset[str]:
    """Names of the tensors that views make, as far as there is a trace to tell."""
    if trace is None:
        return frozenset()
    return frozenset(r.name for node in trace.nodes if node.view for r in node.results)


def _notes(
    statements: Sequence[Statement], graph: Graph | None, views: frozenset[str]
) -> list[int | None]:
    """The operation of each statement, where it can be told from the names that it binds."""
    if graph is None:
        return [None] * len(statements)
    known: dict[str, int] = {}
    for op, operation in enumerate(graph.operations):
        known[operation.name] = op
        known.update((graph.values[v].name, op) for v in operation.outputs)
    found: list[int | None] = []
    for statement in statements:
        names = [_original(bound.name, known) for bound in statement.results]
        if any(name in views for name in names):
            found.append(None)
        else:
            found.append(next((known[name] for name in names if name in known), None))
    return found


def _original(name: str, known: Container[str]) -> str:
    """The tensor of a variable: later copies are called `name__2`, `name__3`, ..."""
    head, _, copy = name.rpartition("__")
    return head if name not in known and head and copy.isdigit() else name


def _fits(notes: list[int | None], plan: PlanData) -> bool:
    """Whether the operations that are told come in the order of the plan's runs."""
    runs = iter(plan.schedule.runs)
    return all(op in runs for op in notes if op is not None)


def _parts(statement: Statement) -> tuple[str, list[str], str]:
    """What stands before the arguments, the arguments, and what stands after them."""
    arguments = [_argument(item) for item in statement.args]
    arguments += [f"{key}={_argument(item)}" for key, item in statement.kwargs.items()]
    bound = {b.position: b.name for b in statement.results}
    if not bound:
        return f"{statement.target}(", arguments, ")"
    if len(bound) == 1:
        position, name = next(iter(bound.items()))
        tail = f")[{position}]" if position >= 0 else ")"
        return f"{name} = {statement.target}(", arguments, tail
    names = [bound.get(position, "_") for position in range(max(bound) + 1)]
    return f"{', '.join(names)}, *_ = {statement.target}(", arguments, ")"


def _argument(argument: Argument) -> str:
    match argument:
        case Ref(name):
            return name
        case Literal("device", text):
            return f"torch.device({text!r})"
        case Literal(kind, text):
            return f"torch.{text}" if text.isidentifier() else f"torch.{kind}({text!r})"
        case tuple():
            inside = ", ".join(_argument(item) for item in argument)
            return f"({inside},)" if len(argument) == 1 else f"({inside})"
        case float() if argument != argument or abs(argument) == float("inf"):
            return f"float({str(argument)!r})"
        case str():
            return ascii(argument)
        case _:
            return repr(argument)


def _lines(statement: Statement, comment: str) -> list[str]:
    """A statement: in one line if its comment still begins where all do, else in several."""
    head, arguments, tail = _parts(statement)
    lines = [f"    {head}{', '.join(arguments)}{tail}"]
    if len(lines[0]) > _COLUMN and arguments:
        lines = _rows(f"    {head}", arguments, tail, indent="    ")
    if comment:
        lines[0] = f"{lines[0]:<{_COLUMN}}  # {comment}"
    return lines


def _signature(name: str, parameters: list[str]) -> list[str]:
    return _wrapped(f"def {name}(", parameters, "):", indent="")


def _return(name: str, values: list[str]) -> list[str]:
    return _wrapped(f"    {name} = [", values, "]", indent="    ")


def _wrapped(head: str, names: list[str], tail: str, indent: str) -> list[str]:
    """Names in lines of at most a hundred characters where they do not fit into one."""
    whole = f"{head}{', '.join(names)}{tail}"
    return [whole] if len(whole) <= _WIDTH else _rows(head, names, tail, indent)


def _rows(head: str, names: list[str], tail: str, indent: str) -> list[str]:
    lines = [head]
    row = f"{indent}    "
    for name in names:
        if len(row) + len(name) + 1 > _WIDTH:
            lines.append(row.rstrip())
            row = f"{indent}    "
        row += f"{name}, "
    return [*lines, row.rstrip(), f"{indent}{tail}"]
