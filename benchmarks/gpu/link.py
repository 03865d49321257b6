"""Step 13: seconds of copies between device and host, which offloading depends on."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.gpu.device import is_cuda
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.verdicts import Report

Copy = Callable[[], object]


def measure_link(setting: Setting, report: Report) -> None:
    """Step 13: bandwidth each way, both at once, during a matrix product, and unpinned."""
    device = setting.device
    subject, requirement = "copies between device and host", "at least 10 GB/s each way"
    if not is_cuda(device):
        report.skip(subject, requirement, "a CPU has no such link")
        return
    size = 256 << 20
    torch.empty(1, device=device).to("cpu")  # the context of CUDA, before the time of pinning
    torch.empty(1).pin_memory()
    start_s = time.perf_counter()
    sent, received = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    pin_s = (time.perf_counter() - start_s) / 2
    pageable = torch.empty(size, dtype=torch.uint8)
    pageable.fill_(1)
    on_device = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)

    def to_host() -> None:
        with torch.cuda.stream(streams[0]):
            received.copy_(on_device[0], non_blocking=True)

    def to_device() -> None:
        with torch.cuda.stream(streams[1]):
            on_device[1].copy_(sent, non_blocking=True)

    def both() -> None:
        to_host()
        to_device()

    def multiply() -> None:
        for _ in range(8):
            torch.mm(matrix, matrix)

    def all_at_once() -> None:
        both()
        multiply()

    seconds = {
        "to_host": _seconds(to_host),
        "to_device": _seconds(to_device),
        "both": _seconds(both),
        "to_host_pageable": _seconds(lambda: pageable.copy_(on_device[0])),
        "to_device_pageable": _seconds(lambda: on_device[1].copy_(pageable)),
        "product": _seconds(multiply),
        "product_with_both": _seconds(all_at_once),
        "pin": pin_s,
    }
    rates = {name: size / s / 1e9 for name, s in seconds.items()}
    small = {
        str(kib): _seconds(lambda n=kib << 10: received[:n].copy_(on_device[0][:n], True))
        for kib in (4, 64, 512, 4096, 32768)
    }
    report.judge(
        subject,
        requirement,
        f"to the host {rates['to_host']:.1f} GB/s, to the device {rates['to_device']:.1f}, "
        f"both at once {2 * rates['both']:.1f} in sum; pageable {rates['to_host_pageable']:.1f} "
        f"and {rates['to_device_pageable']:.1f}; pinning {rates['pin']:.1f}",
        min(rates["to_host"], rates["to_device"]) >= 10,
        bytes=size,
        seconds=seconds,
        seconds_by_kib=small,
    )
    report.info(
        "matrix products and copies at once",
        f"{seconds['product'] * 1e3:.2f} ms alone, {seconds['product_with_both'] * 1e3:.2f} ms "
        f"with copies of {seconds['both'] * 1e3:.2f} ms",
    )


def _seconds(copy: Copy) -> float:
    """Return the median seconds of a call, from a synchronized device to a synchronized device."""
    times = []
    for _ in range(9):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start_s)
    return sorted(times)[len(times) // 2]
