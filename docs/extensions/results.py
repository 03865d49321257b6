"""`{results} NAME`: a table made from `benchmarks/results/*.json` at every build, so that no figure
can drift from what was measured. `TABLES` is also what the tests hold README.md against."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from coverage_results import coverage, coverage_left
from docutils import nodes
from length_results import lengths
from measured import Table, load, newest
from run_results import (
    at_peaks,
    compile_time,
    compiled,
    overhead,
    peers,
    service,
    steps,
    training,
)
from solver_results import baselines, published, random, search, table2, traced
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import inline, table

_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|MiB)\b)")
"""Where a line must not end."""


TABLES: dict[str, Callable[[], Table]] = {
    made.__name__: made
    for made in (
        overhead,
        steps,
        traced,
        search,
        peers,
        compiled,
        at_peaks,
        compile_time,
        published,
        random,
        baselines,
        table2,
        service,
        coverage,
        coverage_left,
        lengths,
        training,
    )
}


def markdown(data: Table) -> Iterable[str]:
    """The lines of the table in Markdown."""
    yield "| " + " | ".join(data.header) + " |"
    yield "| " + " | ".join("---" for _ in data.header) + " |"
    for row in data.rows:
        yield "| " + " | ".join(row) + " |"


class Results(SphinxDirective):
    """The table, and where it is from."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Table and source."""
        data = TABLES[self.arguments[0]]()
        for name in data.sources:
            self.env.note_dependency(str(newest(name)))
        files = ", ".join(
            f"`benchmarks/results/{newest(name).name}`" for name in data.sources
        )
        machine = load(data.sources[0])["machine"]
        caption = (
            f"{machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}"
        )
        words = f"Source: {files}; {caption}."
        source = nodes.paragraph("", "", *inline(words), classes=["source"])
        rows = [
            [_UNIT.sub("\N{NO-BREAK SPACE}", cell) for cell in row]
            for row in data.rows
        ]
        return [table(data.header, rows), source]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("results", Results)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
