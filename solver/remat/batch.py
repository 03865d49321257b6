"""`MaxBatch`: the largest batch that fits a budget, and how that was found."""

from __future__ import annotations

from dataclasses import dataclass, field

from remat.documents.trace import Trace
from remat.limits.budget import format_bytes, format_seconds
from remat.plan import Plan


@dataclass(frozen=True, slots=True)
class Attempt:
    """One batch that was solved for, only until it was known whether it fits.

    `is_proved` says that the answer is certain: a batch that fits has a plan, one that does not was
    proved not to. `peak_bytes` and `overhead` are of the plan that was met, `least_bytes` is the
    smallest peak that was found where none fits, `seconds` what the attempt took.
    """

    batch: int
    fits: bool
    is_proved: bool
    seconds: float
    peak_bytes: int | None = None
    overhead: float | None = None
    least_bytes: int | None = None
    out_of_memory: bool = False
    """`model_fn` itself ran out of memory, before anything was planned."""

    @property
    def found_bytes(self) -> int | None:
        """The peak of the plan, or the smallest that was found."""
        return self.least_bytes if self.peak_bytes is None else self.peak_bytes

    @property
    def words(self) -> str:
        """The outcome for people."""
        if self.fits:
            return "fits"
        if self.out_of_memory:
            return "model_fn ran out of memory"
        if self.overhead is not None:
            return "too slow, proved" if self.is_proved else "no plan fast enough was found"
        return "does not fit, proved" if self.is_proved else "no plan was found"


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch whose step fits, with its plan and trace.

    Run it with `remat.lower(remat.rewrite(trace, plan.schedule), model)`. `is_proved` says that the
    next batch is proved not to fit (or, where `is_most`, that the answer is as many as were asked
    about: nothing larger was tried); else no plan for it was found within the strategy's time.
    `eager_batch` is the largest without recomputation, 0 if there is none; `eager_time_s` is a
    step's time at that batch.
    """

    batch: int
    budget_bytes: int
    max_overhead: float | None
    plan: Plan
    trace: Trace = field(repr=False)
    eager_batch: int
    eager_time_s: float | None
    is_proved: bool
    attempts: tuple[Attempt, ...] = field(repr=False)
    is_most: bool = False

    @property
    def time_per_sample_s(self) -> float:
        """Seconds for each sample of the batch."""
        return self.plan.time_s / self.batch

    @property
    def eager_time_per_sample_s(self) -> float | None:
        """Seconds for each sample of the largest batch without recomputation."""
        return None if self.eager_time_s is None else self.eager_time_s / self.eager_batch

    def describe(self) -> str:
        """The answer, what it costs, and a table of the batches that were tried."""
        limit = "" if self.max_overhead is None else f", overhead at most {self.max_overhead:.1%}"
        if self.is_most:
            certainty = f"as many as were asked about: nothing over most={self.batch} was tried"
        elif self.is_proved:
            certainty = "proved: the next one does not fit"
        else:
            certainty = "not proved: no plan was found for the next one in the time"
        lines = [
            f"batch     {self.batch}, the largest within {format_bytes(self.budget_bytes)}{limit}",
            f"          {certainty}",
            f"peak      {format_bytes(self.plan.peak_bytes)}",
            f"time      {format_seconds(self.plan.time_s)}, {self.plan.overhead:+.2%} over no "
            f"recomputation; {format_seconds(self.time_per_sample_s)} a sample",
            f"eager     {self._eager()}",
            "",
            "tried, until it was known whether it fits (its peak, or the smallest found):",
            f"{'batch':>7}  {'peak':>9}  {'overhead':>8}  {'took':>8}  outcome",
        ]
        for a in self.attempts:
            peak = "" if a.found_bytes is None else format_bytes(a.found_bytes)
            overhead = "" if a.overhead is None else f"{a.overhead:.2%}"
            took = format_seconds(a.seconds)
            lines.append(f"{a.batch:>7}  {peak:>9}  {overhead:>8}  {took:>8}  {a.words}")
        return "\n".join(lines)

    def _eager(self) -> str:
        each = self.eager_time_per_sample_s
        if each is None:
            return "no batch fits without recomputation"
        change = self.time_per_sample_s / each - 1 if each > 0 else 0.0
        return (
            f"batch {self.eager_batch} is the largest without recomputation; "
            f"{format_seconds(each)} a sample, with the plan {change:+.2%}"
        )

    def __str__(self) -> str:
        return self.describe()
