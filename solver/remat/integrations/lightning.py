"""Lightning's `Trainer`:

    Trainer(callbacks=[RematCallback("8GiB", module="model")]).fit(training)

Works with `lightning` and with `pytorch_lightning`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Unpack

from torch import nn

from remat.errors import RematError, TraceError
from remat.frontend.api.enable import Options, check_asked, disable, enable, is_enabled

__all__ = ["RematCallback"]


def _callback() -> Any:
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            return import_module(package).Callback
        except ImportError:
            continue
    raise RematError("this needs Lightning: pip install 'remat[lightning]'")


class RematCallback(_callback()):
    """Has `module`, an attribute of the `LightningModule` (or the path of one), train within
    `budget`: it is enabled when fitting begins, and as it was when that ends. By default it is the
    `LightningModule` itself, for one that trains by calling itself. `**options` are those of
    `remat.enable`. A module that is enabled already stays so.
    """

    def __init__(self, budget: int | str, module: str = "", **options: Unpack[Options]) -> None:
        check_asked(budget, options)
        self.budget = budget
        self.module = module
        self.options = options
        self._enabled: nn.Module | None = None

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Called by Lightning. Raises `TraceError` where there is no such module."""
        try:
            found = pl_module.get_submodule(self.module)
        except AttributeError:
            names = ", ".join(name for name, _ in pl_module.named_children())
            raise TraceError(
                f"this {type(pl_module).__name__} has no module {self.module!r}; it has {names}"
            ) from None
        if not is_enabled(found):
            self._enabled = enable(found, self.budget, **self.options)

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Called by Lightning."""
        if self._enabled is not None:
            disable(self._enabled)
            self._enabled = None
