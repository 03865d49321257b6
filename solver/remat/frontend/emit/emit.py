"""`emit(model, budget, batch)`: how to checkpoint each block, for executors other than remat.

They run a block again as a whole, once, before its backward, but for what it saved: so each block
is tried by itself in several ways under these rules, and the ways are chosen against one budget for
the step, as where remat plans blocks itself (`remat.enable(..., scope="blocks")`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from remat.blockwise.choose import choose
from remat.blockwise.policies import OPERATORS, RULES, BlockPolicy, Policies
from remat.blockwise.settings import cheapest_setting
from remat.blockwise.step import BlockStep
from remat.costs.roofline import Roofline
from remat.errors import InfeasibleBudget, RematError, TraceError, nearest
from remat.frontend.api.enable import check_plain
from remat.frontend.api.optimize import options_of
from remat.frontend.blocks.candidates import Offer, budget_of, with_inputs
from remat.frontend.blocks.discovery import Site, blocks_of
from remat.frontend.blocks.dry_run import observe
from remat.frontend.blocks.planner import block_plan
from remat.frontend.capture.trace import check_differentiable, normalise_inputs
from remat.frontend.costs.cache import CostCache
from remat.frontend.emit.applied import check_not_applied
from remat.frontend.emit.executors import EXECUTORS
from remat.frontend.emit.layers import called_to_checkpoint, layers_of
from remat.frontend.emit.trials import Trials
from remat.frontend.memory.reserve import Reserve
from remat.frontend.planning.options import OptimizeOptions
from remat.frontend.runtime.guards import Call
from remat.limits.budget import Budget
from remat.limits.outputs import HELD, are_dropped
from remat.strategies import Strategy

logger = logging.getLogger("remat")


def emit(
    model: nn.Module,
    budget: int | str,
    example_inputs: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    rules: str = OPERATORS,
    compare: bool = True,
    strategy: Strategy | None = None,
    costs: str | Roofline | None = None,
    cache: str | CostCache | None = None,
    differentiate: str | Sequence[str] = "auto",
    reserve: Reserve | None = None,
    outputs: str = HELD,
) -> Policies:
    """How each repeated block of `model` is to be checkpointed, so that a step takes at most
    `budget` (bytes allocated at most, as in `remat.optimize`).

    `rules` are those of who will run it: "operators" for selective checkpointing by torch, alone or
    through Transformers, where each operator's output is saved or computed again; "regions" for
    torch_remat, where modules inside of a block save what they need, or do not; "megatron" for the
    options of Megatron-core, which are the same for all of its layers. The model runs a
    few times with the example inputs, which are real data. With `compare` the report says what a
    free plan of the same blocks takes within the same peak; `strategy`, `costs` and `cache` are of
    that plan. The executors are in `remat.integrations`.

    Raises `TraceError` where the model has no repeated blocks, or is enabled, optimised, compiled
    or sharded already, `InfeasibleBudget`, `BudgetError`, and `RematError` where the package whose
    rules they are is missing.
    """
    check_plain(model)
    check_not_applied(model)
    if rules not in RULES:
        raise ValueError(
            f"rules is {rules!r}{nearest(rules, RULES)}; they are by {', '.join(RULES)}"
        )
    EXECUTORS[rules].check(model)
    options = options_of(
        budget,
        strategy=strategy,
        costs=costs,
        cache=cache,
        differentiate=differentiate,
        reserve=reserve,
        outputs=outputs,
    )
    given = () if example_inputs is None else example_inputs
    args, kwargs = normalise_inputs(model, given, example_kwargs)
    check_differentiable(model, args, kwargs)
    call = Call.of(args, kwargs, "the example inputs ")
    sites = layers_of(model) or blocks_of(model)
    if not sites:
        raise TraceError(
            f"this {type(model).__name__} has no repeated blocks (modules of one class in one "
            "list), which are what is checkpointed; remat.optimize plans the whole model"
        )
    policies = _chosen(model, call, sites, options, rules)
    if not compare:
        return policies
    optimum = _optimum(model, call, options, policies.peak_bytes)
    return policies.model_copy(update={"optimum_overhead": optimum})


def _chosen(
    model: nn.Module, call: Call, sites: Sequence[Site], options: OptimizeOptions, rules: str
) -> Policies:
    executor = EXECUTORS[rules]
    trials = Trials(executor)
    with called_to_checkpoint(model):
        seen = observe(
            model,
            call,
            sites,
            measured=sites,
            look=trials,
            differentiate=options.differentiate,
            dropped=are_dropped(options.outputs),
        )
    tried = _agreed([c.site for c in seen.calls], trials.policies)
    offers = [
        Offer(each, each.measured[: len(own)], tuple(p.how for p in own))
        for each, own in zip(seen.calls, tried, strict=True)
    ]
    offers = with_inputs(offers, seen)
    step = BlockStep(tuple(o.ways for o in offers), seen.events)
    kept = [0] * len(offers)
    baseline_bytes = step.peak_bytes(kept)
    budget_bytes = budget_of(options, baseline_bytes, model)
    modules = [id(each.site.module) for each in seen.calls]
    with _telling(trials.whys):
        if executor.settings is None:
            chosen = choose(step, budget_bytes, tied=[modules.index(m) for m in modules]).ways
        else:
            settings = executor.settings([each.site.path for each in seen.calls], tried)
            chosen = cheapest_setting(step, list(settings), budget_bytes)
    peak_bytes = step.peak_bytes(chosen)
    named = {
        each.site.path: own[way].model_copy(update={"block": each.site.path})
        for each, own, way in zip(seen.calls, tried, chosen, strict=True)
    }
    return Policies(
        model=type(model).__name__,
        rules=rules,  # type: ignore[arg-type]
        blocks=tuple(named.values()),
        budget_bytes=peak_bytes if budget_bytes is None else budget_bytes,
        peak_bytes=peak_bytes,
        baseline_bytes=baseline_bytes,
        time_s=step.time_s(chosen),
        baseline_time_s=step.time_s(kept),
    )


@contextmanager
def _telling(whys: Mapping[str, str]) -> Iterator[None]:
    """Within it, a budget that is too small says which blocks could not be checkpointed."""
    try:
        yield
    except InfeasibleBudget as error:
        if not whys:
            raise
        told = "; ".join(f"{name}: {why}" for name, why in whys.items())
        raise InfeasibleBudget(
            f"{error}. Left as they are: {told}", min_feasible_bytes=error.min_feasible_bytes
        ) from None


def _agreed(
    sites: Sequence[Site], tried: Sequence[tuple[BlockPolicy, ...]]
) -> list[tuple[BlockPolicy, ...]]:
    """A block has one policy for all of its calls: where these run otherwise, only what has no
    numbers of operators in it."""
    first: dict[int, tuple[BlockPolicy, ...]] = {}
    few: dict[int, int] = {}
    for site, own in zip(sites, tried, strict=True):
        module = id(site.module)
        if own != first.setdefault(module, own):
            few[module] = min(2, len(own), few.get(module, len(first[module])))
    return [own[: few.get(id(s.module))] for s, own in zip(sites, tried, strict=True)]


def _optimum(
    model: nn.Module, call: Call, options: OptimizeOptions, peak_bytes: int
) -> float | None:
    """The extra time of the blocks planned freely within the same peak, if they can be planned."""
    free = replace(options, budget=Budget.parse(peak_bytes), reserve=None)
    try:
        with called_to_checkpoint(model):
            return block_plan(model, call, free).plan.overhead
    except RematError as error:
        logger.info("blocks are not planned freely, for comparison: %s", error)
        return None
