"""Counts what random cases come to, so that a law is known to have been tried where it matters."""

from __future__ import annotations

from dataclasses import dataclass

from remat.plan import Plan


@dataclass
class Tally:
    """How many cases there were, and in how many a program ran, as something had to run again."""

    cases: int = 0
    programs: int = 0

    def add(self, plan: Plan | None) -> None:
        """Count a case; None where there is no plan."""
        self.cases += 1
        if plan is not None and plan.overhead > 0 and int(plan.stats["rows"]) > 0:
            self.programs += 1

    def check(self) -> None:
        """At least half of the cases are worth the name."""
        assert 2 * self.programs >= self.cases > 0, self
