"""A frontier as a file: a picture, a page or a figure, by the ending of the file's name."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remat import view
from remat.plan import Plan
from remat.report.comparison import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Frontier:
    """What is drawn: plans as a line, rows of a comparison as marks, a device's memory; `text` is
    the table below."""

    plans: Sequence[Plan]
    text: str
    rows: Sequence[Row[Plan]] = ()
    device: str | None = None


def figure_bytes(figure: Figure, suffix: str) -> bytes:
    """The file that the ending means: .png or .pdf."""
    stream = io.BytesIO()
    figure.savefig(stream, format=suffix.removeprefix("."))
    return stream.getvalue()


def _figure(suffix: str) -> Callable[[Frontier], bytes]:
    def draw(it: Frontier) -> bytes:
        figure = view.frontier_figure(it.plans, it.rows, device=it.device)
        return figure_bytes(figure, suffix)

    return draw


PICTURES: dict[str, Callable[[Frontier], str | bytes]] = {
    ".svg": lambda it: view.frontier_svg(it.plans, it.rows, device=it.device),
    ".html": lambda it: view.frontier_html(it.plans, it.rows, text=it.text, device=it.device),
    ".png": _figure(".png"),
    ".pdf": _figure(".pdf"),
}
