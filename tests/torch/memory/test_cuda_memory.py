"""Budgets for CUDA devices: memory of libraries, the allocator's overhead, and the reserve for
an optimizer. No device is needed; the traces are for one."""

from __future__ import annotations

import gzip
import json
import threading
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tests.helpers.paths import DATA
from tests.helpers.training.models import WithParts
from torch import Tensor, nn

import remat
from remat.allocator.budget_fitting import plan_within_allocator_budget, uses_expandable_segments
from remat.allocator.prediction import predict_allocator_peaks, uses_cublas
from remat.errors import BudgetError, GraphError
from remat.frontend.memory import device_memory
from remat.frontend.memory.device_memory import ReserveSize, reserve_size
from remat.limits.budget import Budget, share_of_baseline
from remat.strategies import KeepAll, Solution

HOPPER_BYTES = 64 << 20
STRATEGY = remat.Auto(gap=0.02, time_limit=10.0)


@cache
def readme_trace() -> remat.Trace:
    """Return the trace of the README's example for a Hopper GPU."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=128, n_head=4, vocab_size=2000, use_cache=False)
    ids = torch.randint(0, 2000, (4, 128))
    traced = remat.trace(GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids})
    traced = traced.replace(device="cuda:0", library_bytes=HOPPER_BYTES)
    return remat.measure(traced, remat.Roofline("h200"))


@cache
def recorded_step() -> tuple[remat.Trace, remat.Schedule]:
    """Return a small GPT's step, captured on CUDA; see `tests/solver/allocator/test_replay.py`."""
    path = sorted((DATA / "allocator").glob("torch-*.json.gz"))[-1]
    recordings = json.loads(gzip.decompress(path.read_bytes()))
    recording = next(r for r in recordings if r["name"].startswith("plan gpt"))
    trace = remat.Trace.from_json(json.dumps(recording["trace"]))
    return trace, remat.Schedule(tuple(recording["runs"]))


# -- percentages ----------------------------------------------------------------------------


