"""The JSON form of a frontier: `{"format": "remat.sweep", "version": 1, "plans": [...]}`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from remat.documents import Document
from remat.plan import Plan
from remat.plan_document import PlanDocument


class SweepDocument(Document):
    """The plans of `remat.sweep`, smallest budget first."""

    FORMAT: ClassVar[str] = "remat.sweep"
    VERSION: ClassVar[int] = 1

    plans: tuple[PlanDocument, ...]

    @classmethod
    def of(cls, plans: Iterable[Plan]) -> SweepDocument:
        """The document of some plans."""
        return cls(plans=tuple(PlanDocument.of(plan) for plan in plans))

    def read(self) -> list[Plan]:
        """The plans. Raises `DocumentError` if the numbers of one are not those of its schedule."""
        return [document.plan() for document in self.plans]
