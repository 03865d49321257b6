"""The option `infeasible`, in every door: for a budget that no plan fits, "smallest" gives a plan
with the peak of "min", one warning, and the right gradients; the default stays an error."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.command_line import quick
from tests.helpers.training.models import WithParts
from torch import nn

import remat
from remat.errors import BudgetWarning, InfeasibleBudget
from remat.frontend.compile.compat import cause_of_type
from remat.frontend.emit.tags import MemoryPolicy
from remat.plan import Plan

COSTS = remat.Roofline("cpu")
STRATEGY = remat.Auto(gap=0.5, peak_gap=0.3, time_limit=10)
OPTIONS: dict[str, Any] = {"strategy": STRATEGY, "costs": COSTS, "split": "off"}


class Block(WithParts, wide=(16, 64), narrow=(64, 16)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(F.gelu(self.wide(x)))


class Net(WithParts, blocks=lambda: nn.ModuleList(Block() for _ in range(2))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch() -> torch.Tensor:
    return torch.randn(256, 16, generator=torch.Generator().manual_seed(1))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The peak of a plan, and the gradients of its step, by parameter; None if none was run."""

    peak_bytes: int
    gradients: list[torch.Tensor | None] | None = None


def ran(model: nn.Module, step: Callable[[torch.Tensor], Any]) -> list[torch.Tensor | None]:
    """Return the gradients of one step."""
    step(batch()).backward()
    return [p.grad for p in model.parameters()]


def traced() -> remat.Trace:
    return remat.measure(remat.trace(net(), (batch(),)), COSTS)


def solved(budget: str, **options: Any) -> Outcome:
    return Outcome(remat.solve(traced(), budget, STRATEGY, **options).peak_bytes)


def solved_in_pieces(budget: str, **options: Any) -> Outcome:
    step = remat.solve_step(traced(), budget, STRATEGY, split=2, **options)
    return Outcome(step.plan.peak_bytes)


def optimized(budget: str, **options: Any) -> Outcome:
    model = net()
    step = remat.optimize(model, budget, **OPTIONS, **options)
    return Outcome(_peak(step, ran(model, step)), [p.grad for p in model.parameters()])


def optimized_for_examples(budget: str, **options: Any) -> Outcome:
    model = net()
    step = remat.optimize(model, budget, (batch(),), **OPTIONS, **options)
    return Outcome(_peak(step, ran(model, step)), [p.grad for p in model.parameters()])


def _peak(step: Any, _: object) -> int:
    return step.plan.peak_bytes


def enabled(scope: str) -> Callable[..., Outcome]:
    def door(budget: str, **options: Any) -> Outcome:
        model = net()
        remat.enable(model, budget, scope=scope, **OPTIONS, **options)
        gradients = ran(model, model)
        return Outcome(remat.plans(model)[-1].peak_bytes, gradients)

    return door


def enabled_with_calls_in_flight(budget: str, **options: Any) -> Outcome:
    model = net()
    remat.enable(model, budget, scope="model", in_flight=2, **OPTIONS, **options)
    first, second = model(batch()), model(batch())
    ((first + second) / 2).backward()
    return Outcome(remat.plans(model)[-1].peak_bytes, [p.grad for p in model.parameters()])


def called_back(
    start: Callable[[nn.Module, str, dict[str, Any]], object],
) -> Callable[..., Outcome]:
    def door(budget: str, **options: Any) -> Outcome:
        model = net()
        start(model, budget, {"scope": "model", **OPTIONS, **options})
        return Outcome(*reversed((ran(model, model), remat.plans(model)[-1].peak_bytes)))

    return door


