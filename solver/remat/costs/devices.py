"""Peak rates of known devices, from the public data sheets of their manufacturers.

Dense rates without sparsity. `half` and `tf32` are the rates of tensor cores; `fp32` and `fp64` are
vector rates, which apply to matrix products by default (TF32 is opt-in in torch). Where the
data sheet has another memory than drivers report (`nvidia-smi`), the drivers' counts: error
correction takes a sixteenth of GDDR6 (T4, A10, A40, L4, L40), and the 141 GB of an H200 are 140.4
GiB. A `Link` is the
bandwidth between a device and its host in each direction, which offloading has.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace

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
    source: str = field(default="", repr=False, compare=False)
    """The publication that has these figures; "" for a device without one."""

    @property
    def multiprocessor_threads(self) -> int:
        """The largest number of resident threads of one multiprocessor (CUDA C++ Programming
        Guide, technical specifications by compute capability)."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536}.get(self.capability or (0, 0), 2048)


_T = 1e12
_GIB, _MIB = 2**30, 2**20

_CUDA: dict[str, tuple[tuple[int, int], int]] = {
    "v100": ((7, 0), 80),
    "v100-16gb": ((7, 0), 80),
    "t4": ((7, 5), 40),
    "a100": ((8, 0), 108),
    "a100-40gb": ((8, 0), 108),
    "a30": ((8, 0), 56),
    "a10": ((8, 6), 72),
    "a10g": ((8, 6), 80),
    "a40": ((8, 6), 84),
    "rtxa6000": ((8, 6), 84),
    "rtx3090": ((8, 6), 82),
    "rtx3090-ti": ((8, 6), 84),
    "l4": ((8, 9), 58),
    "l40": ((8, 9), 142),
    "l40s": ((8, 9), 142),
    "rtx6000-ada": ((8, 9), 142),
    "rtx4070": ((8, 9), 46),
    "rtx4070-ti": ((8, 9), 60),
    "rtx4070-ti-super": ((8, 9), 66),
    "rtx4080": ((8, 9), 76),
    "rtx4090": ((8, 9), 128),
    "h20": ((9, 0), 78),
    "h100": ((9, 0), 132),
    "h100-pcie": ((9, 0), 114),
    "h200": ((9, 0), 132),
    "gh200": ((9, 0), 132),
    "b200": ((10, 0), 148),
    "rtx5070": ((12, 0), 48),
    "rtx5070-ti": ((12, 0), 70),
    "rtx5080": ((12, 0), 84),
    "rtx5090": ((12, 0), 170),
}
"""CUDA compute capabilities, from NVIDIA's list of CUDA GPUs (developer.nvidia.com/cuda-gpus), and
numbers of multiprocessors, from the architectures' white papers."""

_LINKS = {
    **dict.fromkeys(("v100", "v100-16gb", "t4"), PCIE_3),
    **dict.fromkeys(("h20", "h100", "h100-pcie", "h200", "b200", "mi300x"), PCIE_5),
    **dict.fromkeys(("rtx5070", "rtx5070-ti", "rtx5080", "rtx5090"), PCIE_5),
    "gh200": GRACE_HOPPER,
}
"""The links to the host of devices that have another one than PCIe 4."""

_SOURCES = {
    "v100": "NVIDIA V100 SXM2 data sheet, 2020",
    "v100-16gb": "NVIDIA V100 SXM2 data sheet, 2020",
    "t4": "NVIDIA T4 data sheet, 2019",
    "a100": "NVIDIA A100 80GB SXM data sheet, 2021",
    "a100-40gb": "NVIDIA A100 40GB SXM data sheet, 2020",
    "a30": "NVIDIA A30 data sheet, 2022",
    "a10": "NVIDIA A10 data sheet, 2021",
    "a10g": "NVIDIA A10G product brief",
    "a40": "NVIDIA A40 data sheet, 2021",
    "rtxa6000": "NVIDIA RTX A6000 data sheet, 2020",
    "rtx3090": "NVIDIA Ampere GA102 white paper",
    "rtx3090-ti": "NVIDIA Ampere GA102 white paper",
    "l4": "NVIDIA L4 data sheet, 2023",
    "l40": "NVIDIA L40 data sheet, 2023",
    "rtx6000-ada": "NVIDIA RTX 6000 Ada data sheet, 2023",
    "l40s": "NVIDIA L40S data sheet, 2023",
    "rtx4090": "NVIDIA Ada white paper",
    "rtx4080": "estimated from cores and boost clock, scaled from the RTX 4090",
    "rtx4070-ti-super": "estimated from cores and boost clock, scaled from the RTX 4090",
    "rtx4070-ti": "estimated from cores and boost clock, scaled from the RTX 4090",
    "rtx4070": "estimated from cores and boost clock, scaled from the RTX 4090",
    "rtx5090": "NVIDIA RTX Blackwell white paper",
    "rtx5080": "NVIDIA RTX Blackwell white paper",
    "rtx5070-ti": "NVIDIA RTX Blackwell white paper",
    "rtx5070": "estimated from cores and boost clock, scaled from the RTX 5090",
    "h20": "NVIDIA H20 data sheet, 2023",
    "h100": "NVIDIA H100 SXM data sheet",
    "h100-pcie": "NVIDIA H100 PCIe data sheet",
    "h200": "NVIDIA H200 SXM data sheet",
    "gh200": "NVIDIA GH200 data sheet",
    "b200": "NVIDIA HGX B200 data sheet",
    "mi250": "AMD Instinct MI250 data sheet, 2021",
    "mi300x": "AMD Instinct MI300X data sheet",
}
"""The sources of rates and memory."""

