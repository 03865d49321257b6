"""`Fit`: the answer to "will this training step fit?", with ways to make it fit."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from remat.costs.sharding import ONE_GPU, Sharding
from remat.limits.units import format_bytes, format_seconds
from remat.report.report import (
    Described,
    Fact,
    Report,
    Table,
    facts_of_lines,
    facts_of_parts,
)
from remat.report.training_memory import TrainingMemory

_ACCURACY = "peaks within 2%, reserved bytes within 17% of 477 small loops on a GPU in software"
"""Errors of predictions, checkpoints and convolutions included (docs/how-to/fit.md)."""

_SHARDED_ACCURACY = "peaks within 1% of 32 small loops on CPUs; reserved bytes were not compared"


@dataclass(frozen=True, slots=True)
class FitOption:
    """One way to run the training loop.

    `peak_bytes` and `reserved_bytes` are those of `TrainingMemory`; by the latter the option `fits`
    or not. `step_s` is the time of forward and backward for the whole batch by the data
    sheet, None where it is not predicted. `code` is what to change in the training script, and
    `note` what else the option needs or changes. `gpus` is the number of GPUs.
    """

    name: str
    peak_bytes: int
    reserved_bytes: int
    fits: bool
    step_s: float | None
    code: str
    note: str = ""
    gpus: int = 1


@dataclass(frozen=True, slots=True)
class ExcludedOption:
    """An option that is impossible for a training loop, and the `reason`."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class LongestFit:
    """The longest sequences that fit with an option, in eager mode if `option` is "".

    `length` is None if no length fits. `share` is the share of batches that are not longer.
    """

    option: str
    length: int | None
    share: float


