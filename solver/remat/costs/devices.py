"""Peak rates of known devices, from the public data sheets of their manufacturers.

Dense rates without sparsity. `half` and `tf32` are the rates of tensor cores; `fp32` and `fp64` are
vector rates, which apply to matrix products by default (TF32 is opt-in in torch). A `Link` is the
bandwidth between a device and its host in each direction, which offloading has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """The data sheet of a device: its name, peak rates and memory. `half` is float16 and bfloat16
    with float32 accumulation."""

    name: str
    half_flops_per_s: float
    tf32_flops_per_s: float
    fp32_flops_per_s: float
    fp64_flops_per_s: float
    bytes_per_s: float
    memory_bytes: int
    launch_s: float = 4e-6
    """Seconds that an empty kernel takes: about 4 µs on CUDA in a sequence of kernels, as eager
    mode launches them."""
    capability: tuple[int, int] | None = None
    """The CUDA compute capability, which decides which kernels torch runs; None for a device
    without CUDA."""
    multiprocessors: int = 0
    """The number of streaming multiprocessors, by which CUDA kernels choose their grids; 0 for a
    device without CUDA."""
    link: Link = PCIE_4
    """The link to the host."""

    @property
    def multiprocessor_threads(self) -> int:
        """The largest number of resident threads of one multiprocessor (CUDA C++ Programming
        Guide, technical specifications by compute capability)."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536}.get(self.capability or (0, 0), 2048)


_T = 1e12
_GIB = 2**30

_CUDA: dict[str, tuple[tuple[int, int], int]] = {
    "v100": ((7, 0), 80),
    "t4": ((7, 5), 40),
    "a100": ((8, 0), 108),
    "l4": ((8, 9), 58),
    "l40s": ((8, 9), 142),
    "rtx4090": ((8, 9), 128),
    "h100": ((9, 0), 132),
    "h200": ((9, 0), 132),
    "gh200": ((9, 0), 132),
    "b200": ((10, 0), 148),
}
"""CUDA compute capabilities, from NVIDIA's list of CUDA GPUs (developer.nvidia.com/cuda-gpus), and
numbers of multiprocessors, from the architectures' white papers."""

_LINKS = {
    **dict.fromkeys(("v100", "t4"), PCIE_3),
    **dict.fromkeys(("h100", "h200", "b200", "mi300x"), PCIE_5),
    "gh200": GRACE_HOPPER,
}
"""The links to the host of devices that have another one than PCIe 4."""

DEVICES: dict[str, DeviceSpec] = {
    device.name: replace(
        device,
        capability=capability,
        multiprocessors=multiprocessors,
        link=_LINKS.get(device.name, PCIE_4),
    )
    for device in (
        # NVIDIA V100 SXM2 data sheet, January 2020. No bfloat16 units: torch emulates it.
        DeviceSpec("v100", 125 * _T, 15.7 * _T, 15.7 * _T, 7.8 * _T, 0.9 * _T, 32 * _GIB),
        # NVIDIA T4 data sheet, March 2019.
        DeviceSpec("t4", 65 * _T, 8.1 * _T, 8.1 * _T, 0.25 * _T, 0.32 * _T, 16 * _GIB),
        # NVIDIA A100 80GB SXM data sheet, June 2021; FP64 without tensor cores.
        DeviceSpec("a100", 312 * _T, 156 * _T, 19.5 * _T, 9.7 * _T, 2.039 * _T, 80 * _GIB),
        # NVIDIA L4 data sheet, 2023 (its tensor core rates are with sparsity: halved here).
        DeviceSpec("l4", 121 * _T, 60 * _T, 30.3 * _T, 0.47 * _T, 0.3 * _T, 24 * _GIB),
        # NVIDIA L40S data sheet, 2023.
        DeviceSpec("l40s", 362 * _T, 183 * _T, 91.6 * _T, 1.4 * _T, 0.864 * _T, 48 * _GIB),
        # NVIDIA Ada GPU architecture white paper, appendix A: FP16 with FP32 accumulate.
        DeviceSpec("rtx4090", 165.2 * _T, 82.6 * _T, 82.6 * _T, 1.29 * _T, 1.008 * _T, 24 * _GIB),
        # NVIDIA H100 SXM data sheet (tensor core rates there are with sparsity: halved here).
        DeviceSpec("h100", 989.4 * _T, 494.7 * _T, 67 * _T, 34 * _T, 3.35 * _T, 80 * _GIB),
        # NVIDIA H200 SXM data sheet: H100's rates, 141 GB at 4.8 TB/s.
        DeviceSpec("h200", 989.4 * _T, 494.7 * _T, 67 * _T, 34 * _T, 4.8 * _T, 141 * 10**9),
        # NVIDIA GH200 data sheet: H100's rates, 96 GB of HBM3 at 4.0 TB/s.
        DeviceSpec("gh200", 989.4 * _T, 494.7 * _T, 67 * _T, 34 * _T, 4.0 * _T, 96 * 10**9),
        # NVIDIA HGX B200 data sheet, per GPU, dense.
        DeviceSpec("b200", 2250 * _T, 1100 * _T, 75 * _T, 37 * _T, 8.0 * _T, 180 * 10**9),
        # AMD Instinct MI300X data sheet: vector rates for FP32 and FP64.
        DeviceSpec("mi300x", 1307.4 * _T, 653.7 * _T, 163.4 * _T, 81.7 * _T, 5.3 * _T, 192 * 10**9),
        # No data sheet: eight cores with AVX2 at 2.5 GHz (8 x 32 FLOP a cycle), two DDR4 channels.
        DeviceSpec("cpu", 0.64 * _T, 0.64 * _T, 0.64 * _T, 0.32 * _T, 0.04 * _T, 32 * _GIB, 2e-6),
    )
    for capability, multiprocessors in (_CUDA.get(device.name, (None, 0)),)
}


def find_device(name: str) -> DeviceSpec:
    """Return the data sheet with this name in `DEVICES` (case, spaces and dashes are ignored).

    Raises ValueError, with the names in `DEVICES`, for another name.
    """
    key = "".join(c for c in name.lower() if c.isalnum())
    if key not in DEVICES:
        raise ValueError(
            f"unknown device {name!r}; known are {', '.join(DEVICES)}; for another one pass its "
            "rates: remat.Roofline.custom('name', fp32_flops_per_s=..., bytes_per_s=...)"
        )
    return DEVICES[key]


def match_device(description: str) -> DeviceSpec | None:
    """Return the data sheet for a driver's description of a device ("NVIDIA H100 80GB HBM3"), or
    None."""
    words = description.lower().replace("rtx ", "rtx").replace("geforce ", "").replace("-", " ")
    return next((DEVICES[word] for word in words.split() if word in DEVICES), None)
