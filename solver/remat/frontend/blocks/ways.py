"""Blocks captured and solved for: which of them can be planned, and in which ways they can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from remat.blockwise.menu import menu
from remat.blockwise.step import Way
from remat.documents.trace import Trace
from remat.errors import DocumentError, RematError, TraceError
from remat.frontend.blocks.observe import SeenCall
from remat.frontend.blocks.sharded import gathered
from remat.frontend.capture.trace import trace as capture
from remat.frontend.costs.measure import measure
from remat.frontend.operators import check_allowed
from remat.frontend.options import OptimizeOptions
from remat.frontend.pytree import unflatten
from remat.frontend.runtime.guards import Signature
from remat.frontend.runtime.lower import Compiled, compile_program
from remat.outputs import DROPPED
from remat.passes.accumulation import with_accumulation
from remat.plan import Plan
from remat.rewrite import rewrite

_TIME_LIMIT_S = 30.0
"""For the solves of all blocks together."""

_LONGEST_REASON = 300


@dataclass(frozen=True)
class PlannedWay:
    """A way with its plan, its program, and the numbers of those inputs that it saves."""

    way: Way
    plan: Plan
    compiled: Compiled
    inputs: frozenset[int]


@dataclass
class Ways:
    """What was found out about blocks. Identical ones share traces, plans and programs."""

    options: OptimizeOptions
    note: Callable[[str], None]
    cost_source: str = "run once"
    _traces: dict[tuple[int, Signature], Trace | str] = field(default_factory=dict)
    _whys: dict[tuple[type, object], str] = field(default_factory=dict)
    _kinds: list[Trace] = field(default_factory=list)
    """Those of the traces that differ."""
    _found: dict[int, list[PlannedWay]] = field(default_factory=dict)
    """By the number of the kind."""

    def trace(self, call: SeenCall) -> Trace | str:
        """The block as it is called there, or why it cannot be captured."""
        if call.key is None:
            return call.why
        key = id(call.site.module), call.key
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
        args, kwargs = unflatten(key.structure, leaves)
        try:
            with gathered(module := call.site.module):
                traced = capture(module, args, kwargs, differentiate="all", outputs=DROPPED)
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
        costs = options.costs or traced.device.split(":")[0]
        priced = measure(traced, device=costs, cache=options.cache)
        self.cost_source = priced.cost_source
        number_of = {p.name: int(p.target) for p in traced.placeholders if p.kind == "input"}
        found: list[PlannedWay] = []
        for way, plan in menu(priced.graph(), within_s, options.strategy, options.progress):
            program = rewrite(priced, plan.schedule)
            inputs = frozenset(number_of[n] for n in program.saved if n in number_of)
            compiled = compile_program(program, options.namespaces)
            found.append(PlannedWay(way, plan, compiled, inputs))
        return found


def reason(error: RematError) -> str:
    """What is wrong, in a line, without the remedy."""
    return " ".join(str(error).split()).partition(" Remedy:")[0][:_LONGEST_REASON]
