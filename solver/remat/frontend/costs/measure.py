"""`measure`: a Trace with costs, by running each distinct operation by itself, or by a roofline.

Operations run on tensors made for them (see `tensors`), never on the model's, so a measurement has
no effect but on the cost cache. What cannot be measured is estimated from what could be, and says
so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from textwrap import shorten

import torch
from torch.utils._python_dispatch import _disable_current_modes

from remat.budget import format_bytes
from remat.costs.pricing import FLOOR_S, Priced, by_roofline, tensor_metas, with_costs
from remat.costs.roofline import Roofline, traffic_bytes
from remat.documents.records import Node, TensorMeta
from remat.documents.trace import Trace
from remat.errors import RematError, one_line
from remat.frontend.costs.cache import Cost, CostCache
from remat.frontend.costs.calibration import Calibration
from remat.frontend.costs.key import conditions, cost_key, device_name
from remat.frontend.costs.progress import Progress, reporter
from remat.frontend.costs.tensors import Operands, operand_bytes
from remat.frontend.costs.timers import time_cpu, time_cuda
from remat.frontend.grad_mode import NEEDS_GRAD_MODE, with_grad_mode
from remat.frontend.memory import free_bytes, keeps_workspaces
from remat.frontend.operators import resolve

log = logging.getLogger("remat")

_COPY_BYTES = 64 << 20

MOST_COPIES = 32
"""Of an operation's operands: more than that are small, and take less time than their launch."""

_tuned: set[str] = set()
"""What cuDNN has tuned in this process."""

MEMORY_SHARE = 0.9
"""Of the free memory, what operands and results may take; the rest is for workspaces and others."""


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
        with ExitStack() as stack:
            stack.enter_context(_alone(where))
            report = stack.enter_context(reporter(progress))
            priced = with_costs(trace, _measure(trace, metas, where, costs, report))
            if where.type == "cuda" and not keeps_workspaces():
                return priced.replace(library_bytes=0)  # measured with each product
            return priced
    finally:
        if own and costs is not None:
            costs.close()


def _measure(
    trace: Trace,
    metas: Mapping[str, TensorMeta],
    device: torch.device,
    cache: CostCache | None,
    report: Progress,
) -> dict[str, Priced]:
    home = trace.device.partition(":")[0]
    base = conditions(device)
    groups: dict[str, list[Node]] = {}
    keys: dict[str, dict[str, object]] = {}
    for node in trace.nodes:
        if not node.view:
            key = cost_key(node, metas, home)
            groups.setdefault(text := repr(key), []).append(node)
            keys[text] = {**base, **key}
    bench = _Bench(trace, metas, device)
    known: dict[str, Cost] = {}
    failed: dict[str, str] = {}
    for done, (text, nodes) in enumerate(groups.items()):
        report(done, len(groups), nodes[0].target)
        cost = cache.get(keys[text]) if cache is not None else None
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


def copies(operands: int, needed: int, l2: int, free: int | None) -> int:
    """How many sets of operands to take by turns: as many as twice the cache holds, within the
    memory, up to `MOST_COPIES`."""
    wanted = -(-2 * l2 // max(operands, 1)) + 1 if operands < 2 * l2 else 1
    if free is not None:
        wanted = min(wanted, int(MEMORY_SHARE * free) // max(needed, 1))
    return max(1, min(wanted, MOST_COPIES))


def l2_bytes(device: torch.device) -> int:
    """The size of a CUDA device's cache; that of the largest where torch does not tell."""
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 << 20


class _Bench:
    """Runs operations by themselves on one device."""

    def __init__(self, trace: Trace, metas: Mapping[str, TensorMeta], device: torch.device) -> None:
        self._metas = metas
        self._operands = Operands(metas, trace.device.partition(":")[0], device, trace.nodes)
        self._device = device
        self._copy_s_per_byte: float | None = None

    def cost(self, node: Node) -> Cost:
        if node.target.startswith("remat."):
            # Our helpers move tensors (save, restore, accumulate) and may act on the model's own
            # state, so they are priced by the bytes that they move and never run here.
            return Cost(traffic_bytes(node, self._metas) * self.copy_s_per_byte(), 0)
        runs = [node, *self._operands.forwards(node)]
        needed = sum(operand_bytes(run, self._metas) for run in runs)
        free = free_bytes(self._device)
        if free is not None and needed > MEMORY_SHARE * free:
            raise MemoryError(f"out of memory: needs {needed:,} bytes")
        if self._device.type == "cpu":
            return time_cpu(self._run(node))
        sets = copies(operand_bytes(node, self._metas), needed, l2_bytes(self._device), free)
        others = [self._run(node) for _ in range(sets - 1)]
        return time_cuda(self._run(node), self._device, others)

    def _run(self, node: Node) -> Callable[[], object]:
        """A call of an operation on tensors of its own."""
        operator = resolve(node.target)
        args, kwargs = self._operands.make(node, operator)
        if node.target in NEEDS_GRAD_MODE:
            return lambda: with_grad_mode(operator, args, kwargs)
        return lambda: operator(*args, **kwargs)

    def tune(self, node: Node) -> None:
        """Run an operation once, for what its library remembers of that."""
        self._run(node)()

    def copy_s_per_byte(self) -> float:
        """Seconds for each byte read or written by a large `copy_`."""
        if self._copy_s_per_byte is None:
            source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=self._device)
            into = torch.zeros_like(source)
            cpu = self._device.type == "cpu"
            run: Callable[[], object] = lambda: into.copy_(source)  # noqa: E731
            cost = time_cpu(run) if cpu else time_cuda(run, self._device)
            self._copy_s_per_byte = cost.cost_s / (2 * _COPY_BYTES)
        return self._copy_s_per_byte

    def release(self, node: Node, error: Exception) -> None:
        """After a failure: give back what the allocator has kept.

        Raises `RematError` where the device does not answer any more."""
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        except Exception as broken:
            raise RematError(
                f"measuring {node.target} (operation {node.name}) broke the CUDA context: "
                f"{one_line(error)}; then {one_line(broken)}. Nothing runs on the device in this "
                "process any more: start another, and report the operation"
            ) from error


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


@contextmanager
def _alone(device: torch.device) -> Iterator[None]:
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
        by_reason.setdefault(reason, []).append(groups[text][0].target)
    for reason, targets in by_reason.items():
        names = ", ".join(sorted(set(targets))[:5])
        log.warning(
            "cannot measure %d operations (%s): %s; estimated %s", len(targets), names, reason, how
        )
