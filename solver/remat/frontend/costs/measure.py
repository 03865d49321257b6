"""`measure`: a Trace with costs, by running each distinct operation by itself, or by a roofline.

Operations run on tensors made for them (see `tensors`), never on the model's, so a measurement has
no effect but on the cost cache. What cannot be measured is estimated from what could be, and says
so.
"""

from __future__ import annotations

import logging
import os

import torch

from remat.costs.pricing import by_roofline, tensor_metas, with_costs
from remat.costs.roofline import Roofline
from remat.documents.trace import Trace
from remat.errors import RematError
from remat.frontend.costs.cache import CostCache
from remat.frontend.costs.operations import measure_operations
from remat.frontend.costs.progress import Progress, reporter
from remat.frontend.memory.device_memory import keeps_workspaces

log = logging.getLogger("remat")


def measure(
    trace: Trace,
    device: str | torch.device | Roofline | None = None,
    *,
    cache: CostCache | str | os.PathLike[str] | bool | None = None,
    progress: Progress | bool | None = None,
) -> Trace:
    """A new Trace whose operations have `cost_s` (seconds), `workspace_bytes` and `cost_source`.

    `device` is "cpu", "cuda", "cuda:1", or a `Roofline` that needs no device; by default where the
    trace was made. `cache` is a path or a `CostCache`, by default the user's own; False measures
    anew and keeps nothing. `progress` is called with (done, total, name); True draws a bar on
    stderr. Views cost nothing. What fails to run is estimated, with a warning of the logger
    "remat" for each distinct reason.

    Raises `RematError` where the device is not there.
    """
    metas = tensor_metas(trace)
    if isinstance(device, Roofline):
        return by_roofline(trace, device)
    where = _checked(_named(device or trace.device), trace)
    own = cache is None or not isinstance(cache, CostCache)
    costs = _open_cache(cache)
    try:
        with reporter(progress) as report:
            home = trace.device.partition(":")[0]
            found = measure_operations(trace.nodes, metas, where, costs, report, home=home)
            priced = with_costs(trace, found)
            if where.type == "cuda" and not keeps_workspaces():
                return priced.replace(library_bytes=0)  # measured with each product
            return priced
    finally:
        if own and costs is not None:
            costs.close()


def _named(device: str | torch.device) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise RematError(
            f"cannot measure: {str(device)!r} is no device of this machine, use cpu or cuda; "
            "remat.Roofline('h100') estimates for a GPU that is not here"
        ) from None


def _checked(device: torch.device, trace: Trace) -> torch.device:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RematError(
            "cannot measure on cuda: torch sees no CUDA device here; measure where one is, or "
            "estimate with remat.Roofline('h200') or another known device"
        )
    if device.type not in ("cpu", "cuda"):
        raise RematError(f"cannot measure on {device.type}: only cpu, cuda and a Roofline can")
    if device.type != trace.device.partition(":")[0]:
        log.warning(
            "this trace was made for %s and is measured on %s: torch may choose other operations "
            "there; trace it on %s to be sure",
            trace.device,
            device,
            device.type,
        )
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _open_cache(cache: CostCache | str | os.PathLike[str] | bool | None) -> CostCache | None:
    if isinstance(cache, CostCache):
        return cache
    if isinstance(cache, bool):
        return CostCache() if cache else None
    return CostCache(cache)
