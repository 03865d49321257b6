"""What `remat plot` can draw: a function for each kind of picture and ending of a file's name."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remat import view
from remat.commands.common.exits import UsageError
from remat.commands.common.figures import csv_of, frontier_table, plan_figures
from remat.commands.common.frontiers import PICTURES, Frontier, figure_bytes
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.plan import Plan
from remat.rewrite import rewrite

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Subject:
    """What is drawn: the plans of a file, the trace of the first one where it was given, and the
    device whose memory a frontier shows."""

    plans: Sequence[Plan]
    trace: Trace | None = None
    device: str | None = None

    @property
    def plan(self) -> Plan:
        """The one plan. Raises `UsageError` where there are several."""
        if len(self.plans) != 1:
            raise UsageError(
                f"this file holds the {len(self.plans)} plans of a sweep, of which only --kind "
                "frontier makes a picture; give one plan for any other kind"
            )
        return self.plans[0]

    @property
    def program(self) -> Program | None:
        """What the plan's schedule makes of the trace, if there is one."""
        return None if self.trace is None else rewrite(self.trace, self.plan.schedule)


Drawing = Callable[[Subject], str | bytes]


def _page(subject: Subject) -> str:
    return view.plan_html(subject.plan, subject.program)


def _code(subject: Subject) -> str:
    program = subject.program
    if program is None:
        raise UsageError("--kind code needs the trace that the plan was made for: --trace TRACE")
    return view.annotated_code(program, subject.plan, subject.trace)


def _frontier(suffix: str) -> Drawing:
    return lambda subject: PICTURES[suffix](
        Frontier(subject.plans, frontier_table(subject.plans), device=subject.device)
    )


def _figure(suffix: str, draw: Callable[[Plan], Figure]) -> Drawing:
    return lambda subject: figure_bytes(draw(subject.plan), suffix)


DRAWINGS: dict[tuple[str, str], Drawing] = {
    ("timeline", ".svg"): lambda subject: view.timeline_svg(subject.plan),
    ("schedule", ".svg"): lambda subject: view.schedule_svg(subject.plan),
    ("modules", ".svg"): lambda subject: view.modules_svg(subject.plan),
    ("page", ".html"): _page,
    ("csv", ".csv"): lambda subject: view.operations_csv(subject.plan),
    **{("frontier", suffix): _frontier(suffix) for suffix in PICTURES},
    ("frontier", ".csv"): lambda subject: csv_of([plan_figures(p) for p in subject.plans]),
    ("chrome", ".json"): lambda subject: view.chrome_trace(subject.plan),
    ("snapshot", ".pickle"): lambda subject: pickle.dumps(
        view.memory_snapshot(subject.plan), protocol=4
    ),
    ("code", ".py"): _code,
    ("dot", ".dot"): lambda subject: view.graph_dot(subject.plan.graph, subject.plan),
    ("graphml", ".graphml"): lambda subject: view.graph_graphml(subject.plan.graph),
    **{
        (kind, suffix): _figure(suffix, draw)
        for suffix in (".png", ".pdf")
        for kind, draw in (
            ("timeline", view.timeline_figure),
            ("schedule", view.schedule_figure),
            ("modules", view.modules_figure),
        )
    },
}
"""By kind and suffix; of several kinds with one suffix, the first is what the suffix means."""

KINDS = tuple(dict.fromkeys(kind for kind, _ in DRAWINGS))
SUFFIXES = tuple(dict.fromkeys(suffix for _, suffix in DRAWINGS))


def drawing(kind: str | None, suffix: str, is_sweep: bool) -> Drawing:
    """The function for a kind, if one is given, and a suffix. Raises `UsageError`."""
    if kind is not None and kind not in KINDS:
        raise UsageError(f"there is no kind {kind!r}; there are {', '.join(KINDS)}")
    if kind is None and is_sweep:
        kind = "frontier"
    kinds = [k for k, s in DRAWINGS if s == suffix]
    if kind is None and kinds:
        kind = kinds[0]
    if kind is None:
        raise UsageError(
            f"the name's ending {suffix!r} tells no kind: use one of {', '.join(SUFFIXES)}, or "
            "--kind"
        )
    if (kind, suffix) in DRAWINGS:
        return DRAWINGS[kind, suffix]
    own = [s for k, s in DRAWINGS if k == kind]
    if suffix in SUFFIXES or not suffix:
        raise UsageError(f"the kind {kind} is written as {' or '.join(own)}, not as {suffix!r}")
    return DRAWINGS[kind, own[0]]  # whatever else the file is called
