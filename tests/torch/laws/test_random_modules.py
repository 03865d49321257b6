"""Laws 1 to 3 on random modules, budgets and schedules.

REMAT_EXAMPLES raises the number of examples.
"""

from __future__ import annotations

import copy
import functools
import os
import random

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, assume, example, settings
from hypothesis import strategies as st
from tests.helpers.training.models import FAMILIES, PLAIN, Case
from tests.helpers.training.random_modules import (
    KINDS,
    ROWS,
    WIDTH,
    RandomModule,
    Step,
    lean_schedule,
    random_schedule,
)
from tests.helpers.training.recorded_steps import Step as Ran
from tests.helpers.training.recorded_steps import assert_same, eager_step, run_step

import remat
from remat.rewrite import BATCH_NORM_WITHOUT_STATS

COSTS = remat.Roofline("cpu")
STRATEGY = remat.Auto(gap=0.02, time_limit=3.0)
EXAMPLES = int(os.environ.get("REMAT_EXAMPLES", "10"))
LAWS = settings(
    max_examples=EXAMPLES // 5,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

STEPS = st.lists(st.builds(Step, st.sampled_from(KINDS), st.integers(0, 4)), min_size=2, max_size=7)
SCHEDULED = ("gpt2", "resnet", "mlp", "tied", "norms", "shared")


def case_of(steps: list[Step], seed: int, *, input_grad: bool) -> Case:
    torch.manual_seed(seed)
    x = torch.randn(ROWS, WIDTH, requires_grad=input_grad)
    return Case(RandomModule(steps), (x,), loss=lambda out: out)


def eager_or_none(case: Case) -> Ran | None:
    """Return eager mode's step; None where eager mode refuses (an in-place step on what the
    backward needs)."""
    try:
        return eager_step(case)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None


def assert_bitwise(actual_step: Ran, eager: Ran) -> None:
    assert_same(actual_step, eager, tolerance=0.0)


@LAWS
@hypothesis.given(STEPS, st.floats(0, 1), st.integers(0, 99), st.booleans())
@example([Step("batch_norm", 0), Step("dropout_", 0), Step("attention", 1)], 0.0, 0, True)
@example([Step("tied", 0), Step("slices", 1), Step("tied", 0), Step("mul_", 0)], 0.5, 1, False)
@example(
    [
        Step("expand", 3),
        Step("split", 1),
        Step("layer_norm", 1),
        Step("slices", 0),
        Step("frozen", 4),
    ],
    0.44975832682612993,
    39,
    False,
)
def test_random_modules_train_as_eager_mode_within_random_budgets(
    steps: list[Step], share: float, seed: int, input_grad: bool
) -> None:
    case = case_of(steps, seed, input_grad=input_grad)
    eager = eager_or_none(case)
    assume(eager is not None)
    assert eager is not None
    model = copy.deepcopy(case.model)
    trace = remat.measure(remat.trace(model, case.args), COSTS)
    plan = solved(trace, share)
    gm = remat.lower(remat.rewrite(trace, plan.schedule), model)
    actual = run_step(gm, case)
    assert_bitwise(actual, eager)
    assert actual.peak_bytes <= plan.peak_bytes <= plan.budget_bytes
    assert actual.peak_bytes >= 0.99 * plan.peak_bytes


def solved(trace: remat.Trace, share: float) -> remat.Plan:
    """Return the plan for a share of the memory that is not constant, or for the smallest
    feasible peak."""
    graph = trace.graph()
    baseline_bytes = remat.simulate(graph, remat.Schedule.keep_all(graph)).peak_bytes
    budget = graph.constant_bytes + int(share * (baseline_bytes - graph.constant_bytes))
    try:
        return remat.solve(trace, max(budget, 1) if share else "min", STRATEGY)
    except remat.InfeasibleBudget as error:
        # A loaded machine may find this peak only with more time.
        strategy = remat.Auto(gap=0.02, time_limit=30.0)
        return remat.solve(trace, error.min_feasible_bytes or 0, strategy)


@functools.cache
def traced(name: str) -> tuple[Case, remat.Trace, Ran]:
    torch.manual_seed(0)
    case = (FAMILIES | PLAIN)[name]()
    trace = remat.measure(remat.trace(case.model, case.args, case.kwargs), COSTS)
    return case, trace, eager_step(case)


def assert_runs_as_simulated(name: str, schedule: remat.Schedule) -> None:
    case, trace, eager = traced(name)
    program = remat.rewrite(trace, schedule)
    actual = run_step(remat.lower(program, copy.deepcopy(case.model)), case)
    assert_bitwise(actual, eager)
    if any(s.target == BATCH_NORM_WITHOUT_STATS for s in (*program.forward, *program.backward)):
        # The step has no running statistics, which the plan counts.
        assert 0.98 * program.predicted_peak_bytes < actual.peak_bytes
        assert actual.peak_bytes <= program.predicted_peak_bytes
    else:
        assert actual.peak_bytes == program.predicted_peak_bytes
    assert program.predicted_peak_bytes == remat.simulate(trace.graph(), schedule).peak_bytes


def reruns(name: str, schedule: remat.Schedule) -> int:
    return sum(schedule.recomputed(traced(name)[1].graph()).values())


@pytest.mark.slow_cases("gpt2", "resnet")
@pytest.mark.parametrize("name", SCHEDULED)
def test_schedules_that_retain_a_random_share_run_as_simulated(name: str) -> None:
    graph = traced(name)[1].graph()
    recomputed_count = 0
    for number in range(EXAMPLES // 2):
        rng = random.Random(f"share {number} of {name}")
        schedule = lean_schedule(graph, rng, retained_share=rng.choice((0.0, 0.2, 0.5, 0.8)))
        assert_runs_as_simulated(name, schedule)
        recomputed_count += reruns(name, schedule) > 0
    assert recomputed_count > EXAMPLES // 4


@pytest.mark.parametrize("name", [*SCHEDULED, "weights"])
def test_schedules_that_recompute_at_random_run_as_simulated(name: str) -> None:
    graph = traced(name)[1].graph()
    recomputed_count = 0
    for number in range(EXAMPLES // 2):
        rng = random.Random(f"rate {number} of {name}")
        schedule = random_schedule(graph, rng, rate=rng.uniform(0.02, 0.2))
        assert_runs_as_simulated(name, schedule)
        recomputed_count += reruns(name, schedule) > 0
    assert recomputed_count > EXAMPLES // 4
