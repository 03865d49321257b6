"""One program at a time: built, run, verified with the simulator, and timed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from remat.errors import SolverError
from remat.graph import Graph
from remat.heuristics.polish import prune
from remat.milp import backends, model
from remat.milp.backends import Outcome, SolverRun
from remat.milp.slots import Slots
from remat.milp.solvers.highs import Report
from remat.milp.ties import Ties
from remat.progress import Progress, ProgressCallback
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.solution import Stats
from remat.strategies.options import MilpOptions
from remat.strategies.search.deadline import Clock
from remat.strategies.search.stall import Stall

_TIGHTENINGS = 5

_ROW_S = 2.5e-4
"""Seconds for a row that HiGHS may take before it first looks at the clock: 9 s were measured for
21,000 rows on a busy machine with a limit of 2 s."""


@dataclass
class MilpRunner:
    """Runs programs for one search; `stats` are the facts gathered so far.

    A solver that fails, however it does, is asked no more: `failure` then says how, and every
    program is answered by what is known without it.
    """

    graph: Graph
    options: MilpOptions
    clock: Clock
    progress: ProgressCallback | None = None
    stats: Stats = field(default_factory=dict[str, str | int | float])
    _pace_s: float = 0.0

    def __post_init__(self) -> None:
        for key in ("slots", "rows", "columns"):
            self.stats.setdefault(key, 0)
        self.stats.setdefault("solver", self.options.solver)

    def solve_cost(
        self,
        slots: Slots,
        budget_bytes: int,
        incumbent: Schedule,
        time_limit: float = math.inf,
        enough: Callable[[float], bool] = lambda _: False,
        gap: float | None = None,
    ) -> tuple[SolverRun, float | None]:
        """The program's answer, verified; and the bound on total time that it proves.

        Ends at a schedule of whose time in seconds `enough` is true, or at `gap` (by default the
        one asked for).
        """
        bound: float | None = None
        budget_now = budget_bytes
        for attempt in range(_TIGHTENINGS):
            began = time.monotonic()
            if self.is_over() or self._overhead_s(slots) > self.clock.left_s:
                break
            program = self._build(slots, budget_now)
            if self._is_too_late(program):
                break
            unit_s = program.cost_unit_s
            stall = Stall(self.options.stall, self._report("cost", unit_s), enough, unit_s)
            stall.least = self.time(incumbent) / unit_s
            self._report("cost", unit_s)(stall.least, None)
            answer = self._run(
                program,
                gap=self.options.gap if gap is None else gap,
                time_limit=min(time_limit, self.clock.left_s),
                incumbent=incumbent,
                exact=attempt > 0,
                report=stall.report,
                done=stall.is_over,
            )
            overhead_s = time.monotonic() - began - answer.seconds
            self._pace_s = max(self._pace_s, overhead_s / max(1, len(slots.operations)))
            if budget_now == budget_bytes and answer.bound is not None:
                bound = answer.bound * program.cost_unit_s
            if answer.schedule is None:
                break
            schedule = prune(self.graph, answer.schedule)
            excess = self.peak(schedule) - budget_bytes
            if excess <= 0:
                best = min(schedule, incumbent, key=self.time)
                return replace(answer, schedule=best), bound
            # The solver's tolerance let a row slip: it gets a smaller one, then a smaller budget.
            budget_now -= excess if attempt else 0
        return self.kept(incumbent, bound)

    @staticmethod
    def kept(incumbent: Schedule, bound_s: float | None = None) -> tuple[SolverRun, float | None]:
        """What `solve_cost` answers where a program came to nothing."""
        answer = SolverRun(Outcome.FEASIBLE, incumbent, None, None, 0, 0.0, "incumbent kept")
        return answer, bound_s

    def solve_tied(
        self,
        ties: Ties,
        budget_bytes: int,
        start: Schedule | None,
        time_limit: float,
        enough: Callable[[float], bool],
        gap: float,
    ) -> Schedule | None:
        """What the program finds where slots are tied, not verified; None if nothing. It says
        nothing about other schedules."""
        if self.failure:
            return None
        began = time.monotonic()
        program = model.build(self.graph, ties.slots, budget_bytes, ties)
        if self._is_too_late(program):
            return None
        unit_s = program.cost_unit_s
        stall = Stall(math.inf, enough=enough, unit=unit_s)
        answer = self._run(
            program,
            gap=gap,
            time_limit=time_limit - (time.monotonic() - began),
            incumbent=start,
            report=stall.report,
            done=stall.is_over,
        )
        return answer.schedule

    def solve_peak(
        self, slots: Slots, incumbent: Schedule, time_limit: float, target_bytes: int | None = None
    ) -> tuple[SolverRun, float | None]:
        """The program's answer, and the bound on the peak in bytes that it proves."""
        if self.is_over() or self.clock.is_over():
            return _nothing("no program was asked"), None
        program = self._build(slots, None)
        if self._is_too_late(program):
            return _nothing("no time for the program"), None
        constant, unit = self.graph.constant_bytes, program.unit_bytes
        target = None if target_bytes is None else (target_bytes - constant) / unit
        excluded = threading.Event()
        tell = self._report("peak", unit, constant)
        tell((self.peak(incumbent) - constant) / unit, None)
        stall = Stall(self.options.stall, tell)

        def watch(incumbent: float | None, bound: float | None) -> None:
            stall.report(incumbent, bound)
            if target is not None and bound is not None and bound > target * (1 + 1e-6):
                excluded.set()

        answer = self._run(
            program,
            gap=self.options.peak_gap,
            time_limit=time_limit,
            incumbent=incumbent,
            target=target,
            report=watch,
            done=lambda: excluded.is_set() or stall.is_over(),
        )
        if answer.schedule is not None:
            answer = replace(answer, schedule=prune(self.graph, answer.schedule))
        bound = None if answer.bound is None else answer.bound * unit + constant
        return answer, bound

    def _overhead_s(self, slots: Slots) -> float:
        """What a program takes beside the solver's own run, judged by those before it: seconds
        where it is large."""
        return self._pace_s * len(slots.operations)

    def _is_too_late(self, program: model.Model) -> bool:
        """Whether the solver could overrun the deadline before it looks at the clock. A search that
        is to be exhaustive takes that risk."""
        return self.options.stall < math.inf and program.rows * _ROW_S > self.clock.left_s

    def _build(self, slots: Slots, budget_bytes: int | None) -> model.Model:
        program = model.build(self.graph, slots, budget_bytes)
        self.stats["slots"] = slots.optional_count
        self.stats["rows"] = program.rows
        self.stats["columns"] = program.columns
        return program

    def _run(
        self,
        program: model.Model,
        *,
        gap: float,
        time_limit: float,
        incumbent: Schedule | None,
        report: Report,
        done: Callable[[], bool],
        target: float | None = None,
        exact: bool = False,
    ) -> SolverRun:
        began = time.monotonic()
        try:
            answer = backends.run(
                program,
                solver=self.options.solver,
                gap=gap,
                time_limit=max(0.1, time_limit),
                threads=self.options.threads,
                seed=self.options.seed,
                incumbent=incumbent,
                target=target,
                exact=exact,
                report=report,
                cancelled=lambda: done() or self.clock.is_cancelled(),
            )
        except SolverError as error:
            self.stats["solver_error"] = str(error)
            answer = _nothing("failed", time.monotonic() - began)
        self.stats["solver_s"] = float(self.stats.get("solver_s", 0.0)) + answer.seconds
        self.stats["nodes"] = answer.nodes
        self.stats["solver_message"] = answer.message
        return answer

    def _report(self, phase: str, unit: float, zero: int = 0) -> Report:
        """Tells of the objective and its bound: total time, as extra time, or a peak in bytes."""
        whole, none = (1.0, zero) if phase == "peak" else (self.graph.total_cost_s or 1.0, -1)

        def shown(objective: float | None) -> float | None:
            return None if objective is None else objective * unit / whole + none

        def report(incumbent: float | None, bound: float | None) -> None:
            if self.progress is None:
                return
            gap = None
            if incumbent is not None and bound is not None and incumbent * unit + zero > 0:
                gap = max(0.0, (incumbent - bound) * unit / (incumbent * unit + zero))
            elapsed_s = self.clock.passed_s
            self.progress(Progress(phase, elapsed_s, shown(incumbent), shown(bound), gap))

        return report

    def peak(self, schedule: Schedule) -> int:
        """Bytes, simulated."""
        return peak_and_time(self.graph, schedule)[0]

    def time(self, schedule: Schedule) -> float:
        """Seconds, simulated."""
        return peak_and_time(self.graph, schedule)[1]

    @property
    def failure(self) -> str:
        """How the solver failed; "" where it did not."""
        return str(self.stats.get("solver_error", ""))

    def is_over(self) -> bool:
        """Whether no program will be answered any more."""
        return self.clock.is_cancelled() or bool(self.failure)


def _nothing(message: str, seconds: float = 0.0) -> SolverRun:
    return SolverRun(Outcome.UNKNOWN, None, None, None, 0, seconds, message)
