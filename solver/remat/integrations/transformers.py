"""The Trainer of Transformers, and its models' own checkpointing.

    Trainer(model, arguments, train_dataset=texts, callbacks=[RematCallback("8GiB")])

trains within the budget, and

    policies = remat.emit(model, "60%", example_kwargs=batch)
    remat.integrations.transformers.apply(model, policies)

has each layer checkpoint itself by its policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from torch import nn
from torch.optim import Optimizer

from remat.blockwise.policies import CHECKPOINTED, OPERATORS, BlockPolicy, Policies
from remat.errors import RematError, TraceError
from remat.frontend.api.enable import Options, check_asked, disable, enable, is_enabled
from remat.frontend.emit import operators
from remat.frontend.emit.applied import blocks_of_policies, check_rules
from remat.frontend.emit.layers import module_of
from remat.limits.budget import Budget, is_auto

try:
    from transformers import TrainerCallback
except ImportError:
    raise RematError("this needs Transformers: pip install 'remat[hf]'") from None

__all__ = ["RematCallback", "apply", "gradient_checkpointing_func"]

_OTHERS = BlockPolicy(block="", how=CHECKPOINTED)


class RematCallback(TrainerCallback):
    """Has the Trainer's model train within `budget`: it is enabled when training begins, and as it
    was when training ends. `**options` are those of `remat.enable`.

    Of a budget in bytes, or of what the device has free, room is left for the optimizer's state.
    A model that is enabled already stays so.
    """

    def __init__(self, budget: int | str, **options: Unpack[Options]) -> None:
        check_asked(budget, options)
        self.budget = budget
        self.options = options
        self._enabled: nn.Module | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        """Called by the Trainer, with all of its parts."""
        if model is None or is_enabled(model):
            return
        options: Any = dict(self.options)
        optimizer = getattr(others.get("optimizer"), "optimizer", others.get("optimizer"))
        if isinstance(optimizer, Optimizer) and _is_of_bytes(self.budget):
            options.setdefault("reserve", optimizer)
        self._enabled = enable(model, self.budget, **options)

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Called by the Trainer."""
        if self._enabled is not None:
            disable(self._enabled)
            self._enabled = None


def _is_of_bytes(budget: int | str) -> bool:
    return is_auto(budget) or Budget.parse(budget).size_bytes is not None


def apply(model: nn.Module, policies: Policies) -> nn.Module:
    """Turn the model's gradient checkpointing on, with a policy for each layer, and return it.
    `model.activation_checkpointing_disable()` ends it. With the `Trainer`, leave its own
    `gradient_checkpointing` off, which would set another one.

    Raises `TraceError` where the model has not the blocks, or does not checkpoint.
    """
    set_to: Any = getattr(model, "_set_gradient_checkpointing", None)
    if set_to is None:
        raise TraceError(
            f"this {type(model).__name__} has no gradient checkpointing of Transformers; "
            "remat.integrations.checkpoint is for any module"
        )
    function = gradient_checkpointing_func(model, policies)
    set_to(enable=True, gradient_checkpointing_func=function)
    return model


def gradient_checkpointing_func(model: nn.Module, policies: Policies) -> Callable[..., Any]:
    """What layers call in place of `torch.utils.checkpoint.checkpoint`. Layers without a policy are
    checkpointed as a whole."""
    check_rules(policies, OPERATORS)
    by_layer = dict(blocks_of_policies(model, policies))

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("use_reentrant", None)
        layer = module_of(function)
        policy = _OTHERS if layer is None else by_layer.get(layer, _OTHERS)
        return operators.run(policy, model, function, *args, **kwargs)

    return run
