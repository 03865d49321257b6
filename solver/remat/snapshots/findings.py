"""`Finding`: one cause of an out-of-memory error, with its bytes, its place and a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from remat.snapshots.model import Frame


class Kind(StrEnum):
    """Kinds of findings, and how they are called in reports. Those before `FRAGMENTS` are memory
    that a step does not need; those after it are memory that the device or the allocator withholds,
    and from `OPTIMIZER_STEP` on parts of the step itself."""

    KEPT_TENSORS = "leak: tensors kept"
    KEPT_GRAPHS = "leak: graphs kept"
    GROWING_BUFFER = "leak: growing buffer"
    KEPT_BY_BACKWARD = "leak: backward results kept"
    FAILED_STEP = "tensors of a failed step"
    OLD_OPTIMIZER = "state of an old optimizer"
    GRADIENTS_NOT_FREED = "gradients not freed"
    SECOND_MODEL = "second model"
    RESIDENT_DATA = "data on the device"
    EVALUATION = "evaluation with gradients"
    LARGER_BATCH = "larger batch"
    SEVERAL_FORWARDS = "several forward passes"
    FRAGMENTS = "fragments"
    OTHER_STREAM = "blocks of another stream"
    WAITING_BLOCKS = "blocks that wait for a stream"
    OTHER_POOL = "another memory pool"
    OTHER_PROCESS = "other processes"
    OPTIMIZER_STEP = "peak of the optimizer's step"
    OPTIMIZER_STATE = "optimizer state"
    RECOMPUTATION = "peak of a checkpoint"
    LOSS = "peak of the loss"
    ONE_LINE = "peak of one line"
    STEP = "peak of the step"

    @property
    def is_leak(self) -> bool:
        """True for memory that grows from step to step."""
        return self.value.startswith("leak")


@dataclass(frozen=True, slots=True)
class Place:
    """Where memory was allocated: the innermost frame of user code, the line of the script that led
    there, and the module's path, "" if unknown."""

    frame: Frame | None = None
    script: Frame | None = None
    module: str = ""

    def __str__(self) -> str:
        frames = [f for f in dict.fromkeys((self.frame, self.script)) if f is not None]
        lines = ", from ".join(f"{_short(f.file)}:{f.line} ({f.function})" for f in frames)
        return ": ".join(part for part in (self.module, lines) if part)


def _short(file: str) -> str:
    """Return the last two parts of a path."""
    return "/".join(file.replace("\\", "/").split("/")[-2:])


@dataclass(frozen=True, slots=True)
class Line:
    """Live bytes of one place and phase, and the number of allocations."""

    place: Place
    phase: str
    size_bytes: int
    count: int


@dataclass(frozen=True, slots=True)
class Finding:
    """A cause: its kind, the bytes that it takes when the request fails or at the peak, its place,
    a sentence, and what to do. `bytes_per_step` is the growth of a leak, and `releases_bytes` what
    the remedy is expected to release, 0 where that is unknown."""

    kind: Kind
    size_bytes: int
    place: Place
    text: str
    remedy: str
    bytes_per_step: int = 0
    releases_bytes: int = 0
