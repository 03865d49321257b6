"""The pages of the atlas: one for each model, and the directives `{atlas} models`, `{atlas}
leaderboard` and `{atlas} summary`.

Pages and pictures are written to docs/atlas/models before the build, from the results.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from atlas_picture import picture
from atlas_tables import (
    HEADER,
    OPTIMA,
    gpus_of,
    leaderboard_rows,
    medians,
    model_lines,
    results,
)
from benchmarks.atlas import leaderboard
from benchmarks.atlas.results import (
    AT_BLOCKS,
    BUDGETS,
    METHODS,
    RECOMPUTE,
    RESULTS,
    ModelResult,
    Row,
)
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import table

from remat.limits.units import format_bytes, format_seconds

_PAGES = Path(__file__).parents[1] / "atlas" / "models"

_FILTER = """<p><label>Search: <input type="search" id="atlas-search"
placeholder="llama h100"></label></p>
<script>
document.getElementById("atlas-search").addEventListener("input", event => {
  const words = event.target.value.toLowerCase().split(/\\s+/);
  for (const row of document.querySelectorAll(".atlas-models tbody tr")) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word));
  }
});
</script>"""


def write_pages(app: Sphinx) -> None:
    """Write a page and the pictures of each model, where their content is new."""
    _PAGES.mkdir(exist_ok=True)
    models, solvers = results()
    written: set[Path] = set()
    for result in models:
        rows = [
            row for solver in solvers for row in solver.rows.get(result.model, ())
        ]
        for gpu in gpus_of(result):
            path = _PAGES / f"{result.model}-{gpu}.svg"
            _write(path, picture(result, gpu, rows))
            written.add(path)
        page = _PAGES / f"{result.model}.md"
        _write(page, "\n".join(_page(result, rows)) + "\n")
        written.add(page)
    for stale in {*_PAGES.iterdir()} - written:
        stale.unlink()


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _page(result: ModelResult, solver_rows: list[Row]) -> Iterable[str]:
    """Yield the lines of a model's page."""
    yield f"# {result.title}"
    yield ""
    yield (
        f"{result.operations:,} operations; {format_bytes(result.baseline_peak_bytes)} without "
        f"recomputation, of which {format_bytes(result.constant_bytes)} are parameters, buffers, "
        f"batch and libraries. {{download}}`The graph <../graphs/{result.model}.json.gz>`."
    )
    for gpu in gpus_of(result):
        rows = {
            row.key: row for row in (*result.rows, *solver_rows) if row.gpu == gpu
        }
        methods = [*METHODS, *dict.fromkeys(row.method for row in solver_rows)]
        yield ""
        yield f"## {gpu.upper()}"
        yield ""
        yield f"A step takes {format_seconds(result.step_s[gpu])} without recomputation."
        yield ""
        yield f"```{{image}} {result.model}-{gpu}.svg"
        yield f":alt: Extra time against peak memory of {result.title} on {gpu.upper()}"
        yield "```"
        yield ""
        yield "| | " + " | ".join(map(_budget_text, BUDGETS)) + " |"
        yield "| --- " * (len(BUDGETS) + 1) + "|"
        for method in methods:
            cells = (
                _cell(rows.get((gpu, budget, method)), result) for budget in BUDGETS
            )
            yield f"| {method} | " + " | ".join(cells) + " |"
        bounds = (_bound(rows.get((gpu, budget, RECOMPUTE))) for budget in BUDGETS)
        yield "| bound of recomputation | " + " | ".join(bounds) + " |"
        yield ""
        yield (
            "CPU time in seconds for all budgets: "
            + ", ".join(f"{m} {_processor_s(rows.values(), m):.1f}" for m in OPTIMA)
            + ", each in addition to the one before."
        )
    yield ""
    yield f"remat {result.remat}, {result.date}; {result.machine['cpu']}."


def _budget_text(budget: str) -> str:
    return {AT_BLOCKS: "at per block", "min": "smallest"}.get(budget, budget)


def _cell(row: Row | None, result: ModelResult) -> str:
    """Return the extra time of a row, with its peak where the budget does not name it."""
    if row is None or row.overhead is None or row.peak_bytes is None:
        return ""
    text = f"{100 * row.overhead:+.1f}%"
    if row.budget.endswith("%"):
        return text
    return f"{text} at {100 * row.peak_bytes / result.baseline_peak_bytes:.0f}%"


def _bound(row: Row | None) -> str:
    """Return what every schedule takes at least, as text."""
    return "" if row is None or row.bound is None else f"{100 * row.bound:+.1f}%"


def _processor_s(rows: Iterable[Row], method: str) -> float:
    return sum(row.processor_s for row in rows if row.method == method)


class Atlas(SphinxDirective):
    """The directive `{atlas} NAME`: a table of all models, or of the leaderboard."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of the table."""
        for path in sorted(RESULTS.rglob("*.json.gz")):
            self.env.note_dependency(str(path))
        kinds = {
            "models": _models,
            "leaderboard": _leaderboard,
            "summary": _summary,
        }
        return kinds[self.arguments[0]]()


def _models() -> list[nodes.Node]:
    lines: list[list[str | list[nodes.Node]]] = []
    for line in model_lines():
        link = nodes.reference("", line.title, refuri=f"models/{line.model}.html")
        lines.append([[link], *line.cells])
    models = table(HEADER, lines)
    models["classes"].append("atlas-models")
    return [nodes.raw("", _FILTER, format="html"), models]


def _summary() -> list[nodes.Node]:
    count, columns = medians("h100")
    if not count:
        text = "There are no results on an H100 yet."
        return [nodes.paragraph("", text)]
    blocks, *optima = columns
    text = (
        f"At the peak of per-block checkpointing, over {count} models with repeated blocks on an "
        f"H100, the median of the extra time is {100 * blocks:.1f}% for per-block "
        f"checkpointing, {100 * optima[0]:.1f}% for recomputation as remat plans it, "
        f"{100 * optima[1]:.1f}% with splitting, and {100 * optima[2]:.1f}% with offloading."
    )
    return [nodes.paragraph("", text)]


def _leaderboard() -> list[nodes.Node]:
    return [table(leaderboard.HEADER, leaderboard_rows())]


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the pages, and register the directive with Sphinx."""
    app.connect("builder-inited", write_pages)
    app.add_directive("atlas", Atlas)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
