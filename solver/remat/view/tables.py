"""Exports of a plan and its graph as tables and graphs: CSV, Graphviz and GraphML."""

from __future__ import annotations

import csv
import io

from remat.graph import Graph
from remat.limits.units import format_bytes, format_seconds
from remat.plan_data import PlanData
from remat.view.text import plain_text, shorten_name

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

_FORMULA_STARTS = ("=", "+", "-", "@")
"""First characters of a cell that a spreadsheet would evaluate as a formula."""


def operations_csv(plan: PlanData) -> str:
    """Return CSV text with a line per operation, in the graph's order, and the columns `COLUMNS`.

    `cost_s` is the time of one run, `extra_s` the time of all recomputations; `result` is 1 if an
    output stays in memory to the end. A name that a spreadsheet would evaluate as a formula begins
    with an apostrophe.
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
                _csv_cell(operation.name),
                _csv_cell(operation.module),
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
    """Return Graphviz text with a box per operation and an arrow per value. With a `plan` of this
    graph, recomputed operations are orange and have their number of runs."""
    recomputed = {} if plan is None else plan.schedule.recomputed(graph)
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
        if op in recomputed:
            facts.append(f"runs {recomputed[op] + 1} times")
            attributes = ', fillcolor="#e69f00"'
        elif operation.backward:
            attributes = ', fillcolor="#f3e3ec"'
        label = r"\n".join(_graphviz_label(text) for text in (operation.name, *facts))
        lines.append(f'  o{op} [label="{label}"{attributes}];')
    for value, consumers in enumerate(graph.consumers):
        producer = graph.producer[value]
        size = format_bytes(graph.values[value].size_bytes)
        name = _graphviz_label(graph.values[value].name)
        lines += [f'  o{producer} -> o{op} [tooltip="{name}, {size}"];' for op in consumers]
    return "\n".join([*lines, "}", ""])


def graph_graphml(graph: Graph) -> str:
    """Return GraphML text, which networkx, yEd and Gephi can read. Nodes are `o0`, `o1`, ... in the
    graph's order, with the operations' names and attributes; edges have the values' names."""
    import networkx as nx

    named_graph = graph.to_networkx()
    g = nx.DiGraph(constant_bytes=graph.constant_bytes)
    node_ids = {operation.name: f"o{op}" for op, operation in enumerate(graph.operations)}
    for name, attributes in named_graph.nodes(data=True):
        texts = {k: plain_text(v) if isinstance(v, str) else v for k, v in attributes.items()}
        g.add_node(node_ids[name], name=plain_text(name), **texts)
    for producer, consumer, attributes in named_graph.edges(data=True):
        names = ", ".join(plain_text(value) for value in attributes["values"])
        overwritten = {"overwritten": True} if attributes.get("overwritten") else {}
        g.add_edge(node_ids[producer], node_ids[consumer], values=names, **overwritten)
    return "\n".join(nx.generate_graphml(g)) + "\n"


def _csv_cell(text: str) -> str:
    """Return text for a cell of a CSV file, with an apostrophe before anything that a spreadsheet
    would evaluate as a formula."""
    text = plain_text(text)
    return f"'{text}" if text.startswith(_FORMULA_STARTS) else text


def _graphviz_label(text: str) -> str:
    """Return text in at most 60 characters, escaped for a quoted string of Graphviz."""
    return shorten_name(plain_text(text), 60).replace("\\", "\\\\").replace('"', '\\"')
