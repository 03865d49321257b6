"""Apply policies to a model: the forwards of its blocks are replaced, everything else stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from remat.blockwise.policies import BlockPolicy, Policies
from remat.errors import RematError, TraceError
from remat.frontend.emit.transformers_layers import CheckpointingFlags

RunBlock = Callable[..., Any]
"""Runs a block under a policy; called with the policy, the block, its original forward, and the
arguments of the call."""


class AppliedPolicies:
    """The policies that the `apply` of an integration set in a model, until `remove()`."""

    def __init__(self, model: nn.Module, policies: Policies, run_block: RunBlock) -> None:
        self.policies = policies
        self._forwards: list[_PolicyForward] = []
        blocks = list(blocks_with_policies(model, policies))
        check_no_policies_applied(model)
        for module, policy in blocks:
            original = module.__dict__.get("forward")
            forward = _PolicyForward(module, original, policy, run_block)
            module.__dict__["forward"] = forward
            self._forwards.append(forward)
        self._flags = CheckpointingFlags(model)

    def remove(self) -> None:
        """Restore the original forwards of the blocks, and the model's checkpointing flags."""
        for forward in self._forwards:
            forward.remove()
        self._forwards.clear()
        self._flags.restore()


class _PolicyForward:
    """A block's `forward` that follows a policy when gradients are enabled. A copied or unpickled
    model has a copy of it that refers to the copied block."""

    def __init__(
        self,
        module: nn.Module,
        original: Callable[..., Any] | None,
        policy: BlockPolicy,
        run_block: RunBlock,
    ) -> None:
        self.module, self.original = module, original
        self.policy, self.run_block = policy, run_block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.original or MethodType(type(self.module).forward, self.module)
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        return self.run_block(self.policy, self.module, original, *args, **kwargs)

    def remove(self) -> None:
        """Restore the original forward, unless another one was set in the meantime."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self.original is not None:
                self.module.__dict__["forward"] = self.original


def check_no_policies_applied(model: nn.Module) -> None:
    """Raise `TraceError` if policies are applied to the model already."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _PolicyForward):
            raise TraceError(
                f"a {type(module).__name__} of this {type(model).__name__} has a policy already; "
                "call remove() of what the first apply() returned"
            )


def blocks_with_policies(
    model: nn.Module, policies: Policies
) -> Iterator[tuple[nn.Module, BlockPolicy]]:
    """Yield each block of the model that has a policy, with the policy. Raises `TraceError` if the
    model lacks a block."""
    for policy in policies.blocks:
        try:
            yield model.get_submodule(policy.block), policy
        except AttributeError:
            raise TraceError(
                f"the policies are for a {policies.model} with a block {policy.block}, but this "
                f"{type(model).__name__} has no such block"
            ) from None


def check_policy_rules(policies: Policies, rules: str) -> None:
    """Raise `RematError` if `policies` are made for other rules, or are no `Policies` at all."""
    if not isinstance(policies, Policies):
        raise RematError(
            f"expected the result of remat.emit or Policies.load, got {type(policies).__name__}"
        )
    if policies.rules != rules:
        raise RematError(
            f"these policies have rules={policies.rules!r}, and this executor needs "
            f"rules={rules!r}: call remat.emit(..., rules={rules!r})"
        )
