"""Trials of blocks: each block runs standalone under each candidate policy of an executor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from torch import nn
from torch.utils._pytree import tree_leaves

from remat.blockwise.block_step import AS_IT_IS, BlockOption
from remat.blockwise.choose import ExecutorSetting
from remat.blockwise.policies import MEGATRON, OPERATORS, REGIONS, BlockPolicy
from remat.errors import TraceError, one_line
from remat.frontend.blocks.profile import (
    BackwardFunction,
    ModuleInvocation,
    gradients_by_autograd,
    measure_invocation,
    requires_gradient,
)
from remat.frontend.capture.model.preserved_state import rng_state_preserved
from remat.frontend.emit import megatron, operators, regions
from remat.frontend.emit.operator_profile import block_fingerprint
from remat.frontend.memory.meter import MemoryGauge
from remat.report.report import fold_layer_numbers

logger = logging.getLogger("remat")

_ROUNDS = 3

_UNNAMED_BLOCK = "block"
"""The block name in policies that are not yet assigned to a block."""

Candidate: TypeAlias = tuple[BlockPolicy, float | None]
"""A policy that is worth a trial, with the fraction of the forward's time that its recomputation
takes; None if only a trial shows it."""


@dataclass(frozen=True)
class Executor:
    """A checkpointing library that runs blocks under policies.

    `run_block` runs one call of a block under a policy. `candidate_policies` returns the candidates
    for a block from the name for their policies, the block, and a function that runs one call of
    it. `check_model` raises if the library cannot run a model or is not installed.
    `compute_gradients` runs a backward as the library needs it. `settings_for_all_blocks` is None
    for a library in which each block may have another policy; else it yields for each setting of
    the library the index of every call's policy, from the module path and the policies of each
    call.
    """

    run_block: Callable[..., Any]
    candidate_policies: Callable[[str, nn.Module, Callable[[], Any]], Sequence[Candidate]]
    check_model: Callable[[nn.Module], None] | None = None
    compute_gradients: BackwardFunction = gradients_by_autograd
    settings_for_all_blocks: (
        Callable[[Sequence[str], Sequence[tuple[BlockPolicy, ...]]], Iterator[ExecutorSetting]]
        | None
    ) = None


EXECUTORS = {
    OPERATORS: Executor(operators.run_block_under_policy, operators.candidate_policies),
    REGIONS: Executor(regions.run_block_under_policy, regions.candidate_policies),
    MEGATRON: Executor(
        megatron.run_block_under_policy,
        megatron.candidate_policies,
        megatron.check_megatron_model,
        megatron.gradients_by_backward,
        megatron.settings_for_all_blocks,
    ),
}
"""The executor of each value of `rules`."""

_TrialResult = tuple[tuple[BlockOption, ...], tuple[BlockPolicy, ...], str]
"""The measured options of a block, their policies, and the reason if there is only one."""


@dataclass
class PolicyTrials:
    """Measures the options of each block call that it is called with, and records their policies.

    Blocks that run the same operators share the result of one trial. `policies` has the policies of
    each call's options. `uncheckpointable` has the reason for each block, by module path, that can
    only run as it is.
    """

    executor: Executor
    policies: list[tuple[BlockPolicy, ...]] = field(default_factory=list)
    uncheckpointable: dict[str, str] = field(default_factory=dict)
    _results: dict[object, _TrialResult] = field(default_factory=dict)

    def __call__(self, gauge: MemoryGauge, call: ModuleInvocation) -> tuple[BlockOption, ...]:
        """Return the options of a block call: as it is, and under each policy that ran. Record
        their policies."""
        fingerprint, obstacle = block_fingerprint(call)
        key = (fingerprint, tuple(map(requires_gradient, tree_leaves((call.args, call.kwargs)))))
        if key not in self._results:
            logger.info("measuring the checkpointing options of %s", call.submodule.path)
            self._results[key] = self._try_policies(gauge, call, obstacle)
        options, policies, reason = self._results[key]
        if reason:
            self.uncheckpointable[fold_layer_numbers(call.submodule.path)] = reason
        self.policies.append(policies)
        return options

    def _try_policies(
        self, gauge: MemoryGauge, call: ModuleInvocation, obstacle: str
    ) -> _TrialResult:
        """Measure a block call as it is and, unless `obstacle` is a reason against recomputation,
        under each candidate policy of the executor. Raises `TraceError` if it cannot run
        standalone."""
        path, module = call.submodule.path, call.submodule.module
        candidates: Sequence[Candidate] = ()
        if not obstacle:
            with rng_state_preserved():
                candidates = self.executor.candidate_policies(_UNNAMED_BLOCK, module, call.run)
        as_it_is = BlockPolicy(block=_UNNAMED_BLOCK, how=AS_IT_IS)
        try:
            baseline, forward_s = self._measure(gauge, call, as_it_is, _ROUNDS)
        except RuntimeError as error:
            raise TraceError(f"{path} cannot run standalone: {one_line(error)}") from None
        reason = obstacle
        measured: list[tuple[BlockPolicy, float | None, BlockOption]] = []
        for policy, recomputed in candidates:
            rounds = _ROUNDS if recomputed is None else 1
            try:
                option, _ = self._measure(gauge, call, policy, rounds)
            except Exception as error:  # the executor's own, of any class
                reason = one_line(error)  # the error itself would retain its frames and the graph
                logger.info("%s cannot run when it saves %s: %s", path, policy.saved, reason)
            else:
                measured.append((policy, recomputed, option))
        if any(recomputed is None for _, recomputed, _ in measured):
            # Measured times are compared with the baseline's: it must be as warm.
            warm, warm_forward_s = self._measure(gauge, call, as_it_is, _ROUNDS)
            baseline = replace(baseline, time_s=min(baseline.time_s, warm.time_s))
            forward_s = min(forward_s, warm_forward_s)
        options = [baseline]
        for _, recomputed, option in measured:
            # A single run shows the memory, but not the time: that is a fraction of the forward's.
            extra_s = (
                option.time_s - baseline.time_s if recomputed is None else recomputed * forward_s
            )
            options.append(replace(option, time_s=baseline.time_s + max(0.0, extra_s)))
        policies = (as_it_is, *(policy for policy, _, _ in measured))
        return tuple(options), policies, "" if measured else reason

    def _measure(
        self, gauge: MemoryGauge, call: ModuleInvocation, policy: BlockPolicy, rounds: int
    ) -> tuple[BlockOption, float]:
        """Run a block call under a policy, with its backward, `rounds` times. Return the option of
        the fastest round, and the seconds of the fastest forward."""
        run_block = partial(self.executor.run_block, policy, call.submodule.module, call.forward)
        invocation = call.with_forward(run_block)
        measured = [
            measure_invocation(gauge, invocation, self.executor.compute_gradients)
            for _ in range(rounds)
        ]
        fastest = min((option for option, _ in measured), key=lambda option: option.time_s)
        return fastest, min(forward_s for _, forward_s in measured)
