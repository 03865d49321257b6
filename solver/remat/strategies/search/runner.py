"""`MilpRunner`: builds the programs of a search, solves them, and simulates the results."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from remat.errors import SolverError
from remat.graph import Graph
from remat.heuristics.polish import prune
from remat.milp import backends
from remat.milp.backends import SolverOutcome, SolverRun
from remat.milp.identical_blocks import SharedDecisions
from remat.milp.model import MilpModel
from remat.milp.slots import Slots
from remat.milp.solvers.highs import TIGHT_TOLERANCES, BoundsCallback, HighsSolver
from remat.progress import Clock, Progress, ProgressCallback
from remat.schedule import Schedule
from remat.simulate import peak_and_time
from remat.solution import Stats
from remat.strategies.option_types import MilpOptions

_MAX_ATTEMPTS = 5
"""Attempts with ever tighter programs until the simulated schedule fits the budget."""

_ROW_S = 2.5e-4
"""Seconds per row that HiGHS may take before it first checks the time. 9 s were measured for 21,000
rows on a busy machine with a limit of 2 s."""


@dataclass
class MilpRunner:
    """Runs the programs of one search and collects statistics in `stats`.

    After a solver fails, in whatever way, no further program is run: `failure` has the reason, and
    every later call answers with the incumbent alone.
    """

    graph: Graph
    options: MilpOptions
    clock: Clock
    progress: ProgressCallback | None = None
    stats: Stats = field(default_factory=dict[str, str | int | float])
    _overhead_per_slot_s: float = 0.0

    def __post_init__(self) -> None:
        for key in ("slots", "rows", "columns"):
            self.stats.setdefault(key, 0)
        self.stats.setdefault("solver", self.options.solver)

    def minimize_cost(
        self,
        slots: Slots,
        budget_bytes: int,
        incumbent: Schedule,
        time_limit: float = math.inf,
        is_good_enough: Callable[[float], bool] = lambda _: False,
        gap: float | None = None,
        proved_bound_s: float = 0.0,
    ) -> tuple[SolverRun, float | None]:
        """Return the solver's answer, with the incumbent if no better schedule fits in the
        simulation, and the lower bound on the total time that it proves, if any. If the slots have
        only some of the schedules, the solver's bound says nothing about the others, and
        `proved_bound_s`, a bound for all, is reported as progress instead.

        The run ends at a schedule whose time in seconds `is_good_enough` accepts, or at the
        relative `gap` (by default the option's).
        """
        bound: float | None = None
        tightened_bytes = budget_bytes
        for attempt in range(_MAX_ATTEMPTS):
            began = time.monotonic()
            if self.is_stopped() or self._overhead_s(slots) > self.clock.remaining_s:
                break
            milp = self._build_program(slots, tightened_bytes)
            if self._may_overrun(milp):
                break
            unit_s = milp.cost_unit_s
            is_proof = slots.is_complete and tightened_bytes == budget_bytes
            bound_to_report = None if is_proof else proved_bound_s / unit_s
            report = self._progress_reporter("cost", unit_s, bound=bound_to_report)
            stall = StallDetector(self.options.stall, report, is_good_enough, unit_s)
            stall.best_objective = self.time_s(incumbent) / unit_s
            report(stall.best_objective, None)
            answer = self._run_solver(
                milp,
                gap=self.options.gap if gap is None else gap,
                time_limit=min(time_limit, self.clock.remaining_s),
                incumbent=incumbent,
                exact=attempt > 0,
                report=stall.report,
                is_done=stall.is_over,
            )
            overhead_s = time.monotonic() - began - answer.seconds
            self._overhead_per_slot_s = max(
                self._overhead_per_slot_s, overhead_s / max(1, len(slots.operations))
            )
            if tightened_bytes == budget_bytes and answer.bound is not None:
                bound = answer.bound * milp.cost_unit_s
            if answer.schedule is None:
                break
            schedule = prune(self.graph, answer.schedule)
            excess = self.peak_bytes(schedule) - budget_bytes
            if excess <= 0:
                best = min(schedule, incumbent, key=self.time_s)
                return replace(answer, schedule=best), bound
            # The solver's tolerance allowed a violated row: retry with a smaller tolerance, then
            # with a smaller budget.
            tightened_bytes -= excess if attempt else 0
        answer = SolverRun(SolverOutcome.FEASIBLE, incumbent, None, None, 0, 0.0, "incumbent kept")
        return answer, bound

    def minimize_shared_cost(
        self,
        shared: SharedDecisions,
        budget_bytes: int,
        start: Schedule | None,
        time_limit: float,
        is_good_enough: Callable[[float], bool],
        gap: float,
    ) -> Schedule | None:
        """Return the schedule of the program in which identical blocks share decisions; None if
        there is none, or no time for the program. `start` is a schedule to start from.

        The schedule is not simulated, and no bound on other schedules follows from it.
        """
        if self.failure:
            return None
        began = time.monotonic()
        milp = MilpModel(self.graph, shared.slots, budget_bytes, shared)
        if self._may_overrun(milp):
            return None
        unit_s = milp.cost_unit_s
        stall = StallDetector(math.inf, is_good_enough=is_good_enough, unit=unit_s)
        answer = self._run_solver(
            milp,
            gap=gap,
            time_limit=time_limit - (time.monotonic() - began),
            incumbent=start,
            report=stall.report,
            is_done=stall.is_over,
        )
        return answer.schedule

    def minimize_peak(
        self,
        slots: Slots,
        incumbent: Schedule,
        time_limit: float,
        target_bytes: int | None = None,
        proved_bound_bytes: float = 0.0,
    ) -> tuple[SolverRun, float | None]:
        """Return the solver's answer, without a schedule if no program was solved, and the lower
        bound on the peak in bytes that it proves, if any. The run also ends once a peak of
        `target_bytes` is reached or excluded.

        `proved_bound_bytes` is reported as progress if the slots have only some of the schedules.
        """
        if self.is_stopped() or self.clock.is_set():
            return _run_without_answer("no program was solved"), None
        milp = self._build_program(slots, None)
        if self._may_overrun(milp):
            return _run_without_answer("no time for the program"), None
        constant, unit = self.graph.constant_bytes, milp.unit_bytes
        target = None if target_bytes is None else (target_bytes - constant) / unit
        target_excluded = threading.Event()
        bound_to_report = None if slots.is_complete else (proved_bound_bytes - constant) / unit
        report_progress = self._progress_reporter("peak", unit, constant, bound_to_report)
        report_progress((self.peak_bytes(incumbent) - constant) / unit, None)
        stall = StallDetector(self.options.stall, report_progress)

        def on_report(incumbent: float | None, bound: float | None) -> None:
            stall.report(incumbent, bound)
            if target is not None and bound is not None and bound > target * (1 + 1e-6):
                target_excluded.set()

        answer = self._run_solver(
            milp,
            gap=self.options.peak_gap,
            time_limit=time_limit,
            incumbent=incumbent,
            target=target,
            report=on_report,
            is_done=lambda: target_excluded.is_set() or stall.is_over(),
        )
        if answer.schedule is not None:
            answer = replace(answer, schedule=prune(self.graph, answer.schedule))
        bound = None if answer.bound is None else answer.bound * unit + constant
        return answer, bound

    def _overhead_s(self, slots: Slots) -> float:
        """Estimate the seconds that a program takes in addition to the solver's own run, from the
        programs before it. They matter for large programs."""
        return self._overhead_per_slot_s * len(slots.operations)

    def _may_overrun(self, milp: MilpModel) -> bool:
        """True if the solver could overrun the deadline before it first checks the time. A search
        without a stall limit takes that risk."""
        return (
            self.options.stall < math.inf
            and len(milp.program.rows) * _ROW_S > self.clock.remaining_s
        )

    def _build_program(self, slots: Slots, budget_bytes: int | None) -> MilpModel:
        milp = MilpModel(self.graph, slots, budget_bytes)
        self.stats["slots"] = slots.optional_count
        self.stats["rows"] = len(milp.program.rows)
        self.stats["columns"] = len(milp.program.columns)
        return milp

    def _run_solver(
        self,
        milp: MilpModel,
        *,
        gap: float,
        time_limit: float,
        incumbent: Schedule | None,
        report: BoundsCallback,
        is_done: Callable[[], bool],
        target: float | None = None,
        exact: bool = False,
    ) -> SolverRun:
        began = time.monotonic()
        try:
            highs = HighsSolver(
                gap=gap,
                time_limit=max(0.1, time_limit),
                threads=self.options.threads,
                seed=self.options.seed,
                target=target,
                report=report,
                is_cancelled=lambda: is_done() or self.clock.is_cancelled(),
                options=TIGHT_TOLERANCES if exact else None,
            )
            answer = backends.run_model(
                milp, highs, solver=self.options.solver, incumbent=incumbent
            )
        except SolverError as error:
            self.stats["solver_error"] = str(error)
            answer = _run_without_answer("failed", time.monotonic() - began)
        self.stats["solver_s"] = float(self.stats.get("solver_s", 0.0)) + answer.seconds
        self.stats["nodes"] = answer.nodes
        self.stats["solver_message"] = answer.message
        return answer

    def _progress_reporter(
        self, phase: str, unit: float, offset: int = 0, bound: float | None = None
    ) -> BoundsCallback:
        """Return a function that reports the objective and its bound to the caller: as extra time,
        or as a peak in bytes. The bound is the program's, unless another one is passed."""
        scale, shift = (1.0, offset) if phase == "peak" else (self.graph.baseline_time_s or 1.0, -1)

        def displayed(objective: float | None) -> float | None:
            return None if objective is None else objective * unit / scale + shift

        def report(incumbent: float | None, program_bound: float | None) -> None:
            if self.progress is None:
                return
            proved = program_bound if bound is None else bound
            if proved is not None and incumbent is not None:
                proved = min(proved, incumbent)
            gap = None
            if incumbent is not None and proved is not None and incumbent * unit + offset > 0:
                gap = max(0.0, (incumbent - proved) * unit / (incumbent * unit + offset))
            elapsed_s = self.clock.elapsed_s
            self.progress(Progress(phase, elapsed_s, displayed(incumbent), displayed(proved), gap))

        return report

    def peak_bytes(self, schedule: Schedule) -> int:
        """Return the simulated peak of a schedule."""
        return peak_and_time(self.graph, schedule)[0]

    def time_s(self, schedule: Schedule) -> float:
        """Return the simulated time of a schedule."""
        return peak_and_time(self.graph, schedule)[1]

    @property
    def failure(self) -> str:
        """The solver's error message; "" if it has not failed."""
        return str(self.stats.get("solver_error", ""))

    def is_stopped(self) -> bool:
        """True if no further program will be run: the search was cancelled, or the solver
        failed."""
        return self.clock.is_cancelled() or bool(self.failure)


def _run_without_answer(message: str, seconds: float = 0.0) -> SolverRun:
    """Return a run of no solver, with a message that says why."""
    return SolverRun(SolverOutcome.UNKNOWN, None, None, None, 0, seconds, message)


_MIN_GAP_REDUCTION = 0.05


class StallDetector:
    """Watches the incumbent objective and the bound that a solver run reports.

    `is_over` is true once neither has improved for `patience_s` seconds, or once `is_good_enough`
    accepts the best incumbent objective times `unit`. An improvement is a first incumbent, or one
    that closes a twentieth of the gap. Time counts from the first report, and the patience is at
    least as long as that report took to arrive. Each report is passed on to `on_report`.
    """

    def __init__(
        self,
        patience_s: float,
        on_report: Callable[[float | None, float | None], None] = lambda incumbent, bound: None,
        is_good_enough: Callable[[float], bool] = lambda objective: False,
        unit: float = 1.0,
    ) -> None:
        self._patience_s = patience_s
        self._on_report = on_report
        self._is_good_enough, self._unit = is_good_enough, unit
        self._started_at = time.monotonic()
        self._improved_at: float | None = None
        self._gap: float | None = None
        self.best_objective = math.inf
        """The lowest incumbent objective reported."""

    def report(self, incumbent: float | None, bound: float | None) -> None:
        """Take the objective of the solver's incumbent and its dual bound; None if unknown."""
        self._on_report(incumbent, bound)
        now = time.monotonic()
        if incumbent is not None:
            self.best_objective = min(self.best_objective, incumbent)
        gap = None if incumbent is None or bound is None else incumbent - bound
        if self._improved_at is None:
            self._patience_s = max(self._patience_s, now - self._started_at)
            self._improved_at = now
        if gap is not None and (self._gap is None or gap < self._gap * (1 - _MIN_GAP_REDUCTION)):
            self._gap = gap
            self._improved_at = now

    def is_over(self) -> bool:
        """True if the solver run is to end now."""
        waited_s = 0.0 if self._improved_at is None else time.monotonic() - self._improved_at
        return waited_s > self._patience_s or self._is_good_enough(self.best_objective * self._unit)