DEVICES: dict[str, DeviceSpec] = {
    device.name: replace(
        device,
        capability=capability,
        multiprocessors=multiprocessors,
        link=_LINKS.get(device.name, PCIE_4),
        source=_SOURCES.get(device.name, ""),
    )
    for device in (
        # No bfloat16 units: torch emulates it.
        DeviceSpec("v100", 125 * _T, 15.7 * _T, 15.7 * _T, 7.8 * _T, 0.9 * _T, 32 * _GIB),
        DeviceSpec("v100-16gb", 125 * _T, 15.7 * _T, 15.7 * _T, 7.8 * _T, 0.9 * _T, 16 * _GIB),
        DeviceSpec("t4", 65 * _T, 8.1 * _T, 8.1 * _T, 0.25 * _T, 0.32 * _T, 15360 * _MIB),
        # FP64 without tensor cores.
        DeviceSpec("a100", 312 * _T, 156 * _T, 19.5 * _T, 9.7 * _T, 2.039 * _T, 80 * _GIB),
        DeviceSpec("a100-40gb", 312 * _T, 156 * _T, 19.5 * _T, 9.7 * _T, 1.555 * _T, 40 * _GIB),
        DeviceSpec("a30", 165 * _T, 82 * _T, 10.3 * _T, 5.2 * _T, 0.933 * _T, 24 * _GIB),
        DeviceSpec("a10", 125 * _T, 62.5 * _T, 31.2 * _T, 0.98 * _T, 0.6 * _T, 23028 * _MIB),
        DeviceSpec("a10g", 70 * _T, 35 * _T, 35 * _T, 0.98 * _T, 0.6 * _T, 23028 * _MIB),
        DeviceSpec("a40", 149.7 * _T, 74.8 * _T, 37.4 * _T, 0.58 * _T, 0.696 * _T, 46068 * _MIB),
        DeviceSpec("rtxa6000", 154.8 * _T, 77.4 * _T, 38.7 * _T, 0.6 * _T, 0.768 * _T, 48 * _GIB),
        # White papers, appendix A: FP16 with FP32 accumulate.
        DeviceSpec("rtx3090", 71 * _T, 35.6 * _T, 35.6 * _T, 0.56 * _T, 0.936 * _T, 24 * _GIB),
        DeviceSpec("rtx3090-ti", 80 * _T, 40 * _T, 40 * _T, 0.63 * _T, 1.008 * _T, 24 * _GIB),
        # Tensor core rates of these data sheets are with sparsity: halved here.
        DeviceSpec("l4", 121 * _T, 60 * _T, 30.3 * _T, 0.47 * _T, 0.3 * _T, 23034 * _MIB),
        DeviceSpec("l40", 181 * _T, 90.5 * _T, 90.5 * _T, 1.4 * _T, 0.864 * _T, 46068 * _MIB),
        DeviceSpec(
            "rtx6000-ada", 364.2 * _T, 182.1 * _T, 91.1 * _T, 1.4 * _T, 0.96 * _T, 48 * _GIB
        ),
        DeviceSpec("l40s", 362 * _T, 183 * _T, 91.6 * _T, 1.4 * _T, 0.864 * _T, 46068 * _MIB),
        DeviceSpec("rtx4090", 165.2 * _T, 82.6 * _T, 82.6 * _T, 1.29 * _T, 1.008 * _T, 24 * _GIB),
        DeviceSpec("rtx4080", 97.5 * _T, 48.7 * _T, 48.7 * _T, 0.76 * _T, 0.717 * _T, 16 * _GIB),
        DeviceSpec(
            "rtx4070-ti-super", 88.2 * _T, 44.1 * _T, 44.1 * _T, 0.69 * _T, 0.672 * _T, 16 * _GIB
        ),
        DeviceSpec("rtx4070-ti", 80.2 * _T, 40.1 * _T, 40.1 * _T, 0.63 * _T, 0.504 * _T, 12 * _GIB),
        DeviceSpec("rtx4070", 58.3 * _T, 29.1 * _T, 29.1 * _T, 0.46 * _T, 0.504 * _T, 12 * _GIB),
        DeviceSpec("rtx5090", 209.5 * _T, 104.8 * _T, 104.8 * _T, 1.64 * _T, 1.792 * _T, 32 * _GIB),
        DeviceSpec("rtx5080", 112.6 * _T, 56.3 * _T, 56.3 * _T, 0.88 * _T, 0.96 * _T, 16 * _GIB),
        DeviceSpec("rtx5070-ti", 87.9 * _T, 43.9 * _T, 43.9 * _T, 0.69 * _T, 0.896 * _T, 16 * _GIB),
        DeviceSpec("rtx5070", 61.7 * _T, 30.9 * _T, 30.9 * _T, 0.48 * _T, 0.672 * _T, 12 * _GIB),
        DeviceSpec("h20", 148 * _T, 74 * _T, 44 * _T, 1 * _T, 4.0 * _T, 97871 * _MIB),
        # Tensor core rates of these data sheets are with sparsity: halved here.
        DeviceSpec("h100", 989.4 * _T, 494.7 * _T, 67 * _T, 34 * _T, 3.35 * _T, 80 * _GIB),
        DeviceSpec("h100-pcie", 756 * _T, 378 * _T, 51 * _T, 26 * _T, 2.0 * _T, 80 * _GIB),
        DeviceSpec("h200", 989.4 * _T, 494.7 * _T, 67 * _T, 34 * _T, 4.8 * _T, 143771 * _MIB),
        DeviceSpec("gh200", 989.4 * _T, 494.7 * _T, 67 * _T, 34 * _T, 4.0 * _T, 97871 * _MIB),
        DeviceSpec("b200", 2250 * _T, 1100 * _T, 75 * _T, 37 * _T, 8.0 * _T, 183359 * _MIB),
        # One of its two dies, which torch sees as a device.
        DeviceSpec("mi250", 181 * _T, 45.3 * _T, 22.6 * _T, 22.6 * _T, 1.638 * _T, 64 * _GIB),
        # Vector rates for FP32 and FP64.
        DeviceSpec("mi300x", 1307.4 * _T, 653.7 * _T, 163.4 * _T, 81.7 * _T, 5.3 * _T, 192 * _GIB),
        # No data sheet: eight cores with AVX2 at 2.5 GHz (8 x 32 FLOP a cycle), two DDR4 channels.
        DeviceSpec("cpu", 0.64 * _T, 0.64 * _T, 0.64 * _T, 0.32 * _T, 0.04 * _T, 32 * _GIB, 2e-6),
    )
    for capability, multiprocessors in (_CUDA.get(device.name, (None, 0)),)
}


