"""Run a training step in two versions and compare their peak, time, loss and gradients.

Both versions start from the same weights, buffers, batch and seed. Of each, the results of one step
are compared, one step is measured for its peak, and some steps are timed, in turns.
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

from remat.allocator.replay import round_size
from remat.errors import TraceError, one_line
from remat.frontend.common.pytree import flatten
from remat.frontend.memory.meter import LiveStorageMeter, allocated_peak, cuda_peak, unique_bytes
from remat.limits.options import OUTPUTS_HELD, are_dropped

Tensors = Mapping[str, torch.Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class StepMeasurement:
    """The measured peak, time and loss of one version of a step.

    `peak_bytes` include parameters, buffers and batch. They are live storages on the CPU, or what
    its allocator handed out if torch compiled the step; on CUDA what torch's allocator has
    allocated. `time_s` is the median of the rounds.
    """

    peak_bytes: int
    time_s: float
    loss: float


@dataclass(frozen=True)
class Equality:
    """How many gradients and buffers are equal after the same step in two versions.

    `gradients` counts those of parameters and inputs, `equal_gradients` those that are equal bit
    for bit. The differences are the largest of any gradient, absolute and relative to the
    gradient's largest element (infinite where one is missing). `buffers` counts those that the step
    changes.
    """

    gradients: int
    equal_gradients: int
    largest_difference: float
    largest_relative_difference: float
    buffers: int
    equal_buffers: int

    def text(self) -> str:
        """Return the counts and differences as sentences."""
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
        return "\n".join(lines)

    def to_data(self) -> dict[str, Any]:
        """Return the fields as data for JSON; null stands for a difference that is not finite."""
        fields = dataclasses.asdict(self)
        return {k: v if math.isfinite(v) else None for k, v in fields.items()}


def deep_copy_step(model: nn.Module, arguments: T) -> tuple[nn.Module, T]:
    """Return a deep copy of the model and its arguments. Raises `TraceError` where they cannot be
    copied."""
    try:
        return copy.deepcopy((model, arguments))
    except Exception as error:
        raise TraceError(
            f"{type(model).__name__} or its arguments cannot be copied, so there is nothing to "
            f"compare with: {one_line(error)}"
        ) from error


def check_rounds(rounds: int) -> None:
    """Raise `TraceError` unless at least one step is to be timed."""
    if rounds < 1:
        raise TraceError(f"rounds is {rounds}; at least one step must be timed")


def compare_steps(
    reference: StepRunner, remat: StepRunner, rounds: int, seed: int
) -> tuple[StepMeasurement, StepMeasurement, Equality]:
    """Run steps of both versions in turns, each from `seed`; return the measurement of each, and
    how equal their results are. Clears the gradients at the end. Raises `TraceError` where the
    output has no loss, or a step does not fit the device."""
    runners = (reference, remat)
    buffers_before = reference.buffers()
    # remat first: if it cannot plan, the reference is not compiled in vain.
    losses = [runner.first_step(seed) for runner in (remat, reference)][::-1]
    gradients = _tensor_differences(reference.gradients(), remat.gradients())
    buffers = _tensor_differences(
        *(_changed_tensors(buffers_before, runner.buffers()) for runner in runners)
    )
    peaks = [reference.peak_bytes(seed, remat), remat.peak_bytes(seed, reference)]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for runner, times_s in zip(runners, times, strict=True):
            times_s.append(runner.time_s(seed))
    measurements = [
        StepMeasurement(peak_bytes, statistics.median(times_s), loss)
        for peak_bytes, times_s, loss in zip(peaks, times, losses, strict=True)
    ]
    equality = Equality(
        gradients=len(gradients),
        equal_gradients=sum(gradient.is_equal for gradient in gradients),
        largest_difference=max((gradient.absolute for gradient in gradients), default=0.0),
        largest_relative_difference=max((gradient.relative for gradient in gradients), default=0.0),
        buffers=len(buffers),
        equal_buffers=sum(buffer.is_equal for buffer in buffers),
    )
    return measurements[0], measurements[1], equality


class StepRunner:
    """Runs the training step of one module on one batch, and measures it.

    `name` is for errors. `is_compiled` says that torch compiles the module in its first step, which
    took `first_s` seconds: no operation of a compiled step is visible, so its peak is read from the
    allocator. If `outputs` are "dropped", only the loss is referenced during the backward.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_compiled: bool = False,
        outputs: str = OUTPUTS_HELD,
    ) -> None:
        self.name = name
        self.first_s = 0.0
        self._module = module
        self._args = args
        self._kwargs = kwargs
        self._is_compiled = is_compiled
        self._outputs_dropped = are_dropped(outputs)
        self._inputs = flatten((args, kwargs), "the arguments ")[0]
        first = next(iter([*module.parameters(), *self._inputs]), None)
        self._device = torch.device("cpu") if first is None else first.device

    def first_step(self, seed: int) -> float:
        """Run a step, compilation and planning included, and store its time in `first_s`; return
        the loss."""
        start = time.perf_counter()
        loss = self.step(seed)
        self.first_s = time.perf_counter() - start
        return loss

    def step(self, seed: int) -> float:
        """Clear the gradients, run forward and backward, and return the loss."""
        self.clear_gradients()
        torch.manual_seed(seed)
        try:
            # The output lives until the step ends, as in many training loops, or is dropped before
            # the backward: as the plan assumes.
            output = self._module(*self._args, **self._kwargs)
            loss = loss_of_output(output)
            if self._outputs_dropped:
                del output
            # Autocast keeps its casts until the outermost context ends, which is the caller's.
            torch.clear_autocast_cache()
            with torch.autocast(self._device.type, enabled=False):
                loss.backward()
        except torch.OutOfMemoryError as error:
            raise TraceError(
                f"{self.name} does not fit {self._device} together with the weights of the model "
                f"that it is compared with; use a smaller batch ({one_line(error, 160)})"
            ) from error
        return float(loss.detach())

    def clear_gradients(self) -> None:
        """Set the gradients of parameters and inputs to None."""
        self._module.zero_grad(set_to_none=True)
        for tensor in self._inputs:
            tensor.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the existing gradients of parameters and inputs, by name."""
        owners = dict(self._module.named_parameters())
        owners |= {f"input {number}": tensor for number, tensor in enumerate(self._inputs)}
        return {name: t.grad for name, t in owners.items() if t.grad is not None}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return copies of the module's buffers, by name."""
        return {name: b.detach().clone() for name, b in self._module.named_buffers()}

    def constants(self) -> list[torch.Tensor]:
        """Return the dense parameters, buffers and inputs on the module's device."""
        tensors = [*self._module.parameters(), *self._module.buffers(), *self._inputs]
        return [t for t in tensors if t.layout == torch.strided and t.device == self._device]

    def peak_bytes(self, seed: int, other: StepRunner) -> int:
        """Run a step and return its peak, without the memory of the `other` version's model. Clears
        the gradients of both."""
        self.clear_gradients()
        other.clear_gradients()
        if self._device.type == "cuda":
            peak = cuda_peak(lambda: self.step(seed), self._device) - other.allocated_bytes()
        elif self._is_compiled:
            constant_bytes = unique_bytes(self.constants())
            peak = constant_bytes + allocated_peak(lambda: self.step(seed))
        else:
            with LiveStorageMeter(unique_bytes(self.constants())) as meter:
                self.step(seed)
            peak = meter.peak_bytes
        self.clear_gradients()
        return peak

    def allocated_bytes(self) -> int:
        """Return the bytes of parameters, buffers and inputs as torch's CUDA allocator rounds
        them."""
        storages = {
            s.data_ptr(): s.nbytes() for t in self.constants() if (s := t.untyped_storage())
        }
        return sum(map(round_size, storages.values()))

    def time_s(self, seed: int) -> float:
        """Run a step and return its wall-clock seconds."""
        self.clear_gradients()
        start = time.perf_counter()
        self.step(seed)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elapsed_s = time.perf_counter() - start
        self.clear_gradients()
        return elapsed_s


