"""`FitQuestion`: a training loop, the memory that it has to fit, and the time for the answer.

All solves of an answer share one `Clock`. Reports of its progress name the stage, such as
"option 3 of 8: plan".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from remat.costs.optimizer_memory import OptimizerMemory, smaller_optimizers
from remat.costs.roofline import Roofline
from remat.costs.sharding import Sharding
from remat.documents.trace import Trace
from remat.errors import BudgetError, RematError
from remat.fitting.eager import AS_WRITTEN, EagerStep, check_checkpoint
from remat.limits.options import OUTPUTS_HELD, parse_bytes
from remat.limits.units import format_bytes
from remat.passes.gradient_accumulation import with_gradient_accumulation
from remat.passes.outputs import with_previous_outputs, without_previous_outputs
from remat.progress import STAGE_PHASE, Clock, Progress, ProgressCallback
from remat.report.fit import FitOption
from remat.report.training_memory import TrainingMemory
from remat.strategies import Auto, Strategy


def report_stage(progress: ProgressCallback | None, stage: str, clock: Clock) -> None:
    """Report that a stage starts; no-op without a callback."""
    if progress is not None:
        progress(Progress(STAGE_PHASE, clock.elapsed_s, stage=stage))


def in_stage(progress: ProgressCallback | None, stage: str) -> ProgressCallback | None:
    """Return a callback that adds the stage to reports, in front of a stage that they have; None
    without a callback."""
    if progress is None:
        return None

    def report_in_stage(report: Progress) -> None:
        progress(replace(report, stage=": ".join(filter(None, (stage, report.stage)))))

    return report_in_stage


def parse_memory(memory: int | str) -> int:
    """Return the bytes that torch's allocator may reserve. Raises `BudgetError`."""
    is_size = isinstance(memory, (int, str)) and not isinstance(memory, bool)
    size_bytes = parse_bytes(memory, "memory", "75GiB") if is_size else 0
    if size_bytes == 0:
        raise BudgetError(
            f"the memory is {str(memory)[:80]!r}; pass what torch's allocator may reserve, bytes "
            'above 0 or "75GiB"'
        )
    return size_bytes


def check_time_limit(time_limit: float) -> None:
    """Raise `RematError` if the time limit is no number of seconds above 0."""
    is_number = isinstance(time_limit, (int, float)) and not isinstance(time_limit, bool)
    if not is_number or not time_limit > 0:
        raise RematError(
            f"the time limit is {str(time_limit)[:80]!r}; pass seconds above 0, such as 12, or "
            "math.inf"
        )


def check_batch(batch: int | None) -> None:
    """Raise `RematError` if the batch size is no number from 1 on."""
    if batch is not None and (isinstance(batch, bool) or not isinstance(batch, int) or batch < 1):
        raise RematError(
            f"the batch is {str(batch)[:80]!r}; pass the batch size of the example inputs, an "
            "integer from 1 on"
        )


DEFAULT_STRATEGY = Auto(gap=0.02, time_limit=2.0)
"""How to solve for plans: several are solved for one answer. `remat.enable` takes more time, and
finds a plan that is as fast or faster."""

DEFAULT_LIMIT_S = 12.0
"""The default time limit of an answer, in seconds."""


MAX_ACCUMULATE = 10**6


@dataclass(frozen=True, slots=True)
class LoopOptions(Sharding):
    """The options of a training loop: `checkpoint` (see `check_checkpoint`), the number of batches
    before a step of the optimizer, whether gradients stay in memory
    (`zero_grad(set_to_none=False)`) and the outputs of a step during the next forward, and how GPUs
    share the loop. Raises `RematError` for impossible values."""

    checkpoint: str = AS_WRITTEN
    accumulate: int = 1
    keeps_gradients: bool = False
    keeps_outputs: bool = False

    def __post_init__(self) -> None:
        Sharding.__post_init__(self)
        check_checkpoint(self.checkpoint)
        count = self.accumulate
        is_integer = isinstance(count, int) and not isinstance(count, bool)
        if not is_integer or not 1 <= count <= MAX_ACCUMULATE:
            raise RematError(
                f"accumulate is {str(count)[:80]!r}; pass the number of batches before a step of "
                f"the optimizer, an integer from 1 to {MAX_ACCUMULATE:,}"
            )

    def with_gradients(self, trace: Trace) -> Trace:
        """Return the trace of the loop's step with the largest peak: the one that adds to gradients
        which exist already, if there is one, or into the buckets of DDP."""
        adds = self.keeps_gradients or self.accumulate > 1 or self.gradient_as_bucket_view
        return with_gradient_accumulation(trace) if adds else trace

    def with_outputs(self, trace: Trace) -> Trace:
        """Return the trace, which has costs, with the outputs of the step before in memory if the
        loop keeps them."""
        return with_previous_outputs(trace) if self.keeps_outputs else trace