@dataclass(frozen=True)
class Fit(Described):
    """The memory of a training loop on a device, and the options if it does not fit.

    `usable_bytes` are the bytes that torch's allocator may reserve on the `device`. `memory` is
    that of eager mode, and `step_s` the time of its forward and backward. `options` are empty if
    the loop fits; the first one is the fastest that does. With batches of several lengths, all of
    this is that of the longest ones, and `lengths` are the lengths that fit in eager mode and with
    the best option. `notes` are what else to know about the answer, and `excluded` are options
    that are impossible. `assumptions` are the versions and figures that the answer is for.
    `reserved_range_bytes` are the least and the most that torch's allocator reserves if tensors of
    the step are up to 3% smaller or larger. `checkpoint`, `accumulate`, `keeps_gradients` and
    `keeps_outputs` are the options of `remat.fit`, and `checkpoint_count` is the number of
    checkpoints of the loop. `sharding` are the GPUs that share it: memory, batch and time are those
    of one of them, and `communication_s` is the part of `step_s` that communication adds, by a
    model.
    """

    model: str
    device: str
    optimizer: str
    batch: int | None
    usable_bytes: int
    memory: TrainingMemory
    step_s: float
    options: tuple[FitOption, ...]
    cost_source: str
    lengths: tuple[LongestFit, ...] = ()
    notes: tuple[str, ...] = ()
    excluded: tuple[ExcludedOption, ...] = ()
    checkpoint: str = ""
    checkpoint_count: int = 0
    accumulate: int = 1
    keeps_gradients: bool = False
    keeps_outputs: bool = False
    assumptions: tuple[str, ...] = ()
    reserved_range_bytes: tuple[int, int] = (0, 0)
    sharding: Sharding = ONE_GPU
    communication_s: float = 0.0

    @property
    def fits(self) -> bool:
        """True if the training loop fits as it is."""
        return self.memory.reserved_bytes <= self.usable_bytes

    def report(self) -> Report:
        """Return the verdict, the parts of the peak, and a table of options with their code."""
        memory = self.memory
        missing = memory.reserved_bytes - self.usable_bytes
        verdict = (
            f"yes, {format_bytes(-missing)} remain"
            if self.fits
            else f"no, {format_bytes(missing)} too much"
        )
        batch = "" if self.batch is None else f", batch {self.batch}"
        place = "the optimizer's step" if memory.is_in_optimizer else "forward and backward"
        facts = [
            Fact("model", f"{self.model}{batch}, optimizer {self.optimizer}"),
            *(Fact("loop", text) for text in [self._loop_text()] if text),
            *(Fact("GPUs", text) for text in [self.sharding.describe()] if text),
            Fact("device", f"{self.device}, {format_bytes(self.usable_bytes)} usable"),
            Fact("fits", verdict),
            *facts_of_lines("lengths", list(map(_longest_fit_text, self.lengths))),
            *self._reserved_facts(),
            Fact("peak", f"{format_bytes(memory.peak_bytes)} during {place}; of this"),
            *facts_of_parts(memory.parts, memory.peak_bytes),
            Fact(
                "time",
                f"{format_seconds(self.step_s)} for forward and backward, by {self.cost_source}"
                f"{self._communication_text()}",
            ),
            *(Fact("assumed", "; ".join(self.assumptions)) for _ in self.assumptions[:1]),
            *(Fact("note", note) for note in self.notes),
        ]
        excluded = "\n".join(f"no {option.name}: {option.reason}" for option in self.excluded)
        if not self.options:
            return Report(facts, excluded)
        return Report(facts, self._option_table(), "\n".join(self._code_lines()), excluded)

    def _loop_text(self) -> str:
        """Return the checkpoints and accumulated batches of the loop; "" without any."""
        parts: list[str] = []
        if self.checkpoint_count:
            parts.append(f"{self.checkpoint_count:,} checkpoints ({self.checkpoint})")
        if self.accumulate > 1:
            parts.append(f"gradients of {self.accumulate:,} batches accumulated")
        if self.keeps_gradients:
            parts.append("gradients never freed")
        if self.keeps_outputs:
            parts.append("outputs live until the next ones exist")
        return ", ".join(parts)

    def _communication_text(self) -> str:
        """Return the time of communication; "" on one GPU."""
        if self.sharding.gpus == 1:
            return ""
        return f"; {format_seconds(self.communication_s)} exposed communication (estimated)"

    def _reserved_facts(self) -> list[Fact]:
        """Return a line about torch's allocator, and one about the accuracy; none on a CPU."""
        if self.device == "cpu":
            return []
        low, high = map(format_bytes, self.reserved_range_bytes)
        between = "" if low == high else f" ({low} to {high} with tensors 3% smaller or larger)"
        lines = [
            f"{format_bytes(self.memory.reserved_bytes)} by torch's allocator{between}",
            f"{format_bytes(self.memory.expandable_bytes)} with expandable segments",
        ]
        accuracy = _SHARDED_ACCURACY if self.sharding.gpus > 1 else _ACCURACY
        return [*facts_of_lines("reserved", lines), Fact("accuracy", accuracy)]

    def _option_table(self) -> Table:
        rows = [("option", "fits", "peak", "reserved", "time")]
        for number, option in enumerate(self.options, 1):
            time = "" if option.step_s is None else _relative_time_text(option.step_s, self.step_s)
            rows.append(
                (
                    f"{number}. {option.name}",
                    "yes" if option.fits else "no",
                    format_bytes(option.peak_bytes),
                    format_bytes(option.reserved_bytes),
                    time,
                )
            )
        return Table(rows)

    def _code_lines(self) -> list[str]:
        lines: list[str] = []
        for number, option in enumerate(self.options, 1):
            lines.append(f"{number}. {option.code}")
            if option.note:
                lines.append(f"   {option.note}")
        return lines

    def to_json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps({"fits": self.fits} | asdict(self), indent=2)


def _longest_fit_text(fit: LongestFit) -> str:
    how = f"with {fit.option}" if fit.option else "as it is"
    if fit.length is None:
        return f"no length fits {how}"
    return f"{fit.length:,} tokens fit {how}: {fit.share:.1%} of batches"


def _relative_time_text(step_s: float, eager_s: float) -> str:
    return f"{100 * (step_s / eager_s - 1):+.1f}%" if eager_s else ""
