"""Solvers other than the default; missing, failing and crashing solvers."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pulp
import pytest
from tests.helpers.graphs import chain, random_stages, uneven_layers
from tests.helpers.laws import part_of_peak
from tests.helpers.solvers import needs_cbc, solver_scripts

from remat.errors import SolverError, SolverWarning
from remat.graph import Graph
from remat.heuristics import local_search as incumbent
from remat.milp import backends, slots
from remat.milp.backends import SolverOutcome, SolverRun, is_solution, start_values
from remat.milp.model import MilpModel
from remat.milp.solvers import availability as backend_facts
from remat.milp.solvers import pulp_solvers
from remat.milp.solvers.availability import BackendStatus, usable_backends
from remat.milp.solvers.highs import HighsSolver
from remat.milp.solvers.program import value_of
from remat.milp.solvers.pulp_solvers import IS_PULP_4
from remat.plan import Plan, Status
from remat.progress import Clock, Progress
from remat.simulate import simulate
from remat.solve import solve
from remat.strategies import Exact
from remat.strategies.search.runner import MilpRunner

FACTS = {fact.name: fact for fact in usable_backends()}
NAMES = ["HiGHS", "CBC", "Gurobi", "CPLEX", "SCIP", "COPT", "Xpress", "cuOpt"]
SMALL = {"chain": chain(6, size=3), "uneven": uneven_layers(3)}


def run(
    graph: Graph, share: float, solver: str, *, start: bool = True, limit: float = 60
) -> SolverRun:
    """Solve the program over complete slots, starting from eviction's schedule."""
    budget = part_of_peak(graph, share)
    start_schedule = incumbent.schedules_within_budget(graph, budget)[0].schedule if start else None
    program = MilpModel(graph, slots.build_complete_slots(graph), budget)
    options = HighsSolver(gap=0.0, time_limit=limit, threads=2)
    return backends.run_model(program, options, solver=solver, incumbent=start_schedule)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    return solver_scripts(tmp_path, monkeypatch)


@pytest.mark.slow_cases("0.85-uneven-CBC")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("graph", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("share", [0.75, 0.85])
def test_every_solver_finds_the_optimum(name: str, graph: Graph, share: float) -> None:
    if not FACTS[name].usable:
        pytest.skip(FACTS[name].reason)
    expected = run(graph, share, "HiGHS")
    for start in (False, True):
        solver_run = run(graph, share, name, start=start)
        assert solver_run.outcome is SolverOutcome.OPTIMAL
        assert solver_run.objective == pytest.approx(expected.objective)
        assert solver_run.bound is not None
        assert solver_run.objective is not None
        assert solver_run.bound <= solver_run.objective
        assert solver_run.bound == pytest.approx(expected.objective, rel=1e-6)
        assert solver_run.schedule is not None
        assert simulate(graph, solver_run.schedule).peak_bytes <= part_of_peak(graph, share)


@pytest.mark.parametrize(
    "name",
    [
        "highs",
        "HIGHS",
        pytest.param("cbc", marks=needs_cbc),
        pytest.param("Pulp_Cbc_Cmd", marks=needs_cbc),
    ],
)
def test_solver_names_are_case_insensitive(name: str) -> None:
    plan = solve(SMALL["chain"], "75%", Exact(solver=name))
    assert plan.status is Status.OPTIMAL
    assert plan.time_s == solve(SMALL["chain"], "75%", Exact()).time_s


@pytest.mark.slow
@needs_cbc
def test_another_solver_finds_the_smallest_peak() -> None:
    graph = uneven_layers(3)
    assert solve(graph, "min", Exact(solver="CBC")).peak_bytes == solve(graph, "min").peak_bytes


def test_every_pulp_class_name_belongs_to_a_family() -> None:
    assert pulp_solvers.find_family("xpress").classes == ("XPRESS_PY", "XPRESS")
    assert pulp_solvers.find_family("GLPK_CMD").classes == ("GLPK_CMD",)
    with pytest.raises(SolverError, match=r"no solver is called 'nonsense'.*PuLP knows"):
        pulp_solvers.find_family("nonsense")
    for family in pulp_solvers.FAMILIES:
        for name in family.classes:
            assert hasattr(pulp, name) or (name == "PULP_CBC_CMD" and IS_PULP_4), name


@pytest.mark.skipif(not IS_PULP_4, reason="PuLP 3.3 has every class that remat knows")
def test_a_removed_pulp_class_name_selects_its_family() -> None:
    assert pulp_solvers.find_family("pulp_cbc_cmd").name == "CBC"


@pytest.mark.parametrize("name", ["MOSEK", "GLPK_CMD", *NAMES[2:]])
def test_a_missing_solver_says_what_to_do(name: str) -> None:
    if name in FACTS and "not installed" not in FACTS[name].reason:
        pytest.skip("it is here")
    with pytest.raises(SolverError, match=r"not available here.*HiGHS"):
        run(SMALL["chain"], 0.8, name)


@pytest.mark.parametrize("script", ["exit 1", f"kill -{int(signal.SIGKILL)} $$", "exit 0"])
def test_a_solver_that_dies_says_so_and_the_default_still_works(command, script: str) -> None:
    command("cbc", script)
    graph = SMALL["chain"]
    with pytest.raises(SolverError, match=r"COIN_CMD.*stopped without an answer.*HiGHS"):
        run(graph, 0.75, "COIN_CMD")
    assert solve(graph, "75%", Exact()).status is Status.OPTIMAL


def test_unreadable_solver_output_is_an_error(command) -> None:
    command("cbc", 'while [ "$1" != -solution ]; do shift; done; echo rubbish > "$2"')
    with pytest.raises(SolverError, match="stopped without an answer"):
        run(uneven_layers(3), 0.75, "COIN_CMD")


def test_a_missing_solution_file_is_not_reported_as_infeasible(command) -> None:
    """Some of PuLP's classes report "infeasible" for a command that wrote nothing."""
    command("cplex", "exit 0")
    graph = uneven_layers(3)
    with pytest.raises(SolverError, match="one is known"):
        run(graph, 0.75, "CPLEX_CMD")
    with pytest.warns(SolverWarning, match="one is known"):
        plan = solve(graph, "75%", Exact(solver="CPLEX_CMD"))
    assert plan.status is Status.FEASIBLE
    assert plan.peak_bytes <= plan.budget_bytes


@needs_cbc
def test_optimality_is_not_believed_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "_TIMEOUT_SHARE", 0.0)
    answer = run(uneven_layers(3), 0.75, "CBC")
    assert answer.outcome is SolverOutcome.FEASIBLE
    assert answer.bound is None
    assert answer.schedule is not None


