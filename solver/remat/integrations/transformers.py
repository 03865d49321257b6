"""Transformers: a callback for its `Trainer`, and policies for its models' gradient checkpointing.

    Trainer(model, arguments, train_dataset=texts, callbacks=[RematCallback("8GiB")])

trains within the budget.

    policies = remat.emit(model, "60%", example_kwargs=batch)
    remat.integrations.transformers.apply(model, policies)

makes each layer checkpoint itself by its policy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Unpack

from torch import nn
from torch.optim import Optimizer

from remat.blockwise.block_step import CHECKPOINTED
from remat.blockwise.policies import OPERATORS, BlockPolicy, Policies
from remat.errors import RematError, TraceError
from remat.frontend.api.enable import (
    EnableOptions,
    check_enable_options,
    disable,
    enable,
    is_enabled,
    plans,
)
from remat.frontend.capture.eager_kernels.flash_attention import flash_attention_assumed
from remat.frontend.emit import operators
from remat.frontend.emit.apply_policies import blocks_with_policies, check_policy_rules
from remat.frontend.emit.transformers_layers import checkpointed_layer
from remat.limits.budget import Budget, is_auto

try:
    from transformers import TrainerCallback
except ImportError:
    raise RematError("this needs Transformers: pip install 'remat[hf]'") from None

__all__ = [
    "RematCallback",
    "apply",
    "flash_attention_assumed",
    "gradient_checkpointing_func",
]

logger = logging.getLogger("remat")

_DEFAULT_POLICY = BlockPolicy(block="", how=CHECKPOINTED)


class RematCallback(TrainerCallback):
    """Train the Trainer's model within `budget`: call `remat.enable` when training starts, and
    `remat.disable` when it ends. `**options` are those of `remat.enable`.

    If the budget is in bytes or "auto", the optimizer's state is reserved from it. A model that is
    already enabled is left as it is. TRL's trainers compute their loss from other outputs than
    the model's `loss`: with them, `differentiate` is "all" by default.

    `module` is the name of the submodule to enable, for a trainer that calls only a part of the
    model; by default the whole model, and with TRL's `DistillationTrainer` the layers without the
    head. A `reserve` among the options replaces the optimizer that is reserved by default.
    """

    def __init__(
        self, budget: int | str, *, module: str | None = None, **options: Unpack[EnableOptions]
    ) -> None:
        check_enable_options(budget, options)
        self.budget = budget
        self.module = module
        self.options = options
        self._enabled: nn.Module | None = None
        self._is_first_step = True

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **others: Any
    ) -> None:
        """Enable the model. The Trainer calls this when training starts."""
        if model is None:
            return
        model = model.get_submodule(
            _default_submodule(model, args) if self.module is None else self.module
        )
        if is_enabled(model):
            return
        options: Any = dict(self.options)
        optimizer = getattr(others.get("optimizer"), "optimizer", others.get("optimizer"))
        if isinstance(optimizer, Optimizer) and _is_absolute_budget(self.budget):
            options.setdefault("reserve", optimizer)
        if _is_trl_arguments(args):
            options.setdefault("differentiate", "all")
        self._enabled = enable(model, self.budget, **options)
        self._is_first_step = True

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Log a warning after the first training step if the enabled module has no plan."""
        if self._enabled is not None and self._is_first_step and not plans(self._enabled):
            logger.warning(
                "the first training step did not call the forward of %s with gradients, so nothing "
                "is planned. If the trainer calls a submodule, pass the submodule's name, as in "
                'RematCallback(%r, module="model")',
                type(self._enabled).__name__,
                self.budget,
            )
        self._is_first_step = False

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Disable the model. The Trainer calls this when training ends."""
        if self._enabled is not None:
            disable(self._enabled)
            self._enabled = None


def _default_submodule(model: nn.Module, args: object) -> str:
    """Return the name of the submodule to enable by default; "" for the whole model."""
    is_distillation = any(cls.__name__ == "DistillationConfig" for cls in type(args).__mro__)
    if not is_distillation or not _is_trl_arguments(args):
        return ""
    path = "base_model.model" if hasattr(model, "peft_config") else ""
    prefix = getattr(model.get_submodule(path), "base_model_prefix", "")
    return ".".join(filter(None, (path, prefix)))


def _is_trl_arguments(args: object) -> bool:
    """True if the class of the training arguments is TRL's, or derives from one."""
    return any(cls.__module__.partition(".")[0] == "trl" for cls in type(args).__mro__)


def _is_absolute_budget(budget: int | str) -> bool:
    """True if the budget is "auto" or in bytes, not a percentage of the step or "min"."""
    return is_auto(budget) or Budget.parse(budget).size_bytes is not None


def apply(model: nn.Module, policies: Policies) -> nn.Module:
    """Enable the model's gradient checkpointing with a policy for each layer; return the model.

    `model.activation_checkpointing_disable()` undoes it. With the `Trainer`, leave its argument
    `gradient_checkpointing` off: it would replace these policies.

    Raises `TraceError` if the model does not have the blocks, or has no gradient checkpointing.
    """
    set_checkpointing: Any = getattr(model, "_set_gradient_checkpointing", None)
    if set_checkpointing is None:
        raise TraceError(
            f"this {type(model).__name__} has no gradient checkpointing of Transformers; use "
            "remat.integrations.checkpoint.apply, which is for any module"
        )
    function = gradient_checkpointing_func(model, policies)
    set_checkpointing(enable=True, gradient_checkpointing_func=function)
    return model


def gradient_checkpointing_func(model: nn.Module, policies: Policies) -> Callable[..., Any]:
    """Return the function that layers call in place of `torch.utils.checkpoint.checkpoint`: it runs
    each layer under its policy. Layers without a policy are checkpointed as a whole. Raises
    `RematError` for policies with other rules."""
    check_policy_rules(policies, OPERATORS)
    by_layer = dict(blocks_with_policies(model, policies))

    def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("use_reentrant", None)
        layer = checkpointed_layer(function)
        policy = _DEFAULT_POLICY if layer is None else by_layer.get(layer, _DEFAULT_POLICY)
        return operators.run_block_under_policy(policy, model, function, *args, **kwargs)

    return run
