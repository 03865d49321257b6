"""Two ways to run the same training step, side by side: peak, time, loss, and how equal they are.

Both start from the same weights, buffers, batch and random numbers. One step each is compared, one
measured for its peak, and some are timed in turns.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from remat.allocator.replay import rounded
from remat.errors import TraceError, one_line
from remat.frontend.common.pytree import flatten
from remat.frontend.memory.allocator_peak import allocated_peak, cuda_peak
from remat.frontend.memory.meter import LiveStorageMeter, unique_bytes
from remat.limits.budget import format_bytes, format_seconds
from remat.limits.outputs import HELD, are_dropped

Tensors = Mapping[str, torch.Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """What one way to run the step took. `peak_bytes` include parameters, buffers and batch: live
    storages on CPU, or what its allocator gave out where torch has compiled the step; what torch's
    allocator holds on CUDA. `time_s` is the median of the rounds."""

    peak_bytes: int
    time_s: float
    loss: float


@dataclass(frozen=True)
class Equality:
    """How equal two ways are.

    `gradients` counts those of parameters and inputs, `equal_gradients` those equal bit for bit;
    the differences are the largest of any gradient, absolute and relative to the gradient's largest
    element (infinite where one is missing). `buffers` counts those that the step changes.
    """

    gradients: int
    equal_gradients: int
    largest_difference: float
    largest_relative_difference: float
    buffers: int
    equal_buffers: int

    def describe(self) -> list[str]:
        """Sentences."""
        lines = [f"{self.equal_gradients} of {self.gradients} gradients are equal bit for bit."]
        if self.equal_gradients < self.gradients:
            lines.append(
                f"The largest difference of a gradient is {self.largest_difference:.2g}, or "
                f"{self.largest_relative_difference:.2g} of its largest element."
            )
        if self.buffers:
            lines.append(
                f"{self.equal_buffers} of {self.buffers} buffers that the step changes are equal."
            )
        return lines

    def to_data(self) -> dict[str, Any]:
        """For JSON: a difference that is not finite is null."""
        found = dataclasses.asdict(self)
        return {k: v if math.isfinite(v) else None for k, v in found.items()}


def row(label: str, *cells: str) -> str:
    """A line of a table with a column for each way and one for the change."""
    return f"  {label:<22}" + "".join(f"{cell:>16}" for cell in cells)


def peak_row(before: Measured, after: Measured) -> str:
    """Of the measured peaks."""
    change = f"{after.peak_bytes / before.peak_bytes - 1:+.1%}"
    cells = format_bytes(before.peak_bytes), format_bytes(after.peak_bytes), change
    return row("peak, measured", *cells)


def time_rows(before: Measured, after: Measured, rounds: int) -> list[str]:
    """Of times and losses."""
    change = f"{after.time_s / before.time_s - 1:+.1%}"
    cells = format_seconds(before.time_s), format_seconds(after.time_s), change
    return [
        row(f"time, median of {rounds}", *cells),
        row("loss", f"{before.loss:.6f}", f"{after.loss:.6f}"),
    ]


def copied(model: nn.Module, given: T) -> tuple[nn.Module, T]:
    """The model and its arguments once more. Raises `TraceError` where they cannot be copied."""
    try:
        return copy.deepcopy((model, given))
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} or its arguments cannot be copied, so there is nothing to "
            f"compare with: {one_line(error)}"
        ) from error


def check_rounds(rounds: int) -> None:
    """Raises `TraceError` for none."""
    if rounds < 1:
        raise TraceError(f"rounds is {rounds}; at least one step must be timed")


def run_both(one: Side, other: Side, rounds: int, seed: int) -> tuple[Measured, Measured, Equality]:
    """Steps of both in turns, each from `seed`; gradients are cleared in the end. Raises
    `TraceError` where the output has no loss, or a step does not fit the device."""
    both = (one, other)
    before = one.buffers()
    # The other one first: where it cannot be planned, nobody waits for the one to be compiled.
    losses = [side.first_step(seed) for side in (other, one)][::-1]
    gradients = _compared(one.gradients(), other.gradients())
    buffers = _compared(*(_changed(before, side.buffers()) for side in both))
    peaks = [one.peak_bytes(seed, other), other.peak_bytes(seed, one)]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for side, found in zip(both, times, strict=True):
            found.append(side.time_s(seed))
    measured = [
        Measured(peak, statistics.median(found), loss)
        for peak, found, loss in zip(peaks, times, losses, strict=True)
    ]
    equality = Equality(
        gradients=len(gradients),
        equal_gradients=sum(found.equal for found in gradients),
        largest_difference=max((found.difference for found in gradients), default=0.0),
        largest_relative_difference=max((found.relative for found in gradients), default=0.0),
        buffers=len(buffers),
        equal_buffers=sum(found.equal for found in buffers),
    )
    return measured[0], measured[1], equality


class Side:
    """One way to run the step. `compiled` says that torch compiles it, in the first step, which
    took `first_s`: what it allocates is then asked of the allocator, as no operation is seen. Of
    what the model returns only the loss is held during the backward where `outputs` are
    dropped."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        compiled: bool = False,
        outputs: str = HELD,
    ) -> None:
        self.name = name
        self._are_dropped = are_dropped(outputs)
        self._module = module
        self._compiled = compiled
        self.first_s = 0.0
        self._args = args
        self._kwargs = kwargs
        self._inputs = flatten((args, kwargs), "the arguments ")[0]
        first = next(iter([*module.parameters(), *self._inputs]), None)
        self._device = torch.device("cpu") if first is None else first.device

    def first_step(self, seed: int) -> float:
        """A step that is timed, whatever is made in it; the loss."""
        began = time.perf_counter()
        loss = self.step(seed)
        self.first_s = time.perf_counter() - began
        return loss

    def step(self, seed: int) -> float:
        """Forward and backward on cleared gradients; the loss."""
        self.clear()
        torch.manual_seed(seed)
        try:
            # The output lives until the step ends, as in many training loops, or is let go of:
            # whichever the plan counts on.
            output = self._module(*self._args, **self._kwargs)
            loss = loss_of(output)
            if self._are_dropped:
                del output
            # Autocast keeps its casts until the outermost context ends, which is the caller's.
            torch.clear_autocast_cache()
            with torch.autocast(self._device.type, enabled=False):
                loss.backward()
        except torch.OutOfMemoryError as error:
            raise TraceError(
                f"{self.name} does not fit {self._device}, beside the other's weights; compare "
                f"with a smaller batch ({one_line(error, 160)})"
            ) from error
        return float(loss.detach())

    def clear(self) -> None:
        """Drop all gradients."""
        self._module.zero_grad(set_to_none=True)
        for tensor in self._inputs:
            tensor.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Those of parameters, and of inputs that require one."""
        owners = dict(self._module.named_parameters())
        owners |= {f"input {number}": tensor for number, tensor in enumerate(self._inputs)}
        return {name: t.grad for name, t in owners.items() if t.grad is not None}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Copies of them."""
        return {name: b.detach().clone() for name, b in self._module.named_buffers()}

    def constants(self) -> list[torch.Tensor]:
        """Parameters, buffers and batch on the device."""
        tensors = [*self._module.parameters(), *self._module.buffers(), *self._inputs]
        return [t for t in tensors if t.layout == torch.strided and t.device == self._device]

    def peak_bytes(self, seed: int, other: Side) -> int:
        """Of a step without what the other side holds."""
        self.clear()
        other.clear()
        if self._device.type == "cuda":
            peak = cuda_peak(lambda: self.step(seed), self._device) - other.allocated_bytes()
        elif self._compiled:
            constant_bytes = unique_bytes(self.constants())
            peak = constant_bytes + allocated_peak(lambda: self.step(seed))
        else:
            with LiveStorageMeter(unique_bytes(self.constants())) as meter:
                self.step(seed)
            peak = meter.peak_bytes
        self.clear()
        return peak

    def allocated_bytes(self) -> int:
        """Of the constants, as torch's CUDA allocator counts them."""
        storages = {
            s.data_ptr(): s.nbytes() for t in self.constants() if (s := t.untyped_storage())
        }
        return sum(map(rounded, storages.values()))

    def time_s(self, seed: int) -> float:
        """Wall-clock seconds of a step."""
        self.clear()
        start = time.perf_counter()
        self.step(seed)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        spent = time.perf_counter() - start
        self.clear()
        return spent


