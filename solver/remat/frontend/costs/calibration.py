"""Estimates of operations that cannot be measured, by a roofline fitted to the measured ones.

The fit is one factor: the median ratio of measured to predicted time over the measured operations.
So the data sheet of a similar device is adapted to the speed of this one.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from remat.costs.devices import match_device
from remat.costs.roofline import Roofline, operation_seconds
from remat.documents.records import Node, TensorMeta
from remat.frontend.costs.cost_cache import MeasuredCost
from remat.frontend.costs.cost_key import device_name

_FALLBACK_DEVICES = {"cpu": "cpu", "cuda": "a100"}
"""Names of data sheets by device type, for devices without a data sheet of their own."""


@dataclass(frozen=True)
class CalibratedRoofline:
    """A roofline whose times are multiplied by a factor, the median of `sample_count` ratios."""

    metas: Mapping[str, TensorMeta]
    roofline: Roofline
    factor: float
    sample_count: int

    @classmethod
    def fit(
        cls,
        device: torch.device,
        metas: Mapping[str, TensorMeta],
        measured: Iterable[tuple[Node, MeasuredCost]],
    ) -> CalibratedRoofline:
        """Fit the factor to measured operations; it is 1 without any."""
        spec = match_device(device_name(device)) if device.type == "cuda" else None
        roofline = Roofline(spec.name if spec else _FALLBACK_DEVICES.get(device.type, "cpu"))
        ratios = [cost.cost_s / operation_seconds(node, metas, roofline) for node, cost in measured]
        factor = statistics.median(ratios) if ratios else 1.0
        return cls(metas, roofline, factor, len(ratios))

    def seconds(self, node: Node) -> float:
        """Return the estimated seconds of an operation."""
        return self.factor * operation_seconds(node, self.metas, self.roofline)

    @property
    def description(self) -> str:
        """The way of estimation, as text for messages."""
        return (
            f"by the roofline of {self.roofline.name}, times {self.factor:.2g} as fitted to "
            f"{self.sample_count} measured operations"
        )