def test_the_readmes_example_is_feasible_at_70_percent_on_hopper():
    plan = remat.solve(readme_trace(), "70%", STRATEGY)
    assert plan.share <= 0.7
    assert plan.budget_bytes == HOPPER_BYTES + (plan.baseline_peak_bytes - HOPPER_BYTES) * 7 // 10
    with pytest.raises(remat.InfeasibleBudget):  # the meaning of 70% in earlier versions
        remat.solve(readme_trace(), plan.baseline_peak_bytes * 70 // 100, STRATEGY)
    assert f"{plan.share:.1%} of" in plan.describe()
    assert "64.0 MiB of libraries, not in the percentage" in plan.describe()
    assert f"peak, {plan.share:.1%} of" in plan.to_html()
    decoded = remat.Plan.from_json(plan.to_json())
    assert decoded == plan
    assert decoded.share == plan.share


@hypothesis.given(st.integers(1, 10**12), st.integers(0, 10**12), st.integers(1, 400))
def test_a_percentage_is_unchanged_by_library_memory(rest: int, library: int, percent: int):
    baseline = library + rest
    try:
        budget_bytes = Budget.parse(f"{percent}%").in_bytes(baseline, library)
    except BudgetError:
        assert rest * percent < 100
        return
    assert isinstance(budget_bytes, int)
    share = share_of_baseline(budget_bytes, baseline_bytes=baseline, library_bytes=library)
    assert share == pytest.approx(percent / 100, abs=1.01 / rest)


def test_the_graph_includes_the_memory_of_libraries():
    graph = readme_trace().graph()
    assert graph.library_bytes == HOPPER_BYTES < graph.constant_bytes
    with pytest.raises(GraphError, match="libraries hold 5 bytes"):
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
def test_workspace_settings_are_parsed_as_torch_does(configuration: str, expected: int | None):
    """The expected sizes are those of `torch.backends.cuda.cublas_workspace_size()` of torch
    2.15."""
    assert device_memory.configured_cublas_workspace_bytes(configuration) == expected
    assert [device_memory.default_cublas_workspace_bytes(major) for major in (7, 8, 9, 10, 12)] == [
        *(8519680,) * 2,
        *(33554432,) * 3,
    ]


def test_libraries_allocate_nothing_without_matrix_products_or_cuda():
    assert device_memory.library_bytes("cpu", ["aten.mm.default"]) == 0
    assert (
        device_memory.library_bytes("cuda", ["aten.relu.default", "aten.convolution.default"]) == 0
    )
    assert [t for t in ("aten.mm.default", "aten.mul.Tensor", "aten.bmm.default") if uses_cublas(t)]
    assert not uses_cublas("aten.mul.Tensor")


# -- allocated bytes ------------------------------------------------------------------------


def test_a_plan_predicts_its_allocated_and_reserved_bytes():
    plan = remat.solve(readme_trace(), "70%", STRATEGY)
    prediction = plan.allocator
    assert prediction == predict_allocator_peaks(readme_trace(), plan.schedule)
    assert (
        prediction.requested_peak_bytes
        <= plan.peak_bytes
        == prediction.expandable_allocated_peak_bytes
    )
    assert prediction.allocated_peak_bytes <= prediction.reserved_peak_bytes
    assert "reserved; with expandable segments" in plan.describe()
    on_cpu = remat.solve(readme_trace().replace(device="cpu"), "100%", KeepAll())
    assert on_cpu.allocator is None


def test_a_budget_holds_for_the_allocated_bytes():
    trace, schedule = recorded_step()
    full = remat.solve(trace, remat.simulate(trace.graph(), schedule).peak_bytes, STRATEGY)
    full = replace(full, budget_bytes=full.peak_bytes)
    budget = full.peak_bytes
    assert predict_allocator_peaks(trace, full.schedule).allocated_peak_bytes > budget, (
        "otherwise there is nothing to test"
    )
    requested_budgets: list[int | float | str] = []

    def solve(budget: Budget) -> remat.Plan:
        requested_budgets.append(budget.requested)
        is_first = budget.size_bytes == full.peak_bytes
        return full if is_first else remat.solve(trace, budget, STRATEGY)

    plan = plan_within_allocator_budget(trace, Budget.parse(budget), solve)
    prediction = plan.allocator
    assert prediction is not None
    assert prediction.allocated_peak_bytes <= budget
    assert plan.budget_bytes == requested_budgets[-1]
    assert plan.budget_bytes < budget == plan.stats["requested_budget_bytes"]
    assert ", to fit the allocator" in plan.describe()
    assert len(requested_budgets) <= 4
    requested_budgets.clear()
    loose = plan_within_allocator_budget(trace, Budget.parse(budget), solve, is_expandable=True)
    assert requested_budgets == [budget] == [loose.budget_bytes]
    assert loose.time_s <= plan.time_s
    requested_budgets.clear()
    for unbounded in ("min", "100%"):
        plan_within_allocator_budget(trace, Budget.parse(unbounded), solve)
    assert requested_budgets == ["min", "100%"]


def test_where_nothing_fits_the_plan_reports_the_excess():
    """A strategy that has only one schedule cannot lower the peak."""
    trace, schedule = recorded_step()
    plan = remat.solve(trace, "100%", KeepAll())
    budget = Budget.parse(plan.peak_bytes)
    plan_over_budget = plan_within_allocator_budget(
        trace, budget, lambda b: remat.solve(trace, b, KeepAll())
    )
    assert plan_over_budget.schedule == plan.schedule
    assert "requested_budget_bytes" not in plan_over_budget.stats
    assert schedule != plan.schedule


def test_the_environment_variable_selects_expandable_segments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    assert uses_expandable_segments()
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert not uses_expandable_segments()


def test_a_cancelled_solve_is_not_restarted():
    trace, schedule = recorded_step()
    budget_bytes = remat.simulate(trace.graph(), schedule).peak_bytes
    cancel, requested_budgets = threading.Event(), list[int | None]()

    def solve(budget: Budget) -> remat.Plan:
        requested_budgets.append(budget.size_bytes)
        cancel.set()
        return remat.Plan.of(trace.graph(), budget_bytes, Solution(schedule), {})

    plan = plan_within_allocator_budget(trace, Budget.parse(budget_bytes), solve, cancel=cancel)
    assert requested_budgets == [budget_bytes] == [plan.budget_bytes]
    assert plan.allocator == predict_allocator_peaks(trace, schedule)


def test_segments_stay_within_the_memory_of_the_device():
    trace, schedule = recorded_step()
    budget = Budget.parse(remat.simulate(trace.graph(), schedule).peak_bytes)
    wide = plan_within_allocator_budget(trace, budget, lambda b: remat.solve(trace, b, STRATEGY))
    before = wide.allocator
    assert before is not None
    plan = plan_within_allocator_budget(
        trace,
        budget,
        lambda b: remat.solve(trace, b, STRATEGY),
        reserved_bytes=before.reserved_peak_bytes - (60 << 20),
    )
    after = plan.allocator
    assert after is not None
    assert after.reserved_peak_bytes < before.reserved_peak_bytes


# -- the reserve ----------------------------------------------------------------------------


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
def test_the_size_of_an_optimizers_state_is_predicted(kind: str, options: dict[str, Any]):
    optimizer = getattr(torch.optim, kind)(parameters(), **options)
    predicted = reserve_size(optimizer)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    allocated = reserve_size(optimizer)
    assert allocated == ReserveSize(predicted.total_bytes, 0)
    assert (predicted.unallocated_bytes == predicted.total_bytes) or kind == "Adagrad"
    assert (allocated.total_bytes > 0) == (options != {"lr": 0.1})


def test_an_optimizer_of_unpredictable_size_is_refused():
    with pytest.raises(BudgetError, match=r"state of LBFGS cannot be predicted.*pass its bytes"):
        reserve_size(torch.optim.LBFGS(parameters()))


@pytest.mark.parametrize("wrong", ["60%", "min", "auto", True, 2.5, "lots", torch.optim.Adam])
def test_a_reserve_is_bytes_or_an_optimizer(wrong: Any):
    with pytest.raises(BudgetError):
        reserve_size(wrong)
    assert reserve_size(None) == reserve_size(0) == ReserveSize()
    assert reserve_size("2GiB") == ReserveSize(2 << 30, 2 << 30)


def test_the_reserve_is_subtracted_from_the_budget():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(4, 8)
    costs = remat.Roofline("cpu")
    module = remat.optimize(model, "10MiB", (x,), costs=costs, reserve="4MiB")
    assert module.plan is not None
    assert module.plan.budget_bytes == 6 << 20
    assert "budget    6.00 MiB, plus 4.00 MiB reserved" in module.plan.describe()
    adam = torch.optim.Adam(model.parameters())
    module = remat.optimize(model, "10MiB", (x,), costs=costs, reserve=adam)
    assert module.plan is not None
    assert module.plan.budget_bytes == (10 << 20) - reserve_size(adam).total_bytes < 10 << 20
    with pytest.raises(remat.InfeasibleBudget, match=r"Another 10\.00 MiB are reserved") as error:
        remat.optimize(model, "10MiB", (x,), costs=costs, reserve=(10 << 20) - 300)
    enough = error.value.min_feasible_bytes
    assert enough is not None
    assert remat.optimize(model, enough, (x,), costs=costs, reserve=(10 << 20) - 300).plan
    with pytest.raises(BudgetError, match="needs a budget in bytes"):
        remat.optimize(model, "60%", reserve=adam)
    with pytest.raises(BudgetError, match="leaves nothing for the step"):
        remat.optimize(model, "4KiB", reserve="1GiB")  # at once, not at the first call


def test_an_estimate_takes_the_reserve_into_account():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), torch.randn(4, 64)
    plain = remat.estimate(model, (x,))
    estimate = remat.estimate(model, (x,), reserve="1MiB")
    assert estimate.peak_bytes == plain.peak_bytes
    assert plain.fits(plain.peak_bytes)
    assert not estimate.fits(plain.peak_bytes + (1 << 20) - 1)
    assert estimate.fits(plain.peak_bytes + (1 << 20))
    assert "reserved  1.00 MiB; with the peak" in estimate.describe()