def loss_of(output: object) -> torch.Tensor:
    """The scalar that a step goes backward from: the output's `loss`, the output itself, or the
    first scalar of a tuple or dict. Raises `TraceError` where there is none."""
    named = getattr(output, "loss", None)
    candidates: list[object] = [named, output]
    if isinstance(output, Mapping):
        candidates += output.values()
    elif isinstance(output, (tuple, list)):
        candidates += output
    for item in candidates:
        if isinstance(item, torch.Tensor) and item.numel() == 1 and item.is_floating_point():
            if not item.requires_grad:
                break
            return item.reshape(())
    raise TraceError(
        f"a step needs a loss, and the model returned {_what(output)}; return a scalar that "
        "requires a gradient: by itself, as the attribute `loss`, or as the first scalar of a "
        "tuple or dict (models of transformers return one where they are called with labels)"
    )


def _what(output: object) -> str:
    if isinstance(output, torch.Tensor):
        grad = "" if output.requires_grad else " without a gradient"
        return f"a tensor of shape {tuple(output.shape)}{grad}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    return f"a {type(output).__name__}"


@dataclass(frozen=True)
class _Alike:
    """How far two tensors are from each other."""

    equal: bool
    difference: float
    relative: float

    @classmethod
    def of(cls, a: torch.Tensor | None, b: torch.Tensor | None) -> _Alike:
        if a is None or b is None or a.shape != b.shape:
            return cls(False, math.inf, math.inf)
        a, b = (t.to_dense() if t.layout != torch.strided else t for t in (a, b))
        if _equal(a, b):
            return cls(True, 0.0, 0.0)
        wide = torch.complex128 if a.is_complex() else torch.float64
        apart = (a.to(wide) - b.to(wide)).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        apart = apart.masked_fill(a.isnan() & b.isnan(), 0.0)
        difference, scale = float(apart.max()), float(a.abs().nan_to_num(0.0).max())
        return cls(False, difference, difference / scale if scale else math.inf)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, but for the kinds of NaN."""
    if a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _compared(a: Tensors, b: Tensors) -> list[_Alike]:
    return [_Alike.of(a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b))]


def _changed(before: Tensors, after: Tensors) -> dict[str, torch.Tensor]:
    return {k: t for k, t in after.items() if k not in before or not _equal(before[k], t)}
