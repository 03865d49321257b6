"""Solvers other than the default, and what happens when one is missing, refuses or dies."""

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
from tests.graphs import chain
from tests.solvers import needs_cbc, scripted
from tests.test_baselines import uneven_stages
from tests.test_solve import uneven

from remat.errors import SolverError, SolverWarning
from remat.graph import Graph
from remat.heuristics import local_search as incumbent
from remat.milp import backends, model, slots
from remat.milp.backends import Outcome, SolverRun
from remat.milp.solvers import facts as backend_facts
from remat.milp.solvers import pulp_solvers
from remat.milp.solvers.facts import BackendFact, usable_backends
from remat.milp.solvers.highs import BulkHiGHS
from remat.milp.solvers.pulp_versions import IS_4
from remat.milp.start import is_solution, start_values
from remat.plan import Plan, Status
from remat.progress import Progress
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import solve
from remat.strategies import Exact
from remat.strategies.search.deadline import Clock
from remat.strategies.search.runner import MilpRunner

FACTS = {fact.name: fact for fact in usable_backends()}
NAMES = ["HiGHS", "CBC", "Gurobi", "CPLEX", "SCIP", "COPT", "Xpress", "cuOpt"]
SMALL = {"chain": chain(6, size=3), "uneven": uneven(3)}


def budget_bytes(graph: Graph, share: float) -> int:
    return int(share * simulate(graph, Schedule.keep_all(graph)).peak_bytes)


