"""`emit(model, budget, batch)`: a checkpointing policy for each block, for executors other than
remat.

These recompute a block as a whole, once, before its backward, except for what it saved. So each
block is tried standalone under several policies, and one is selected for each block, against one
budget for the step, as where remat plans blocks itself (`remat.enable(..., scope="blocks")`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from remat.blockwise.block_step import AS_IT_IS, CHECKPOINTED, BlockStep
from remat.blockwise.choose import cheapest_setting, choose_options
from remat.blockwise.policies import OPERATORS, RULES, BlockPolicy, Policies
from remat.costs.roofline import Roofline
from remat.errors import InfeasibleBudget, RematError, TraceError, similar_names_hint
from remat.frontend.api.enable import check_not_planned
from remat.frontend.api.optimize import checked_door_options
from remat.frontend.blocks.block_planning import plan_blocks
from remat.frontend.blocks.candidates import CallCandidates, step_limits, with_saved_inputs
from remat.frontend.blocks.discovery import Submodule, repeated_blocks
from remat.frontend.blocks.dry_run import run_dry
from remat.frontend.capture.trace import check_differentiable, normalise_inputs
from remat.frontend.costs.cost_cache import CostCache
from remat.frontend.emit.apply_policies import check_no_policies_applied
from remat.frontend.emit.transformers_layers import (
    checkpointable_layers,
    temporary_checkpointing_flags,
)
from remat.frontend.emit.trials import EXECUTORS, PolicyTrials
from remat.frontend.memory.device_memory import Reserve
from remat.frontend.runtime.guards import ModelCall
from remat.limits.budget import Budget
from remat.limits.limits import INFEASIBLE_ERROR, plan_or_smallest
from remat.limits.options import OUTPUTS_HELD, OUTPUTS_LOSS, are_dropped
from remat.plan_options import OPTIMIZE, CheckedOptions
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
    outputs: str = OUTPUTS_HELD,
    infeasible: str = INFEASIBLE_ERROR,
) -> Policies:
    """Return a checkpointing policy for each repeated block of `model`, such that the peak of a
    training step is at most `budget` (allocated bytes, as in `remat.optimize`).

    `rules` name the library that will run the policies: "operators" for selective checkpointing by
    torch, alone or through Transformers, which saves or recomputes the output of each operator;
    "regions" for torch_remat, which saves what selected submodules save; "megatron" for the
    settings of Megatron-core, which are the same for all of its layers. The model runs a few times
    with the example inputs, which are real data. With `compare`, the report also has the overhead
    of remat's own plan for the same blocks and peak; `strategy`, `costs` and `cache` are for that
    plan. With `infeasible="smallest"`, the policies have the smallest peak if no policies fit the
    budget, with a `BudgetWarning`. The functions that apply policies are in `remat.integrations`.

    Raises `TraceError` if the model has no repeated blocks, or is enabled, optimised, compiled or
    sharded already, `InfeasibleBudget`, `BudgetError`, and `RematError` if the library is not
    installed.
    """
    check_not_planned(model)
    check_no_policies_applied(model)
    if outputs == OUTPUTS_LOSS:
        raise ValueError(
            'outputs="loss" is not for policies: the model of another library returns all of its '
            'outputs; use outputs="dropped" if the training loop keeps only the loss'
        )
    if rules not in RULES:
        raise ValueError(
            f"rules is {rules!r}{similar_names_hint(rules, RULES)}; it must be one of "
            f"{', '.join(RULES)}"
        )
    if (check_model := EXECUTORS[rules].check_model) is not None:
        check_model(model)
    options = checked_door_options(
        OPTIMIZE,
        budget,
        {
            "strategy": strategy,
            "costs": costs,
            "cache": cache,
            "differentiate": differentiate,
            "reserve": reserve,
            "outputs": outputs,
            "infeasible": infeasible,
        },
    )
    inputs = () if example_inputs is None else example_inputs
    args, kwargs = normalise_inputs(model, inputs, example_kwargs)
    check_differentiable(model, args, kwargs)
    call = ModelCall.of(args, kwargs, "the example inputs ")
    blocks = checkpointable_layers(model) or repeated_blocks(model)
    if not blocks:
        raise TraceError(
            f"this {type(model).__name__} has no repeated blocks (modules of one class in one "
            "list), which emit makes policies for; remat.optimize plans the whole model"
        )
    policies = _select_policies(model, call, blocks, options, rules)
    if not compare:
        return policies
    overhead = _optimum_overhead(model, call, options, policies.peak_bytes)
    return policies.model_copy(update={"optimum_overhead": overhead})


def _select_policies(
    model: nn.Module,
    call: ModelCall,
    blocks: Sequence[Submodule],
    options: CheckedOptions,
    rules: str,
) -> Policies:
    """Try the candidate policies of each block under the executor of `rules`, and select those with
    which the step is the fastest within the budget."""
    executor = EXECUTORS[rules]
    trials = PolicyTrials(executor)
    with temporary_checkpointing_flags(model):
        dry_run = run_dry(
            model,
            call,
            blocks,
            measured_submodules=blocks,
            measure_options=trials,
            differentiate=options.differentiate,
            outputs_dropped=are_dropped(options.outputs),
        )
    calls = dry_run.calls
    policies_per_call = _policies_for_all_calls([c.submodule for c in calls], trials.policies)
    candidates = [
        CallCandidates(
            c,
            tuple(
                option
                for option, policy in zip(c.measured_options, tried, strict=True)
                if policy in policies
            ),
            tuple(policy.how for policy in policies),
        )
        for c, tried, policies in zip(calls, trials.policies, policies_per_call, strict=True)
    ]
    candidates = with_saved_inputs(candidates, dry_run)
    step = BlockStep(tuple(candidate.options for candidate in candidates), dry_run.events)
    as_it_is = [0] * len(candidates)
    baseline_bytes = step.peak_bytes(as_it_is)
    limits = step_limits(options, model)
    budget_bytes = limits.available_bytes(baseline_bytes, dry_run.library_bytes)

    def select_within(budget: Budget) -> Sequence[int]:
        if executor.settings_for_all_blocks is None:
            modules = [id(c.submodule.module) for c in calls]
            first_calls = [modules.index(module) for module in modules]
            choice = choose_options(step, budget.size_bytes, tied=first_calls)
            return choice.option_indices
        paths = [c.submodule.path for c in calls]
        settings = executor.settings_for_all_blocks(paths, policies_per_call)
        return cheapest_setting(step, list(settings), budget.size_bytes)

    with _infeasible_names_blocks(trials.uncheckpointable):
        selected = plan_or_smallest(
            select_within,
            Budget.parse("min" if budget_bytes is None else budget_bytes),
            options.infeasible,
            peak_bytes=lambda selected: step.peak_bytes(selected) + limits.reserve_bytes,
            requested=limits.budget,
        )
    peak_bytes = step.peak_bytes(selected)
    if budget_bytes is not None:
        budget_bytes = max(budget_bytes, peak_bytes)
    policy_of_block = {
        c.submodule.path: policies[index].model_copy(update={"block": c.submodule.path})
        for c, policies, index in zip(calls, policies_per_call, selected, strict=True)
    }
    return Policies(
        model=type(model).__name__,
        rules=rules,  # type: ignore[arg-type]
        blocks=tuple(policy_of_block.values()),
        budget_bytes=peak_bytes if budget_bytes is None else budget_bytes,
        peak_bytes=peak_bytes,
        baseline_bytes=baseline_bytes,
        time_s=step.time_s(selected),
        baseline_time_s=step.time_s(as_it_is),
    )


@contextmanager
def _infeasible_names_blocks(reasons: Mapping[str, str]) -> Iterator[None]:
    """Within the context, an `InfeasibleBudget` gets the `reasons` why some blocks, by module path,
    cannot be checkpointed."""
    try:
        yield
    except InfeasibleBudget as error:
        if not reasons:
            raise
        details = "; ".join(f"{path}: {reason}" for path, reason in reasons.items())
        raise error.with_hint(f"Blocks that cannot be checkpointed: {details}") from None


def _policies_for_all_calls(
    blocks: Sequence[Submodule], policies_per_call: Sequence[tuple[BlockPolicy, ...]]
) -> list[tuple[BlockPolicy, ...]]:
    """Return for each call the policies that are possible for all calls of its block.

    A block has one policy. If its calls run different operators, only "as it is" and "checkpointed"
    remain, which do not name operator calls, where they ran in all calls.
    """
    first: dict[int, tuple[BlockPolicy, ...]] = {}
    common: dict[int, tuple[BlockPolicy, ...]] = {}
    for block, policies in zip(blocks, policies_per_call, strict=True):
        module = id(block.module)
        if policies != first.setdefault(module, policies):
            remaining = common.get(module, first[module])
            common[module] = tuple(
                p for p in remaining if p.how in (AS_IT_IS, CHECKPOINTED) and p in policies
            )
    return [
        common.get(id(block.module), policies)
        for block, policies in zip(blocks, policies_per_call, strict=True)
    ]


def _optimum_overhead(
    model: nn.Module, call: ModelCall, options: CheckedOptions, peak_bytes: int
) -> float | None:
    """Return the overhead of remat's own plan for the same blocks and peak; None if they cannot be
    planned."""
    optimum_options = replace(
        options, budget=Budget.parse(peak_bytes), reserve=None, infeasible=INFEASIBLE_ERROR
    )
    try:
        with temporary_checkpointing_flags(model):
            return plan_blocks(model, call, optimum_options).plan.overhead
    except RematError as error:
        logger.info("remat's own plan of the blocks, for comparison, failed: %s", str(error))
        return None
