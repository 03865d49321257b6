"""A solver that crashes does not lose the incumbent.

Real CBC processes are killed with SIGKILL at several moments. Scripts stand for what cannot be
provoked: a licence that is lost during the search.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import highspy
import pytest
from tests.helpers.graphs import random_stages
from tests.helpers.killed_solvers import (
    at_once,
    killing_cbc,
    needs_procfs,
    once_solution_is_written,
    while_solving,
)
from tests.helpers.solvers import needs_cbc, solver_scripts

from remat.errors import InfeasibleBudget, RematError, SolverError, SolverWarning
from remat.plan import Plan, Status
from remat.progress import Progress
from remat.schedule import Schedule
from remat.simulate import peak_and_time, simulate
from remat.solve import solve, sweep
from remat.strategies import (
    Auto,
    CheckmateMilp,
    Exact,
    LpRounding,
    Solution,
    Strategy,
    Task,
    auto,
    orders,
)
from remat.strategies.search.pipeline import Pipeline, search
from remat.strategies.search.state import SearchState

pytestmark = pytest.mark.usefixtures("short_eviction")

LONG = random_stages(2, 14)
"""A graph for which CBC takes minutes for the cost at 60%, and for the smallest peak."""

TIGHT_BYTES = 64
"""A budget of `LONG`: no operation needs that much alone, and eviction finds no peak below 65."""

SHORT = random_stages(2, 5)
"""A graph for which CBC takes a twentieth of a second for the cost at 75%, which nothing else
proves."""

# -- killing CBC --------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files that PuLP exchanges with CBC."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("TMP", raising=False)
    return tmp_path


def check(plan: Plan, solver: str = "CBC") -> None:
    assert plan.status is Status.FEASIBLE
    assert plan.peak_bytes <= plan.budget_bytes
    assert str(plan.stats["solver_error"]).startswith(f"{solver} (")
    assert "stopped without an answer: its command failed or was killed" in str(
        plan.stats["solver_error"]
    )
    assert plan.stats["solver_message"] == "failed"
    assert plan.status is Plan.from_json(plan.to_json()).status


@pytest.mark.slow_cases("min-while_solving")
@needs_cbc
@needs_procfs
@pytest.mark.parametrize(
    ("budget", "when"),
    [
        ("60%", at_once),
        ("min", while_solving),
        pytest.param("60%", while_solving, marks=pytest.mark.slow),
        pytest.param("min", at_once, marks=pytest.mark.slow),
    ],
)
def test_a_killed_solver_leaves_the_incumbent(
    budget: str, when: Callable[[int], bool], folder: Path
) -> None:
    with killing_cbc(when) as kills, pytest.warns(SolverWarning) as recorded:
        plan = solve(LONG, budget, Exact(solver="CBC", time_limit=200, threads=1))
    check(plan)
    assert len(recorded) == 1
    assert str(recorded[0].message).startswith(str(plan.stats["solver_error"]))
    assert kills.pids
    # A failed solver is not started again; "min" takes two searches.
    assert len(kills.pids) <= (2 if budget == "min" else 1)
    assert not list(folder.iterdir()), "files of a dead command are left behind"


@needs_cbc
@needs_procfs
@pytest.mark.parametrize("threads", [1, 2])
def test_a_killed_solver_is_not_restarted(threads: int) -> None:
    """A search has many programs. With two threads, programs over checkpoint cuts run
    concurrently."""
    auto = Auto(solver="CBC", time_limit=200, threads=threads, complete_slots=0, gap=0.0)
    with killing_cbc(at_once) as kills, pytest.warns(SolverWarning):
        plan = solve(LONG, "60%", auto)
    check(plan)
    assert len(kills.pids) == 1


@needs_cbc
@needs_procfs
def test_at_once_kills_a_solver_before_it_has_read_its_problem() -> None:
    """On a busy machine this may need some attempts."""
    for _ in range(20):
        with killing_cbc(at_once) as kills, warnings.catch_warnings():
            warnings.simplefilter("ignore", SolverWarning)
            solve(LONG, "60%", Exact(solver="CBC", time_limit=200, threads=1))
        if kills.unread:
            return
    raise AssertionError("CBC was always faster")


@needs_cbc
@needs_procfs
@pytest.mark.parametrize("budget", ["75%", pytest.param("min", marks=pytest.mark.slow)])
def test_a_solver_killed_right_after_writing_its_solution_leaves_a_plan(
    budget: str, folder: Path
) -> None:
    """The solver ends within a millisecond of that: one of some attempts catches it."""
    for _ in range(20):
        with (
            killing_cbc(once_solution_is_written),
            warnings.catch_warnings(record=True) as recorded,
        ):
            warnings.simplefilter("always")
            plan = solve(SHORT, budget, Exact(solver="CBC", threads=1))
        assert [w.category for w in recorded] in ([], [SolverWarning])
        assert not list(folder.iterdir())
        assert bool(recorded) == ("solver_error" in plan.stats)
        if recorded:
            assert plan.peak_bytes <= plan.budget_bytes
            # The second of the two searches for "min" may have finished.
            assert plan.status is Status.FEASIBLE or budget == "min"
            return
        assert plan.status is Status.OPTIMAL
    raise AssertionError("CBC was always faster")


@pytest.mark.slow
@needs_cbc
@needs_procfs
@pytest.mark.parametrize("when", [at_once, pytest.param(while_solving, marks=pytest.mark.slow)])
def test_without_a_schedule_the_error_has_a_remedy(when: Callable[[int], bool]) -> None:
    with (
        killing_cbc(when) as kills,
        pytest.raises(
            SolverError,
            match=r"(?s)^CBC .*failed or was killed.*HiGHS.*No schedule within 64 B was found "
            r"without it; the smallest peak found is 65 bytes",
        ) as error,
    ):
        solve(LONG, TIGHT_BYTES, Exact(solver="CBC", time_limit=200, threads=1))
    assert kills.pids
    assert not isinstance(error.value, InfeasibleBudget)


@needs_cbc
@needs_procfs
def test_a_sweep_goes_on_where_its_solver_is_killed() -> None:
    with killing_cbc(at_once) as kills, pytest.warns(SolverWarning) as recorded:
        plans = sweep(LONG, ["60%", "75%"], Exact(solver="CBC", time_limit=200, threads=1))
    assert len(plans) == len(kills.pids) == len(recorded) == 2
    for plan in plans:
        check(plan)
    assert plans[1].time_s <= plans[0].time_s


@needs_cbc
@needs_procfs
@pytest.mark.parametrize(
    "limit",
    [0.2, *(pytest.param(limit, marks=pytest.mark.slow) for limit in (0.3, 0.5))],
)
def test_short_time_limits_give_a_plan(limit: float) -> None:
    """CBC 2.10.3 ends with SIGSEGV at some of these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SolverWarning)
        plan = solve(LONG, "60%", Exact(solver="CBC", time_limit=limit))
    assert plan.peak_bytes <= plan.budget_bytes


