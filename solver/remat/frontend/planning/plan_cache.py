"""What a planner has found out, with and without the model that it is for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from remat.blockwise.plan import BlocksPlan
from remat.documents.trace import Trace
from remat.frontend.planning.options import OptimizeOptions
from remat.frontend.runtime.guards import Signature
from remat.frontend.runtime.lower import Compiled
from remat.frontend.runtime.module import Ready, Runnable
from remat.passes.outline import outline
from remat.plan import Plan


@dataclass
class Entry:
    """One planned signature. Without a `trace` if it was not planned as a whole; `reused` if its
    schedule was solved for other sizes, or nothing had to be solved. `nominal_bytes` are the sizes
    of the storages before they were measured."""

    ready: Runnable
    trace: Trace | None
    plan: Plan | BlocksPlan
    nominal_bytes: tuple[int, ...] = ()
    reused: bool = False

    def __post_init__(self) -> None:
        self.outline = None if self.trace is None else outline(self.trace)

    def kept(self) -> KeptEntry:
        """Without the model."""
        assert isinstance(self.ready, Ready)
        assert isinstance(self.plan, Plan)
        assert self.trace is not None
        return KeptWhole(
            self.ready.compiled, self.trace, self.plan, self.nominal_bytes, self.reused
        )


class KeptEntry(Protocol):
    """An entry without the model that it is for."""

    def bound(self, model: nn.Module) -> Entry:
        """The entry for a model."""
        ...


@dataclass(frozen=True)
class KeptWhole:
    """A program for the whole model."""

    compiled: Compiled
    trace: Trace
    plan: Plan
    nominal_bytes: tuple[int, ...]
    reused: bool

    def bound(self, model: nn.Module) -> Entry:
        """The entry for a model."""
        ready = Ready(self.compiled, model, self.plan)
        return Entry(ready, self.trace, self.plan, self.nominal_bytes, self.reused)


@dataclass(frozen=True)
class Kept:
    """What a planner has found out, without the model that it is for."""

    options: OptimizeOptions
    timings_s: dict[str, float]
    entries: tuple[tuple[Signature, KeptEntry], ...]
    has_run: bool