PLAIN_LOOP = LoopOptions()

RELEASE_CODE = "del outputs, loss after optimizer.step()"
"""The code of a loop that keeps no outputs of the step before."""


@dataclass(frozen=True, slots=True)
class ScriptChanges:
    """The code that a model's training script needs: `checkpoints` to checkpoint each block, or ""
    if the model has no method for that, and `before_plan` what precedes a plan. `outputs` is the
    option of `remat.enable`."""

    checkpoints: str = ""
    before_plan: str = ""
    outputs: str = OUTPUTS_HELD


@dataclass(frozen=True)
class FitQuestion:
    """A step, the name of its optimizer, and the bytes that torch's allocator may reserve.

    `roofline` gives costs to pieces of operations. `trace_of_batch` returns the trace with costs of
    another batch size, which accumulates its gradients; `batch` is the present size.
    `trace_with_adapters` returns the trace with costs for options `lora` and `quantize`. They may
    be unknown. Once the `clock` is set, options that trace or solve are left out; `progress`
    reports the stages of the answer, and the solves for plans. `assumptions` are what the answer
    names of the trace.
    """

    step: EagerStep
    optimizer_name: str
    usable_bytes: int
    roofline: Roofline
    strategy: Strategy = DEFAULT_STRATEGY
    script: ScriptChanges = ScriptChanges()
    batch: int | None = None
    trace_of_batch: Callable[[int], Trace] | None = None
    loop: LoopOptions = PLAIN_LOOP
    trace_with_adapters: Callable[[str, str], Trace] | None = None
    assumptions: tuple[str, ...] = ()
    clock: Clock = field(default_factory=lambda: Clock.of(math.inf))
    progress: ProgressCallback | None = None

    def at_stage(self, stage: str) -> FitQuestion:
        """Report that a stage of the answer starts, and return the question with that stage in the
        reports of its solves."""
        report_stage(self.progress, stage, self.clock)
        return replace(self, progress=in_stage(self.progress, stage))

    def with_outputs_released(self) -> FitQuestion:
        """Return the question about a loop that keeps no outputs of the step before."""
        if not self.loop.keeps_outputs:
            return self
        step = self.step.with_trace(without_previous_outputs(self.step.trace))
        return replace(self, step=step, loop=replace(self.loop, keeps_outputs=False))

    @property
    def optimizer(self) -> OptimizerMemory:
        """The memory of the user's optimizer."""
        return self.step.optimizer(self.optimizer_name)

    def is_usable(self, memory: TrainingMemory) -> bool:
        """True if torch's allocator reserves no more for this memory than it may."""
        return memory.reserved_bytes <= self.usable_bytes

    def option(
        self, name: str, memory: TrainingMemory, step_s: float, code: str, note: str = ""
    ) -> FitOption:
        """Return an option with the memory of its training loop."""
        fits = self.is_usable(memory)
        return FitOption(name, memory.peak_bytes, memory.reserved_bytes, fits, step_s, code, note)

    def fragmentation_ratio(self, optimizer: OptimizerMemory) -> float:
        """Return what torch's allocator reserves in eager mode with an optimizer, relative to the
        peak."""
        memory = self.step.memory(optimizer)
        return memory.reserved_bytes / max(1, memory.peak_bytes)

    def optimizers_to_combine(self) -> Iterator[OptimizerMemory]:
        """Yield the user's optimizer and smaller ones, if their own step fits. Ends with the first
        with which the loop fits in eager mode."""
        for name in (self.optimizer_name, *smaller_optimizers(self.optimizer_name)):
            optimizer = self.step.optimizer(name)
            step_bytes = self.step.optimizer_step_bytes(optimizer)
            if step_bytes * self.fragmentation_ratio(optimizer) <= self.usable_bytes:
                yield optimizer
            if self.is_usable(self.step.memory(optimizer)):
                return  # that optimizer is an option on its own

    def reason_of_optimizers(self) -> str:
        """Return why `optimizers_to_combine` yields none."""
        names = (self.optimizer_name, *smaller_optimizers(self.optimizer_name))
        sizes = {name: self.step.optimizer_step_bytes(self.step.optimizer(name)) for name in names}
        name = min(sizes, key=lambda name: sizes[name])
        return (
            f"the step of {name} alone takes {format_bytes(sizes[name])}: parameters, gradients, "
            "state, and outputs that the caller keeps, which recomputation does not reduce"
        )

    def name_with_optimizer(self, name: str, optimizer: OptimizerMemory) -> str:
        """Return the name of an option, with its optimizer if that is not the user's."""
        return name if optimizer.name == self.optimizer_name else f"{name}, {optimizer.name}"