# -- failures by scripts ------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    return solver_scripts(tmp_path, monkeypatch)


@pytest.mark.parametrize("budget", ["60%", pytest.param("min", marks=pytest.mark.slow)])
def test_a_licence_lost_during_the_search_leaves_a_plan(command, budget: str) -> None:
    command("cbc", "sleep 0.2; echo 'the licence server does not answer' >&2; exit 1")
    with pytest.warns(SolverWarning, match="its licence allows"):
        plan = solve(LONG, budget, Exact(solver="COIN_CMD", time_limit=200))
    check(plan, "COIN_CMD")


@pytest.mark.slow
def test_a_solver_that_disappears_after_its_first_program_leaves_a_plan(command) -> None:
    """For "min" two searches use the solver; the second has a schedule to start from."""
    command("cbc", '/bin/rm "$0"; exit 1')
    with pytest.warns(SolverWarning) as recorded:
        plan = solve(LONG, "min", Exact(solver="COIN_CMD", time_limit=200))
    assert plan.status is Status.FEASIBLE
    assert plan.peak_bytes <= plan.budget_bytes
    assert len(recorded) == 1


def test_a_solver_missing_from_the_start_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def too_late(*_: object, **__: object) -> Schedule:
        raise AssertionError("it has searched before it has looked for the solver")

    monkeypatch.setattr(orders, "anneal_schedule", too_late)
    monkeypatch.setattr(orders, "small_peak_order", too_late)
    for budget in ("100%", "60%", "min"):
        for strategy in (Exact(solver="MIPCL_CMD"), Auto(solver="MIPCL_CMD", order="on")):
            with pytest.raises(SolverError, match="not available here"):
                solve(SHORT, budget, strategy)


