"""The file formats of `remat plot`: one writer for each kind of plot and file name ending."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from remat import view
from remat.commands.common import files
from remat.commands.common.exits import UsageError
from remat.commands.common.running import with_costs_of_pieces
from remat.commands.common.summaries import JsonObject, frontier_table, plan_summary, to_csv_text
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.passes.split.splits import with_recorded_splits
from remat.plan import Plan
from remat.report.comparison import ComparisonRow
from remat.report.report import Report
from remat.rewrite import rewrite

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


def _frontier_figure_writer(suffix: str) -> Callable[[FrontierContent], bytes]:
    """Return the writer of a frontier as a .png or .pdf file."""

    def write(content: FrontierContent) -> bytes:
        figure = view.frontier_figure(content.plans, content.rows, device=content.device)
        return figure_bytes(figure, suffix)

    return write


FRONTIER_WRITERS: dict[str, Callable[[FrontierContent], str | bytes]] = {
    ".svg": lambda content: view.frontier_svg(content.plans, content.rows, device=content.device),
    ".html": lambda content: view.frontier_html(
        content.plans, content.rows, text=content.text, device=content.device
    ),
    ".png": _frontier_figure_writer(".png"),
    ".pdf": _frontier_figure_writer(".pdf"),
}
"""Functions that return a file's content, by file name ending."""

_TABLE_SUFFIXES = (".json", ".csv")


def check_frontier_output(output: Path | None, title: str) -> None:
    """Raise `UsageError` for an output file that a frontier cannot be written to; nothing for None.
    `title` names the content, such as "a sweep"."""
    files.check_outputs(output)
    suffixes = (*_TABLE_SUFFIXES, *FRONTIER_WRITERS)
    if output is not None and files.suffix_without_gz(output) not in suffixes:
        raise UsageError(
            f"{output}: {title} can be written as {', '.join(suffixes)}; use one of these file "
            "name endings"
        )


def write_frontier(
    output: Path, content: FrontierContent, json_text: str, rows: Sequence[JsonObject]
) -> None:
    """Write a frontier to a file, by its ending: as a picture or page of `content`, as `json_text`,
    or `rows` as CSV."""
    suffix = files.suffix_without_gz(output)
    texts = {".json": json_text, ".csv": to_csv_text(rows)}
    data = texts[suffix] if suffix in texts else FRONTIER_WRITERS[suffix](content)
    files.write_output(output, data)


@dataclass(frozen=True)
class PlotInput:
    """Input of a plot: the plans of a file, the trace of the first plan if given, and the device
    whose memory a frontier shows."""

    plans: Sequence[Plan]
    trace: Trace | None = None
    device: str | None = None

    @property
    def plan(self) -> Plan:
        """The only plan. Raises `UsageError` if there are several or none."""
        if len(self.plans) != 1:
            raise UsageError(
                f"this file has the {len(self.plans)} plans of a sweep, which only --kind frontier "
                "can plot; give one plan for any other kind"
            )
        return self.plans[0]

    @cached_property
    def plan_trace(self) -> Trace | None:
        """The trace, in which the operations that the only plan splits are split; None without a
        trace."""
        splits = self.plan.graph.splits
        if self.trace is None or not splits or self.trace.splits:
            return self.trace
        return with_costs_of_pieces(with_recorded_splits(self.trace, splits))

    @property
    def program(self) -> Program | None:
        """The program of the only plan; None without a trace."""
        trace = self.plan_trace
        return None if trace is None else rewrite(trace, self.plan.schedule)


PlotWriter = Callable[[PlotInput], str | bytes]
"""Returns the content of an output file."""


def _plan_page(plot_input: PlotInput) -> str:
    """Return the page about the only plan."""
    return view.plan_html(plot_input.plan, plot_input.program)


def _plan_code(plot_input: PlotInput) -> str:
    """Return the annotated code of the only plan. Raises `UsageError` without a trace."""
    program = plot_input.program
    if program is None:
        raise UsageError("--kind code needs the trace of the plan: --trace TRACE")
    return view.annotated_code(program, plot_input.plan, plot_input.plan_trace)


