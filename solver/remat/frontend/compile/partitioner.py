"""`Partitioner`: what torch.compile asks to split a step into forward and backward."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

from torch import fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from remat.errors import InfeasibleBudget, RematError, SolverTimeout, TraceError, one_line
from remat.frontend.compile import reporting
from remat.frontend.compile.errors import explained
from remat.frontend.compile.external_memory import allocated_share, outside_bytes
from remat.frontend.compile.inductor.compat import min_cut
from remat.frontend.compile.inductor.fusion_control import Holding
from remat.frontend.compile.inductor.peak_check import Verifier
from remat.frontend.compile.joint.fx_utils import node_bytes, source
from remat.frontend.compile.joint.joint_graph import rejoined
from remat.frontend.compile.joint.symbolic_sizes import Symbol, bound, bound_by_call
from remat.frontend.compile.kernels.cost_model import Prices
from remat.frontend.compile.kernels.in_place import without_overwrites
from remat.frontend.compile.kernels.to_fx import write
from remat.frontend.compile.kernels.to_solver import Step, leaving_room, peak_as_inductor_runs, read
from remat.frontend.compile.kernels.variants import Way, badness, least, ways_of
from remat.frontend.compile.naming import compiled_now, number_now
from remat.frontend.compile.options import CompileOptions, read_options
from remat.frontend.compile.registry import (
    NOTHING,
    CompiledPlan,
    Lesson,
    forget,
    held_by_others,
    remember,
    titled,
)
from remat.frontend.compile.reporting import Listening
from remat.graph import Graph
from remat.limits.budget import format_bytes
from remat.limits.reserve import telling
from remat.plan import Plan
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import solve
from remat.strategies import Auto, Strategy
from remat.version import VERSION

_LEAST_S = 2.0
"""For solving, however long it took to find the kernels."""

_BESIDE = "are held beside this graph (by its step's others, by the rest of the model, or reserved)"


class Partitioner(CustomPartitionerFn):
    """Plans each step that torch.compile traces within a budget, for code that sets Inductor's
    options itself:

        torch.compile(model, options=remat.Partitioner("60%").settings())

    Options are those of `torch.compile(backend="remat")`. That one also plans again where Inductor
    needs more than was planned; here this is an error.
    """

    def __init__(self, budget: int | str, **options: Any) -> None:
        own, left = read_options({"budget": budget, **options})
        if left:
            raise ValueError(
                f"{next(iter(left))} is an option of Inductor: give it to torch.compile"
            )
        self._set(own)

    def _set(
        self,
        options: CompileOptions,
        group: object = None,
        lesson: Lesson = NOTHING,
        rounds: int = 1,
    ) -> None:
        self.options = options
        self.group = group
        self.lesson = lesson
        self.rounds = rounds
        self.module = self.compile_id = ""
        self._began = 0.0
        self._ways_left = 1
        """To be solved in the time that is left: each has its share."""
        self.bounded: list[Symbol] | None = None
        """Sizes of the graph that had no bound before the first round; None for one round."""
        self.made: CompiledPlan | None = None
        """The last plan."""

    @classmethod
    def of_backend(
        cls, options: CompileOptions, group: object, lesson: Lesson = NOTHING, rounds: int = 1
    ) -> Partitioner:
        """For a budget that the graphs of one `group` share."""
        found = cls.__new__(cls)
        found._set(options, group, lesson, rounds)
        return found

    def __deepcopy__(self, _: object) -> Partitioner:
        return self  # Inductor copies its options to write them down; torch's symbols are here

    def settings(self) -> dict[str, Any]:
        """Inductor's options: this partitioner, and what holds Inductor to its plans."""
        return {
            "custom_partitioner_fn": self,
            "reorder_for_peak_memory": False,
            "allow_buffer_reuse": False,  # it keeps what nobody reads for later buffers
            "_pre_fusion_custom_pass": Holding(),
            "_post_fusion_custom_pass": Verifier(self.uuid()),
        }

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        static = static_lifetime_input_indices
        # Planning changes the graph that it is given, and may fail after that.
        kept = fx.GraphModule(gm, copy.deepcopy(gm.graph)) if self.options.fallback else gm
        try:
            return self._planned(gm, joint_inputs, num_fwd_outputs, static)
        except Exception as error:
            if isinstance(error, RematError) and not isinstance(error, TraceError):
                raise  # of the budget, or of what solves
            title = titled(self.module, self.compile_id)
            why = f"remat cannot plan {title}: {one_line(error)}"
            if not self.options.fallback:
                raise TraceError(
                    f"{why}; please report it, or pass fallback=True: torch's own partitioner then "
                    "takes this graph, outside of the budget"
                ) from error
            warnings.warn(f"{why}; torch's own partitioner takes it", stacklevel=2)
            return min_cut(kept, joint_inputs, num_fwd_outputs, static)

    def _planned(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        num_fwd_outputs: int,
        static: list[int] | None,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        began = self._began = time.perf_counter()
        self.module, self.compile_id = compiled_now(), number_now()
        title = titled(self.module, self.compile_id)
        operations = sum(node.op == "call_function" for node in gm.graph.nodes)
        reporting.begun(title, operations, self.options, self.lesson)
        is_held = self.options.inductor
        bounded = bound(gm.graph.find_nodes(op="placeholder"))
        if self.bounded is not None:
            self.bounded += bounded
            bounded = self.bounded
        joint = rejoined(gm, joint_inputs, num_fwd_outputs, static, inductor=is_held)
        prices = Prices(joint, fused=self.options.costs == "kernels")
        # What was planned twice and does not fit is planned on the kernels that were seen.
        ways = ways_of(joint, sturdy=self.rounds > 2)
        reporting.found(title, *ways[0], time.perf_counter() - began)
        step, compiled = self._solved(ways, prices, bounded)
        reporting.solved(compiled)
        halves = write(step, compiled, num_fwd_outputs, static or (), held=is_held)
        compiled.operations = operations
        compiled.planned_s = time.perf_counter() - began
        remember(compiled)
        self.made = compiled
        return halves

    def _solved(
        self, ways: list[Way], prices: Prices, bounded: Sequence[Symbol]
    ) -> tuple[Step, CompiledPlan]:
        def steps() -> list[Step]:
            return [read(joint, regions, prices, self.options.outputs) for joint, regions in ways]

        if bounded and self.options.budget.size_bytes is not None:
            with suppress(InfeasibleBudget):
                return self._solution(steps())
            # What does not fit at twice the size may fit at this.
            bound_by_call(bounded)
        found = steps()
        with explained(found[0].graph, titled(self.module, self.compile_id)):
            return self._solution(found)

    def _solution(self, steps: Sequence[Step]) -> tuple[Step, CompiledPlan]:
        """The first of the steps is as torch.compile would run it."""
        step = steps[0]
        joint = step.joint
        keep_all = simulate(step.graph, Schedule.keep_all(step.graph))
        # Of small graphs that of our order may be the larger one.
        baseline_bytes = max(peak_as_inductor_runs(step), keep_all.peak_bytes)
        kept = step.held.union(map(source, joint.saved))
        others = held_by_others(self.group)
        asked_bytes = self.options.budget_bytes(baseline_bytes + others.baseline_bytes)
        beside_bytes = others.held_bytes
        if self.options.budget.size_bytes is not None:
            beside_bytes += outside_bytes(step, self.options.model, others.held_bytes)
        saved_bytes = sum(map(node_bytes, kept))
        share_bytes = None
        if asked_bytes is not None and self.options.budget.size_bytes is None:
            share_bytes = asked_bytes * saved_bytes // (baseline_bytes + others.baseline_bytes)
        step, plan = self._best(steps, asked_bytes, beside_bytes, share_bytes)
        return step, CompiledPlan(
            plan=plan,
            budget_bytes=None if asked_bytes is None else asked_bytes - beside_bytes,
            module=self.module,
            compile_id=self.compile_id,
            baseline_bytes=baseline_bytes,
            others_bytes=beside_bytes,
            given_bytes=joint.given_bytes,
            group=self.group,
            rounds=self.rounds,
            baseline_saved_bytes=saved_bytes,
        )

    def _best(
        self,
        steps: Sequence[Step],
        asked_bytes: int | None,
        beside_bytes: int,
        share_bytes: int | None,
    ) -> tuple[Step, Plan]:
        """The quickest plan, with nothing run again where that is one; for "min" the smallest."""
        found: list[tuple[Step, Plan]] = []
        failed: list[InfeasibleBudget | SolverTimeout] = []
        for number, step in enumerate(steps):
            self._ways_left = len(steps) - number
            try:
                found.append((step, self._roomy(step, asked_bytes, beside_bytes, share_bytes)))
            except (InfeasibleBudget, SolverTimeout) as error:
                failed.append(error)
        if not found:
            raise least(failed)
        return min(found, key=lambda each: badness(each[1], is_smallest=asked_bytes is None))

    def _roomy(
        self, step: Step, asked_bytes: int | None, beside_bytes: int, share_bytes: int | None
    ) -> Plan:
        """A plan; with room for other graphs of the step where there is one."""
        graph = without_overwrites(step.graph, self.lesson.apart)
        if asked_bytes is not None and share_bytes is not None:
            roomy = leaving_room(
                replace(step, graph=graph), asked_bytes - beside_bytes, share_bytes
            )
            if roomy is not graph:
                with suppress(InfeasibleBudget, SolverTimeout):
                    return self._plan(roomy, asked_bytes, beside_bytes)
        return self._plan(graph, asked_bytes, beside_bytes)

    def _plan(self, graph: Graph, asked_bytes: int | None, beside_bytes: int) -> Plan:
        if asked_bytes is None:
            return self._solve(graph, "min")
        left_bytes = asked_bytes - beside_bytes - self.lesson.less_bytes
        beside_bytes += self.options.reserve_bytes  # which `asked_bytes` are without
        if left_bytes <= 0:
            raise InfeasibleBudget(
                f"{format_bytes(beside_bytes)} {_BESIDE}, of a budget of "
                f"{format_bytes(asked_bytes + self.options.reserve_bytes)}; raise the budget"
            )
        with telling(beside_bytes, _BESIDE):
            return self._solve(graph, left_bytes)

    def _solve(self, graph: Graph, budget: int | str) -> Plan:
        whole_s = self.options.within_s
        if whole_s is None:
            return self._within(None, graph, budget)
        left_s = max(_LEAST_S, (whole_s - (time.perf_counter() - self._began)) / self._ways_left)
        try:
            return self._within(left_s, graph, budget)
        except SolverTimeout:  # reading a large graph took most of it: better late than never
            if left_s >= whole_s:
                raise
            return self._within(whole_s, graph, budget)

    def _within(self, limit_s: float | None, graph: Graph, budget: int | str) -> Plan:
        listening = Listening(self.options.progress, limit_s)
        source = f"of {self.options.costs if self.options.inductor else 'operations'}, measured"
        return _solved(graph, budget, self.options.strategy, listening, source)

    def forget(self) -> None:
        """Its last plan is not what runs."""
        if self.made is not None:
            forget(self.made)

    def uuid(self) -> str:
        """For torch's caches: all that decides a plan."""
        others = held_by_others(self.group)
        lesson = (self.lesson.less_bytes, *sorted(self.lesson.apart))
        own = (self.options, *lesson, others, self.group is None)
        return f"remat {VERSION} {own!r} {allocated_share(self.options.budget.size_bytes)}"


@lru_cache(maxsize=32)
def _solved(
    graph: Graph, budget: int | str, strategy: Strategy, listening: Listening, cost_source: str
) -> Plan:
    """Identical blocks that are compiled one by one are solved once."""
    if listening.limit_s is not None:
        strategy = replace(cast(Auto, strategy), time_limit=listening.limit_s)
    with listening.heard() as told:
        plan = solve(graph, budget, strategy, progress=told)
    return replace(plan, stats={**plan.stats, "cost_source": cost_source})
