"""Entries of a planner's plan cache, bound to a model or without one (for copies and pickles), and
reports of new ones: the difference from the calls that were planned before.

A Python number that changes in each step costs a capture in each step. So the third capture for a
new value of the same argument or attribute logs a warning, once.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import nn

from remat.documents.trace import Trace
from remat.frontend.capture.model.attribute_guards import AttributeGuards, BoundGuards
from remat.frontend.runtime.dispatch import PlannedStep
from remat.frontend.runtime.guards import ACCUMULATION, CallSignature, signature_changes
from remat.frontend.runtime.lower import LoweredProgram
from remat.frontend.runtime.module import BoundProgram
from remat.passes.trace_equality import topology_key
from remat.plan import Plan
from remat.plan_options import CheckedOptions

logger = logging.getLogger("remat")


class EntryKey(NamedTuple):
    """The key of an entry: the signature of its calls, the number of calls in flight, and a unique
    number. Entries for different Python values of the model differ only in this number."""

    signature: CallSignature
    in_flight: int
    number: int


@dataclass(frozen=True)
class PlanRecord(ABC):
    """The plan for one call signature, without a reference to the model: it can be pickled, and
    bound to a copy of the model.

    `trace` is None where the model is planned block by block. `is_reused` is True if the schedule
    comes from other sizes, or nothing needs to be recomputed: then the solver did not run.
    `captured_storage_bytes` are the sizes of the trace's storages before they were measured.
    """

    plan: Plan
    is_reused: bool = False
    trace: Trace | None = None
    captured_storage_bytes: tuple[int, ...] = ()

    @cached_property
    def topology_key(self) -> object:
        """The key of the trace's operations; None without a trace."""
        return None if self.trace is None else topology_key(self.trace)

    @abstractmethod
    def bind(self, model: nn.Module) -> PlanEntry:
        """Return a new entry with this plan, whose step runs on `model`."""


@dataclass(frozen=True, kw_only=True)
class ModelRecord(PlanRecord):
    """A plan of the whole model. `guards` are the Python values of the model that it is for."""

    lowered: LoweredProgram
    guards: AttributeGuards

    def bind(self, model: nn.Module) -> PlanEntry:
        """Return a new entry with this plan, whose step runs on `model`."""
        step = BoundProgram(self.lowered, model, self.plan)
        return PlanEntry(self, step, self.guards.bind(model))


@dataclass(frozen=True)
class PlanEntry:
    """A plan for one call signature, and the step of a model that runs it."""

    record: PlanRecord
    step: PlannedStep
    guards: BoundGuards

    @property
    def plan(self) -> Plan:
        """The plan of the record."""
        return self.record.plan


@dataclass(frozen=True)
class PlannerState:
    """A planner's options and plan cache without the model, for copies and pickles of the model.
    The last entry is the one that ran last, if `has_run`."""

    options: CheckedOptions
    timings_s: dict[str, float]
    entries: tuple[tuple[EntryKey, PlanRecord], ...]
    has_run: bool


_MAX_VALUES = 3
"""The number of captures for new values of one argument or attribute at which to warn."""


class ReplanReport:
    """Logs the new plans of one planner."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def log(
        self,
        plan: Plan,
        signature: CallSignature,
        entries: OrderedDict[EntryKey, PlanEntry],
        timings_s: Mapping[str, float],
        *,
        is_reused: bool,
    ) -> None:
        """Log a new plan. `entries` are the earlier entries of the plan cache, the latest last."""
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in timings_s.items())
        is_accumulating = signature.accumulates_gradients
        purpose = " for gradient accumulation" if is_accumulating else ""
        if not entries:
            logger.info("planned%s: %r (%s)", purpose, plan, phases)
            return
        changes = min((signature_changes(k.signature, signature) for k in entries), key=len)
        value = self.count_value(signature, entries, timings_s)
        if ACCUMULATION in changes:
            purpose = ""
        changed = value or f"{' and '.join(changes or ['inputs'])} changed"
        if is_reused:
            strategy = plan.solve["strategy"]
            logger.info("%s%s: %r by %s (%s)", changed, purpose, plan, strategy, phases)
        else:
            logger.info("%s: replanned%s: %r (%s)", changed, purpose, plan, phases)

    def count_value(
        self,
        signature: CallSignature,
        entries: OrderedDict[EntryKey, PlanEntry],
        timings_s: Mapping[str, float],
    ) -> str:
        """Return the Python values in which a call differs from the latest plan of such calls, as
        text; "" if there are none, or other properties differ. Count the plans for these values,
        and warn at the third. `timings_s` are the seconds of the latest planning."""
        changes = min((signature_changes(k.signature, signature) for k in entries), key=len)
        value = self._changed_value(signature, entries) if changes in ([], ["inputs"]) else ""
        if value:
            name = value.split(" is ")[0]
            self._counts[name] += 1
            if self._counts[name] == _MAX_VALUES:
                logger.warning(
                    "%s: each new value needs a capture of the step (%d so far, %.2f s for this "
                    "one). If it changes in each step, pass it as a tensor (an argument, or a "
                    "buffer of the module), which needs no new capture",
                    value,
                    _MAX_VALUES + 1,
                    sum(timings_s.values()),
                )
        return value

    def _changed_value(
        self, signature: CallSignature, entries: OrderedDict[EntryKey, PlanEntry]
    ) -> str:
        """Return the Python values that differ from the latest plan of such calls, as text: "tau
        is 0.9 instead of 1.0"; "" if none does, or the arguments differ in structure."""
        for key in reversed(entries):
            if key.signature == signature:
                return entries[key].guards.difference()
            if key.signature._replace(structure=signature.structure) == signature:
                values = list(signature.structure.changed_values(key.signature.structure))
                if any(before == now for _, before, now in values):
                    return ""
                return " and ".join(
                    f"the argument {_argument_label(path)} is {now} instead of {before}"
                    for path, before, now in values
                )
        return ""


def _argument_label(path: tuple[str | int, ...]) -> str:
    """Return the name of an argument with this path in the pair (args, kwargs): "args[0]"."""
    text = f"args[{path[1]}]" if path[0] == 0 else str(path[1])
    return text + "".join(f"[{step!r}]" for step in path[2:])
