"""The solve told step by step: what the table and the data say is what the stats say."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from tests.graphs import chain
from tests.test_baselines import uneven_stages

from remat.limits.budget import format_bytes, format_seconds
from remat.plan import Plan
from remat.report.solving import describe_steps, steps
from remat.solution import steps_of
from remat.solve import solve
from remat.strategies import Auto, EveryK, Exact, KeepAll, Strategy

GRAPH = uneven_stages(1, 6)


@pytest.fixture(scope="module")
def smallest() -> Plan:
    return solve(GRAPH, "min", Exact(threads=1))


def test_a_line_for_each_step(smallest: Plan) -> None:
    peak, cost = describe_steps(smallest).split("\n\n")
    names = steps_of(smallest.stats)
    assert names[:2] == ["peak_eviction", "peak_program"]
    assert "relaxation" in names
    first, *lines = peak.splitlines()
    assert first.split("  ")[0] == "smallest peak"
    assert [line.split()[0] for line in lines] == ["eviction", "program"]
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
    """Of an aligned table."""
    return re.split(r"  +", line)


def test_what_is_not_known_yet_is_a_dash() -> None:
    text = describe_steps(solve(GRAPH, "70%", Auto(order="off", threads=1)))
    assert text.splitlines()[1].split()[0] == "relaxation"
    assert text.splitlines()[1].split()[-2] == "-"


def test_the_same_as_data(smallest: Plan) -> None:
    found = steps(smallest)
    assert [step["step"] for step in found] == steps_of(smallest.stats)
    for step in found:
        for key in step.keys() - {"step"}:
            fact = "s" if key == "seconds_s" else key
            assert step[key] == smallest.stats[f"{step['step']}_{fact}"]
    assert found[0].keys() == {"step", "seconds_s", "bytes", "bound_bytes"}
    assert found[-1].keys() == {"step", "seconds_s", "cost", "bound"}
    assert steps(Plan.from_json(smallest.to_json())) == found


def test_it_follows_the_usual_text_and_stays_out_of_it(smallest: Plan) -> None:
    usual = smallest.describe()
    assert smallest.describe(solve=True) == f"{usual}\n\n{describe_steps(smallest)}"
    (solver,) = (line for line in usual.splitlines() if line.startswith("solver "))
    total = format_seconds(float(smallest.stats["total_s"]))
    assert solver.endswith(f", solved in {total}")
    assert not any(name in solver for name in steps_of(smallest.stats))
    assert not any(name in solver for name in ("peak_search", "solver_s"))


def test_a_solver_that_was_not_asked_has_no_rows() -> None:
    plan = solve(chain(4), "100%", Auto())
    assert "slots" not in plan.describe()


@pytest.mark.parametrize("strategy", [Auto(), Exact(), KeepAll()])
def test_where_all_fits_nothing_was_searched_for(strategy: Strategy) -> None:
    text = describe_steps(solve(chain(4), "100%", strategy))
    assert text == "no steps: all fits without recomputation, so nothing was searched for"


def test_a_baseline_has_no_steps() -> None:
    plan = solve(chain(8), "80%", EveryK(2))
    assert plan.describe(solve=True).endswith(
        "\n\nno steps: every_k finds its schedule in one go; auto and exact search step by step"
    )


@pytest.mark.parametrize("forged", ["abc", "nothing", "relaxation abc"])
def test_stats_of_anybody(smallest: Plan, forged: str) -> None:
    """A plan may come from a file: steps without seconds are left out."""
    stats = {"steps": forged, "abc_s": "long", "abc_cost": "dear", "relaxation_s": 1}
    found = describe_steps(replace(smallest, stats=stats))
    assert "abc" not in found
    assert ("relaxation" in found) == ("relaxation" in forged)


def test_what_ran_beside_and_what_failed_is_said() -> None:
    plan = solve(GRAPH, 80, Auto(threads=1))
    first, *_ = steps_of(plan.stats)
    told = {f"{first}_beside": 1, "search_error": f"{first}: it broke"}
    plan = replace(plan, stats={**plan.stats, **told})
    assert steps(plan)[0]["note"] == "beside, failed"
    assert f"{first} (beside, failed)" in describe_steps(plan)
    assert all("note" not in step for step in steps(plan)[1:])
