"""Memory that a step must leave alone: bytes, or what an optimizer's state takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Adafactor, Optimizer

from remat.allocator.replay import ALIGNMENT_BYTES, rounded
from remat.errors import BudgetError
from remat.limits.reserve import parse_reserve

Reserve = int | str | Optimizer
"""Bytes, a string such as "2GiB", or an optimizer."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """`total_bytes` to leave of a budget, of which `missing_bytes` are not allocated yet: only they
    are to be left of free memory."""

    total_bytes: int = 0
    missing_bytes: int = 0


def reserved(reserve: Reserve | None) -> Reserved:
    """What to leave. An optimizer's state is measured where it exists; the rest is what one step of
    the optimizer makes on tensors without memory. What `step()` needs for a moment is not counted:
    the activations are gone by then.

    Raises `BudgetError` for what is no number of bytes, and for an optimizer whose state cannot be
    told before it is there.
    """
    if reserve is None:
        return Reserved()
    if isinstance(reserve, Optimizer):
        there = missing = 0
        for group in reserve.param_groups:
            without = [p for p in group["params"] if p.requires_grad and not reserve.state.get(p)]
            for parameter in group["params"]:
                there += _state_bytes(reserve.state.get(parameter, {}), parameter.device)
            missing += _future_bytes(reserve, group, without) if without else 0
        return Reserved(there + missing, missing)
    if isinstance(reserve, bool) or not isinstance(reserve, (int, str)):
        raise BudgetError(
            f"the reserve is a {type(reserve).__name__}; pass bytes, a string such as "
            '"2GiB", or an optimizer (a torch.optim.Optimizer, not its class)'
        )
    size_bytes = parse_reserve(reserve)
    return Reserved(size_bytes, size_bytes)


def _state_bytes(state: dict[str, Any], device: torch.device) -> int:
    """Tensors of a parameter's state that are on its device; steps may be counted on the CPU."""
    found = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in state.values()
        if isinstance(t, Tensor) and t.device == device
    }
    return sum(map(rounded, found.values()))


def _future_bytes(optimizer: Optimizer, group: dict[str, Any], parameters: list[Tensor]) -> int:
    # Scalars, such as the number of steps, are on the CPU unless a kernel has to read them.
    scalars_count = parameters[0].device.type == "cpu" or any(
        group.get(option) for option in ("fused", "capturable")
    )
    if isinstance(optimizer, Adafactor):
        step_bytes = ALIGNMENT_BYTES if scalars_count else 0
        return sum(step_bytes + _adafactor_bytes(p) for p in parameters)
    twins = [torch.empty_like(p, device="meta", requires_grad=True) for p in parameters]
    for twin in twins:
        twin.grad = torch.empty_like(twin)
    options = {key: value for key, value in group.items() if key != "params"}
    plain = {key: False for key in ("foreach", "fused", "capturable") if key in options}
    try:
        made = cast("Callable[..., Optimizer]", type(optimizer))
        copied = made([{**options, **plain, "params": twins}])
        copied.step()
    except Exception as error:  # whatever an optimizer of others needs to be made and run
        kind = type(optimizer).__name__
        reason = str(error).partition("\n")[0][:80]
        raise BudgetError(
            f"the size of the state of {kind} cannot be told before it is there "
            f"({type(error).__name__}: {reason}); pass its bytes, such as "
            'reserve="2GiB", or the optimizer after its first step'
        ) from None
    states = list(copied.state.values())
    scalars = sum(_state_bytes(state, torch.device("cpu")) for state in states)
    values = sum(_state_bytes(state, torch.device("meta")) for state in states)
    return values + scalars * scalars_count


def _adafactor_bytes(parameter: Tensor) -> int:
    """A variance by rows and one by columns; of a vector, one as large as it. (Run on tensors
    without memory, `step` fails: it reads numbers back.)"""
    shape, item = parameter.shape, parameter.element_size()
    if len(shape) < 2:
        return rounded(parameter.numel() * item)
    rows, columns = parameter.numel() // shape[-1], parameter.numel() // shape[-2]
    return rounded(rows * item) + rounded(columns * item)
