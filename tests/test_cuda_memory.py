"""Budgets for CUDA devices: what libraries hold, what the allocator makes of a plan, and what
has to be left to an optimizer. No device is needed; traces say that they are for one."""

from __future__ import annotations

import gzip
import json
import threading
import weakref
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import remat
from remat.allocator.fitting import has_expandable_segments, solve_within
from remat.allocator.prediction import Prediction, predict, uses_cublas
from remat.errors import BudgetError
from remat.frontend.memory import auto_budget, device_memory
from remat.frontend.memory.reserve import Reserved, reserved
from remat.limits.budget import Budget, share_of_baseline
from remat.strategies import Solution

HOPPER_BYTES = 64 << 20
STRATEGY = remat.Auto(gap=0.02, time_limit=10.0)


@cache
def readme_trace() -> remat.Trace:
    """The README's own example, as it would be on a Hopper GPU."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=2000, use_cache=False)
    ids = torch.randint(0, 2000, (4, 128))
    traced = remat.trace(GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids})
    traced = traced.replace(device="cuda:0", library_bytes=HOPPER_BYTES)
    return remat.measure(traced, remat.Roofline("h200"))


@cache
def recorded_step() -> tuple[remat.Trace, remat.Schedule]:
    """A small GPT's, captured on CUDA; see `test_allocator.py`."""
    path = sorted((Path(__file__).parent / "allocator").glob("torch-*.json.gz"))[-1]
    recordings = json.loads(gzip.decompress(path.read_bytes()))
    found = next(r for r in recordings if r["name"].startswith("plan gpt"))
    trace = remat.Trace.from_json(json.dumps(found["trace"]))
    return trace, remat.Schedule(tuple(found["runs"]))


# -- percentages ----------------------------------------------------------------------------


def test_seventy_per_cent_of_the_readmes_example_is_feasible_on_hopper():
    plan = remat.solve(readme_trace(), "70%", STRATEGY)
    assert plan.share <= 0.7
    assert plan.budget_bytes == HOPPER_BYTES + (plan.baseline_peak_bytes - HOPPER_BYTES) * 7 // 10
    with pytest.raises(remat.InfeasibleBudget):  # what 70% meant before
        remat.solve(readme_trace(), plan.baseline_peak_bytes * 70 // 100, STRATEGY)
    assert f"{plan.share:.1%} of" in plan.describe()
    assert "64.0 MiB libraries' and in no percentage" in plan.describe()
    assert f"peak, {plan.share:.1%} of" in plan.to_html()
    again = remat.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.share == plan.share


@given(st.integers(1, 10**12), st.integers(0, 10**12), st.integers(1, 400))
def test_a_share_is_the_percentage_that_it_was(rest: int, library: int, percent: int):
    baseline = library + rest
    try:
        found = Budget.parse(f"{percent}%").in_bytes(baseline, library)
    except BudgetError:
        assert rest * percent < 100
        return
    assert isinstance(found, int)
    share = share_of_baseline(found, baseline_bytes=baseline, library_bytes=library)
    assert share == pytest.approx(percent / 100, abs=1.01 / rest)


def test_the_graph_knows_what_libraries_hold():
    graph = readme_trace().graph()
    assert graph.library_bytes == HOPPER_BYTES < graph.constant_bytes
    with pytest.raises(remat.GraphError, match="libraries hold 5 bytes"):
        remat.Graph((), (), library_bytes=5)


# -- libraries ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("configuration", "expected"),
    [
        ("", None),
        ("junk", None),
        (":4096:8", 33554432),
        (":16:8", 131072),
        (":4096:2:16:8", 8519680),
        (":0:0", 0),
    ],
)
def test_workspaces_are_configured_as_torch_reads_it(configuration: str, expected: int | None):
    """What `torch.backends.cuda.cublas_workspace_size()` of 2.15 said under each of them."""
    assert device_memory.configured_workspace_bytes(configuration) == expected
    assert [device_memory.default_workspace_bytes(major) for major in (7, 8, 9, 10, 12)] == [
        *(8519680,) * 2,
        *(33554432,) * 3,
    ]


def test_libraries_hold_nothing_without_products_or_without_cuda():
    assert device_memory.library_bytes("cpu", ["aten.mm.default"]) == 0
    assert (
        device_memory.library_bytes("cuda", ["aten.relu.default", "aten.convolution.default"]) == 0
    )
    assert [t for t in ("aten.mm.default", "aten.mul.Tensor", "aten.bmm.default") if uses_cublas(t)]
    assert not uses_cublas("aten.mul.Tensor")


# -- what is allocated ----------------------------------------------------------------------