def loss_of_output(output: object) -> torch.Tensor:
    """Return the scalar of a model's output to call `backward()` on: its attribute `loss`, the
    output itself, or the first scalar of a tuple or dict. Raises `TraceError` if there is none, or
    if it requires no gradient."""
    candidates: list[object] = [getattr(output, "loss", None), output]
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
        f"a step needs a loss, and the model returned {_output_summary(output)}; return a scalar "
        "that requires a gradient: as the only output, as the attribute `loss`, or as the first "
        "scalar of a tuple or dict (models of transformers return one where they are called with "
        "labels)"
    )


def _output_summary(output: object) -> str:
    """Return the type of a model's output in a few words, for an error."""
    if isinstance(output, torch.Tensor):
        grad = "" if output.requires_grad else " without a gradient"
        return f"a tensor of shape {tuple(output.shape)}{grad}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    return f"a {type(output).__name__}"


@dataclass(frozen=True)
class _TensorDifference:
    """The largest difference between the elements of two tensors, absolute and relative to the
    largest element; infinite where one is missing or has another shape."""

    is_equal: bool
    absolute: float
    relative: float

    @classmethod
    def of(cls, a: torch.Tensor | None, b: torch.Tensor | None) -> _TensorDifference:
        """Return the difference of two tensors, either of which may be missing."""
        if a is None or b is None or a.shape != b.shape:
            return cls(False, math.inf, math.inf)
        a, b = (t.to_dense() if t.layout != torch.strided else t for t in (a, b))
        if _tensors_equal(a, b):
            return cls(True, 0.0, 0.0)
        wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
        distance = (a.to(wide) - b.to(wide)).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        distance = distance.masked_fill(_equal_elements(a, b), 0.0)
        absolute, scale = _largest(distance), _largest(a.abs().nan_to_num(0.0, posinf=0.0))
        return cls(False, absolute, absolute and (absolute / scale if scale else math.inf))


def _largest(elements: torch.Tensor) -> float:
    """Return the largest element; 0 without elements."""
    return float(elements.max()) if elements.numel() else 0.0


def _equal_elements(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the boolean mask of elements that are equal, or not a number in both tensors."""
    return (a == b) | (a.isnan() & b.isnan())


def _tensors_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the tensors are equal bit for bit, except for the bits of NaNs."""
    if a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(_equal_elements(a, b).all())


def _tensor_differences(a: Tensors, b: Tensors) -> list[_TensorDifference]:
    """Return the difference of the two tensors of each name; infinite if one of them is missing."""
    return [_TensorDifference.of(a.get(name), b.get(name)) for name in dict.fromkeys((*a, *b))]


def _changed_tensors(before: Tensors, after: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors of `after` that are missing in `before`, or not equal there."""
    return {k: t for k, t in after.items() if k not in before or not _tensors_equal(before[k], t)}