_OTHER_NAMES = {"a10080gb": "a100", "a800": "a100", "v10032gb": "v100", "h10080gb": "h100"}
"""Other names of data sheets, without dashes."""

_BY_KEY = {device.name.replace("-", ""): device for device in DEVICES.values()}


def find_device(name: str) -> DeviceSpec:
    """Return the data sheet with this name in `DEVICES`, or with a driver's description. Case,
    spaces, dashes and brands are ignored, and "RTX" may be left out: "NVIDIA A100 40GB", "A6000",
    "4090".

    Raises ValueError, with the names in `DEVICES`, for another name.
    """
    key = "".join(c for c in name.lower() if c.isalnum())
    for brand in ("nvidia", "amd", "instinct", "geforce", "tesla"):
        key = key.removeprefix(brand)
    key = _OTHER_NAMES.get(key, key)
    device = _BY_KEY.get(key) or _BY_KEY.get(f"rtx{key}") or match_device(name)
    if device is None:
        raise ValueError(
            f"unknown device {name!r}; known are {', '.join(DEVICES)}; for another one pass its "
            "rates: remat.Roofline.custom('name', fp32_flops_per_s=..., bytes_per_s=...)"
        )
    return device


_OTHER_BOARD = re.compile("d|laptop|max|nvl|super|ti|mig|grid|3e|[0-9]+[cq]")
"""Words of descriptions that name another board, or a part of one, than without the word."""


def match_device(description: str) -> DeviceSpec | None:
    """Return the data sheet for a driver's description of a device ("NVIDIA H100 80GB HBM3"), or
    None, also for a board with another memory. If several match, the name with the most words
    counts."""
    text = description.lower().replace("rtx ", "rtx").replace("-", " ").replace("/", " ")
    words = {_OTHER_NAMES.get(word, word) for word in text.split()}
    names = {name: set(name.split("-")) for name in DEVICES if name != "cpu"}
    matching = [
        name
        for name, parts in names.items()
        if parts <= words
        and not any(map(_OTHER_BOARD.fullmatch, words - parts))
        and all(_has_memory(DEVICES[name], word) for word in words)
    ]
    best = max(matching, key=lambda name: len(names[name]), default=None)
    return None if best is None else DEVICES[best]


def _has_memory(device: DeviceSpec, word: str) -> bool:
    """False for a size such as "80gb" that is not the device's memory. A GH200 is described by the
    memory of its CPU."""
    size = re.fullmatch("([0-9]+)gb", word)
    if size is None or device.name == "gh200":
        return True
    return 0.9 < device.memory_bytes / (int(size[1]) * _GIB) < 1.05
