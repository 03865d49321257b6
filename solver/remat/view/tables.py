"""A plan and its graph for other programs: CSV, Graphviz and GraphML."""

from __future__ import annotations

import csv
import io

from remat.graph import Graph
from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.view.drawing.text import plain, shorten

COLUMNS = (
    "index",
    "name",
    "module",
    "phase",
    "runs",
    "first_run",
    "last_run",
    "cost_s",
    "extra_s",
    "output_bytes",
    "workspace_bytes",
    "result",
    "recomputable",
)

_FORMULA = ("=", "+", "-", "@")


def operations_csv(plan: PlanData) -> str:
    """One line an operation, in the graph's order, with the columns `COLUMNS`.

    `cost_s` is one run, `extra_s` all but the first; `result` is 1 where an output is held to the
    end. A name that a spreadsheet would take for a formula has an apostrophe before it.
    """
    graph = plan.graph
    runs: list[list[int]] = [[] for _ in graph.operations]
    for run, op in enumerate(plan.schedule.runs):
        runs[op].append(run)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for op, operation in enumerate(graph.operations):
        writer.writerow(
            (
                op,
                _cell(operation.name),
                _cell(operation.module),
                "backward" if operation.backward else "forward",
                len(runs[op]),
                runs[op][0],
                runs[op][-1],
                operation.cost_s,
                operation.cost_s * (len(runs[op]) - 1),
                sum(graph.values[v].size_bytes for v in operation.outputs),
                operation.workspace_bytes,
                int(any(v in graph.results for v in operation.outputs)),
                int(operation.recomputable),
            )
        )
    return text.getvalue()


def graph_dot(graph: Graph, plan: PlanData | None = None) -> str:
    """Graphviz text: a box an operation, an arrow a value. With a `plan` (of this graph), what it
    runs again is orange and says how often it runs."""
    again = {} if plan is None else plan.schedule.recomputed(graph)
    lines = [
        "digraph remat {",
        '  node [shape=box, style=filled, fillcolor="#e3f1fb", fontname="Helvetica", fontsize=10];',
        '  edge [color="#888888", fontname="Helvetica", fontsize=8];',
    ]
    for op, operation in enumerate(graph.operations):
        size = sum(graph.values[v].size_bytes for v in operation.outputs)
        facts = [f"{format_seconds(operation.cost_s)}, {format_bytes(size)}"]
        if operation.module:
            facts.insert(0, operation.module)
        attributes = ""
        if op in again:
            facts.append(f"runs {again[op] + 1} times")
            attributes = ', fillcolor="#e69f00"'
        elif operation.backward:
            attributes = ', fillcolor="#f3e3ec"'
        label = r"\n".join(_quoted(text) for text in (operation.name, *facts))
        lines.append(f'  o{op} [label="{label}"{attributes}];')
    for value, consumers in enumerate(graph.consumers):
        source = graph.producer[value]
        size = format_bytes(graph.values[value].size_bytes)
        name = _quoted(graph.values[value].name)
        lines += [f'  o{source} -> o{op} [tooltip="{name}, {size}"];' for op in consumers]
    return "\n".join([*lines, "}", ""])


def graph_graphml(graph: Graph) -> str:
    """GraphML text, as networkx, yEd and Gephi read it. Nodes are `o0`, `o1`, ... in the graph's
    order, with the operations' names and attributes; edges carry the values' names."""
    import networkx as nx

    source = graph.to_networkx()
    g = nx.DiGraph(constant_bytes=graph.constant_bytes)
    index = {operation.name: f"o{op}" for op, operation in enumerate(graph.operations)}
    for name, attributes in source.nodes(data=True):
        words = {k: plain(v) if isinstance(v, str) else v for k, v in attributes.items()}
        g.add_node(index[name], name=plain(name), **words)
    for tail, head, attributes in source.edges(data=True):
        names = ", ".join(plain(value) for value in attributes["values"])
        over = {"overwritten": True} if attributes.get("overwritten") else {}
        g.add_edge(index[tail], index[head], values=names, **over)
    return "\n".join(nx.generate_graphml(g)) + "\n"


def _cell(text: str) -> str:
    text = plain(text)
    return f"'{text}" if text.startswith(_FORMULA) else text


def _quoted(text: str) -> str:
    return shorten(plain(text), 60).replace("\\", "\\\\").replace('"', '\\"')
