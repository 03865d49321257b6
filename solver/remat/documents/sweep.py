"""The JSON form of a frontier: `{"format": "remat.sweep", "version": 1, "plans": [...]}`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from remat.documents.base import Document
from remat.documents.plan import PlanDocument
from remat.plan_data import P, PlanData


class SweepDocument(Document):
    """The plans of `remat.sweep`, smallest budget first."""

    FORMAT: ClassVar[str] = "remat.sweep"
    VERSION: ClassVar[int] = 1

    plans: tuple[PlanDocument, ...]

    @classmethod
    def of(cls, plans: Iterable[PlanData]) -> SweepDocument:
        """The document of some plans."""
        return cls(plans=tuple(PlanDocument.of(plan) for plan in plans))

    def read(self, kind: type[P]) -> list[P]:
        """The plans. Raises `DocumentError` if the numbers of one are not those of its schedule."""
        return [document.read(kind) for document in self.plans]
