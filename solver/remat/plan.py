"""`Plan`: a schedule with all that is known about it, which shows, explains and saves itself.

A plan is self-contained: it carries its graph (left out of its repr), so that a plan that comes
from a file or a server can be described, explained and compared without the trace. The JSON
document holds the graph too, and reading one checks the schedule against it: a plan whose peak or
time is not what its schedule gives is refused.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Self

from remat.documents.plan import PlanDocument
from remat.plan_data import PlanData, Status
from remat.report import describe, explain
from remat.view.html import plan_fragment, plan_html
from remat.view.timeline import timeline_svg

__all__ = ["Plan", "Status"]


@dataclass(frozen=True, repr=False)
class Plan(PlanData):
    """What to run, and what it costs; see `PlanData` for what it holds."""

    def describe(self, solve: bool = False) -> str:
        """A table: budget, peak, time, bound, and what is recomputed, by module. With `solve`, also
        the steps of the solve: the seconds that each took, and what was known after it."""
        return describe.describe(self, solve)

    def explain(self, name: str) -> str:
        """Why one operation is kept or recomputed, and what the other way would cost: the peak,
        where it is, the time. With the path of a module, a table of its operations.

        Raises `UnknownName`, which is a `KeyError`, with the nearest known names.
        """
        return explain.explain(self, name)

    def diff(self, other: PlanData) -> str:
        """What `other` does differently: peak, time, and the operations recomputed in one only."""
        return describe.diff(self, other)

    def to_svg(self) -> str:
        """A picture: memory over the step by what holds it, under the budget."""
        return timeline_svg(self)

    def to_html(self) -> str:
        """A page: figures, table, timeline, schedule, modules and the dearest recomputations."""
        return plan_html(self)

    def _repr_html_(self) -> str:
        """What notebooks show."""
        return plan_fragment(self)

    def to_json(self) -> str:
        """JSON text, graph included; `from_json` gives back an equal plan."""
        return PlanDocument.of(self).to_json()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Raises `DocumentError` for text that is truncated, of another version, or forged."""
        return PlanDocument.from_json(text).read(cls)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON document, gzipped where the name ends in `.gz`. All or nothing."""
        PlanDocument.of(self).save(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what `save` wrote. Raises `DocumentError`."""
        return PlanDocument.load(path).read(cls)

    def __str__(self) -> str:
        return self.describe()
