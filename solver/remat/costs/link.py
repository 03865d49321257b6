"""Links between a device and its host: the bandwidth that offloading has in each direction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from remat.errors import wrong_type


@dataclass(frozen=True, slots=True)
class Link:
    """Bytes per second of copies to the host and to the device, from and to pinned memory, each as
    if the other direction were idle.

    Raises TypeError unless they are numbers, and ValueError for rates that are not above zero.
    """

    to_host_bytes_per_s: float
    to_device_bytes_per_s: float

    def __post_init__(self) -> None:
        rates = (self.to_host_bytes_per_s, self.to_device_bytes_per_s)
        for rate in rates:
            if isinstance(rate, bool) or not isinstance(rate, int | float):
                raise wrong_type(
                    "Link", "numbers of bytes per second", rate, "pass Link(55e9, 55e9)"
                )
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError("the bandwidths of a link are above zero, and finite")

    def scaled(self, factor: float) -> Link:
        """Return a link with both bandwidths multiplied by `factor`."""
        return Link(self.to_host_bytes_per_s * factor, self.to_device_bytes_per_s * factor)


PCIE_3 = Link(12e9, 12e9)
"""PCIe 3 x16: 15.75e9 bytes a second before the overhead of packets; about 12e9 are reached."""

PCIE_4 = Link(25e9, 25e9)
"""PCIe 4 x16: twice PCIe 3."""

PCIE_5 = Link(54.8e9, 54.8e9)
"""PCIe 5 x16. Measured on an H200, 256 MiB a copy; both directions at once have 100.4e9 in sum, and
matrix products at the same time take 2% longer (27 November 2026)."""

GRACE_HOPPER = Link(170e9, 411e9)
"""NVLink-C2C of a GH200, which has 450e9 each way by its data sheet; these rates were reached by
copies."""