# -- free memory ----------------------------------------------------------------------------


class Wide(
    WithParts, layers=lambda: nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))
):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).mean()


@pytest.mark.slow
def test_auto_counts_the_memory_of_the_model_once(monkeypatch: pytest.MonkeyPatch):
    """Free memory is read while the model exists: its own bytes are not free, and are added."""
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
    strategy = KeepAll()
    largest = remat.max_batch(make, "auto", costs=costs, strategy=strategy)
    assert alive == [True]
    model_bytes = sum(p.numel() * 4 for p in Wide().parameters()) + 8 * 64 * 4
    assert largest.budget_bytes == int(1_000_000 * (1 - device_memory.MARGIN)) + model_bytes
    less = remat.max_batch(make, "auto", costs=costs, strategy=strategy, reserve=optimizer)
    assert largest.budget_bytes - less.budget_bytes == reserve_size(optimizer).unallocated_bytes > 0


@pytest.mark.parametrize("most", [1, 3, 6])
@pytest.mark.parametrize("start", [1, 16])
def test_running_out_of_memory_means_that_a_batch_does_not_fit(most: int, start: int):
    model = Wide()

    def make(batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
        if batch > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return model, (torch.zeros(8 * batch, 64),)

    costs, strategy = remat.Roofline("cpu"), KeepAll()
    largest = remat.max_batch(make, "1GiB", start=start, costs=costs, strategy=strategy)
    assert largest.batch == largest.eager_batch == most
    assert not largest.is_proved
    assert largest.attempts[-1].batch == most + 1
    assert "model_fn ran out of memory" in largest.describe()


def test_running_out_of_memory_for_every_batch_is_an_error():
    def full(batch: int) -> Any:
        raise RuntimeError("CUDA error: out of memory")

    def broken(batch: int) -> Any:
        raise RuntimeError("shapes differ")

    with pytest.raises(remat.InfeasibleBudget, match="not even a batch of 1"):
        remat.max_batch(full, "1GiB")
    with pytest.raises(RuntimeError, match="shapes differ"):
        remat.max_batch(broken, "1GiB")
