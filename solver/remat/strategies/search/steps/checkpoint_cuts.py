"""The steps that relax the problem to checkpoint cuts: first for a lower bound, then with more and
more cuts, concurrently with the programs over slots.

HiGHS releases Python's global lock while it runs, so a thread suffices to use a second core.
"""

from __future__ import annotations

from remat.heuristics.local_search import schedules_within_budget
from remat.milp.retention_advice import RetentionAdvisor
from remat.progress import Clock
from remat.strategies.search.state import SearchState

_PROGRAM_TIME_LIMIT_S = 20.0

_EVICTION_RUNS_PER_OPERATION = 12
"""Operations that eviction may run per piece of advice, in multiples of the graph's."""


def relax(state: SearchState, clock: Clock) -> None:
    """Solve the relaxation at the checkpoint cuts with the highest memory, for a lower bound on
    all schedules of the order and for advice to eviction."""
    budget_bytes = state.task.budget_bytes
    assert budget_bytes is not None
    state.advisor = RetentionAdvisor(
        state.task.graph,
        budget_bytes,
        gap=state.options.gap,
        clock=state.clock,
        stop=clock.is_set,
    )


def add_checkpoint_cuts(state: SearchState, clock: Clock) -> None:
    """Solve programs over more and more checkpoint cuts, and add schedules that follow their
    advice."""
    advisor = state.advisor
    if advisor is None:
        return
    for advice in advisor.advice_from_more_cuts(
        lambda: state.best, _PROGRAM_TIME_LIMIT_S, clock.is_set
    ):
        candidates = schedules_within_budget(
            state.graph,
            state.budget_bytes,
            incumbents=state.schedules,
            advice=[advice],
            is_good_enough=state.is_good_enough,
            max_runs=_EVICTION_RUNS_PER_OPERATION * len(state.graph),
            stop=clock.is_set,
        )
        state.add_schedules(candidate.schedule for candidate in candidates)
        if clock.is_set():
            return
