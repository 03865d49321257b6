"""The JSON form of a sweep over budgets: `{"format": "remat.sweep", "plans": [...], ...}`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from remat.documents.base import Document
from remat.documents.plan import PlanDocument
from remat.plan_data import P, PlanData


class SweepDocument(Document):
    """The plans that `remat.sweep` returns, smallest budget first."""

    FORMAT: ClassVar[str] = "remat.sweep"
    VERSION: ClassVar[int] = 2

    plans: tuple[PlanDocument, ...]

    @classmethod
    def of(cls, plans: Iterable[PlanData]) -> SweepDocument:
        """Return the document of these plans."""
        return cls(plans=tuple(PlanDocument.of(plan) for plan in plans))

    def to_plans(self, kind: type[P]) -> list[P]:
        """Return the plans. Raises `DocumentError` if the numbers of a plan are not those of its
        schedule."""
        return [document.to_plan(kind) for document in self.plans]
