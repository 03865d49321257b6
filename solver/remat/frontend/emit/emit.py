"""`emit(model, budget, batch)`: how to checkpoint each block, for executors other than remat.

They run a block again as a whole, once, before its backward, but for what it saved: so each block
is tried by itself in several ways under these rules, and the ways are chosen against one budget for
the step, as where remat plans blocks itself (`remat.enable(..., scope="blocks")`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from remat.blockwise.choose import choose
from remat.blockwise.policies import AS_IT_IS, OPERATORS, REGIONS, RULES, BlockPolicy, Policies
from remat.blockwise.step import BlockStep, Way
from remat.budget import Budget
from remat.costs.roofline import Roofline
from remat.errors import InfeasibleBudget, RematError, TraceError, nearest, one_line
from remat.frontend.blocks.gauge import Gauge
from remat.frontend.blocks.measured import Invocation, gets_gradient, measured
from remat.frontend.blocks.observe import observe
from remat.frontend.blocks.offers import Offer, budget_of, with_inputs
from remat.frontend.blocks.planner import block_plan
from remat.frontend.blocks.sites import Site, blocks_of
from remat.frontend.capture.surroundings import random_numbers_restored
from remat.frontend.capture.trace import check_differentiable, normalise_inputs
from remat.frontend.costs.cache import CostCache
from remat.frontend.emit import operators, regions
from remat.frontend.emit.applied import check_not_applied
from remat.frontend.emit.layers import called_to_checkpoint, layers_of
from remat.frontend.emit.recorded import fingerprint
from remat.frontend.enable import check_plain
from remat.frontend.optimize import options_of
from remat.frontend.options import OptimizeOptions
from remat.frontend.reserve import Reserve
from remat.frontend.runtime.guards import Call
from remat.outputs import HELD, are_dropped
from remat.report.tables import starred
from remat.strategies import Strategy

logger = logging.getLogger("remat")

_EXECUTORS: dict[str, ModuleType] = {OPERATORS: operators, REGIONS: regions}

_ROUNDS = 3


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
    torch_remat, where modules inside of a block save what they need, or do not. The model runs a
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
            f"rules is {rules!r}{nearest(rules, RULES)}; they are by {' or '.join(RULES)}"
        )
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
    trials = _Trials(_EXECUTORS[rules])
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
        chosen = choose(step, budget_bytes, tied=[modules.index(m) for m in modules]).ways
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


@dataclass
class _Trials:
    """Looks at each call of a block, and tells its ways. Blocks that run the same operators have
    the same ones, tried once. `policies` has what the ways of each call are."""

    executor: ModuleType
    policies: list[tuple[BlockPolicy, ...]] = field(default_factory=list)
    whys: dict[str, str] = field(default_factory=dict)
    """Of the blocks that can only be left as they are."""
    _known: dict[object, tuple[tuple[Way, ...], tuple[BlockPolicy, ...]]] = field(
        default_factory=dict
    )

    def __call__(self, gauge: Gauge, call: Invocation) -> tuple[Way, ...]:
        kind, why = fingerprint(call.site.module, call.run)
        key = (kind, tuple(map(gets_gradient, tree_leaves((call.args, call.kwargs)))))
        if key not in self._known:
            logger.info("trying ways to checkpoint %s", call.site.path)
            self._known[key] = self._tried(gauge, call, again=not why)
        ways, policies = self._known[key]
        if len(ways) == 1:
            name = starred(call.site.path)
            self.whys[name] = why or self.whys.get(name, "its executor refuses each policy")
        self.policies.append(policies)
        return ways

    def _tried(
        self, gauge: Gauge, call: Invocation, *, again: bool
    ) -> tuple[tuple[Way, ...], tuple[BlockPolicy, ...]]:
        """As it is, and, of what may be run `again`, by each policy that is worth a try."""
        name, site = "block", call.site
        found: list[tuple[BlockPolicy, float]] = []
        if again:
            with random_numbers_restored():
                found = self.executor.choices(name, site.module, call.run)
        try:
            rounds = [measured(gauge, call) for _ in range(_ROUNDS)]
        except RuntimeError as error:
            raise TraceError(f"{site.path} cannot be run by itself: {one_line(error)}") from None
        kept = min((way for way, _ in rounds), key=lambda way: way.time_s)
        forward_s = min(seconds for _, seconds in rounds)
        ways, policies = [kept], [BlockPolicy(block=name, how=AS_IT_IS)]
        for policy, left in found:
            by_policy = partial(self.executor.run, policy, site.module, call.forward)
            try:
                way, _ = measured(gauge, call.by(by_policy))
            except RuntimeError as error:  # the executor's, which has rules that we do not know
                logger.info("%s cannot run like this: %s: %s", site.path, policy.saved, error)
                self.whys[starred(site.path)] = one_line(error)
                continue
            ways.append(replace(way, time_s=kept.time_s + left * forward_s))
            policies.append(policy)
        return tuple(ways), tuple(policies)


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
