"""The fields of the documents from the models that check them, and an example of each, generated at
every build: what the page says is what the library does.

    {fields} remat.documents.trace:Trace  tables of a record's fields, and of those within it
    {example} plan                        such a document of a small model, shortened
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

import torch
from docutils import nodes
from pydantic import BaseModel
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective
from tables import Cell, inline, table

import remat
from remat.documents.plan import PlanDocument
from remat.plan import Plan
from remat.service.wire import SolveRequest, SolveResult

_LONG = 3
"""Items of a list, and of an object with names as keys, that an example shows."""


class Fields(SphinxDirective):
    """`{fields} module:Class`, with `:skip:` for records that are described elsewhere."""

    required_arguments = 1
    option_spec: ClassVar = {"skip": str.split}

    def run(self) -> list[nodes.Node]:
        """Return a table of the fields of each record, the outermost first."""
        module, _, name = self.arguments[0].partition(":")
        skip = set(self.options.get("skip", ()))
        content: list[nodes.Node] = []
        for number, kind in enumerate(
            _records(getattr(import_module(module), name), skip)
        ):
            if number:
                content.append(nodes.rubric(kind.__name__, kind.__name__))
            content += _paragraphs(kind)
            content.append(
                table(("field", "what it is", "default"), list(_fields(kind)))
            )
        return content


class Example(SphinxDirective):
    """The directive `{example} NAME`: a shortened document of a small model."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the document as a block of shortened JSON."""
        shown = _pretty(_shortened(json.loads(_EXAMPLES[self.arguments[0]]())))
        return [nodes.literal_block(shown, shown, language="text")]


def _records(kind: type[BaseModel], skip: set[str]) -> list[type[BaseModel]]:
    """Return a record's class and, once each, the classes of records in its fields."""
    records: list[type[BaseModel]] = []

    def visit(kind: type[BaseModel]) -> None:
        if kind in records or kind.__name__ in skip:
            return
        records.append(kind)
        for field in kind.model_fields.values():
            for part in _parts(field.annotation):
                if isinstance(part, type) and issubclass(part, BaseModel):
                    visit(part)

    visit(kind)
    return records


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in getattr(annotation, "__args__", ()):
        yield from _parts(part)


def _fields(kind: type[BaseModel]) -> Iterator[list[Cell]]:
    schema = kind.model_json_schema()
    schema = schema.get("$defs", {}).get(
        kind.__name__, schema
    )  # one that refers to itself
    descriptions = {
        name: " ".join(lines).strip()
        for base in reversed(kind.__mro__)
        if issubclass(base, BaseModel) and base is not BaseModel
        for (owner, name), lines in _comments(base.__module__).items()
        if owner == base.__name__
    }
    for name, part in schema["properties"].items():
        field = kind.model_fields[name]
        required = field.is_required()
        default = (
            "" if required else json.dumps(part.get("default"), ensure_ascii=False)
        )
        if field.default_factory is not None:
            default = json.dumps(
                field.get_default(call_default_factory=True), default=_plain
            )
        if name in ("format", "version"):
            default = f'"{kind.FORMAT}"' if name == "format" else str(kind.VERSION)  # type: ignore[attr-defined]
        words = f"{_type(part)}{_limits(part)}" + (
            f". {descriptions[name]}" if descriptions.get(name) else ""
        )
        yield [
            [nodes.literal(name, name)],
            inline(words),
            [nodes.literal(default, default)] if default else "needed",
        ]


def _plain(value: object) -> object:
    """Return a default that is no JSON value (a record or a strategy) as a dictionary."""
    return {} if isinstance(value, BaseModel) else {"name": value.name}  # type: ignore[attr-defined]


@cache
def _comments(module: str) -> dict[tuple[str, str], list[str]]:
    """Return the docstrings of a module's class attributes."""
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    return analyzer.attr_docs


def _paragraphs(kind: type[BaseModel]) -> list[nodes.Node]:
    text = (kind.__doc__ or "").strip()
    return [
        nodes.paragraph("", "", *inline(" ".join(part.split())))
        for part in text.split("\n\n")
    ]


