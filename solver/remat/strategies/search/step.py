"""A step of a search, and how steps are run: one after the other, each for its share of the time.

A step that fails takes no plan in hand with it: it is told of, and left out.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from remat.errors import SolverWarning, one_line
from remat.solution import STEPS, Stats, steps_of
from remat.strategies.search.deadline import Clock
from remat.strategies.search.state import Known


def _always(known: Known) -> bool:
    return True


@dataclass(frozen=True)
class Step:
    """A way to know more: `work` offers schedules to what is known, or raises its bound, until its
    clock is over.

    `share` is its part of the time that is left when it begins, `share_within_gap` the same where
    the gap is reached by then; without one it is left out. `is_beside` runs it in a thread of its
    own, beside all steps that follow, if there are two threads. `must_succeed` says that its errors
    are the search's.
    """

    name: str
    work: Callable[[Known, Clock], None]
    share: float = 1.0
    share_within_gap: float = 0.0
    is_wanted: Callable[[Known], bool] = _always
    is_beside: bool = False
    must_succeed: bool = False

    def share_of(self, known: Known) -> float:
        """Of the time that is left; 0 to leave it out."""
        if not self.is_wanted(known):
            return 0.0
        return self.share_within_gap if known.is_within_gap else self.share


def run(steps: Sequence[Step], known: Known) -> None:
    """Do all steps that are wanted, until the time is up; but something shall be known by then."""
    with ExitStack() as beside:
        for step in steps:
            if known.rated and known.clock.is_over():
                return
            share = step.share_of(known)
            if not share:
                continue
            if step.is_beside and known.options.threads > 1:
                known.stats[f"{step.name}_beside"] = 1
                beside.enter_context(_beside(step, known))
            else:
                _told(step, known, _done(step, known, known.clock.share(share)))


@contextmanager
def _beside(step: Step, known: Known) -> Iterator[None]:
    ended = threading.Event()
    errors: list[Exception | None] = []
    thread = threading.Thread(
        target=lambda: errors.append(_done(step, known, known.clock.unless(ended))),
        name=f"remat-{step.name}",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _told(step, known, *errors)


def _done(step: Step, known: Known, clock: Clock) -> Exception | None:
    """Why a step failed, if it did; what came of it is written to the stats."""
    error = None
    try:
        step.work(known, clock)
    except Exception as caught:
        error = caught
    _write(step.name, known, clock)
    return error


def _told(step: Step, known: Known, error: Exception | None) -> None:
    if error is not None and step.must_succeed:
        raise error
    if error is not None:
        tell(known.stats, step.name, error)


def _write(name: str, known: Known, clock: Clock) -> None:
    """Seconds, and the objective and the bound after the step: as shares of extra time, or as
    bytes."""
    stats = known.stats
    done = steps_of(stats)
    stats[STEPS] = " ".join(done if name in done else [*done, name])
    stats[f"{name}_s"] = float(stats.get(f"{name}_s", 0.0)) + clock.passed_s
    if known.is_for_peak:
        figures = {"bytes": known.objective, "bound_bytes": known.bound}
        stats |= {f"{name}_{key}": int(size) for key, size in figures.items() if known.rated}
        return
    whole_s = known.graph.total_cost_s or 1.0
    if known.rated:
        stats[f"{name}_cost"] = known.objective / whole_s - 1
    stats[f"{name}_bound"] = known.bound / whole_s - 1


def tell(stats: Stats, part: str, error: BaseException) -> None:
    """Warn that a part of a solve has failed, and keep why in `stats`."""
    told = f"{part}: {one_line(error)}"
    known = stats.get("search_error")
    stats["search_error"] = f"{known}; {told}" if known else told
    warnings.warn(
        f"{told}. The plan is the best that is known without this part of the search; please "
        "report this with the graph",
        SolverWarning,
        stacklevel=2,
    )
