"""The steps of `Auto` and `Exact`, in their order, with all shares of the time.

A step begins where the gap asked for is not reached yet, unless it has a share of the time for the
other case too; see `Step`. What the steps are depends on the graph alone, so it can be asked for:

    >>> [step.name for step in pipeline.exact().cost]
    ['relaxation', 'eviction', 'reach', 'program']
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from remat.graph import Graph
from remat.strategies.search.state import Known
from remat.strategies.search.step import Step
from remat.strategies.search.steps.annealing import anneal
from remat.strategies.search.steps.baselines import try_baselines
from remat.strategies.search.steps.eviction import evict, shrink
from remat.strategies.search.steps.feasibility import nothing_fits, reach
from remat.strategies.search.steps.identical_blocks import blocks_to_tie, tie_blocks
from remat.strategies.search.steps.moments import more_moments, relax
from remat.strategies.search.steps.order import is_worthwhile
from remat.strategies.search.steps.slots import follow, prove, prove_smallest, sift
from remat.strategies.search.steps.windows import is_unproved, refine


class Pipeline(NamedTuple):
    """Steps for the least cost within a budget; for the smallest peak; and for the smallest peak
    that is told of where a budget is impossible, which should not take long."""

    cost: tuple[Step, ...]
    peak: tuple[Step, ...]
    nearest: tuple[Step, ...]


def _is_quick(known: Known) -> bool:
    """In an order that another search chose, the baselines are none, and slow."""
    return known.start is None or not is_worthwhile(known.task.graph)


RELAXATION = Step("relaxation", relax, share_within_gap=1.0)

PEAK = (
    Step("peak_baselines", try_baselines, share=0.2, share_within_gap=0.2),
    Step("peak_eviction", shrink, share=0.2, share_within_gap=0.2),
    Step("peak_program", prove_smallest),
)


def exact() -> Pipeline:
    """Eviction to begin from, and one program, to the end."""
    peak = PEAK[1:]
    return Pipeline(
        cost=(
            RELAXATION,
            Step("eviction", evict, share=0.25, share_within_gap=0.25),
            Step("reach", partial(reach, peak, peak), is_wanted=nothing_fits, must_succeed=True),
            Step("program", prove),
        ),
        peak=peak,
        nearest=peak,
    )


def near(graph: Graph) -> Pipeline:
    """For graphs of any size: what eviction and the bound leave open is closed from both sides.

    In graphs that are no training step, annealing places a few dozen recomputations among a
    thousand operations better than anything else, and eviction has less time; so it has where
    identical blocks went before, of which a large network has many.
    """
    blocks = blocks_to_tie(graph)
    is_annealed = is_worthwhile(graph)
    evict_share = 0.08 if blocks else 0.1 if is_annealed else 0.2
    peak, nearest = PEAK, PEAK[:-1]
    optional: list[Step] = []
    return Pipeline(
        cost=(
            RELAXATION,
            *([Step("blocks", partial(tie_blocks, blocks), share=0.5)] if blocks else optional),
            Step("eviction", evict, share=evict_share, share_within_gap=evict_share),
            Step("baselines", try_baselines, share=0.2, is_wanted=_is_quick),
            *(
                [Step("annealing", anneal, share=0.5, share_within_gap=0.15)]
                if is_annealed
                else optional
            ),
            Step("reach", partial(reach, peak, nearest), is_wanted=nothing_fits, must_succeed=True),
            Step("moments", more_moments, share=0.3, is_beside=True),
            Step("sifting", sift, share=0.4),
            Step("following", follow, share=0.2),
            Step("program", prove, share=0.6),
            Step("windows", refine, is_wanted=is_unproved),
        ),
        peak=peak,
        nearest=nearest,
    )