# -- HiGHS --------------------------------------------------------------------------------------


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make HiGHS refuse every program, as it does for coefficients of extreme ratio."""
    monkeypatch.setattr(highspy.Highs, "run", lambda self: highspy.HighsStatus.kError)


@pytest.mark.slow_cases("auto-min", "auto over near slots-min")
@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("budget", ["60%", "min"])
@pytest.mark.parametrize(
    "strategy",
    [
        Exact(time_limit=100, threads=1),
        Auto(time_limit=100, threads=2, order="off"),
        Auto(time_limit=100, threads=1, complete_slots=0, gap=0.0),
    ],
    ids=["exact", "auto", "auto over near slots"],
)
def test_a_failure_of_highs_leaves_the_incumbent(strategy: Strategy, budget: str) -> None:
    with pytest.warns(SolverWarning, match="HiGHS refused to run") as recorded:
        plan = solve(LONG, budget, strategy)
    assert len(recorded) == 1
    assert plan.status is Status.FEASIBLE
    assert plan.peak_bytes <= plan.budget_bytes


def test_a_failure_of_highs_in_one_of_two_orders_keeps_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where orders are searched, the smallest peak is searched in two of them."""
    searches: list[SearchState] = []

    def failing_in_the_second(state: SearchState, steps: Pipeline) -> Solution:
        searches.append(state)
        if len(searches) == 2:
            state.stats["solver_error"] = "HiGHS refused to run"
        return search(state, steps)

    monkeypatch.setattr(auto, "search", failing_in_the_second)
    solution = Auto(order="on", time_limit=20, threads=1).run(Task(SHORT))
    assert len(searches) == 2
    assert solution.failure_stats == {"solver_error": "HiGHS refused to run"}


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize(
    "strategy", [LpRounding(), CheckmateMilp()], ids=lambda strategy: strategy.name
)
def test_a_failure_of_highs_in_a_published_program_is_an_error(strategy: Strategy) -> None:
    baseline_bytes, _ = peak_and_time(SHORT, Schedule.keep_all(SHORT))
    for budget in ("100%", "min"):
        with pytest.warns(SolverWarning, match="HiGHS refused to run"):
            plan = solve(SHORT, budget, strategy)
        assert plan.peak_bytes == baseline_bytes
        assert plan.status is Status.FEASIBLE
    with pytest.raises(SolverError, match="use Auto"):
        solve(SHORT, "80%", strategy)


@pytest.mark.parametrize(
    "strategy", [LpRounding(), CheckmateMilp(), Exact()], ids=lambda strategy: strategy.name
)
def test_a_failure_of_highs_during_a_sweep_reuses_an_earlier_plan(
    strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan for a smaller budget fits the next one."""

    def fail(plan: Plan) -> None:
        monkeypatch.setattr(highspy.Highs, "run", lambda self: highspy.HighsStatus.kError)

    with pytest.warns(SolverWarning) as recorded:
        plans = sweep(SHORT, ["80%", "85%"], strategy, on_plan=fail)
    assert len(plans) == 2
    assert len(recorded) == 1
    assert "solver_error" not in plans[0].stats
    assert "solver_error" in plans[1].stats
    assert plans[1].time_s <= plans[0].time_s
    assert simulate(SHORT, plans[1].schedule).peak_bytes <= plans[1].budget_bytes


@pytest.mark.usefixtures("refusing")
def test_a_failure_of_highs_without_a_schedule_is_an_error() -> None:
    with pytest.raises(RematError, match=r"HiGHS refused.*No schedule within 64 B") as error:
        solve(LONG, TIGHT_BYTES, Exact())
    assert isinstance(error.value, SolverError)


# -- a caller that raises -----------------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 2])
def test_an_exception_of_the_progress_callback_ends_the_solve(times: int) -> None:
    reports: list[Progress] = []

    def progress(now: Progress) -> None:
        reports.append(now)
        if len(reports) >= times:
            raise LookupError("the caller's own")

    with pytest.raises(LookupError, match="the caller's own"):
        solve(LONG, "60%", Exact(), progress=progress)
    assert len(reports) == times
    with pytest.raises(LookupError, match="the caller's own"):
        sweep(LONG, ["60%", "70%"], Exact(), progress=progress)
    assert len(reports) == times + 1
