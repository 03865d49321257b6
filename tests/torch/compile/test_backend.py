"""torch.compile(backend="remat"): the same gradients, within the budget, as Inductor runs it."""

from __future__ import annotations

import itertools
import random
import time
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.graphs import chain
from tests.helpers.training.compiled_steps import (
    assert_same,
    blocks,
    compiled,
    compiled_as_without,
    convolutions,
    dropout_case,
    measured_peak,
    plans_of,
    step,
    two_steps,
    with_state,
)
from tests.helpers.training.models import FAMILIES, PLAIN, Case, WithParts
from torch import nn
from torch._inductor.virtualized import V

import remat
from remat.errors import BudgetError, SolverTimeout
from remat.frontend.compile import candidates
from remat.frontend.compile.compile_options import read_options
from remat.frontend.compile.inductor import peak_check, probe
from remat.heuristics.peak_bounds import peak_lower_bound_bytes
from remat.progress import Clock

pytestmark = pytest.mark.usefixtures("empty_compile_caches")


QUICK = {"tied", "norms", "two-heads"}


# -- without Inductor -----------------------------------------------------------------------------


@pytest.mark.quick_cases("tied-min")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        *(
            (name, "min") if name in QUICK else pytest.param(name, "min", marks=pytest.mark.slow)
            for name in (*PLAIN, "gpt2", "llama", "bert", "t5", "vit", "resnet")
        ),
        pytest.param("norms", "100%", marks=pytest.mark.slow),
    ],
)
def test_gradients_without_inductor_are_bitwise_those_of_the_same_graph(
    name: str, budget: str
) -> None:
    """Buffers included, in a second step too, with dropout and checkpointed parts."""
    case = (PLAIN | FAMILIES)[name]()
    compiled_as_without(case, budget, 0.0, inductor=False, time_limit=5.0, split="off")


def test_a_plan_recomputes_operations() -> None:
    case = PLAIN["checkpointed"]()
    (plan,) = plans_of(case, "min", inductor=False, split="off", time_limit=3.0)
    assert plan.plan.peak_bytes < 0.9 * plan.plan.baseline_peak_bytes
    assert len(plan.plan.schedule) > len(plan.plan.graph)
    assert plan.verified_bytes is None
    assert repr(plan).startswith("CompiledPlan(Checkpointed: Plan(")
    assert "budget min" in repr(plan)


# -- with Inductor --------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    ("make", "percent"),
    [
        pytest.param(dropout_case, 80, marks=pytest.mark.slow),
        pytest.param(blocks, 60, marks=pytest.mark.slow),
        pytest.param(convolutions, 75, marks=pytest.mark.slow),
    ],
)
def test_compiled_steps_are_within_the_budget(make: Any, percent: int) -> None:
    """Planned, verified and measured; with the gradients of plain torch.compile, dropout
    included."""
    case = make()
    run, (plan,) = compiled_as_without(case, f"{percent}%", 1e-5, time_limit=5.0)
    assert plan.budget_bytes is not None
    assert plan.verified_bytes is not None
    assert plan.budget_bytes == plan.baseline_bytes * percent // 100
    assert plan.verified_bytes <= plan.budget_bytes
    assert plan.verified_bytes == pytest.approx(plan.plan.peak_bytes, rel=0.05)
    measured = measured_peak(case, run)
    assert measured <= 1.01 * plan.verified_bytes
    assert measured <= plan.budget_bytes


@pytest.mark.slow
@needs_compiler
def test_a_budget_of_100_percent_gives_torch_compiles_step() -> None:
    _, (plan,) = compiled_as_without(dropout_case(), "100%", 1e-6)
    assert len(plan.plan.schedule) == len(plan.plan.graph)
    assert plan.plan.overhead == 0
    assert plan.rounds == 1


class Counting(nn.Module):
    """A module that reads a buffer after changing it: torch 2.13 recomputes what it read from
    the changed buffer."""

    def __init__(self, by_a_view: bool) -> None:
        super().__init__()
        self.by_a_view = by_a_view
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.by_a_view:
            self.steps.view(1).mul_(2)
        return (x * self.weight * self.steps).square().mean()


