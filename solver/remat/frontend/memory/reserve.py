"""`reserve_size`: the size of the memory that a plan must not use, such as an optimizer's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Adafactor, Optimizer

from remat.allocator.replay import ALIGNMENT_BYTES, round_size
from remat.errors import BudgetError
from remat.limits.reserve import parse_reserve

Reserve = int | str | Optimizer
"""Bytes, a string such as "2GiB", or an optimizer."""


@dataclass(frozen=True, slots=True)
class ReserveSize:
    """The size of a reserve. `total_bytes` are subtracted from a budget in bytes. Of these,
    `unallocated_bytes` are not allocated yet: only they are subtracted from a device's free memory.
    """

    total_bytes: int = 0
    unallocated_bytes: int = 0


def reserve_size(reserve: Reserve | None) -> ReserveSize:
    """Return the size of a reserve.

    The existing state of an optimizer is measured. State that its first step creates is predicted
    by a step on tensors without memory. The temporary memory of `step()` is not counted: it runs
    when the activations are freed. Raises `BudgetError` for a value that is not a number of bytes,
    and for an optimizer whose state cannot be predicted.
    """
    if reserve is None:
        return ReserveSize()
    if isinstance(reserve, Optimizer):
        allocated_bytes = unallocated_bytes = 0
        for group in reserve.param_groups:
            stateless = [p for p in group["params"] if p.requires_grad and not reserve.state.get(p)]
            for parameter in group["params"]:
                state = reserve.state.get(parameter, {})
                allocated_bytes += _state_bytes(state, parameter.device)
            if stateless:
                unallocated_bytes += _predicted_state_bytes(reserve, group, stateless)
        return ReserveSize(allocated_bytes + unallocated_bytes, unallocated_bytes)
    if isinstance(reserve, bool) or not isinstance(reserve, (int, str)):
        raise BudgetError(
            f"the reserve is a {type(reserve).__name__}; pass bytes, a string such as "
            '"2GiB", or an optimizer (a torch.optim.Optimizer, not its class)'
        )
    size_bytes = parse_reserve(reserve)
    return ReserveSize(size_bytes, size_bytes)


def _state_bytes(state: dict[str, Any], device: torch.device) -> int:
    """Return the bytes of a parameter's state on the parameter's device; a step count may be on the
    CPU."""
    sizes = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in state.values()
        if isinstance(t, Tensor) and t.device == device
    }
    return sum(map(round_size, sizes.values()))


def _predicted_state_bytes(
    optimizer: Optimizer, group: dict[str, Any], parameters: list[Tensor]
) -> int:
    """Return the bytes of the state that the first step of an optimizer creates for parameters of
    one group: run it on a copy of the optimizer with meta tensors."""
    # Scalars, such as the step count, are on the CPU unless a kernel has to read them.
    scalars_count = parameters[0].device.type == "cpu" or any(
        group.get(option) for option in ("fused", "capturable")
    )
    if isinstance(optimizer, Adafactor):
        step_bytes = ALIGNMENT_BYTES if scalars_count else 0
        return sum(step_bytes + _adafactor_bytes(p) for p in parameters)
    meta_parameters = [torch.empty_like(p, device="meta", requires_grad=True) for p in parameters]
    for parameter in meta_parameters:
        parameter.grad = torch.empty_like(parameter)
    options = {key: value for key, value in group.items() if key != "params"}
    plain = {key: False for key in ("foreach", "fused", "capturable") if key in options}
    try:
        optimizer_type = cast("Callable[..., Optimizer]", type(optimizer))
        meta_optimizer = optimizer_type([{**options, **plain, "params": meta_parameters}])
        meta_optimizer.step()
    except Exception as error:  # an optimizer of a third party may need anything
        kind = type(optimizer).__name__
        reason = str(error).partition("\n")[0][:80]
        raise BudgetError(
            f"the size of the state of {kind} cannot be predicted before its first step "
            f"({type(error).__name__}: {reason}); pass its bytes, such as "
            'reserve="2GiB", or the optimizer after its first step'
        ) from None
    states = list(meta_optimizer.state.values())
    scalar_bytes = sum(_state_bytes(state, torch.device("cpu")) for state in states)
    tensor_bytes = sum(_state_bytes(state, torch.device("meta")) for state in states)
    return tensor_bytes + scalar_bytes * scalars_count


def _adafactor_bytes(parameter: Tensor) -> int:
    """Return the bytes of Adafactor's state for a parameter: a variance of its rows and one of its
    columns; for a vector, a variance of each element. (On meta tensors, Adafactor's `step` fails:
    it reads elements.)"""
    shape, item = parameter.shape, parameter.element_size()
    if len(shape) < 2:
        return round_size(parameter.numel() * item)
    rows, columns = parameter.numel() // shape[-1], parameter.numel() // shape[-2]
    return round_size(rows * item) + round_size(columns * item)
