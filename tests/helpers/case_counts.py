"""Counts of random cases, to check that a law was tried on cases where it matters."""

from __future__ import annotations

from dataclasses import dataclass

from remat.plan import Plan


@dataclass
class Tally:
    """The number of cases, and of those in which a program was solved because recomputation was
    needed."""

    cases: int = 0
    programs: int = 0

    def add(self, plan: Plan | None) -> None:
        """Count a case; None stands for one without a plan."""
        self.cases += 1
        if plan is not None and plan.overhead > 0 and int(plan.stats["rows"]) > 0:
            self.programs += 1

    def check(self) -> None:
        """Check that at least half of the cases needed a program."""
        assert 2 * self.programs >= self.cases > 0, self
