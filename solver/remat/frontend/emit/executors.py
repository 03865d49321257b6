"""Who runs policies, by the name of their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from remat.blockwise.policies import MEGATRON, OPERATORS, REGIONS, BlockPolicy
from remat.blockwise.settings import Setting
from remat.frontend.blocks.profile import Gradients, by_grad
from remat.frontend.emit import megatron, operators, regions


def _any(model: nn.Module) -> None:
    """Any model will do."""


@dataclass(frozen=True)
class Executor:
    """`run` runs a call of a block by a policy; `choices` has the policies that are worth a try,
    each with the share of the block's forward that runs again, None where only a trial tells.

    `check` raises where a model is none of its kind, or its package is missing; `gradients` runs a
    backward as it needs it; `settings` are the ways of all calls together that it can be asked for,
    where it cannot be told for each block by itself.
    """

    run: Callable[..., Any]
    choices: Callable[
        [str, nn.Module, Callable[[], Any]], Sequence[tuple[BlockPolicy, float | None]]
    ]
    check: Callable[[nn.Module], None] = _any
    gradients: Gradients = by_grad
    settings: (
        Callable[[Sequence[str], Sequence[tuple[BlockPolicy, ...]]], Iterator[Setting]] | None
    ) = None


EXECUTORS = {
    OPERATORS: Executor(operators.run, operators.choices),
    REGIONS: Executor(regions.run, regions.choices),
    MEGATRON: Executor(
        megatron.run, megatron.choices, megatron.check, megatron.gradients, megatron.settings
    ),
}
