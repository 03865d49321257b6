"""Executors of policies, by the name of their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from remat.blockwise.choose import ExecutorSetting
from remat.blockwise.policies import MEGATRON, OPERATORS, REGIONS, BlockPolicy
from remat.frontend.blocks.profile import BackwardFunction, gradients_by_autograd
from remat.frontend.emit import megatron, operators, regions


def _accept_any_model(model: nn.Module) -> None:
    """Accept the model: the executor runs any."""


@dataclass(frozen=True)
class Executor:
    """A checkpointing library that runs blocks under policies.

    `run_block` runs one call of a block under a policy. `candidate_policies` returns the policies
    that are worth a trial, each with the fraction of the block's forward that is recomputed, or
    None if only a trial shows it. `check_model` raises if the library cannot run a model or is not
    installed. `compute_gradients` runs a backward as the library needs it. `settings` is set for a
    library that has one setting for all blocks: it yields the policies of all calls under each
    setting.
    """

    run_block: Callable[..., Any]
    candidate_policies: Callable[
        [str, nn.Module, Callable[[], Any]], Sequence[tuple[BlockPolicy, float | None]]
    ]
    check_model: Callable[[nn.Module], None] = _accept_any_model
    compute_gradients: BackwardFunction = gradients_by_autograd
    settings: (
        Callable[[Sequence[str], Sequence[tuple[BlockPolicy, ...]]], Iterator[ExecutorSetting]]
        | None
    ) = None


EXECUTORS = {
    OPERATORS: Executor(operators.run_block, operators.candidate_policies),
    REGIONS: Executor(regions.run_block, regions.candidate_policies),
    MEGATRON: Executor(
        megatron.run_block,
        megatron.candidate_policies,
        megatron.check_model,
        megatron.compute_gradients,
        megatron.settings,
    ),
}
"""The executor of each value of `rules`."""
