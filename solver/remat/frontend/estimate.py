"""`estimate`: the peak of a training step and its parts, before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from remat.devices import match_device
from remat.footprint import Estimate
from remat.frontend.capture import trace as capture
from remat.frontend.target import find_target
from remat.pricing import by_roofline
from remat.roofline import Roofline
from remat.trace import Trace


def estimate(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    differentiate: str | Sequence[str] = "auto",
    device: str | torch.device | None = None,
) -> Estimate:
    """What one training step of `model` on inputs like these takes in eager mode, and what of it.

    Arguments are those of `remat.trace`. Nothing is computed or allocated: the model may be on the
    "meta" device, and far too large for this machine; `device="h100"` estimates the step on a GPU
    that is not here. What is not counted is in `Estimate`'s own
    description. Raises `TraceError` where the model cannot be captured.
    """
    traced = capture(
        model, example_inputs, example_kwargs, differentiate=differentiate, device=device
    )
    return Estimate.of(by_roofline(traced, data_sheet(traced, device)))


def data_sheet(trace: Trace, device: str | torch.device | None = None) -> Roofline:
    """The roofline of the trace's device where it is known, else one of its kind. `device` is what
    the trace was asked for."""
    if (target := find_target(device)) is not None:
        return Roofline(target.name)
    if not trace.device.startswith("cuda"):
        return Roofline("cpu")
    known = None
    if torch.cuda.is_available():
        known = match_device(torch.cuda.get_device_name(trace.device))
    return Roofline("h200" if known is None else known.name)