def transformers_callback(model: nn.Module, budget: str, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("remat.integrations.transformers")
    callback = transformers.RematCallback(budget, **options)
    callback.on_train_begin(None, None, None, model=model)


def lightning_callback(model: nn.Module, budget: str, options: dict[str, Any]) -> None:
    pytest.importorskip("pytorch_lightning")
    from remat.integrations.lightning import RematCallback

    RematCallback(budget, **options).on_fit_start(None, model)


def compiled(budget: str, **options: Any) -> Outcome:
    torch._dynamo.reset()
    model = net()
    step = remat.compile(model, budget, strategy=STRATEGY, split="off", inductor=False, **options)
    gradients = ran(model, step)
    return Outcome(remat.compiled_plans()[-1].plan.peak_bytes, gradients)


def compiled_by_inductor(budget: str, **options: Any) -> Outcome:
    torch._dynamo.reset()
    model = net()
    step = remat.compile(model, budget, strategy=STRATEGY, **options)
    gradients = ran(model, step)
    return Outcome(remat.compiled_plans()[-1].planned_bytes, gradients)


def partitioned(budget: str, **options: Any) -> Outcome:
    torch._dynamo.reset()
    model = net()
    partitioner = remat.Partitioner(budget, strategy=STRATEGY, **options)
    gradients = ran(model, torch.compile(model, options=partitioner.settings()))
    assert partitioner.compiled is not None
    return Outcome(partitioner.compiled.planned_bytes, gradients)


def emitted(budget: str, **options: Any) -> Outcome:
    policies = remat.emit(net(), budget, (batch(),), compare=False, **options)
    return Outcome(policies.peak_bytes)


def tagged(budget: str, **options: Any) -> Outcome:
    from tests.torch.emit.test_tags import step_of

    gm, _ = step_of()
    policy = MemoryPolicy(budget, costs=COSTS, **options)
    policy(gm)
    assert policy.plan is not None
    return Outcome(policy.plan.peak_bytes)


DOORS: dict[str, Callable[..., Outcome]] = {
    "solve": solved,
    "optimize": optimized,
    "optimize, example inputs": optimized_for_examples,
    "enable, model": enabled("model"),
    "enable, auto": enabled("auto"),
    "Transformers": called_back(transformers_callback),
    "Lightning": called_back(lightning_callback),
    "emit": emitted,
    "tags": tagged,
}
SLOW: dict[str, Callable[..., Outcome]] = {
    "compile": compiled,
    "enable, blocks": enabled("blocks"),
    "solve_step": solved_in_pieces,
    "enable, two calls in flight": enabled_with_calls_in_flight,
    "compile, Inductor": compiled_by_inductor,
    "partitioner": partitioned,
}
EVERY_DOOR = [
    *DOORS.items(),
    *(pytest.param(*item, marks=pytest.mark.slow) for item in SLOW.items()),
]


@pytest.fixture(autouse=True)
def _dynamo_reset() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.quick_cases("solve-solved", "Lightning-door", "emit-emitted", "tags-tagged")
@pytest.mark.parametrize(("name", "door"), EVERY_DOOR)
def test_smallest_gives_the_peak_of_min_with_one_warning(
    name: str, door: Callable[..., Outcome]
) -> None:
    smallest = door("min")
    budget = "16KiB" if len(name) % 2 else "5%"
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        outcome = door(budget, infeasible="smallest")
    about_budget = [str(w.message) for w in recorded if w.category is BudgetWarning]
    assert len(about_budget) == 1
    assert repr(budget) in about_budget[0]
    assert f"{outcome.peak_bytes:,} bytes" in about_budget[0]
    assert outcome.peak_bytes <= smallest.peak_bytes
    if outcome.gradients is not None:
        model = net()
        expected = ran(model, model)
        torch.testing.assert_close(outcome.gradients, expected)


@pytest.mark.parametrize(("name", "door"), EVERY_DOOR)
def test_the_default_is_an_error(name: str, door: Callable[..., Outcome]) -> None:
    for options in ({}, {"infeasible": "error"}):
        with pytest.raises(Exception, match="budget") as error:
            door("5%", **options)
        assert cause_of_type(error.value, InfeasibleBudget) is not None  # torch.compile wraps it


HOSTILE = ("smalest", "", None, True, ["smallest"])


@pytest.mark.slow_cases("tags-tagged")
@pytest.mark.parametrize(("name", "door"), EVERY_DOOR)
def test_an_unknown_value_is_a_clear_error(name: str, door: Callable[..., Outcome]) -> None:
    for value in HOSTILE:
        with pytest.raises(ValueError, match=r"infeasible is .*'error'.*'smallest'") as error:
            door("100%", infeasible=value)
        assert ("near are smallest" in str(error.value)) == (value == "smalest")


@pytest.mark.parametrize(("name", "door"), DOORS.items())
def test_a_feasible_budget_is_met_without_a_warning(
    name: str, door: Callable[..., Outcome]
) -> None:
    door("100%", infeasible="smallest")  # a warning would be an error here


def test_a_reserve_is_part_of_the_peak_that_the_warning_names() -> None:
    model = net()
    remat.enable(model, "16KiB", reserve="8KiB", scope="model", infeasible="smallest", **OPTIONS)
    with pytest.warns(BudgetWarning) as recorded:
        ran(model, model)
    (plan,) = remat.plans(model)
    assert f"{plan.peak_bytes + 8 * 1024:,} bytes" in str(recorded[0].message)


def test_the_error_does_not_contradict_itself() -> None:
    """A proof is about the operations as they are; pieces are said to be beyond it."""
    model = net()
    with pytest.raises(InfeasibleBudget, match="proved infeasible") as error:
        remat.optimize(model, "5%", strategy=STRATEGY, costs=COSTS)(batch())
    assert "may reach" not in str(error.value)
    assert "so neither was tried" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["solve", pytest.param("run", marks=pytest.mark.slow)])
def test_commands_take_the_smallest_peak(command: str, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "import torch\nfrom tests.torch.laws.test_infeasible import batch, net\n\n\n"
        "def step():\n    return net(), (batch(),)\n"
    )
    source = f"{tmp_path / 'net.py'}:step"
    if command == "solve":
        source = str(tmp_path / "trace.json")
        traced().save(source)
    options = ["--budget", "5%", "--time-limit", "2", "--json"]
    failed = quick(command, source, *options, models=command == "run")
    assert failed.code == 3
    passed = quick(command, source, *options, "--infeasible", "smallest", models=command == "run")
    assert passed.code == 0, passed.err
    assert passed.err.count("no plan fits the budget '5%'") == 1
    assert passed.err.splitlines()[0].startswith("remat: no plan fits")
    wrong = quick(command, source, *options, "--infeasible", "smalest", models=command == "run")
    assert wrong.code == 2
    assert "--infeasible is 'smalest'; near are smallest" in wrong.err


def test_the_plan_of_the_smallest_peak_says_its_budget() -> None:
    with pytest.warns(BudgetWarning):
        plan = remat.solve(traced(), "5%", STRATEGY, infeasible="smallest")
    assert isinstance(plan, Plan)
    assert plan.peak_bytes <= plan.budget_bytes


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_the_error_of_a_step_that_accumulates_says_that_gradients_exist(scope: Any) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
    x = torch.ones(16, 64)
    options: dict[str, Any] = {"scope": scope, "split": "off", "costs": COSTS}
    remat.enable(model, "min", **options)
    model(x).square().mean().backward()
    peak_bytes = remat.plans(model)[0].peak_bytes
    remat.disable(model)
    model.zero_grad(set_to_none=True)
    remat.enable(model, peak_bytes, **options)
    model(x).square().mean().backward()
    with pytest.raises(remat.InfeasibleBudget, match=r"\. This call accumulates into gradients"):
        model(x).square().mean().backward()
