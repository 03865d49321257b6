"""`MaxBatch`: the largest batch that fits a budget, and the batches that were tried."""

from __future__ import annotations

from dataclasses import dataclass, field

from remat.documents.trace import Trace
from remat.limits.units import format_bytes, format_seconds
from remat.plan import Plan
from remat.report.report import Described, Fact, Report, Table


@dataclass(frozen=True, slots=True)
class BatchAttempt:
    """One batch that was tried; the solver stops as soon as it is clear whether the batch fits.

    `is_proved` is True if the answer is certain: the batch has a plan, or it was proved not to fit.
    `peak_bytes` and `overhead` are from the first plan that fits. Where none fits,
    `min_peak_bytes` is the smallest peak of any schedule. `elapsed_s` is how long the attempt took.
    """

    batch: int
    fits: bool
    is_proved: bool
    elapsed_s: float
    peak_bytes: int | None = None
    overhead: float | None = None
    min_peak_bytes: int | None = None
    out_of_memory: bool = False
    """True if `model_fn` ran out of memory, before anything was planned."""

    @property
    def shown_peak_bytes(self) -> int | None:
        """The peak of the plan, or the smallest peak of any schedule where none fits; None if
        neither is known."""
        return self.min_peak_bytes if self.peak_bytes is None else self.peak_bytes

    @property
    def outcome(self) -> str:
        """The outcome in words, for the table of `MaxBatch.describe`."""
        if self.fits:
            return "fits"
        if self.out_of_memory:
            return "model_fn ran out of memory"
        if self.overhead is not None:
            return "too slow, proved" if self.is_proved else "no plan fast enough was found"
        return "does not fit, proved" if self.is_proved else "no plan was found"


@dataclass(frozen=True)
class MaxBatch(Described):
    """The largest batch whose step fits, with its plan and trace.

    Run it with `remat.lower(remat.rewrite(trace, plan.schedule), model)`. `is_proved` is True if
    the next batch is proved not to fit; else no plan for it was found within the strategy's time
    limit. It is also True if the answer is the largest batch that was allowed (`reached_most`): no
    larger batch was tried. `eager_batch` is the largest batch that fits without recomputation, 0 if
    there is none; `eager_time_s` is the time of a step at that batch.
    """

    batch: int
    budget_bytes: int
    max_overhead: float | None
    plan: Plan
    trace: Trace = field(repr=False)
    eager_batch: int
    eager_time_s: float | None
    is_proved: bool
    attempts: tuple[BatchAttempt, ...] = field(repr=False)
    reached_most: bool = False

    @property
    def time_per_sample_s(self) -> float:
        """Seconds for each sample of the batch."""
        return self.plan.time_s / self.batch

    @property
    def eager_time_per_sample_s(self) -> float | None:
        """Seconds for each sample of the largest batch without recomputation; None if no batch fits
        without."""
        return None if self.eager_time_s is None else self.eager_time_s / self.eager_batch

    def report(self) -> Report:
        """Return the batch, its peak and time, and a table of the batches that were tried."""
        limit = "" if self.max_overhead is None else f", overhead at most {self.max_overhead:.1%}"
        if self.reached_most:
            certainty = f"the largest that was allowed: nothing over most={self.batch} was tried"
        elif self.is_proved:
            certainty = "proved: the next one does not fit"
        else:
            certainty = "not proved: no plan was found for the next one within the time limit"
        facts = [
            Fact(
                "batch",
                f"{self.batch}, the largest within {format_bytes(self.budget_bytes)}{limit}",
            ),
            Fact("", certainty),
            Fact("peak", format_bytes(self.plan.peak_bytes)),
            Fact(
                "time",
                f"{format_seconds(self.plan.time_s)}, {self.plan.overhead:+.2%} over no "
                f"recomputation; {format_seconds(self.time_per_sample_s)} a sample",
            ),
            Fact("eager", self._eager_batch_text()),
        ]
        rows = [("batch", "peak", "overhead", "took", "outcome")]
        for attempt in self.attempts:
            peak_bytes, overhead = attempt.shown_peak_bytes, attempt.overhead
            rows.append(
                (
                    str(attempt.batch),
                    "" if peak_bytes is None else format_bytes(peak_bytes),
                    "" if overhead is None else f"{overhead:.2%}",
                    format_seconds(attempt.elapsed_s),
                    attempt.outcome,
                )
            )
        title = "batches tried (the peak of the plan, or the smallest peak of any schedule):"
        return Report(facts, title, Table(rows, "rrrrl"))

    def _eager_batch_text(self) -> str:
        """Return the text about the largest batch without recomputation."""
        sample_s = self.eager_time_per_sample_s
        if sample_s is None:
            return "no batch fits without recomputation"
        change = self.time_per_sample_s / sample_s - 1 if sample_s > 0 else 0.0
        return (
            f"batch {self.eager_batch} is the largest without recomputation; "
            f"{format_seconds(sample_s)} a sample, with the plan {change:+.2%}"
        )
