"""The steps of `Auto` and `Exact`, in order, with their shares of the time.

A step starts only while the requested gap is not reached, unless it has a time share for that case
too: see `SearchStep`. The steps depend on the graph alone, so they can be inspected:

    >>> [step.name for step in pipeline.exact_pipeline().cost]
    ['relaxation', 'eviction', 'feasibility', 'milp']
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from remat.graph import Graph
from remat.strategies.search.state import SearchState
from remat.strategies.search.step import SearchStep
from remat.strategies.search.steps.annealing import anneal
from remat.strategies.search.steps.baselines import run_quick_baselines
from remat.strategies.search.steps.checkpoint_cuts import add_checkpoint_cuts, relax
from remat.strategies.search.steps.eviction import (
    evict_by_advice,
    evict_for_cost,
    evict_for_peak,
)
from remat.strategies.search.steps.feasibility import find_feasible_schedule, has_no_incumbent
from remat.strategies.search.steps.identical_blocks import (
    find_repeated_blocks,
    solve_identical_blocks,
)
from remat.strategies.search.steps.order_search import may_reorder
from remat.strategies.search.steps.slot_programs import (
    evict_by_relaxation,
    minimize_cost_over_slots,
    minimize_peak_over_slots,
    solve_relaxation_support,
)
from remat.strategies.search.steps.windows import improve_windows, is_gap_open


class Pipeline(NamedTuple):
    """The step lists of a strategy: `cost` for the least time within a budget, `peak` for the
    smallest peak, and `quick_peak` for a small peak to name in the error of an infeasible
    budget."""

    cost: tuple[SearchStep, ...]
    peak: tuple[SearchStep, ...]
    quick_peak: tuple[SearchStep, ...]


def _may_use_baselines(state: SearchState) -> bool:
    """True unless an order search chose the order: baselines do not apply there, and are slow."""
    return state.start is None or not may_reorder(state.task.graph)


RELAXATION = SearchStep("relaxation", relax, time_share_within_gap=1.0)

PEAK = (
    SearchStep("peak_baselines", run_quick_baselines, time_share=0.2, time_share_within_gap=0.2),
    SearchStep("peak_eviction", evict_for_peak, time_share=0.2, time_share_within_gap=0.2),
    SearchStep("peak_milp", minimize_peak_over_slots),
)


def exact_pipeline() -> Pipeline:
    """Return the steps of `Exact`: a relaxation and eviction to start from, then one program."""
    peak = PEAK[1:]
    return Pipeline(
        cost=(
            RELAXATION,
            SearchStep("eviction", evict_for_cost, time_share=0.25, time_share_within_gap=0.25),
            SearchStep(
                "feasibility",
                partial(find_feasible_schedule, peak, peak),
                is_needed=has_no_incumbent,
                must_succeed=True,
            ),
            SearchStep("milp", minimize_cost_over_slots),
        ),
        peak=peak,
        quick_peak=peak,
    )


def auto_pipeline(graph: Graph, *, has_complete_slots: bool = True) -> Pipeline:
    """Return the steps of `Auto` for a graph of any size. Without complete slots, no program can
    prove a bound on the peak, so the search for the smallest one ends before it.

    They close the gap that eviction and the bound leave open from both sides. In graphs that are no
    training step, annealing places a few dozen recomputations among a thousand operations better
    than anything else, and eviction has less time. It also has less after the step for identical
    blocks, of which a large network has many; but it follows the advice of the relaxation before,
    which often reaches the gap at once.
    """
    blocks = find_repeated_blocks(graph)
    is_annealed = may_reorder(graph)
    evict_share = 0.08 if blocks else 0.1 if is_annealed else 0.2
    quick_peak = PEAK[:-1]
    cost: list[SearchStep] = [RELAXATION]
    if blocks:
        solve_blocks = partial(solve_identical_blocks, blocks)
        cost += [
            SearchStep("advised_eviction", evict_by_advice, time_share=0.3),
            SearchStep("identical_blocks", solve_blocks, time_share=0.5),
        ]
    cost += [
        SearchStep(
            "eviction", evict_for_cost, time_share=evict_share, time_share_within_gap=evict_share
        ),
        SearchStep("baselines", run_quick_baselines, time_share=0.2, is_needed=_may_use_baselines),
    ]
    if is_annealed:
        cost.append(SearchStep("annealing", anneal, time_share=0.5, time_share_within_gap=0.15))
    cost += [
        SearchStep(
            "feasibility",
            partial(find_feasible_schedule, PEAK, quick_peak),
            is_needed=has_no_incumbent,
            must_succeed=True,
        ),
        SearchStep("checkpoint_cuts", add_checkpoint_cuts, time_share=0.3, is_concurrent=True),
        SearchStep("relaxation_support", solve_relaxation_support, time_share=0.4),
        SearchStep("guided_eviction", evict_by_relaxation, time_share=0.2),
        SearchStep("milp", minimize_cost_over_slots, time_share=0.6),
        SearchStep("windows", improve_windows, is_needed=is_gap_open),
    ]
    return Pipeline(tuple(cost), PEAK if has_complete_slots else quick_peak, quick_peak)
