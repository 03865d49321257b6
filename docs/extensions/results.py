"""Sphinx directive `{results} NAME`: a table generated from `benchmarks/results/*.json`.

Each build generates the tables, so that figures always match the result files. Tests compare
README.md with `TABLES`, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from coverage_results import coverage, coverage_left
from docutils import nodes
from gpu_results import gpu_missed, gpu_steps, gpu_times
from length_results import lengths
from measured import Table, load, newest
from offload_results import offload_below, offload_steps, offloading
from planning_results import planning
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
from software_gpu_results import (
    software_gpu,
    software_gpu_budgets,
    software_gpu_memory,
    software_gpu_missed,
    software_gpu_training,
    software_gpu_training_families,
)
from solver_results import baselines, published, random, search, table2, traced
from source_results import source_assumptions, source_sizes, sources
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from split_results import (
    loss_peers,
    split_coverage,
    split_models,
    split_peers,
    split_steps,
)
from tables import inline, table
from world_results import fit_world, fit_world_missed

_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|MiB)\b)")
"""Spaces between a number and its unit, at which a line must not break."""


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
        planning,
        training,
        software_gpu,
        software_gpu_budgets,
        software_gpu_memory,
        software_gpu_missed,
        software_gpu_training,
        software_gpu_training_families,
        fit_world,
        fit_world_missed,
        gpu_steps,
        gpu_times,
        gpu_missed,
        split_models,
        split_steps,
        split_peers,
        loss_peers,
        split_coverage,
        offloading,
        offload_steps,
        offload_below,
        sources,
        source_sizes,
        source_assumptions,
    )
}


def markdown(data: Table) -> Iterable[str]:
    """Yield the lines of a table in Markdown."""
    yield "| " + " | ".join(data.header) + " |"
    yield "| " + " | ".join("---" for _ in data.header) + " |"
    for row in data.rows:
        yield "| " + " | ".join(row) + " |"


class Results(SphinxDirective):
    """The directive `{results} NAME`: a table of `TABLES`, with its source."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the table, and of a line with its files and machine."""
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
    """Register the directive with Sphinx."""
    app.add_directive("results", Results)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
