"""Executors of policies, by the name of their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from remat.blockwise.choose import ExecutorSetting
from remat.blockwise.policies import MEGATRON, OPERATORS, REGIONS, BlockPolicy
from remat.frontend.blocks.profile import BackwardFunction, gradients_by_autograd
from remat.frontend.emit import megatron, operators, regions


def _accept_any_model(model: nn.Module) -> None:
    """Accept the model: the executor runs any."""


class CandidatePolicies(Protocol):
    """A function that returns the policies of a block that are worth a trial."""

    def __call__(
        self, block: str, module: nn.Module, forward: Callable[[], Any]
    ) -> Sequence[tuple[BlockPolicy, float | None]]:
        """Return policies named `block`, each with the fraction of the forward's time that the
        recomputation takes; None if only a trial shows it. `forward` runs one call of `module`."""
        ...


class SettingsForAllBlocks(Protocol):
    """A function that yields the settings of a library whose settings apply to all blocks."""

    def __call__(
        self, paths: Sequence[str], policies: Sequence[tuple[BlockPolicy, ...]]
    ) -> Iterator[ExecutorSetting]:
        """Yield for each setting the index of every call's policy, from the module path and the
        policies of each call."""
        ...


@dataclass(frozen=True)
class Executor:
    """A checkpointing library that runs blocks under policies.

    `run_block` runs one call of a block under a policy. `check_model` raises if the library cannot
    run a model or is not installed. `compute_gradients` runs a backward as the library needs it.
    `settings_for_all_blocks` is None for a library in which each block may have another policy.
    """

    run_block: Callable[..., Any]
    candidate_policies: CandidatePolicies
    check_model: Callable[[nn.Module], None] = _accept_any_model
    compute_gradients: BackwardFunction = gradients_by_autograd
    settings_for_all_blocks: SettingsForAllBlocks | None = None


EXECUTORS = {
    OPERATORS: Executor(operators.run_block, operators.candidate_policies),
    REGIONS: Executor(regions.run_block, regions.candidate_policies),
    MEGATRON: Executor(
        megatron.run_block,
        megatron.candidate_policies,
        megatron.check_model,
        megatron.compute_gradients,
        megatron.settings_for_all_blocks,
    ),
}
"""The executor of each value of `rules`."""
