"""Writers for files of a time/memory frontier: .svg, .html, .png and .pdf."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remat import view
from remat.plan import Plan
from remat.report.comparison import ComparisonRow

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FrontierContent:
    """Content of a picture of the frontier: plans as a line, rows of a comparison as marks, and the
    memory of `device`. A page also has the table `text` below the picture."""

    plans: Sequence[Plan]
    text: str
    rows: Sequence[ComparisonRow[Plan]] = ()
    device: str | None = None


def figure_bytes(figure: Figure, suffix: str) -> bytes:
    """Return a matplotlib figure as the content of a .png or .pdf file."""
    stream = io.BytesIO()
    figure.savefig(stream, format=suffix.removeprefix("."))
    return stream.getvalue()


def _figure_writer(suffix: str) -> Callable[[FrontierContent], bytes]:
    def write(content: FrontierContent) -> bytes:
        figure = view.frontier_figure(content.plans, content.rows, device=content.device)
        return figure_bytes(figure, suffix)

    return write


FRONTIER_WRITERS: dict[str, Callable[[FrontierContent], str | bytes]] = {
    ".svg": lambda content: view.frontier_svg(content.plans, content.rows, device=content.device),
    ".html": lambda content: view.frontier_html(
        content.plans, content.rows, text=content.text, device=content.device
    ),
    ".png": _figure_writer(".png"),
    ".pdf": _figure_writer(".pdf"),
}
"""Functions that return a file's content, by file name ending."""
