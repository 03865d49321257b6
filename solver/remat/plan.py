"""`Plan`: a schedule with its peak, time and bound, which can be printed, explained and saved.

A plan is self-contained: it includes its graph (left out of its repr), so that a plan from a file
or a server can be described, explained and compared without the trace. The JSON document has the
graph too, and reading one checks the schedule against it: a plan whose peak or time is not that of
its schedule is rejected.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

from remat.documents.plan import PlanDocument
from remat.plan_data import PlanData, Status
from remat.report.explain import explain
from remat.report.plan_report import diff, plan_report
from remat.report.report import Described, Report
from remat.view.html import plan_fragment, plan_html
from remat.view.pictures import timeline_svg

__all__ = ["Plan", "Status"]


@dataclass(frozen=True, repr=False)
class Plan(PlanData, Described):
    """A schedule and its costs; see `PlanData` for the fields."""

    def report(self, solve: bool = False) -> Report:
        """Return the report of the plan."""
        return plan_report(self, solve)

    def describe(self, solve: bool = False) -> str:
        """Return a table: budget, peak, time, bound, and what is recomputed, by module. With
        `solve`, also the candidates among which the plan was selected, and the steps of the solve:
        the seconds that each took, and the objective and bound after it."""
        return str(self.report(solve))

    def explain(self, name: str) -> str:
        """Explain why one operation is retained or recomputed, and what the alternative would cost:
        the peak, its place, the time. For the path of a module, return a table of its operations.

        Raises `UnknownName`, which is a `KeyError`, with the most similar names.
        """
        return explain(self, name)

    def diff(self, other: PlanData) -> str:
        """Return what `other` does differently: peak, time, and the operations that only one
        recomputes."""
        return diff(self, other)

    def to_svg(self) -> str:
        """Return an SVG of the memory over the step, by what it is used for, under the budget."""
        return timeline_svg(self)

    def to_html(self) -> str:
        """Return a page: figures, table, timeline, schedule, modules and the most expensive
        recomputations."""
        return plan_html(self)

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show."""
        return plan_fragment(self)

    def to_json(self) -> str:
        """Return JSON text, graph included; `from_json` returns an equal plan."""
        return PlanDocument.of(self).to_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what `to_json` returned. Raises `DocumentError` for text that is truncated, of
        another version, or forged."""
        return PlanDocument.from_json(text).to_plan(cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON document, gzipped if the name ends in `.gz`. The file is written
        completely or not at all."""
        PlanDocument.of(self).save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote. Raises `DocumentError`."""
        return PlanDocument.load(path).to_plan(cls)
