"""`estimate`: the peak of a training step and its parts, before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from remat.costs.pricing import by_roofline
from remat.costs.roofline import Roofline
from remat.documents.trace import Trace
from remat.frontend.capture.trace import trace as capture
from remat.frontend.common.target import ANY
from remat.frontend.memory.reserve import Reserve, reserved
from remat.limits.outputs import HELD
from remat.report.estimate import Estimate


def estimate(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    differentiate: str | Sequence[str] = "auto",
    device: str | torch.device | None = None,
    reserve: Reserve | None = None,
    outputs: str = HELD,
) -> Estimate:
    """What one training step of `model` on inputs like these takes in eager mode, and what of it.

    Arguments are those of `remat.trace`. `reserve` is what else needs memory, as in
    `remat.optimize`: `Estimate.fits` leaves it free. Nothing is computed or allocated: the model
    may be on the "meta" device, and far too large for this machine; `device="h100"` estimates the
    step on a GPU that is not here. What is not counted is in `Estimate`'s own description. Raises
    `TraceError` where the model cannot be captured.
    """
    traced = capture(
        model,
        example_inputs,
        example_kwargs,
        differentiate=differentiate,
        device=device,
        outputs=outputs,
    )
    found = Estimate.of(by_roofline(traced, data_sheet(traced)))
    return dataclasses.replace(found, reserve_bytes=reserved(reserve).total_bytes)


def data_sheet(trace: Trace) -> Roofline:
    """The roofline of the trace's device where it is known, else one of its kind."""
    if not trace.device.startswith("cuda"):
        return Roofline("cpu")
    return Roofline(trace.gpu or ANY)