@pytest.mark.slow
@needs_cbc
def test_a_stopped_solver_returns_its_incumbent() -> None:
    """Also one that crashes then: CBC 2.10.3 ends with SIGSEGV at some short limits."""
    graph = uneven_layers(14)
    budget = part_of_peak(graph, 0.6)
    incumbent_schedule = incumbent.schedules_within_budget(graph, budget)[0]
    programs = MilpRunner(graph, Exact(solver="CBC"), Clock.of(300.0))
    answer, bound_s = programs.minimize_cost(
        slots.build_complete_slots(graph), budget, incumbent_schedule.schedule, 0.2
    )
    assert answer.outcome is SolverOutcome.FEASIBLE
    assert answer.schedule is not None
    assert programs.time_s(answer.schedule) <= incumbent_schedule.time_s
    assert programs.peak_bytes(answer.schedule) <= budget
    assert bound_s is None
    assert programs.failure == "" or "failed or was killed" in programs.failure


def test_a_fractional_solution_is_rejected() -> None:
    """CBC writes one where it has no other, and reports "Stopped on time"."""
    graph = uneven_layers(5)
    program = MilpModel(graph, slots.build_complete_slots(graph), part_of_peak(graph, 0.6))
    highs = HighsSolver(gap=0.0, time_limit=30.0, threads=1)
    for arrays, expected in ((program.arrays.relaxed(), False), (program.arrays, True)):
        assert highs.run(arrays).outcome is SolverOutcome.OPTIMAL
        values = {x: value_of(x) for x in arrays.columns}
        assert is_solution(program, values) == expected


@pytest.mark.parametrize("where", ["report", "is_cancelled"])
def test_an_interrupt_inside_of_highs_is_raised(where: str) -> None:
    """Python notices Ctrl-C in a callback of HiGHS, which turns it into an error of its own."""

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    graph = uneven_layers(8)
    program = MilpModel(graph, slots.build_complete_slots(graph), part_of_peak(graph, 0.6))
    calls: dict[str, Any] = {where: interrupted}
    with pytest.raises(KeyboardInterrupt):
        HighsSolver(gap=0.0, time_limit=60.0, threads=1, **calls).run(program.arrays)


