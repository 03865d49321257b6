"""`frontier_html`: a frontier, or a comparison of strategies, as one page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from remat.plan_data import PlanData
from remat.report.comparison import Row
from remat.view.drawing.text import escape_lines
from remat.view.frontier import frontier_svg
from remat.view.html import page


def frontier_html(
    plans: Sequence[PlanData], rows: Iterable[Row] = (), *, text: str, device: str | None = None
) -> str:
    """A self-contained page: the picture of `frontier_svg`, and a table as preformatted `text`."""
    parts = [
        "<h1>Extra time against peak memory</h1>",
        frontier_svg(plans, rows, device=device),
        f'<pre class="remat-code">{escape_lines(text)}</pre>',
    ]
    return page("Extra time against peak memory", "".join(parts))
