"""What is planned inside of a model that is to be planned."""

from __future__ import annotations

from torch import nn

from remat.errors import TraceError
from remat.frontend.runtime.module import RematModule

PLACE = "_remat_forward"
"""Where an enabled module keeps its planned forward."""


def check_none_inside(model: nn.Module) -> None:
    """Raises `TraceError` where a module of it has a plan of its own: its random numbers would be
    drawn by both."""
    for name, module in model.named_modules():
        if name and (PLACE in module.__dict__ or isinstance(module, RematModule)):
            how = "optimised" if isinstance(module, RematModule) else "enabled"
            raise TraceError(
                f"{name} inside of this {type(model).__name__} is {how} by remat already; plan the "
                "whole, or its parts"
            )