@pytest.mark.slow_cases("None")
@pytest.mark.parametrize("budget", [0.55, 0.7, 0.9, None])
def test_the_values_of_a_schedule_are_a_solution(budget: float | None) -> None:
    for graph in (*SMALL.values(), uneven_layers(8), chain(25, size=7)):
        limit = None if budget is None else part_of_peak(graph, budget)
        small = incumbent.smallest_peak_schedule(graph, target_bytes=limit or 0).schedule
        offered = slots.build_idle_read_slots(
            graph, max_distance=9, stride=1, min_idle=4, group_span=50, schedules=(small,)
        )
        for slot_set in (slots.build_complete_slots(graph), offered):
            program = MilpModel(graph, slot_set, limit)
            values = start_values(program, small)
            if values is None:
                continue
            fits = limit is None or simulate(graph, small).peak_bytes <= limit
            assert is_solution(program, values) == fits
            missing = {x.name for x in program.arrays.columns if x not in values}
            assert missing <= {"b"}


def test_availability_is_probed_quickly_and_without_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    began = time.monotonic()
    facts = usable_backends()
    assert time.monotonic() - began < 60  # each solver has a limit of seconds
    assert [fact.name for fact in facts] == NAMES
    assert facts[0].usable
    assert facts[0].version
    assert all(fact.usable or fact.reason for fact in facts)
    assert not all("died" in fact.reason for fact in facts[1:]), "the probe itself works"
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_a_crashed_or_hanging_probe_does_not_affect_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import os, sys, time\n"
        "for name in sys.argv[1:]:\n"
        "    if name == 'GUROBI': os.abort()\n"
        "    if name == 'COPT': print('remat-backend {\"name', flush=True); time.sleep(60)\n"
        '    told = \'{"name": "%s", "usable": true, "version": "1", "reason": ""}\'\n'
        "    print('remat-backend ' + told % name, flush=True)\n"
    )
    monkeypatch.setattr(backend_facts, "_PROBE", probe)
    monkeypatch.setattr(backend_facts, "_TIMEOUT_S", 1.5)
    facts = {fact.name: fact for fact in usable_backends()}
    assert facts["SCIP"] == BackendStatus("SCIP", True, "1")
    assert facts["Gurobi"].usable, "its command works"
    assert not facts["COPT"].usable
    assert "did not answer" in facts["COPT"].reason


@pytest.mark.slow
def test_the_first_solve_of_a_process_prints_nothing() -> None:
    code = (
        "from remat.milp.solvers.highs import HighsSolver\n"
        "from tests.helpers.solvers import small\n"
        "program = small().arrays()\n"
        "run = HighsSolver(gap=0.0, time_limit=9.0, threads=1).run(program)\n"
        "assert program.columns[0].value is not None"
    )
    completed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "", "")


@pytest.mark.slow
def test_threads_may_change_from_solve_to_solve() -> None:
    graph = uneven_layers(5)
    for threads in (1, 2, 1):
        assert solve(graph, "70%", Exact(threads=threads)).status is Status.OPTIMAL


@pytest.mark.slow
def test_concurrent_solves_give_the_same_times() -> None:
    graphs = [uneven_layers(4), uneven_layers(5), chain(12, size=5)]
    one_at_a_time = [solve(graph, "65%", Exact(threads=1)).time_s for graph in graphs]
    plans: dict[int, Plan] = {}

    def work(i: int) -> None:
        plans[i] = solve(graphs[i], "65%", Exact(threads=1 + i % 2))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(graphs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [plans[i].time_s for i in range(len(graphs))] == one_at_a_time
    assert all(plan.status is Status.OPTIMAL for plan in plans.values())


@pytest.mark.slow
def test_another_thread_can_cancel_a_running_solve() -> None:
    """HiGHS polls for cancellation, but not in presolve or during a round of cuts."""
    graph = random_stages(3, 14)
    cancel = threading.Event()
    timer = threading.Timer(0.5, cancel.set)
    begun: list[bool] = []

    def watch(progress: Progress) -> None:
        if progress.bound is not None and not begun:
            begun.append(True)
            timer.start()

    began = time.monotonic()
    plan = solve(graph, "60%", Exact(threads=1), cancel=cancel, progress=watch)
    assert cancel.is_set()
    assert time.monotonic() - began < 60
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.status is Status.FEASIBLE
    assert plan.lower_bound is not None


def test_a_probe_that_fails_says_how(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    probe = tmp_path / "probe.py"
    probe.write_text("raise SystemExit(3)")
    monkeypatch.setattr(backend_facts, "_PROBE", probe)
    assert "died when tried (exit 3)" in usable_backends()[1].reason
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no_python"))
    assert "could not be tried: " in usable_backends()[1].reason