def _type(part: dict[str, Any]) -> str:
    """Describe a type of JSON Schema in words."""
    if "$ref" in part:
        return f"`{part['$ref'].rpartition('/')[2]}`"
    if "allOf" in part:
        return _type(part["allOf"][0])
    if "anyOf" in part or "oneOf" in part:
        return " or ".join(
            dict.fromkeys(map(_type, part.get("anyOf") or part["oneOf"]))
        )
    if "enum" in part:
        return "one of " + ", ".join(f'`"{value}"`' for value in part["enum"])
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    kind = part.get(
        "type", "arguments"
    )  # which know no schema: the page tells their form
    if kind == "array":
        return f"list of {_type(part.get('items', {}))}"
    if kind == "object" and isinstance(part.get("additionalProperties"), dict):
        return f"object with values: {_type(part['additionalProperties'])}"
    return str(kind)


def _limits(part: dict[str, Any]) -> str:
    words = (
        ("minimum", "at least {}"), ("exclusiveMinimum", "above {}"), ("maximum", "at most {}"),
        ("exclusiveMaximum", "below {}"), ("minItems", "at least {} items"),
        ("maxItems", "at most {} items"), ("maxLength", "up to {} characters"),
    )  # fmt: skip
    descriptions = [
        text.format(f"{part[key]:,}") for key, text in words if key in part
    ]
    return ", " + ", ".join(descriptions) if descriptions else ""


# -- examples ---------------------------------------------------------------------------------


@cache
def _made() -> tuple[remat.Trace, Plan, remat.Program]:
    torch.manual_seed(0)
    layers = [
        part for _ in range(3) for part in (torch.nn.Linear(8, 8), torch.nn.Tanh())
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 1), torch.nn.Flatten(0))
    trace = remat.trace(model, (torch.randn(256, 8),))
    trace = remat.measure(trace, remat.Roofline("h200"))
    plan = remat.solve(trace, "90%")
    return trace, plan, remat.rewrite(trace, plan.schedule)


def _request() -> str:
    request = SolveRequest(trace=_made()[0], budget="90%")
    return request.model_dump_json(exclude_none=True)


def _answer() -> str:
    trace, plan, program = _made()
    answer = SolveResult(
        plan=PlanDocument.of(plan), program=program, costs=trace.cost_source
    )
    return answer.model_dump_json()


_EXAMPLES: dict[str, Callable[[], str]] = {
    "trace": lambda: _made()[0].to_json(),
    "plan": lambda: _made()[1].to_json(),
    "program": lambda: _made()[2].to_json(),
    "request": _request,
    "answer": _answer,
}


def _shortened(data: Any, depth: int = 0) -> Any:
    if isinstance(data, list):
        items = [
            _shortened(item, depth + 1)
            for item in data[: 1 if _is_rich(data) else _LONG]
        ]
        more = len(data) - len(items)
        return [*items, _More(more)] if more else items
    if isinstance(data, dict):
        return {key: _shortened(value, depth + 1) for key, value in data.items()}
    return data


def _is_rich(data: list[Any]) -> bool:
    return isinstance(data[0], dict) if data else False


class _More(int):
    """The number of omitted items of a list."""


def _pretty(data: Any, indent: str = "") -> str:
    """Format JSON with small parts on one line, and with the number of omitted items."""
    flat = _flat(data)
    if len(indent) + len(flat) <= 88 or not isinstance(data, (list, dict)):
        return flat
    inner = indent + "  "
    if isinstance(data, dict):
        parts = [
            f"{json.dumps(key)}: {_pretty(value, inner)}"
            for key, value in data.items()
        ]
        return (
            "{\n" + ",\n".join(inner + part for part in parts) + "\n" + indent + "}"
        )
    parts = [_pretty(item, inner) for item in data]
    return "[\n" + ",\n".join(inner + part for part in parts) + "\n" + indent + "]"


def _flat(data: Any) -> str:
    if isinstance(data, _More):
        return f"... {int(data)} more"
    if isinstance(data, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(k)}: {_flat(v)}" for k, v in data.items())
            + "}"
        )
    if isinstance(data, list):
        return "[" + ", ".join(map(_flat, data)) + "]"
    return json.dumps(data)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives with Sphinx."""
    app.add_directive("fields", Fields)
    app.add_directive("example", Example)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
