"""Blocks captured and solved for: which of them can be planned, and in which ways they can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from remat.blockwise.menu import menu
from remat.blockwise.step import Way
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.errors import DocumentError, RematError, TraceError
from remat.frontend.blocks.dry_run import SeenCall
from remat.frontend.blocks.fsdp2 import gathered
from remat.frontend.blocks.menus import Menus
from remat.frontend.capture.model.context import autocast_as
from remat.frontend.capture.trace import trace as capture
from remat.frontend.common.operators import check_allowed
from remat.frontend.common.pytree import unflatten
from remat.frontend.costs.measure import measure
from remat.frontend.planning.options import OptimizeOptions
from remat.frontend.runtime.guards import Signature
from remat.frontend.runtime.lower import Compiled, compile_program
from remat.limits.outputs import DROPPED
from remat.passes.accumulation import with_accumulation
from remat.plan import Plan
from remat.rewrite import rewrite

_TIME_LIMIT_S = 30.0
"""For the solves of all blocks together."""

_LONGEST_REASON = 300


@dataclass(frozen=True)
class PlannedWay:
    """A way with its plan, and its program once somebody asks for it."""

    way: Way
    plan: Plan
    trace: Trace
    namespaces: frozenset[str]

    @cached_property
    def program(self) -> Program:
        """As data."""
        return rewrite(self.trace, self.plan.schedule)

    @cached_property
    def inputs(self) -> frozenset[int]:
        """The numbers of those inputs that it saves."""
        inputs = {p.name: int(p.target) for p in self.trace.placeholders if p.kind == "input"}
        return frozenset(inputs[name] for name in self.program.saved if name in inputs)

    @cached_property
    def compiled(self) -> Compiled:
        """What runs."""
        return compile_program(self.program, self.namespaces)


@dataclass
class Ways:
    """What was found out about blocks. Identical ones share traces, plans and programs."""

    options: OptimizeOptions
    note: Callable[[str], None]
    menus: Menus = field(default_factory=Menus)
    cost_source: str = "run once"
    reused: bool = True
    """Whether nothing had to be solved."""
    _traces: dict[tuple[int, Signature, frozenset[str]], Trace | str] = field(default_factory=dict)
    _whys: dict[tuple[type, object], str] = field(default_factory=dict)
    _kinds: list[Trace] = field(default_factory=list)
    """Those of the traces that differ."""
    _found: dict[int, list[PlannedWay]] = field(default_factory=dict)
    """By the number of the kind."""

    def trace(self, call: SeenCall) -> Trace | str:
        """The block as it is called there, or why it cannot be captured."""
        if call.key is None:
            return call.why
        key = id(call.site.module), call.key, call.used
        if key not in self._traces:
            found = self._captured(call, call.key)
            if isinstance(found, Trace) and found not in self._kinds:
                self._kinds.append(found)
            self._traces[key] = found
        return self._traces[key]

    def _captured(self, call: SeenCall, key: Signature) -> Trace | str:
        self.note(f"capturing {call.site.path}")
        leaves = [
            torch.empty_strided(
                t.shape, t.stride, dtype=t.dtype, device=t.device, requires_grad=t.requires_grad
            )
            for t in key.inputs
        ]
        # A gradient of zeros is not the same as none: parameters would get zeros, or NaN.
        used = sorted(call.used) or "all"
        try:
            args, kwargs = unflatten(key.structure, leaves)
            with gathered(module := call.site.module), autocast_as(key.autocast):
                traced = capture(module, args, kwargs, differentiate=used, outputs=DROPPED)
            check_allowed((n.target for n in traced.nodes), self.options.namespaces)
        except (TraceError, DocumentError) as error:
            return reason(error)
        return with_accumulation(traced) if key.accumulating else traced

    def why(self, call: SeenCall) -> str:
        """Why a block without parts cannot be captured, or "": asked once for each of its kind."""
        kind = type(call.site.module), None if call.key is None else call.key.inputs
        if kind not in self._whys:
            found = self.trace(call)
            self._whys[kind] = found if isinstance(found, str) else ""
        return self._whys[kind]

    def of(self, call: SeenCall) -> list[PlannedWay]:
        """The ways to run a call of what was captured, the fastest first."""
        traced = self.trace(call)
        assert isinstance(traced, Trace)
        number = self._kinds.index(traced)
        if number not in self._found:
            kinds = len(self._kinds)
            self.note(f"block {number + 1} of {kinds}, with {len(traced.nodes)} operations")
            self._found[number] = self._solved(traced, _TIME_LIMIT_S / kinds)
        return self._found[number]

    def _solved(self, traced: Trace, within_s: float) -> list[PlannedWay]:
        options = self.options
        known = self.menus.find(traced)
        if known is None:
            self.reused = False
            costs = options.costs or traced.device.split(":")[0]
            priced = measure(traced, device=costs, cache=options.cache)
            found = menu(priced.graph(), within_s, options.strategy, options.progress)
            self.menus.add(traced, priced, tuple(plan for _, plan in found))
        else:
            priced, found = known
        self.cost_source = priced.cost_source
        return [PlannedWay(way, plan, priced, options.namespaces) for way, plan in found]


def reason(error: RematError) -> str:
    """What is wrong, in a line, without the remedy."""
    return " ".join(str(error).split()).partition(" Remedy:")[0][:_LONGEST_REASON]
