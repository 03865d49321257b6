"""The table of a solve's steps, and its data, agree with the stats of the plan."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.helpers.graphs import chain, random_stages

from remat.limits.units import format_bytes, format_seconds
from remat.plan import Plan
from remat.report.solve_progress import step_rows, steps_report
from remat.solution import step_names
from remat.solve import solve
from remat.strategies import Auto, EveryK, Exact, KeepAll, Strategy

GRAPH = random_stages(1, 6)


@pytest.fixture(scope="module")
def smallest() -> Plan:
    return solve(GRAPH, "min", Exact(threads=1))


def test_each_step_has_a_line(smallest: Plan) -> None:
    peak, cost = str(steps_report(smallest)).split("\n\n")
    names = step_names(smallest.stats)
    assert names[:2] == ["peak_eviction", "peak_milp"]
    assert "relaxation" in names
    first, *lines = peak.splitlines()
    assert first.split("  ")[0] == "smallest peak"
    assert [line.split()[0] for line in lines] == ["eviction", "milp"]
    for line, name in zip(lines, names, strict=False):
        assert cells(line)[1:] == [
            format_seconds(float(smallest.stats[f"{name}_s"])),
            format_bytes(int(smallest.stats[f"{name}_bytes"])),
            format_bytes(int(smallest.stats[f"{name}_bound_bytes"])),
        ]
    assert cells(lines[-1])[2] == format_bytes(smallest.peak_bytes)
    first, *lines = cost.splitlines()
    assert cells(first) == ["least time", "took", "extra time", "at least"]
    assert [cells(line)[0] for line in lines] == names[2:]
    assert cells(lines[-1])[2:] == [f"{smallest.overhead:+.3%}", f"{smallest.lower_bound:+.3%}"]
    assert len({len(line) for line in (*peak.splitlines(), *cost.splitlines())}) == 1


def cells(line: str) -> list[str]:
    """Return the cells of an aligned table."""
    return re.split(r"  +", line)


def test_missing_figures_are_dashes() -> None:
    text = str(steps_report(solve(GRAPH, "70%", Auto(order="off", threads=1))))
    assert text.splitlines()[1].split()[0] == "relaxation"
    assert text.splitlines()[1].split()[-2] == "-"


def test_the_rows_are_available_as_data(smallest: Plan) -> None:
    rows = step_rows(smallest)
    assert [step["step"] for step in rows] == step_names(smallest.stats)
    for step in rows:
        for key in step.keys() - {"step"}:
            fact = "s" if key == "seconds_s" else key
            assert step[key] == smallest.stats[f"{step['step']}_{fact}"]
    assert rows[0].keys() == {"step", "seconds_s", "bytes", "bound_bytes"}
    assert rows[-1].keys() == {"step", "seconds_s", "cost", "bound"}
    assert step_rows(Plan.from_json(smallest.to_json())) == rows


def test_the_steps_follow_the_description_of_the_plan(smallest: Plan) -> None:
    usual = smallest.describe()
    assert smallest.describe(solve=True) == f"{usual}\n\n{steps_report(smallest)!s}"
    (solver,) = (line for line in usual.splitlines() if line.startswith("solver "))
    total = format_seconds(float(smallest.stats["total_s"]))
    assert solver.endswith(f", solved in {total}")
    assert not any(name in solver for name in step_names(smallest.stats))
    assert not any(name in solver for name in ("peak_search", "solver_s"))


def test_a_solver_that_was_not_used_has_no_rows() -> None:
    plan = solve(chain(4), "100%", Auto())
    assert "slots" not in plan.describe()


@pytest.mark.parametrize("strategy", [Auto(), Exact(), KeepAll()])
def test_where_everything_fits_there_was_no_search(strategy: Strategy) -> None:
    text = str(steps_report(solve(chain(4), "100%", strategy)))
    assert text == "no steps: everything fits without recomputation, so there was no search"


def test_a_baseline_has_no_steps() -> None:
    plan = solve(chain(8), "80%", EveryK(2))
    assert plan.describe(solve=True).endswith(
        "\n\nno steps: every_k computes its schedule directly; auto and exact search in steps"
    )


@pytest.mark.parametrize("forged", ["abc", "nothing", "relaxation abc"])
def test_unusual_stats_are_described(smallest: Plan, forged: str) -> None:
    """A plan may come from a file: steps without seconds are left out."""
    stats = {"steps": forged, "abc_s": "long", "abc_cost": "high", "relaxation_s": 1}
    text = str(steps_report(replace(smallest, solve=stats)))
    assert "abc" not in text
    assert ("relaxation" in text) == ("relaxation" in forged)


def test_concurrent_and_failed_steps_are_reported() -> None:
    plan = solve(GRAPH, 80, Auto(threads=1))
    first, *_ = step_names(plan.stats)
    stats = {f"{first}_concurrent": 1, "search_error": f"{first}: it broke"}
    plan = replace(plan, solve={**plan.solve, **stats})
    assert step_rows(plan)[0]["note"] == "concurrent, failed"
    assert f"{first} (concurrent, failed)" in str(steps_report(plan))
    assert all("note" not in step for step in step_rows(plan)[1:])