def _frontier_plot_writer(suffix: str) -> PlotWriter:
    """Return the writer of a frontier for a file name ending."""
    return lambda plot_input: FRONTIER_WRITERS[suffix](
        FrontierContent(
            plot_input.plans,
            str(Report(frontier_table(plot_input.plans))),
            device=plot_input.device,
        )
    )


def _figure_plot_writer(suffix: str, draw_figure: Callable[[Plan], Figure]) -> PlotWriter:
    """Return the writer of the only plan's figure for a file name ending."""
    return lambda plot_input: figure_bytes(draw_figure(plot_input.plan), suffix)


PLOT_WRITERS: dict[tuple[str, str], PlotWriter] = {
    ("timeline", ".svg"): lambda plot_input: view.timeline_svg(plot_input.plan),
    ("schedule", ".svg"): lambda plot_input: view.schedule_svg(plot_input.plan),
    ("modules", ".svg"): lambda plot_input: view.modules_svg(plot_input.plan),
    ("page", ".html"): _plan_page,
    ("csv", ".csv"): lambda plot_input: view.operations_csv(plot_input.plan),
    **{("frontier", suffix): _frontier_plot_writer(suffix) for suffix in FRONTIER_WRITERS},
    ("frontier", ".csv"): lambda plot_input: to_csv_text(
        [plan_summary(p) for p in plot_input.plans]
    ),
    ("chrome", ".json"): lambda plot_input: view.chrome_trace(plot_input.plan),
    ("snapshot", ".pickle"): lambda plot_input: pickle.dumps(
        view.memory_snapshot(plot_input.plan), protocol=4
    ),
    ("code", ".py"): _plan_code,
    ("dot", ".dot"): lambda plot_input: view.graph_dot(plot_input.plan.graph, plot_input.plan),
    ("graphml", ".graphml"): lambda plot_input: view.graph_graphml(plot_input.plan.graph),
    **{
        (kind, suffix): _figure_plot_writer(suffix, draw_figure)
        for suffix in (".png", ".pdf")
        for kind, draw_figure in (
            ("timeline", view.timeline_figure),
            ("schedule", view.schedule_figure),
            ("modules", view.modules_figure),
        )
    },
}
"""Writers by kind and suffix. If several kinds share a suffix, the first one is the default."""

PLOT_KINDS = tuple(dict.fromkeys(kind for kind, _ in PLOT_WRITERS))
PLOT_SUFFIXES = tuple(dict.fromkeys(suffix for _, suffix in PLOT_WRITERS))


def find_plot_writer(kind: str | None, suffix: str, is_sweep: bool) -> PlotWriter:
    """Return the writer for a kind and a file name ending. Without a kind, a sweep is a frontier,
    and the ending selects it otherwise. An ending that no kind has gets the first format of the
    kind. Raises `UsageError` if there is no writer."""
    if kind is not None and kind not in PLOT_KINDS:
        raise UsageError(f"there is no kind {kind!r}; there are {', '.join(PLOT_KINDS)}")
    if kind is None and is_sweep:
        kind = "frontier"
    kinds = [k for k, s in PLOT_WRITERS if s == suffix]
    if kind is None and kinds:
        kind = "timeline" if "timeline" in kinds else kinds[0]
    if kind is None:
        raise UsageError(
            f"the file name ending {suffix!r} does not select a kind: use one of "
            f"{', '.join(PLOT_SUFFIXES)}, or --kind"
        )
    if (kind, suffix) in PLOT_WRITERS:
        return PLOT_WRITERS[kind, suffix]
    kind_suffixes = [s for k, s in PLOT_WRITERS if k == kind]
    if suffix in PLOT_SUFFIXES or not suffix:
        raise UsageError(
            f"the kind {kind} is written as {' or '.join(kind_suffixes)}, not as {suffix!r}"
        )
    return PLOT_WRITERS[kind, kind_suffixes[0]]  # --kind and an ending that no kind has
