"""`measure_operations`: what each of some operations takes, each distinct one run once.

What cannot be measured, or not within the time given, is estimated from what could be.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from textwrap import shorten

import torch
from torch.utils._python_dispatch import _disable_current_modes

from remat.costs.pricing import FLOOR_S, Priced
from remat.documents.records import Node, TensorMeta
from remat.frontend.costs.bench import Bench
from remat.frontend.costs.cache import Cost, CostCache
from remat.frontend.costs.calibration import Calibration
from remat.frontend.costs.key import conditions, cost_key, device_name
from remat.frontend.costs.progress import Progress
from remat.frontend.costs.tensors import operand_bytes
from remat.limits.budget import format_bytes

log = logging.getLogger("remat")

_tuned: set[str] = set()
"""What cuDNN has tuned in this process."""

_NO_TIME = "no time was left"


def measure_operations(
    operations: Sequence[Node],
    metas: Mapping[str, TensorMeta],
    device: torch.device,
    cache: CostCache | None,
    report: Progress,
    *,
    home: str,
    limit_s: float = math.inf,
) -> dict[str, Priced]:
    """The cost of each by its name, views left out. `metas` knows all tensors; `home` is the type
    of the device that they were made for. After `limit_s` seconds no more are run."""
    until = time.monotonic() + limit_s
    base = conditions(device)
    groups: dict[str, list[Node]] = {}
    keys: dict[str, dict[str, object]] = {}
    for node in operations:
        if not node.view:
            key = cost_key(node, metas, home)
            groups.setdefault(text := repr(key), []).append(node)
            keys[text] = {**base, **key}
    known: dict[str, Cost] = {}
    failed: dict[str, str] = {}
    with alone(device):
        bench = Bench(operations, metas, home, device)
        for done, (text, nodes) in enumerate(groups.items()):
            report(done, len(groups), nodes[0].target)
            cost = cache.get(keys[text]) if cache is not None else None
            if cost is None and time.monotonic() > until:
                failed[text] = _NO_TIME
                continue
            if cost is None:
                try:
                    cost = bench.cost(nodes[0])
                except Exception as error:  # whatever an operation raises, the others still count
                    failed[text] = _reason(error)
                    bench.release(nodes[0], error)
                    continue
                if cache is not None:
                    cache.put(keys[text], cost)
            elif is_tuned(nodes[0], device) and text not in _tuned:
                with suppress(Exception):  # what fails here was measured elsewhere
                    bench.tune(nodes[0])
            if is_tuned(nodes[0], device):
                _tuned.add(text)
            known[text] = cost
        report(len(groups), len(groups), "")
        del bench
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the step finds the memory that tuning took
    source = f"measured {device.type} {device_name(device)}"
    priced = {
        n.name: Priced(c.cost_s, c.workspace_bytes, source, c.output_bytes, c.launch_s or None)
        for t, c in known.items()
        for n in groups[t]
    }
    if failed:
        calibration = Calibration.fit(
            device, metas, [(groups[text][0], cost) for text, cost in known.items()]
        )
        for text, reason in failed.items():
            cost_s = max(FLOOR_S, calibration.seconds(groups[text][0]))
            margin = unknown_workspace_bytes(groups[text][0], metas, device)
            told = f"; workspace unknown, {format_bytes(margin)} planned" if margin else ""
            estimated = Priced(
                cost_s, margin, f"estimated: {shorten(reason, 50, placeholder='...')}{told}"
            )
            priced.update((node.name, estimated) for node in groups[text])
        _warn(failed, groups, calibration.description)
    return priced


def unknown_workspace_bytes(
    node: Node, metas: Mapping[str, TensorMeta], device: torch.device
) -> int:
    """What to plan for the workspace of an operation that could not be run: on CUDA as much again
    as its operands and results (attention and convolutions take hundreds of megabytes), on the CPU
    nothing, since no peak there contains it."""
    if device.type != "cuda" or node.target.startswith("remat."):
        return 0
    return operand_bytes(node, metas)


def is_tuned(node: Node, device: torch.device) -> bool:
    """Whether cuDNN tries several algorithms the first time that a process runs this: then that is
    not to happen within a step, whose memory is planned."""
    convolution = "convolution" in node.target
    return device.type == "cuda" and convolution and torch.backends.cudnn.benchmark


@contextmanager
def alone(device: torch.device) -> Iterator[None]:
    """Without the caller's gradient mode, autocast, dispatch modes and random state."""
    devices = [device.index] if device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.no_grad(),
        torch.autocast(device.type, enabled=False),
        _disable_current_modes(),
    ):
        yield


def _reason(error: Exception) -> str:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in str(error):
        return "out of memory"
    first = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first[0][:80]}"


def _warn(failed: Mapping[str, str], groups: Mapping[str, list[Node]], how: str) -> None:
    by_reason: dict[str, list[str]] = {}
    for text, reason in failed.items():
        if reason == _NO_TIME:
            continue
        by_reason.setdefault(reason, []).append(groups[text][0].target)
    for reason, targets in by_reason.items():
        names = ", ".join(sorted(set(targets))[:5])
        log.warning(
            "cannot measure %d operations (%s): %s; estimated %s", len(targets), names, reason, how
        )
