"""The doors through which a model that trains in eager mode gets a plan."""

from __future__ import annotations

from typing import Any

from torch import nn

import remat

DOORS = ("optimize", "model", "blocks")
"""`remat.optimize`, and the scopes of `remat.enable`. "auto" is one of these, too."""

OPTIONS: dict[str, Any] = {
    "costs": remat.Roofline("cpu"),
    "split": "off",
    "strategy": remat.Auto(time_limit=2),
}


def planned(model: nn.Module, door: str, budget: Any = "100%", **options: Any) -> Any:
    """Plan a model through a door, and return what runs its step."""
    options = OPTIONS | options
    if door == "optimize":
        return remat.optimize(model, budget, **options)
    return remat.enable(model, budget, scope=door, **options)  # type: ignore[arg-type]


def latest_plan(run: Any) -> Any:
    """Return the plan that ran last, of what `planned` returned; None before the first."""
    if isinstance(run, remat.RematModule):
        return run.plan
    return next(reversed(remat.plans(run)), None)
