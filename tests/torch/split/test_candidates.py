"""A plan says among which forms of the step it was selected; sources propose them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.helpers.training.models import language_model

import remat
from remat.choice import candidates
from remat.choice.candidate_log import LARGER_PEAK, SLOWER, TAKEN, CandidateLog
from remat.choice.candidates import Candidate, CandidateSearch, in_pieces
from remat.choice.offloadable_step import TraceStep
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.plan_request import PlanRequest, TracePlan
from remat.choice.step import plan_step
from remat.costs.devices import Link
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.limits.options import PIECES
from remat.passes.split.splits import split_largest_operations

COSTS = remat.Roofline("h100")
STRATEGY = remat.Auto(time_limit=5.0)


@pytest.fixture(scope="module")
def trace() -> remat.Trace:
    case = language_model()
    return remat.measure(remat.trace(case.model, case.args), COSTS)


def chosen(trace: remat.Trace, budget: int | str, **options: object) -> TracePlan:
    """Return the answer to a request with these options."""
    request = PlanRequest(Limits(Budget.parse(budget)), STRATEGY, **options)  # type: ignore[arg-type]
    return plan_step(trace, request, measure=lambda split: remat.measure(split, COSTS))


@pytest.mark.parametrize("budget", ["100%", "60%", "min"])
def test_each_candidate_has_its_result_and_one_is_taken(trace: remat.Trace, budget: str) -> None:
    answer = chosen(trace, budget, pieces=PIECES)
    plan = answer.plan
    if answer.trace is trace:
        assert plan.candidates == ()
        return
    (taken,) = (c for c in plan.candidates if c.outcome == TAKEN)
    assert taken.name == f"in {answer.trace.splits[0].pieces} pieces"
    assert (taken.peak_bytes, taken.overhead) == (plan.peak_bytes, plan.overhead)
    assert not taken.is_estimate
    (whole,) = (c for c in plan.candidates if c.name == "as it is")
    if whole.overhead is None:
        assert whole.outcome.startswith("needs ")
    else:
        assert whole.outcome == LARGER_PEAK
    slower = [c for c in plan.candidates if c.outcome == SLOWER]
    assert all(c.overhead is not None and c.overhead > plan.overhead for c in slower)
    assert remat.Plan.from_json(plan.to_json()).candidates == plan.candidates


def test_the_report_of_a_solve_has_a_row_for_each_candidate(trace: remat.Trace) -> None:
    plan = chosen(trace, "60%", pieces=PIECES).plan
    heading = next(line for line in plan.describe(solve=True).splitlines() if "outcome" in line)
    assert heading.split() == ["candidate", "peak", "extra", "time", "outcome"]
    table = plan.describe(solve=True).split(heading)[1].split("\n\n")[0]
    assert len(table.strip().splitlines()) == len(plan.candidates)
    assert heading not in plan.describe()
    assert table.strip().splitlines()[0] in plan.to_html()


def test_tensors_on_the_host_are_candidates(trace: remat.Trace) -> None:
    offload = OffloadLimits(Link(1e12, 1e12), min_bytes=1)
    plan = chosen(trace, "50%", pieces=PIECES, offload=offload).plan
    tensors = len(plan.graph.renewal)
    assert tensors
    (taken,) = (c for c in plan.candidates if c.outcome == TAKEN)
    assert taken.name.endswith(f", {tensors} tensors offloaded")
    assert taken.overhead == plan.overhead
    names = [c.name for c in plan.candidates]
    assert "as it is" in names
    assert any(name.startswith("in ") and "offloaded" not in name for name in names)


def in_three(search: CandidateSearch) -> Iterator[Candidate]:
    """Propose the step with its largest operations in three pieces."""
    split = split_largest_operations(search.step.trace, 3)
    yield search.judged(TraceStep(search.measure(split), "in thirds"))


@pytest.mark.parametrize("sources", [[in_three], [in_three, in_pieces], [in_pieces, in_three]])
def test_a_candidate_of_any_source_may_be_taken(
    trace: remat.Trace,
    sources: list[Callable[[CandidateSearch], Iterator[Candidate]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = chosen(trace, "60%", pieces=(2, 4)).plan
    monkeypatch.setattr(candidates, "SOURCES", sources)
    answer = chosen(trace, "60%", pieces=(2, 4))
    assert "in thirds" in [c.name for c in answer.plan.candidates]
    assert answer.plan.overhead <= usual.overhead
    if sources == [in_three]:
        (split,) = answer.trace.splits
        assert split.pieces == 3


def test_a_candidate_that_is_not_better_changes_nothing(
    trace: remat.Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_halves(search: CandidateSearch) -> Iterator[Candidate]:
        split = split_largest_operations(search.step.trace, 2)
        yield search.judged(TraceStep(search.measure(split), "in halves"))

    usual = chosen(trace, "100%")
    monkeypatch.setattr(candidates, "SOURCES", [in_halves])
    answer = chosen(trace, "100%")
    assert answer.trace is trace
    assert answer.plan.schedule == usual.plan.schedule
    outcomes = {c.name: c.outcome for c in answer.plan.candidates}
    assert outcomes == {"as it is": TAKEN, "in halves": SLOWER}


def test_a_full_solve_replaces_an_estimate(trace: remat.Trace) -> None:
    fast, slow = remat.solve(trace, "100%", STRATEGY), remat.solve(trace, "97%", STRATEGY)
    assert slow.time_s > fast.time_s
    log = CandidateLog()
    log.add("a", slow, is_estimate=True)
    log.add("a", fast)
    log.add("b", slow, is_estimate=True)
    log.add("c", remat.InfeasibleBudget("too small", min_feasible_bytes=2048, is_proved=True))
    log.add("d", remat.SolverTimeout("no time"))
    results = log.results(fast, is_min=False)
    assert [(c.name, c.outcome, c.is_estimate) for c in results] == [
        ("a", TAKEN, False),
        ("b", SLOWER, True),
        ("c", "needs 2.00 KiB at least", False),
        ("d", "no plan was found in time", False),
    ]
    log.refuse(fast, "its kernels need more")
    assert log.results(slow, is_min=False)[0].outcome == "its kernels need more"


def test_a_compiled_step_has_candidates(trace: remat.Trace) -> None:
    case = language_model()
    compiled = remat.compile(case.model, "min", inductor=False, split="auto")
    compiled(*case.args).backward()
    plan = remat.compiled_plans()[-1].plan
    outcomes = [c.outcome for c in plan.candidates]
    assert outcomes.count(TAKEN) == 1, plan.candidates
    torch.compiler.reset()
