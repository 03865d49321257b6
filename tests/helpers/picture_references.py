"""The structure of the pictures of a few fixed plans, to see the effect of a change.

A reference has what a reader would notice, without coordinates: how many elements of which class
there are, the texts in order, how many commands each path has, the picture's size.

    python -m tests.helpers.picture_references

rewrites them; then read `git diff tests/data/references`. The plans are made by hand, not by a
solver: the references change with the pictures only.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection
from xml.etree import ElementTree

from tests.helpers.paths import DATA

from remat.graph import Graph, Operation, Value
from remat.plan import Plan
from remat.report.comparison import ComparisonRow
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solution import Solution
from remat.view import frontier_svg, modules_svg, schedule_svg, timeline_svg

FOLDER = DATA / "references"
_SVG = "{http://www.w3.org/2000/svg}"
_LAYER = (("norm", 4, 10e-6), ("linear", 16, 400e-6), ("act", 16, 40e-6), ("drop", 5, 15e-6))
"""Name, size in MiB and seconds of the operations of a layer."""


def network(layers: int) -> Graph:
    """Return a graph of an embedding, layers of four operations and a loss, and a backward
    operation for each, which reads the output of the one before its own: 4 + 8 * `layers`
    operations."""
    forward = [("embed", "net.embed", 4, 20e-6)]
    for i in range(layers):
        forward += [(f"{name}_{i}", f"net.h.{i}.{name}", s, t) for name, s, t in _LAYER]
    forward.append(("loss", "", 0, 5e-6))
    count = len(forward)
    operations: list[Operation] = []
    values: list[Value] = []
    for i, (name, module, size, cost) in enumerate(forward):
        workspace = 2 << 20 if name.startswith("linear") else 0
        values.append(Value(name, (size << 20) or 4))
        inputs = (i - 1,) if i else ()
        operations.append(
            Operation(name, inputs, (i,), cost, workspace_bytes=workspace, module=module)
        )
    for i in reversed(range(count)):
        name, module, _, cost = forward[i]
        inputs = {i - 1 if i else 0, *([len(values) - 1] if i < count - 1 else [])}
        values.append(Value(f"d_{name}", 8 << 20 if name.startswith("linear") else 4 << 20))
        operations.append(
            Operation(
                f"{name}_backward",
                tuple(sorted(inputs)),
                (len(values) - 1,),
                2 * cost,
                module=module,
                backward=True,
            )
        )
    results = {count - 1} | {v for v, value in enumerate(values) if value.name.startswith("d_lin")}
    return Graph(tuple(operations), tuple(values), frozenset(results), constant_bytes=10 << 20)


def without(graph: Graph, names: Collection[str]) -> Schedule:
    """Return the schedule that recomputes forward operations of these names where a backward
    operation reads their output."""
    runs: list[int] = []
    recomputed: set[int] = set()
    for op, operation in enumerate(graph.operations):
        if operation.backward:
            for value in operation.inputs:
                source = graph.producer[value]
                name = graph.operations[source].name.rpartition("_")[0]
                if name in names and source not in recomputed:
                    recomputed.add(source)
                    runs.append(source)
        runs.append(op)
    return Schedule.of(runs)


def plan(graph: Graph, *names: str) -> Plan:
    """Return the plan that drops the outputs of these operations, as if a bound were proved for
    it."""
    schedule = without(graph, names)
    timeline = simulate(graph, schedule)
    solution = Solution(schedule, bound=timeline.time_s * 0.995)
    return Plan.of(graph, timeline.peak_bytes + (1 << 20), solution, {})


def _frontier(graph: Graph) -> str:
    line = [plan(graph), plan(graph, "act"), plan(graph, "norm", "act")]
    baselines = {"per_block": ("norm", "act", "linear"), "every_k": ("norm", "act"), "slow": ()}
    rows = [
        ComparisonRow(name, "min", 1, plan(graph, *drop), "", 0.0)
        for name, drop in baselines.items()
    ]
    return frontier_svg(line, rows, capacity_bytes=2 * line[0].peak_bytes)


PICTURES: dict[str, Callable[[Graph], str]] = {
    "timeline": lambda graph: timeline_svg(plan(graph, "norm", "act")),
    "schedule": lambda graph: schedule_svg(plan(graph, "norm", "act")),
    "modules": lambda graph: modules_svg(plan(graph, "norm", "act")),
    "frontier": _frontier,
}
GRAPHS = {"small": 2, "large": 49}
"""The numbers of layers: 20 and 396 operations."""


def structure(picture: str) -> str:
    """Return the elements of a picture, as JSON text of many lines."""
    root = ElementTree.fromstring(picture)
    elements = [e for e in root.iter() if e.tag not in (f"{_SVG}style", f"{_SVG}title")]
    paths = [
        f"{e.get('class')}: " + " ".join(f"{c}{n}" for c, n in sorted(_commands(e).items()))
        for e in root.iter(f"{_SVG}path")
    ]
    tips = [e.text for e in root.iter(f"{_SVG}title")]
    facts = {
        "viewBox": root.get("viewBox"),
        "label": root.get("aria-label"),
        "elements": dict(sorted(Counter(map(_kind, elements)).items())),
        "paths": paths,
        "texts": [e[0].tail if len(e) else e.text for e in root.iter(f"{_SVG}text")],
        "tips": [f"{len(tips)} of them", *tips[:4], *tips[-2:]],
    }
    return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


def style(picture: str) -> str:
    """Return the rules of a picture's style sheet, one a line: colours of all classes, light and
    dark."""
    root = ElementTree.fromstring(picture)
    rules = next(root.iter(f"{_SVG}style")).text or ""
    return json.dumps(re.findall(r"[^{}]+\{[^{}]*\}?", rules), indent=1) + "\n"


def references() -> dict[str, str]:
    """Return the text of every reference by the name of its file."""
    texts: dict[str, str] = {}
    for size, layers in GRAPHS.items():
        graph = network(layers)
        for name, draw_picture in PICTURES.items():
            texts[f"{size}_{name}.json"] = structure(draw_picture(graph))
    return texts | {"style.json": style(timeline_svg(plan(network(1))))}


def _kind(element: ElementTree.Element) -> str:
    tag = element.tag.removeprefix(_SVG)
    return ".".join([tag, *element.get("class", "").replace("remat-", "").split()])


def _commands(path: ElementTree.Element) -> Counter[str]:
    return Counter(re.findall("[A-Za-z]", path.get("d", "")))


def rewrite() -> None:
    """Replace the references by those of the current code."""
    texts = references()
    for file in FOLDER.glob("*.json"):
        if file.name not in texts:
            file.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    rewrite()
