"""Policies put into a model: the blocks' forwards are others, everything else stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from remat.blockwise.policies import BlockPolicy, Policies
from remat.errors import RematError, TraceError
from remat.frontend.emit.layers import CalledToCheckpoint

Run = Callable[..., Any]
"""Called with a policy, its block, the block's own forward, and the arguments of a call."""


class Applied:
    """What `apply` of an integration did, to be undone by `remove()`."""

    def __init__(self, model: nn.Module, policies: Policies, run: Run) -> None:
        self.policies = policies
        self._forwards: list[_Forward] = []
        found = list(blocks_of_policies(model, policies))
        check_not_applied(model)
        for module, policy in found:
            forward = _Forward(module, module.__dict__.get("forward"), policy, run)
            module.__dict__["forward"] = forward
            self._forwards.append(forward)
        self._state = CalledToCheckpoint(model)

    def remove(self) -> None:
        """Give the blocks their own forwards back."""
        for forward in self._forwards:
            forward.remove()
        self._forwards.clear()
        self._state.undo()


class _Forward:
    """The `forward` of a block. Copies and pickles of a model have their own."""

    def __init__(
        self,
        module: nn.Module,
        own: Callable[..., Any] | None,
        policy: BlockPolicy,
        run: Run,
    ) -> None:
        self.module, self.own, self.policy, self.run = module, own, policy, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self.own or MethodType(type(self.module).forward, self.module)
        if not torch.is_grad_enabled():
            return own(*args, **kwargs)
        return self.run(self.policy, self.module, own, *args, **kwargs)

    def remove(self) -> None:
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]
            if self.own is not None:
                self.module.__dict__["forward"] = self.own


def check_not_applied(model: nn.Module) -> None:
    """Raises `TraceError` where a block has a policy."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), _Forward):
            raise TraceError(
                f"a {type(module).__name__} of this {type(model).__name__} has a policy already; "
                "call remove() of what the first apply() returned"
            )


def blocks_of_policies(
    model: nn.Module, policies: Policies
) -> Iterator[tuple[nn.Module, BlockPolicy]]:
    """The blocks of a model with their policies. Raises `TraceError` where the model has others."""
    for policy in policies.blocks:
        try:
            yield model.get_submodule(policy.block), policy
        except AttributeError:
            raise TraceError(
                f"the policies are for a {policies.model} with a block {policy.block}, which this "
                f"{type(model).__name__} has not"
            ) from None


def check_rules(policies: Policies, rules: str) -> None:
    """Raises `RematError` where they are not those, or nothing that `emit` made."""
    if not isinstance(policies, Policies):
        raise RematError(
            f"expected what remat.emit returns, or Policies.load reads, got "
            f"{type(policies).__name__}"
        )
    if policies.rules != rules:
        raise RematError(
            f"these policies are by {policies.rules}, and this executor needs {rules}: "
            f"remat.emit(..., rules={rules!r}) makes them"
        )