def run(
    graph: Graph, share: float, solver: str, *, start: bool = True, limit: float = 60
) -> SolverRun:
    """The program over complete slots, from what eviction finds."""
    budget = budget_bytes(graph, share)
    known = incumbent.fitting(graph, budget)[0].schedule if start else None
    program = model.build(graph, slots.complete(graph), budget)
    return backends.run(program, solver=solver, gap=0.0, time_limit=limit, incumbent=known)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    return scripted(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("graph", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("share", [0.75, 0.85])
def test_every_solver_finds_the_optimum(name: str, graph: Graph, share: float) -> None:
    if not FACTS[name].usable:
        pytest.skip(FACTS[name].reason)
    expected = run(graph, share, "HiGHS")
    for start in (False, True):
        found = run(graph, share, name, start=start)
        assert found.outcome is Outcome.OPTIMAL
        assert found.objective == pytest.approx(expected.objective)
        assert found.bound is not None
        assert found.objective is not None
        assert found.bound <= found.objective
        assert found.bound == pytest.approx(expected.objective, rel=1e-6)
        assert found.schedule is not None
        assert simulate(graph, found.schedule).peak_bytes <= budget_bytes(graph, share)


@pytest.mark.parametrize(
    "name",
    [
        "highs",
        "HIGHS",
        pytest.param("cbc", marks=needs_cbc),
        pytest.param("Pulp_Cbc_Cmd", marks=needs_cbc),
    ],
)
def test_names_are_read_in_any_case(name: str) -> None:
    plan = solve(uneven(3), "75%", Exact(solver=name))
    assert plan.status is Status.OPTIMAL
    assert plan.time_s == solve(uneven(3), "75%", Exact()).time_s


@needs_cbc
def test_the_smallest_peak_by_another_solver() -> None:
    graph = uneven(3)
    assert solve(graph, "min", Exact(solver="CBC")).peak_bytes == solve(graph, "min").peak_bytes


def test_every_pulp_class_is_known_by_its_name() -> None:
    assert pulp_solvers.family("xpress").classes == ("XPRESS_PY", "XPRESS")
    assert pulp_solvers.family("GLPK_CMD").classes == ("GLPK_CMD",)
    for known in pulp_solvers.FAMILIES:
        for name in known.classes:
            assert hasattr(pulp, name) or (name == "PULP_CBC_CMD" and IS_4), name


@pytest.mark.skipif(not IS_4, reason="PuLP 3.3 has every class that remat knows")
def test_a_class_that_is_gone_stands_for_its_family() -> None:
    assert pulp_solvers.family("pulp_cbc_cmd").name == "CBC"


@pytest.mark.parametrize("name", ["MOSEK", "GLPK_CMD", *NAMES[2:]])
def test_a_missing_solver_says_what_to_do(name: str) -> None:
    if name in FACTS and "not installed" not in FACTS[name].reason:
        pytest.skip("it is here")
    with pytest.raises(SolverError, match=r"not available here.*HiGHS"):
        run(SMALL["chain"], 0.8, name)


@pytest.mark.parametrize("script", ["exit 1", f"kill -{int(signal.SIGKILL)} $$", "exit 0"])
def test_a_solver_that_dies_says_so_and_the_default_still_works(command, script: str) -> None:
    command("cbc", script)
    graph = uneven(3)
    with pytest.raises(SolverError, match=r"COIN_CMD.*stopped without an answer.*HiGHS"):
        run(graph, 0.75, "COIN_CMD")
    assert solve(graph, "75%", Exact()).status is Status.OPTIMAL


def test_a_solver_that_writes_rubbish(command) -> None:
    command("cbc", 'while [ "$1" != -solution ]; do shift; done; echo rubbish > "$2"')
    with pytest.raises(SolverError, match="stopped without an answer"):
        run(uneven(3), 0.75, "COIN_CMD")


def test_a_solution_is_not_called_impossible(command) -> None:
    """Some of PuLP's classes say "infeasible" of a command that wrote nothing."""
    command("cplex", "exit 0")
    graph = uneven(3)
    with pytest.raises(SolverError, match="one is known"):
        run(graph, 0.75, "CPLEX_CMD")
    with pytest.warns(SolverWarning, match="one is known"):
        plan = solve(graph, "75%", Exact(solver="CPLEX_CMD"))
    assert plan.status is Status.FEASIBLE
    assert plan.peak_bytes <= plan.budget_bytes


@needs_cbc
def test_nobody_is_believed_to_have_finished_when_the_time_was_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backends, "_TIME_IS_UP", 0.0)
    answer = run(uneven(3), 0.75, "CBC")
    assert answer.outcome is Outcome.FEASIBLE
    assert answer.bound is None
    assert answer.schedule is not None


@needs_cbc
def test_a_stopped_solver_gives_what_it_had() -> None:
    """Even one that dies then: CBC 2.10.3 ends with SIGSEGV at some short limits."""
    graph = uneven(14)
    budget = budget_bytes(graph, 0.6)
    known = incumbent.fitting(graph, budget)[0]
    programs = MilpRunner(graph, Exact(solver="CBC"), Clock.of(300.0))
    answer, bound_s = programs.solve_cost(slots.complete(graph), budget, known.schedule, 0.2)
    assert answer.outcome is Outcome.FEASIBLE
    assert answer.schedule is not None
    assert programs.time(answer.schedule) <= known.time_s
    assert programs.peak(answer.schedule) <= budget
    assert bound_s is None
    assert programs.failure == "" or "failed or was killed" in programs.failure


def test_a_fractional_solution_is_none() -> None:
    """Which CBC writes where it has no other, and calls "Stopped on time"."""
    graph = uneven(5)
    program = model.build(graph, slots.complete(graph), budget_bytes(graph, 0.6))
    highs = BulkHiGHS(gap=0.0, time_limit=30.0, threads=1)
    for arrays, expected in ((program.arrays.relaxed(), False), (program.arrays, True)):
        assert highs.solve(arrays).outcome is Outcome.OPTIMAL
        values = {v: float(v.varValue or 0.0) for v in arrays.variables}
        assert is_solution(program, values) == expected


@pytest.mark.parametrize("where", ["report", "cancelled"])
def test_an_interrupt_inside_of_highs_is_raised(where: str) -> None:
    """Ctrl-C, where Python notices it: in what HiGHS calls, of which it makes its own error."""

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    graph = uneven(8)
    program = model.build(graph, slots.complete(graph), budget_bytes(graph, 0.6))
    calls: dict[str, Any] = {where: interrupted}
    with pytest.raises(KeyboardInterrupt):
        BulkHiGHS(gap=0.0, time_limit=60.0, threads=1, **calls).solve(program.arrays)


@pytest.mark.parametrize("budget", [0.55, 0.7, 0.9, None])
def test_a_schedule_as_values_is_a_solution(budget: float | None) -> None:
    for graph in (*SMALL.values(), uneven(8), chain(25, size=7)):
        limit = None if budget is None else budget_bytes(graph, budget)
        small = incumbent.smallest(graph, target_bytes=limit or 0).schedule
        offered = slots.near(graph, back=9, every=1, idle=4, region=50, known=(small,))
        for slot_set in (slots.complete(graph), offered):
            program = model.build(graph, slot_set, limit)
            values = start_values(program, small)
            if values is None:
                continue
            fits = limit is None or simulate(graph, small).peak_bytes <= limit
            assert is_solution(program, values) == fits
            missing = {v.name for v in program.problem.variables() if v not in values}
            assert missing <= {"b"}


def test_facts_are_told_quietly_and_soon(capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    facts = usable_backends()
    assert time.monotonic() - began < 6
    assert [fact.name for fact in facts] == NAMES
    assert facts[0].usable
    assert facts[0].version
    assert all(fact.usable or fact.reason for fact in facts)
    assert not all("died" in fact.reason for fact in facts[1:]), "the probe itself works"
    assert capfd.readouterr() == ("", "")


def test_a_probe_that_dies_or_hangs_spoils_no_other(
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
    monkeypatch.setattr(backend_facts, "_PATIENCE_S", 1.5)
    facts = {fact.name: fact for fact in usable_backends()}
    assert facts["SCIP"] == BackendFact("SCIP", True, "1")
    assert facts["Gurobi"].usable, "its command is"
    assert not facts["COPT"].usable
    assert "did not answer" in facts["COPT"].reason


def test_the_first_solve_of_a_process_says_nothing() -> None:
    code = (
        "from remat.milp.solvers import pulp_versions\n"
        "from remat.milp.solvers.highs import BulkHiGHS\n"
        "from tests.test_pulp_versions import small\n"
        "program = pulp_versions.read(small())\n"
        "run = BulkHiGHS(gap=0.0, time_limit=9.0, threads=1).solve(program)\n"
        "assert program.variables[0].varValue is not None"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_threads_may_change_from_solve_to_solve() -> None:
    graph = uneven(5)
    for threads in (1, 2, 1):
        assert solve(graph, "70%", Exact(threads=threads)).status is Status.OPTIMAL


def test_solves_at_the_same_time() -> None:
    graphs = [uneven(4), uneven(5), chain(12, size=5)]
    alone = [solve(graph, "65%", Exact(threads=1)).time_s for graph in graphs]
    plans: dict[int, Plan] = {}

    def work(i: int) -> None:
        plans[i] = solve(graphs[i], "65%", Exact(threads=1 + i % 2))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(graphs))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [plans[i].time_s for i in range(len(graphs))] == alone
    assert all(plan.status is Status.OPTIMAL for plan in plans.values())


@pytest.mark.slow
def test_cancel_from_another_thread_while_it_solves() -> None:
    """HiGHS asks now and then; it does not in presolve, nor in a round of cuts."""
    graph = uneven_stages(3, 14)
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