@pytest.mark.slow_cases("True-True")
@pytest.mark.parametrize(
    ("inductor", "by_a_view"),
    [
        (False, False),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=[needs_compiler, pytest.mark.slow]),
        pytest.param(True, True, marks=needs_compiler),
    ],
)
def test_reads_of_a_mutated_buffer_are_not_recomputed(inductor: bool, by_a_view: bool) -> None:
    case, state = with_state(Case(Counting(by_a_view), (torch.randn(4, 8),), loss=lambda out: out))
    expected = [step(case, case.model, seed) for seed in (1, 2)]
    case.model.load_state_dict(state)
    _, _, actual = compiled(case, "100%", (1, 2), inductor=inductor)
    assert_same(actual, expected, 1e-6)


def layers() -> Case:
    torch.manual_seed(0)
    made_of = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)]
    return Case(nn.Sequential(*made_of), (torch.randn(512, 32),), loss=lambda out: out.sum())


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), 99])
def test_kernels_that_take_more_memory_trigger_a_replan(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For that much less; three times at most, while there are plans, and then it is an error."""
    case, state = with_state(layers())
    expected = [step(case, case.model, seed) for seed in (1, 2)]
    read, halves = peak_check.live_peak_bytes, itertools.count()
    assert probe.live_peak_bytes is read  # the observed plan is unchanged

    def larger(*arguments: Any, **named: Any) -> int:
        number = next(halves) if V.graph.is_backward else times
        return round(
            read(*arguments, **named) * (1 + (0.4 * (number + 1) if number < times else 0))
        )

    monkeypatch.setattr(peak_check, "live_peak_bytes", larger)
    case.model.load_state_dict(state)
    if times > 3:
        before = remat.compiled_plans()
        with pytest.raises(Exception, match=r"after [123] plans. Pass a budget of"):
            compiled(case, "95%", split="off")
        assert remat.compiled_plans() == before
        return
    _, (plan,), actual = compiled(case, "95%", (1, 2))
    assert_same(actual, expected, 1e-5)
    assert plan.rounds == 2
    assert plan.budget_bytes is not None
    assert plan.plan.budget_bytes < plan.budget_bytes


@needs_compiler
@pytest.mark.slow
def test_the_partitioner_works_without_the_backend() -> None:
    case, state = with_state(blocks())
    expected = two_steps(case, state)
    before = len(remat.compiled_plans())
    settings = remat.Partitioner("60%", time_limit=5.0).settings()
    assert_same(two_steps(case, state, options=settings), expected, 1e-5)
    (plan,) = remat.compiled_plans()[before:]
    assert plan.verified_bytes is not None


class Broken(nn.Module):
    """A step of three graphs, whose later ones have most of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
                nn.Linear(width, 32), nn.GELU(),
            )
            for width in (64, 256, 512)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.parts
        x = x + first(x)
        torch._dynamo.graph_break()  # in a loop, dynamo would leave the whole frame to eager mode
        x = x + second(x)
        torch._dynamo.graph_break()
        x = x + third(x)
        return x.square().mean()


class BrokenOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(x).square().mean()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("rows", [1, 4096])
def test_external_memory_does_not_depend_on_the_batch(rows: int) -> None:
    """It is the other layer and its gradient, and what the other graph saves. The batch of a graph
    and the gradient of its input are none of them."""
    torch.compiler.reset()
    model = BrokenOnce()
    before = len(remat.compiled_plans())
    remat.compile(model, "1GiB", inductor=False)(torch.randn(rows, 64)).backward()
    first, second = remat.compiled_plans()[before:]
    layer_bytes = model.first.weight.nbytes
    assert first.external_bytes == 2 * layer_bytes
    assert second.external_bytes == 2 * layer_bytes + first.saved_bytes


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_graphs_of_one_step_share_a_budget() -> None:
    """The parameters of all, what the other graphs retain, and the gradients of later graphs
    count."""
    torch.manual_seed(0)
    case, state = with_state(Case(Broken(), (torch.randn(1024, 32),), loss=lambda out: out))
    expected = [step(case, case.model, seed) for seed in (1, 2)]
    torch._dynamo.reset()
    plain_peak = measured_peak(case, torch.compile(case.model))
    budget = plain_peak * 99 // 100
    case.model.load_state_dict(state)
    run, plans, actual = compiled(case, budget, (1, 2), time_limit=3.0)
    assert_same(actual, expected, 1e-5)
    assert len(plans) >= 3
    parameters = sum(p.nbytes for p in case.model.parameters())
    assert all(plan.external_bytes > parameters / 4 for plan in plans)
    assert measured_peak(case, run) <= budget
    with pytest.raises(Exception, match="are used outside this graph"):
        step(case, remat.compile(case.model, plain_peak * 9 // 10, inductor=False))
    shares = plans_of(case, "80%", inductor=False)
    assert all(len(plan.plan.schedule) > len(plan.plan.graph) for plan in shares)


class Wide(WithParts, up=(32, 64), down=(64, 32)):
    """A module whose backward needs more memory besides the saved tensors than others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@pytest.mark.slow
def test_a_graph_that_is_not_the_last_saves_at_most_its_share() -> None:
    """Its share of a percentage, its outputs included."""
    block = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(6)))
    block.append(Wide())
    case = Case(block, (torch.randn(512, 32),), loss=lambda out: out.sum())
    (saving,) = plans_of(case, "80%", inductor=False)
    assert saving.saved_bytes <= 0.8 * saving.baseline_saved_bytes
    assert saving.plan.overhead > 0
    graph = saving.plan.graph
    assert graph.boundary is not None
    assert graph.operations[graph.boundary].workspace_bytes > 0


def test_identical_blocks_are_solved_once() -> None:
    first, second = (
        nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16), nn.Tanh()) for _ in range(2)
    )
    before = len(remat.compiled_plans())
    for block in (first, second):
        torch._dynamo.reset()
        run = remat.compile(block, "100%", inductor=False)
        run(torch.randn(256, 16)).sum().backward()
    one, other = remat.compiled_plans()[before:]
    assert one is not other
    assert one.plan is other.plan


# -- options and errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, BudgetError, "needs a budget"),
        ({"bugdet": "60%"}, BudgetError, "'bugdet' is no option"),
        ({"budget": "60%", "gap": 2}, ValueError, "Auto: gap is 2"),
        ({"budget": "60%", "max_autotuned": True}, ValueError, "near are max_autotune"),
        ({"budget": "60%", "inductor": 1}, ValueError, "inductor is 1; it is True or False"),
        ({"budget": "60%", "custom_partitioner_fn": 1}, ValueError, "is set by remat"),
        ({"budget": 10, "strategy": remat.Exact(), "gap": 0.1}, ValueError, "give gap to the"),
    ],
)
def test_an_unknown_option_is_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        read_options(options)
    if "budget" in options:
        budget = options.pop("budget")
        with pytest.raises(error, match=words):
            remat.compile(nn.Linear(2, 2), budget, **options)


def test_options_of_inductor_are_passed_on() -> None:
    remat_options, inductor_options = read_options(
        {"budget": "2GiB", "reserve": "1GiB", "max_autotune": True}
    )
    assert inductor_options == {"max_autotune": True}
    assert remat_options.limits.available_bytes(10**12) == 2**30
    assert remat_options.strategy == remat.Auto(time_limit=8.0)
    assert remat_options.planning_s == 8.0
    assert read_options({"budget": "2GiB", "time_limit": 5.0})[0].planning_s is None


def test_reading_a_large_graph_does_not_use_up_the_time_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once, no time was left after Inductor's kernels were read to find the smallest schedule."""
    monkeypatch.setattr(candidates, "MIN_SOLVE_S", 1e-9)
    numbers = random.Random(2)
    graph = chain(40)
    sized = tuple(replace(v, size_bytes=numbers.randint(1, 1000)) for v in graph.values)
    graph, budget_bytes = replace(graph, values=sized), 2793
    assert budget_bytes == peak_lower_bound_bytes(graph)
    options, _ = read_options({"budget": "60%", "gap": 0.99})
    assert options.planning_s is not None
    clock = Clock(options.planning_s, started_at=time.monotonic() - 60)
    solver = candidates.GraphSolver(options.strategy, clock, None, "")
    with pytest.raises(SolverTimeout):
        solver.plan_within(graph, budget_bytes, 1e-9)
    assert solver.solve(graph, budget_bytes).peak_bytes <= budget_bytes


def test_inference_is_not_planned() -> None:
    case = PLAIN["tied"]()
    before = len(remat.compiled_plans())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # where no plan was made before
        expected = case.model(*case.args)
        actual = remat.compile(case.model, "50%", inductor=False)(*case.args)
    assert torch.equal(actual, expected)
    assert len(remat.compiled_plans()) == before


# -- symbolic sizes -------------------------------------------------------------------------------


@pytest.mark.parametrize("marked", [False, True])
def test_a_plan_is_for_the_largest_size(marked: bool) -> None:
    """For the maximum that was marked, otherwise for a bound above the first call's size."""
    linear = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    before = remat.compiled_plans()
    run = remat.compile(linear, "100%", inductor=False, dynamic=None if marked else True)
    for rows in (20, 60, 33, 64):
        x = torch.randn(rows, 8)
        if marked:
            torch._dynamo.mark_dynamic(x, 0, min=2, max=96)
        run(x).sum().backward()
    (plan,) = remat.compiled_plans()[len(before) :]
    sizes = [v.size_bytes for v in plan.plan.graph.values]
    assert max(sizes) == (96 if marked else 64) * 8 * 4
    if not marked:
        run(torch.randn(65, 8)).sum().backward()
        assert len(remat.compiled_plans()) == len(before) + 2


@pytest.mark.slow
def test_a_step_that_does_not_fit_at_twice_its_size_is_planned_for_its_own() -> None:
    linear = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    before = len(remat.compiled_plans())
    run = remat.compile(linear, 400_000, inductor=False, dynamic=True)
    run(torch.randn(2000, 8)).sum().backward()
    (plan,) = remat.compiled_plans()[before:]
    assert max(v.size_bytes for v in plan.plan.graph.values) == 2000 * 8 * 4
    with pytest.raises(Exception, match="Pass a budget of at least"):
        run(torch.randn(20_000, 8)).sum().backward()


@needs_compiler
@pytest.mark.slow
def test_lengths_never_exceed_the_budget() -> None:
    """Fifty batches of ten lengths: three compilations at most. The longest steps and every
    fifth are metered."""
    case = blocks()
    model = case.model.eval()  # no dropout: eager mode samples other numbers
    lengths = [48, 64, 80, 96, 120, 160, 200, 280, 400, 512]
    longest = torch.randint(0, 50, (8, 512))
    plain = torch.compile(model)
    plain_peak = measured_peak(Case(model, (longest,), loss=lambda out: out), plain)
    torch._dynamo.reset()
    budget = plain_peak * 7 // 10
    before = len(remat.compiled_plans())
    run = remat.compile(model, budget, dynamic=True, time_limit=5.0)
    torch.manual_seed(0)
    order = [int(i) for _ in range(5) for i in torch.randperm(10)]
    assert len(order) == 50
    for number, place in enumerate(order):
        ids = torch.randint(0, 50, (8, lengths[place]))
        one = Case(model, (ids,), loss=lambda out: out)
        assert_same([step(one, run)], [step(one, model)], 1e-5)
        if number % 5 == 0 or lengths[place] == 512:
            assert measured_peak(one, run) <= budget
    assert len(remat.compiled_plans()) - before <= 3
