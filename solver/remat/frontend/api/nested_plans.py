"""Reject a model with a submodule that is planned already."""

from __future__ import annotations

from torch import nn

from remat.errors import TraceError
from remat.frontend.runtime.module import RematModule

FORWARD_ATTRIBUTE = "_remat_forward"
"""The attribute of an enabled module that has its `PlannedForward`: also there where a library
has wrapped the module's `forward` since."""


def check_no_planned_submodule(model: nn.Module) -> None:
    """Raise `TraceError` if a submodule has a plan of its own: both plans would replay the RNG
    state of its random operations."""
    for name, module in model.named_modules():
        if name and (FORWARD_ATTRIBUTE in module.__dict__ or isinstance(module, RematModule)):
            how = "optimised" if isinstance(module, RematModule) else "enabled"
            raise TraceError(
                f"{name} inside of this {type(model).__name__} is {how} by remat already; plan the "
                "whole model, or only its submodules"
            )
