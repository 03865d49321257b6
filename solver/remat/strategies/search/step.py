"""`SearchStep`, and running steps one after the other, each for its share of the time.

A step that fails is reported with a warning and skipped; the incumbents are kept.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from remat.errors import SolverWarning, one_line
from remat.progress import Clock
from remat.solution import STEPS, Stats, step_names
from remat.strategies.search.state import SearchState


def _is_always_needed(state: SearchState) -> bool:
    return True


@dataclass(frozen=True)
class SearchStep:
    """A named function that adds schedules to the search state, or raises its lower bound, until
    the clock that it gets is over.

    `time_share` is its share of the time that remains when it starts. If the incumbent is within
    the requested gap by then, `time_share_within_gap` is used instead. A share of 0 skips the step,
    and so does `is_needed` where it returns False. With `is_concurrent` and two threads or more,
    the step runs in its own thread, alongside all steps that follow and until they end, whatever
    its share. The errors of a step with `must_succeed` end the search.
    """

    name: str
    function: Callable[[SearchState, Clock], None]
    time_share: float = 1.0
    time_share_within_gap: float = 0.0
    is_needed: Callable[[SearchState], bool] = _is_always_needed
    is_concurrent: bool = False
    must_succeed: bool = False

    def time_share_for(self, state: SearchState) -> float:
        """Return the share of the remaining time for this step now; 0 to skip it."""
        if not self.is_needed(state):
            return 0.0
        return self.time_share_within_gap if state.is_within_gap else self.time_share


def run_steps(steps: Sequence[SearchStep], state: SearchState) -> None:
    """Run the steps that are needed, in order, until the time is up.

    Steps go on after the deadline for as long as there is no incumbent.
    """
    with ExitStack() as concurrent_steps:
        for step in steps:
            if state.incumbents and state.clock.is_set():
                return
            share = step.time_share_for(state)
            if not share:
                continue
            if step.is_concurrent and state.options.threads > 1:
                state.stats[f"{step.name}_concurrent"] = 1
                concurrent_steps.enter_context(_step_running_concurrently(step, state))
            else:
                clock = state.clock.limited_to_share(share)
                _handle_step_error(step, state, _run_step(step, state, clock))


@contextmanager
def _step_running_concurrently(step: SearchStep, state: SearchState) -> Iterator[None]:
    """Run a step in its own thread while the context is active, then stop it."""
    stop_event = threading.Event()
    errors: list[Exception | None] = []
    thread = threading.Thread(
        target=lambda: errors.append(_run_step(step, state, state.clock.with_cancel(stop_event))),
        name=f"remat-{step.name}",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()
        _handle_step_error(step, state, errors.pop())


def _run_step(step: SearchStep, state: SearchState, clock: Clock) -> Exception | None:
    """Run a step and record its statistics; return its error if it fails.

    No variable keeps the error: with its traceback, which has this frame and those of the callers,
    it would be a reference cycle.
    """
    try:
        step.function(state, clock)
    except Exception as error:
        return error
    finally:
        _record_step_stats(step.name, state, clock)
    return None


def _handle_step_error(step: SearchStep, state: SearchState, error: Exception | None) -> None:
    """Raise the error of a step that must succeed; warn of any other."""
    if error is None:
        return
    if not step.must_succeed:
        warn_of_failure(state.stats, step.name, error)
        return
    try:
        raise error
    finally:
        del error  # its traceback has this frame: a reference cycle


def _record_step_stats(name: str, state: SearchState, clock: Clock) -> None:
    """Write the seconds of a step to the stats, and the objective and bound after it, as
    fractions of extra time or as bytes."""
    stats = state.stats
    names = step_names(stats)
    stats[STEPS] = " ".join(names if name in names else [*names, name])
    stats[f"{name}_s"] = float(stats.get(f"{name}_s", 0.0)) + clock.elapsed_s
    if state.is_peak_search:
        sizes = {"bytes": state.objective, "bound_bytes": state.bound}
        stats |= {f"{name}_{key}": int(size) for key, size in sizes.items() if state.incumbents}
        return
    baseline_s = state.graph.baseline_time_s or 1.0
    if state.incumbents:
        stats[f"{name}_cost"] = state.objective / baseline_s - 1
    stats[f"{name}_bound"] = state.bound / baseline_s - 1


def warn_of_failure(stats: Stats, part: str, error: BaseException) -> None:
    """Warn that a part of the search failed, and record the reason in `stats`."""
    reason = f"{part}: {one_line(error)}"
    earlier = stats.get("search_error")
    stats["search_error"] = f"{earlier}; {reason}" if earlier else reason
    warnings.warn(
        f"{reason}. The plan is the best found without this part of the search; please report "
        "this with the graph",
        SolverWarning,
        stacklevel=2,
    )
