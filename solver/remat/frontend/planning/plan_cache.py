"""Entries of a planner's plan cache, bound to a model or without one (for copies and pickles)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import nn

from remat.documents.trace import Trace
from remat.frontend.capture.model.attribute_guards import AttributeGuards, BoundGuards
from remat.frontend.runtime.dispatch import PlannedStep
from remat.frontend.runtime.guards import CallSignature
from remat.frontend.runtime.lower import LoweredProgram
from remat.frontend.runtime.module import BoundProgram
from remat.passes.trace_equality import topology_key
from remat.plan import Plan
from remat.plan_options import CheckedOptions


class EntryKey(NamedTuple):
    """The key of an entry: the signature of its calls, the number of calls in flight, and a unique
    number. Entries for different Python values of the model differ only in this number."""

    signature: CallSignature
    in_flight: int
    number: int


@dataclass
class PlanEntry:
    """The plan for one call signature, and the step that runs it.

    `guards` are the Python values of the model that the plan is for. `trace` is None where the
    model is planned block by block. `is_reused` is True if the schedule comes from other sizes, or
    nothing needs to be recomputed: then the solver did not run.
    `captured_storage_bytes` are the sizes of the trace's storages before they were measured.
    """

    step: PlannedStep
    trace: Trace | None
    plan: Plan
    guards: BoundGuards
    captured_storage_bytes: tuple[int, ...] = ()
    is_reused: bool = False

    def __post_init__(self) -> None:
        self.topology_key = None if self.trace is None else topology_key(self.trace)

    def unbound(self) -> UnboundEntry:
        """Return the entry without the model."""
        assert isinstance(self.step, BoundProgram)
        assert self.trace is not None
        return UnboundModelEntry(
            self.step.lowered,
            self.trace,
            self.plan,
            self.guards.guards,
            self.captured_storage_bytes,
            self.is_reused,
        )


class UnboundEntry(Protocol):
    """An entry of the plan cache without the model that it is for."""

    def bind(self, model: nn.Module) -> PlanEntry:
        """Return a new entry with the same plans, whose step runs on `model`."""
        ...


@dataclass(frozen=True)
class UnboundModelEntry:
    """An entry for a plan of the whole model, without a reference to the model: it can be pickled,
    and bound to a copy of the model."""

    lowered: LoweredProgram
    trace: Trace
    plan: Plan
    guards: AttributeGuards
    captured_storage_bytes: tuple[int, ...]
    is_reused: bool

    def bind(self, model: nn.Module) -> PlanEntry:
        """Return a new entry with the same plan, whose step runs on `model`."""
        step = BoundProgram(self.lowered, model, self.plan)
        return PlanEntry(
            step,
            self.trace,
            self.plan,
            self.guards.bind(model),
            self.captured_storage_bytes,
            self.is_reused,
        )


@dataclass(frozen=True)
class PlannerState:
    """A planner's options and plan cache without the model, for copies and pickles of the model.
    The last entry is the one that ran last, if `has_run`."""

    options: CheckedOptions
    timings_s: dict[str, float]
    entries: tuple[tuple[EntryKey, UnboundEntry], ...]
    has_run: bool
