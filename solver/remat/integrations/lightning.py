"""A callback with which Lightning's `Trainer` trains a model within a budget:

    Trainer(callbacks=[RematCallback("8GiB", module="model")]).fit(training)

Works with `lightning` and with `pytorch_lightning`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Unpack

from torch import nn

from remat.errors import RematError, TraceError
from remat.frontend.api.enable import (
    EnableOptions,
    check_enable_options,
    disable,
    enable,
    is_enabled,
)

__all__ = ["RematCallback"]


def _lightning_callback_class() -> Any:
    """Return the class `Callback` of the installed Lightning package. Raises `RematError` if there
    is none."""
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return import_module(package).Callback
        except ImportError:
            continue
    raise RematError("this needs Lightning: pip install 'remat[lightning]'")


class RematCallback(_lightning_callback_class()):
    """Train `module` within `budget`: call `remat.enable` when fitting starts, and `remat.disable`
    when it ends.

    `module` is the path of a submodule of the `LightningModule`. The default "" is the
    `LightningModule` itself, for one that calls itself in its training step. `**options` are those
    of `remat.enable`. A module that is already enabled is left as it is.
    """

    def __init__(
        self, budget: int | str, module: str = "", **options: Unpack[EnableOptions]
    ) -> None:
        check_enable_options(budget, options)
        self.budget = budget
        self.module = module
        self.options = options
        self._enabled: nn.Module | None = None

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Enable the module, unless it is enabled. Lightning calls this when fitting starts.

        Raises `TraceError` if the `LightningModule` has no such submodule.
        """
        try:
            module = pl_module.get_submodule(self.module)
        except AttributeError:
            names = ", ".join(name for name, _ in pl_module.named_children())
            raise TraceError(
                f"this {type(pl_module).__name__} has no module {self.module!r}; it has {names}"
            ) from None
        if not is_enabled(module):
            self._enabled = enable(module, self.budget, **self.options)

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Disable the module, if this callback enabled it. Lightning calls this when fitting
        ends."""
        if self._enabled is not None:
            disable(self._enabled)
            self._enabled = None
