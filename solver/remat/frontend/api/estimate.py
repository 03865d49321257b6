"""`estimate`: predict the peak of a training step and its parts, without running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from remat.costs.roofline import Roofline
from remat.costs.trace_costs import with_roofline_costs
from remat.documents.trace import Trace
from remat.frontend.capture.trace import trace as capture
from remat.frontend.common.target_gpu import DEFAULT_GPU
from remat.frontend.memory.device_memory import Reserve, reserve_size
from remat.limits.options import OUTPUTS_HELD
from remat.report.estimate import Estimate


def estimate(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    differentiate: str | Sequence[str] = "auto",
    device: str | torch.device | None = None,
    reserve: Reserve | None = None,
    outputs: str = OUTPUTS_HELD,
) -> Estimate:
    """Estimate the peak of one training step of `model` in eager mode, and the parts of the peak.

    Arguments are those of `remat.trace`. `reserve` is memory for other uses, as in
    `remat.optimize`: `Estimate.fits` leaves it free. Nothing is computed or allocated: the model
    may be on the "meta" device, and far too large for this machine; `device="h100"` estimates the
    step on a GPU that this machine does not have. `Estimate` documents what is not counted. Raises
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
    estimated = Estimate.of(with_roofline_costs(traced, roofline_for_trace(traced)))
    return dataclasses.replace(estimated, reserve_bytes=reserve_size(reserve).total_bytes)


def roofline_for_trace(trace: Trace) -> Roofline:
    """Return the roofline of the trace's GPU, of `DEFAULT_GPU` if its GPU is unknown, or of a
    CPU."""
    if not trace.device.startswith("cuda"):
        return Roofline("cpu")
    return Roofline(trace.gpu or DEFAULT_GPU)
