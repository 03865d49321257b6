"""Costs of what cannot be measured, from a roofline that is fitted to what could be.

The fit is one factor: the median ratio of measured to predicted time over the operations that
were measured, so a generic profile learns how fast this device really is.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from remat.costs.devices import match_device
from remat.costs.roofline import Roofline, seconds_of
from remat.documents.records import Node, TensorMeta
from remat.frontend.costs.cache import Cost
from remat.frontend.costs.key import device_name

_GENERIC = {"cpu": "cpu", "cuda": "a100"}


@dataclass(frozen=True)
class Calibration:
    """A roofline times a factor."""

    metas: Mapping[str, TensorMeta]
    roofline: Roofline
    factor: float
    samples: int

    @classmethod
    def fit(
        cls,
        device: torch.device,
        metas: Mapping[str, TensorMeta],
        measured: Iterable[tuple[Node, Cost]],
    ) -> Calibration:
        """Fit to measured operations; without any the factor is 1."""
        known = match_device(device_name(device)) if device.type == "cuda" else None
        roofline = Roofline(known.name if known else _GENERIC.get(device.type, "cpu"))
        ratios = [cost.cost_s / seconds_of(node, metas, roofline) for node, cost in measured]
        factor = statistics.median(ratios) if ratios else 1.0
        return cls(metas, roofline, factor, len(ratios))

    def seconds(self, node: Node) -> float:
        """Estimated seconds of an operation."""
        return self.factor * seconds_of(node, self.metas, self.roofline)

    @property
    def description(self) -> str:
        """For messages."""
        return (
            f"by the roofline of {self.roofline.name}, times {self.factor:.2g} as fitted to "
            f"{self.samples} measured operations"
        )