def test_a_plan_tells_what_the_allocator_makes_of_it():
    plan = remat.solve(readme_trace(), "70%", STRATEGY)
    found = Prediction.of_plan(plan)
    assert found == predict(readme_trace(), plan.schedule)
    assert found.requested_bytes <= plan.peak_bytes == found.expandable_allocated_bytes
    assert found.allocated_bytes <= found.reserved_bytes
    assert "reserved; with expandable segments" in plan.describe()
    on_cpu = remat.solve(readme_trace().replace(device="cpu"), "100%", remat.KeepAll())
    assert Prediction.of_plan(on_cpu) is None


def test_a_budget_is_kept_as_the_allocator_counts():
    trace, schedule = recorded_step()
    full = remat.solve(trace, remat.simulate(trace.graph(), schedule).peak_bytes, STRATEGY)
    full = replace(full, budget_bytes=full.peak_bytes)
    budget = full.peak_bytes
    assert predict(trace, full.schedule).allocated_bytes > budget, "or there is nothing to see"
    asked: list[int | float | str] = []

    def solve(budget: Budget) -> remat.Plan:
        asked.append(budget.given)
        is_first = budget.size_bytes == full.peak_bytes
        return full if is_first else remat.solve(trace, budget, STRATEGY)

    plan = solve_within(trace, Budget.parse(budget), solve)
    found = Prediction.of_plan(plan)
    assert found is not None
    assert found.allocated_bytes <= budget
    assert plan.budget_bytes == asked[-1]
    assert plan.budget_bytes < budget == plan.stats["asked_budget_bytes"]
    assert "asked for, so that blocks fit as well" in plan.describe()
    assert len(asked) <= 4
    asked.clear()
    loose = solve_within(trace, Budget.parse(budget), solve, is_expandable=True)
    assert asked == [budget] == [loose.budget_bytes]
    assert loose.time_s <= plan.time_s
    asked.clear()
    for unbounded in ("min", "100%"):
        solve_within(trace, Budget.parse(unbounded), solve)
    assert asked == ["min", "100%"]


def test_where_nothing_fits_the_plan_tells_the_excess():
    """A strategy that knows one schedule cannot make room."""
    trace, schedule = recorded_step()
    plan = remat.solve(trace, "100%", remat.KeepAll())
    budget = Budget.parse(plan.peak_bytes)
    found = solve_within(trace, budget, lambda b: remat.solve(trace, b, remat.KeepAll()))
    assert found.schedule == plan.schedule
    assert "asked_budget_bytes" not in found.stats
    assert schedule != plan.schedule


def test_the_environment_says_which_segments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    assert has_expandable_segments()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert not has_expandable_segments()


def test_a_cancelled_solve_is_not_begun_again():
    trace, schedule = recorded_step()
    budget_bytes = remat.simulate(trace.graph(), schedule).peak_bytes
    cancel, asked = threading.Event(), list[int | None]()

    def solve(budget: Budget) -> remat.Plan:
        asked.append(budget.size_bytes)
        cancel.set()
        return remat.Plan.of(trace.graph(), budget_bytes, Solution(schedule), {})

    plan = solve_within(trace, Budget.parse(budget_bytes), solve, cancel=cancel)
    assert asked == [budget_bytes] == [plan.budget_bytes]
    assert Prediction.of_plan(plan) == predict(trace, schedule)


def test_segments_are_kept_within_what_the_device_has():
    trace, schedule = recorded_step()
    budget = Budget.parse(remat.simulate(trace.graph(), schedule).peak_bytes)
    wide = solve_within(trace, budget, lambda b: remat.solve(trace, b, STRATEGY))
    before = Prediction.of_plan(wide)
    assert before is not None
    plan = solve_within(
        trace,
        budget,
        lambda b: remat.solve(trace, b, STRATEGY),
        reserved_bytes=before.reserved_bytes - (60 << 20),
    )
    after = Prediction.of_plan(plan)
    assert after is not None
    assert after.reserved_bytes < before.reserved_bytes


# -- what is reserved -----------------------------------------------------------------------


def parameters() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((300, 40), (40,), (3, 5, 7, 9), ())
    return [nn.Parameter(torch.randn(shape)) for shape in shapes]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("SGD", {"lr": 0.1}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {}),
        ("AdamW", {"amsgrad": True}),
        ("AdamW", {"foreach": True}),
        ("NAdam", {}),
        ("RMSprop", {"momentum": 0.9, "centered": True}),
        ("Adagrad", {}),
        ("Adadelta", {}),
        ("Adafactor", {}),
    ],
)
def test_an_optimizers_state_is_foreseen(kind: str, options: dict[str, Any]):
    optimizer = getattr(torch.optim, kind)(parameters(), **options)
    foreseen = reserved(optimizer)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    there = reserved(optimizer)
    assert there == Reserved(foreseen.total_bytes, 0)
    assert (foreseen.missing_bytes == foreseen.total_bytes) or kind == "Adagrad"
    assert (there.total_bytes > 0) == (options != {"lr": 0.1})


def test_an_optimizer_that_cannot_be_foreseen_is_refused():
    with pytest.raises(BudgetError, match=r"state of LBFGS cannot be told.*pass its bytes"):
        reserved(torch.optim.LBFGS(parameters()))


