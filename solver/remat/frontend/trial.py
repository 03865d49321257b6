"""`trial`: a training step in eager mode and under a plan, side by side.

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
from typing import Any

import torch
from torch import nn

from remat.allocator.replay import rounded
from remat.budget import format_bytes, format_seconds
from remat.errors import TraceError, one_line
from remat.frontend.meter import LiveStorageMeter, cuda_peak, unique_bytes
from remat.frontend.pytree import flatten
from remat.frontend.runtime.module import RematModule
from remat.plan import Plan

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Measured:
    """What one way to run the step took. `peak_bytes` include parameters, buffers and batch: live
    storages on CPU, what torch's allocator holds on CUDA. `time_s` is the median of the rounds."""

    peak_bytes: int
    time_s: float
    loss: float


@dataclass(frozen=True)
class Trial:
    """Eager mode and the plan, compared.

    `gradients` counts those of parameters and inputs, `equal_gradients` those equal bit for bit;
    the differences are the largest of any gradient, absolute and relative to the gradient's largest
    element (infinite where one is missing). `buffers` counts those that the step changes.
    """

    eager: Measured
    remat: Measured
    gradients: int
    equal_gradients: int
    largest_difference: float
    largest_relative_difference: float
    buffers: int
    equal_buffers: int
    rounds: int
    plan: Plan
    predicted_eager_bytes: int

    def describe(self) -> str:
        """The table of both, side by side, and how equal their results are."""

        def row(label: str, *cells: str) -> str:
            return f"  {label:<22}" + "".join(f"{cell:>16}" for cell in cells)

        before, after, plan = self.eager, self.remat, self.plan
        lines = [
            row("", "eager", "remat", "change"),
            row(
                "peak, predicted",
                format_bytes(self.predicted_eager_bytes),
                format_bytes(plan.peak_bytes),
            ),
            row(
                "peak, measured",
                format_bytes(before.peak_bytes),
                format_bytes(after.peak_bytes),
                f"{after.peak_bytes / before.peak_bytes - 1:+.1%}",
            ),
            row("time, predicted", "", "", f"{plan.overhead:+.1%}"),
            row(
                f"time, median of {self.rounds}",
                format_seconds(before.time_s),
                format_seconds(after.time_s),
                f"{after.time_s / before.time_s - 1:+.1%}",
            ),
            row("loss", f"{before.loss:.6f}", f"{after.loss:.6f}"),
            "",
            f"{self.equal_gradients} of {self.gradients} gradients are equal bit for bit.",
        ]
        if self.equal_gradients < self.gradients:
            lines.append(
                f"The largest difference of a gradient is {self.largest_difference:.2g}, or "
                f"{self.largest_relative_difference:.2g} of its largest element."
            )
        if self.buffers:
            lines.append(
                f"{self.equal_buffers} of {self.buffers} buffers that the step changes are equal."
            )
        return "\n".join(lines)

    def to_data(self) -> dict[str, Any]:
        """Everything but the plan's schedule, for JSON. A difference that is not finite is null."""
        plan = self.plan
        return {
            "eager": dataclasses.asdict(self.eager),
            "remat": dataclasses.asdict(self.remat),
            "predicted": {
                "eager_peak_bytes": self.predicted_eager_bytes,
                "remat_peak_bytes": plan.peak_bytes,
                "overhead": plan.overhead,
            },
            "budget_bytes": plan.budget_bytes,
            "rounds": self.rounds,
            "gradients": self.gradients,
            "equal_gradients": self.equal_gradients,
            "largest_difference": _finite(self.largest_difference),
            "largest_relative_difference": _finite(self.largest_relative_difference),
            "buffers": self.buffers,
            "equal_buffers": self.equal_buffers,
        }


def trial(
    model: nn.Module,
    module: RematModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    rounds: int = 5,
    seed: int = 1,
    predicted_eager_bytes: int | None = None,
) -> Trial:
    """Compare `model` in eager mode with `module`, its plan, on one batch.

    Eager mode runs on a copy, and every step starts from `seed`. Call it under `torch.autocast`
    where the plan was made under it; backward passes run outside of it, as they should. Gradients
    are cleared at the end; buffers such as those of batch norm are as after `rounds + 2` steps.
    `predicted_eager_bytes` stands beside the peak that eager mode is measured to have: that of
    `remat.report.estimate.eager_peak_bytes`, or else the plan's baseline.

    Raises `TraceError` where the output has no loss, the model cannot be copied, or a step does not
    fit the device.
    """
    if rounds < 1:
        raise TraceError(f"rounds is {rounds}; at least one step must be timed")
    try:
        other, other_args, other_kwargs = copy.deepcopy((model, args, dict(kwargs)))
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} or its arguments cannot be copied, so there is nothing to "
            f"compare with: {one_line(error)}"
        ) from error
    eager = _Side("eager mode", other, other_args, other_kwargs)
    remat = _Side("the plan", module, args, dict(kwargs))
    before = eager.buffers()
    losses = [side.step(seed) for side in (eager, remat)]
    plan = module.plan
    if plan is None:
        raise TraceError("the module has no plan to compare with; make it with remat.optimize")
    gradients = _compared(eager.gradients(), remat.gradients())
    buffers = _compared(*(_changed(before, side.buffers()) for side in (eager, remat)))
    peaks = [eager.peak_bytes(seed, remat), remat.peak_bytes(seed, eager)]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for side, found in zip((eager, remat), times, strict=True):
            found.append(side.time_s(seed))
    measured = [
        Measured(peak, statistics.median(found), loss)
        for peak, found, loss in zip(peaks, times, losses, strict=True)
    ]
    return Trial(
        eager=measured[0],
        remat=measured[1],
        gradients=len(gradients),
        equal_gradients=sum(one.equal for one in gradients),
        largest_difference=max((one.difference for one in gradients), default=0.0),
        largest_relative_difference=max((one.relative for one in gradients), default=0.0),
        buffers=len(buffers),
        equal_buffers=sum(one.equal for one in buffers),
        rounds=rounds,
        plan=plan,
        predicted_eager_bytes=predicted_eager_bytes or plan.baseline_peak_bytes,
    )


class _Side:
    """One way to run the step."""

    def __init__(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.name = name
        self._module = module
        self._args = args
        self._kwargs = kwargs
        self._inputs = flatten((args, kwargs), "the arguments ")[0]
        first = next(iter([*module.parameters(), *self._inputs]), None)
        self._device = torch.device("cpu") if first is None else first.device

    def step(self, seed: int) -> float:
        """Forward and backward on cleared gradients; the loss."""
        self.clear()
        torch.manual_seed(seed)
        try:
            # The output lives until the step ends, as in a training loop and as plans assume.
            output = self._module(*self._args, **self._kwargs)
            loss = loss_of(output)
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

    def peak_bytes(self, seed: int, other: _Side) -> int:
        """Of a step without what the other side holds."""
        self.clear()
        other.clear()
        if self._device.type == "cuda":
            peak = cuda_peak(lambda: self.step(seed), self._device) - other.allocated_bytes()
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


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