@pytest.mark.parametrize("wrong", ["60%", "min", "auto", True, 2.5, "lots", torch.optim.Adam])
def test_a_reserve_is_bytes_or_an_optimizer(wrong: Any):
    with pytest.raises(BudgetError):
        reserved(wrong)
    assert reserved(None) == reserved(0) == Reserved()
    assert reserved("2GiB") == Reserved(2 << 30, 2 << 30)


def test_a_budget_is_less_by_what_is_reserved():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4, 8)
    costs = remat.Roofline("cpu")
    module = remat.optimize(model, "10MiB", (x,), costs=costs, reserve="4MiB")
    assert module.plan is not None
    assert module.plan.budget_bytes == 6 << 20
    assert "budget    6.00 MiB, beside 4.00 MiB reserved" in module.plan.describe()
    adam = torch.optim.Adam(model.parameters())
    module = remat.optimize(model, "10MiB", (x,), costs=costs, reserve=adam)
    assert module.plan is not None
    assert module.plan.budget_bytes == (10 << 20) - reserved(adam).total_bytes < 10 << 20
    with pytest.raises(
        remat.InfeasibleBudget, match=r"without the 10\.00 MiB that are reserved"
    ) as error:
        remat.optimize(model, "10MiB", (x,), costs=costs, reserve=(10 << 20) - 300)
    enough = error.value.min_feasible_bytes
    assert enough is not None
    assert remat.optimize(model, enough, (x,), costs=costs, reserve=(10 << 20) - 300).plan
    with pytest.raises(BudgetError, match="is all of the budget"):
        remat.optimize(model, "1MiB", (x,), costs=costs, reserve="1MiB")
    with pytest.raises(BudgetError, match="nothing to reserve of it"):
        remat.optimize(model, "60%", reserve=adam)
    with pytest.raises(BudgetError, match="is all of the budget"):
        remat.optimize(model, "4KiB", reserve="1GiB")  # at once, not at the first call


def test_an_estimate_leaves_what_is_reserved():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(4, 64)
    plain = remat.estimate(model, (x,))
    found = remat.estimate(model, (x,), reserve="1MiB")
    assert found.peak_bytes == plain.peak_bytes
    assert plain.fits(plain.peak_bytes)
    assert not found.fits(plain.peak_bytes + (1 << 20) - 1)
    assert found.fits(plain.peak_bytes + (1 << 20))
    assert "reserved  1.00 MiB; with the peak" in found.describe()


# -- what is free ---------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean()


def test_auto_counts_the_model_once(monkeypatch: pytest.MonkeyPatch):
    """Free memory is read while the model lives, so what it holds is not free, and is added."""
    models: list[weakref.ref[nn.Module]] = []
    alive: list[bool] = []

    def free(device: object) -> int:
        alive.append(models[-1]() is not None)
        return 1_000_000

    def make(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
        model = Wide()
        models.append(weakref.ref(model))
        return model, (torch.zeros(8 * batch, 64),)

    monkeypatch.setattr(device_memory, "free_bytes", free)
    costs, optimizer = remat.Roofline("cpu"), torch.optim.SGD(parameters(), lr=0.1, momentum=0.9)
    strategy = remat.KeepAll()
    found = remat.max_batch(make, "auto", costs=costs, strategy=strategy)
    assert alive == [True]
    held = sum(p.numel() * 4 for p in Wide().parameters()) + 8 * 64 * 4
    assert found.budget_bytes == int(1_000_000 * (1 - auto_budget.MARGIN)) + held
    less = remat.max_batch(make, "auto", costs=costs, strategy=strategy, reserve=optimizer)
    assert found.budget_bytes - less.budget_bytes == reserved(optimizer).missing_bytes > 0


@pytest.mark.parametrize("most", [1, 3, 6])
@pytest.mark.parametrize("start", [1, 16])
def test_no_memory_for_a_batch_means_that_it_does_not_fit(most: int, start: int):
    model = Wide()

    def make(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
        if batch > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model, (torch.zeros(8 * batch, 64),)

    costs, strategy = remat.Roofline("cpu"), remat.KeepAll()
    found = remat.max_batch(make, "1GiB", start=start, costs=costs, strategy=strategy)
    assert found.batch == found.eager_batch == most
    assert not found.is_proved
    assert found.attempts[-1].batch == most + 1
    assert "model_fn ran out of memory" in found.describe()


def test_no_memory_for_any_batch_and_other_errors_are_errors():
    def full(batch: int) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    def broken(batch: int) -> Any:
        raise RuntimeError("shapes differ")

    with pytest.raises(remat.InfeasibleBudget, match="not even a batch of 1"):
        remat.max_batch(full, "1GiB")
    with pytest.raises(RuntimeError, match="shapes differ"):
        remat.max_batch(broken, "1GiB")
