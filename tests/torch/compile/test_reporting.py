"""The output of torch.compile's backend for users: log lines, progress, plans by name."""

from __future__ import annotations

import functools
import io
import itertools
import json
import logging
import os
import pty
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.models import PLAIN, Case, WithParts
from tests.helpers.training.steps import loss_of
from torch import nn

import remat
from remat import view
from remat.errors import InfeasibleBudget, TraceError
from remat.frontend.common import planning_line
from remat.frontend.compile import candidates
from remat.frontend.compile.compat import cause_of_type
from remat.frontend.compile.registry import CompiledPlan, register_plan, unregister_plan
from remat.plan import Plan
from remat.solution import Solution
from remat.strategies.base import Task

pytestmark = pytest.mark.usefixtures("empty_compile_caches")


def checkpointed() -> Case:
    torch.manual_seed(0)
    return PLAIN["checkpointed"]()


def layers() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    return Case(model, (torch.randn(64, 16),), loss=torch.Tensor.sum)


def run(case: Case, budget: str = "min", **options: object) -> list[CompiledPlan]:
    """Return the plans of one step."""
    before = len(remat.compiled_plans())
    defaults = {"inductor": False, "time_limit": 3.0, "split": "off"}
    model = remat.compile(case.model, budget, **(defaults | options))
    case.loss(model(*case.args, **case.kwargs)).backward()
    return remat.compiled_plans()[before:]


# -- the log --------------------------------------------------------------------------------------


def test_planning_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    case = checkpointed()
    with caplog.at_level(logging.INFO, "remat"):
        (plan,) = run(case)
    title = f"{type(case.model).__name__} [0/0]"
    assert plan.title == title
    begun, captured_line, solved = caplog.messages
    assert begun.startswith(f"{title}: planning ")
    assert begun.endswith(" operations within min")
    assert f"{title}: " in captured_line
    assert " operations in the forward, " in captured_line
    assert f"{title}: solved in " in solved
    assert remat.limits.units.format_bytes(plan.plan.peak_bytes) in solved
    assert f"{len(plan.plan.schedule) - len(plan.plan.graph)} recomputations" in solved


@pytest.mark.slow
@needs_compiler
def test_inductors_verified_peak_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))
    case = Case(model, (torch.randn(512, 32),), loss=torch.Tensor.sum)
    with caplog.at_level(logging.INFO, "remat"):
        (plan,) = run(case, "95%", inductor=True)
    assert " Inductor kernels in the forward, " in caplog.messages[1]
    size = remat.limits.units.format_bytes
    assert caplog.messages[3:] == [
        f"Sequential [0/0]: verified: the {half}'s kernels use {size(plan.verified_by_half[half])}"
        f" of {size(plan.budget_bytes or 0)}"
        for half in ("forward", "backward")
    ]


def method_decorator(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    return wrapper


def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function as Transformers' `deprecate_kwarg` does."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def breaking_decorator(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        torch._dynamo.graph_break()
        return result.tanh()

    return wrapper


class MethodDecorated(nn.Linear):
    forward = method_decorator(lambda self, x: F.linear(x, self.weight).tanh())


class Decorated(nn.Linear):
    @decorator
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


class DecoratedTwice(nn.Linear):
    @decorator
    @decorator
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


class DecoratedWithBreak(nn.Linear):
    @breaking_decorator
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


class CallableObject:
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


@decorator
def decorated_function(x: torch.Tensor) -> torch.Tensor:
    return x.tanh()


def hooked(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the `forward` that a module had before, as hooks of Accelerate do."""
    return module.previous_forward(*args, **kwargs)


def with_hook(module: Any) -> nn.Module:
    module.previous_forward = module.forward
    module.forward = functools.partial(hooked, module)
    return module


class Broken(WithParts, first=(8, 8), head=(8, 400)):
    """A model that Dynamo breaks into two graphs, of which the second ends in the loss."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x).tanh()
        torch._dynamo.graph_break()
        logits = self.head(x)
        return logits.logsumexp(-1).mean(), logits


def trained_by_function() -> Callable[..., torch.Tensor]:
    loss = F.mse_loss

    def train(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return loss(x, x.tanh())

    return train


@pytest.mark.slow_cases("trained_by_function-names11", "<lambda>-names0")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: MethodDecorated(8, 8), ["MethodDecorated"]),
        (lambda: Decorated(8, 8), ["Decorated"]),
        (lambda: DecoratedTwice(8, 8), ["DecoratedTwice"]),
        (
            lambda: DecoratedWithBreak(8, 8),
            ["DecoratedWithBreak", r"DecoratedWithBreak from line \d+"],
        ),
        (lambda: Decorated(8, 8).forward, ["Decorated"]),
        (lambda: decorator(nn.Linear(8, 8)), ["Linear"]),
        (lambda: decorator(nn.Linear(8, 8).forward), ["Linear"]),
        (lambda: with_hook(nn.Linear(8, 8)), ["Linear"]),
        (lambda: decorated_function, ["decorated_function"]),
        (lambda: functools.partial(decorated_function), ["decorated_function"]),
        (CallableObject, ["CallableObject"]),
        (trained_by_function, [r"trained_by_function\.<locals>\.train"]),
        pytest.param(Broken, ["Broken", r"Broken from line \d+"], marks=pytest.mark.slow),
        pytest.param(lambda: nn.Sequential(nn.Tanh()), ["Sequential"], marks=pytest.mark.slow),
    ],
)
def test_plans_have_the_name_of_their_module_or_function(
    make: Callable[[], Callable[..., Any]], names: list[str]
) -> None:
    """Inside of decorators, and after a graph break."""
    before = len(remat.compiled_plans())
    fast = torch.compile(make(), backend="remat", options={"budget": "100%", "inductor": False})
    loss_of(fast(torch.randn(4, 8, requires_grad=True))).sum().backward()
    actual = [plan.module for plan in remat.compiled_plans()[before:]]
    assert all(itertools.starmap(re.fullmatch, zip(names, actual, strict=True))), actual


# -- progress -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_progress_is_reported_to_the_callback() -> None:
    candidates.cached_plan.cache_clear()  # another test may have planned the same
    reports: list[remat.Progress] = []
    (plan,) = run(checkpointed(), progress=reports.append)
    assert reports
    assert reports[-1].budget_bytes == plan.plan.budget_bytes


@pytest.mark.slow
@pytest.mark.parametrize("progress", [True, None])
def test_a_terminal_shows_progress_at_once_on_request(
    progress: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, terminal = pty.openpty()
    with open(terminal, "w") as stderr:
        monkeypatch.setattr(planning_line, "_DELAY_S", 1e4)
        monkeypatch.setattr(sys, "stderr", stderr)
        run(layers(), progress=progress)
        monkeypatch.undo()
        stderr.write("end")
        stderr.flush()
        shown = b""
        while not shown.endswith(b"end"):
            shown += os.read(screen, 1024)
    os.close(screen)
    if progress:
        assert b"remat: planning the step, " in shown
        assert shown.endswith(b"\r\x1b[2Kend"), "the line is gone"
    else:
        assert shown == b"end"


@pytest.mark.slow
def test_progress_is_not_written_to_files(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    run(layers(), progress=True)
    monkeypatch.undo()
    assert stderr.getvalue() == ""


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_infeasible_budget_says_what_uses_the_memory() -> None:
    with pytest.raises(Exception, match="Pass a budget of at least") as caught:
        run(checkpointed(), "10%")
    error = cause_of_type(caught.value, InfeasibleBudget)
    assert error is not None
    assert error.min_feasible_bytes
    words = str(error)
    assert words.startswith("Checkpointed [0/0]: no plan fits the budget '10%'. Pass a budget of")
    assert re.findall(r"[\d,]+ bytes", words) == [f"{error.min_feasible_bytes:,} bytes"]
    assert "At the smallest, the peak is in " in words
    assert " parameters, buffers and batch, " in words
    assert "; the largest are " in words
    smallest, expected = run(checkpointed()), error.min_feasible_bytes
    assert smallest[0].plan.peak_bytes == pytest.approx(expected, rel=0.02)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_an_infeasible_budget_names_graph_breaks_and_outputs() -> None:
    model, x = Broken(), torch.randn(64, 8)
    compiled = remat.compile(model, 50_000, inductor=False, split="off", time_limit=3.0)
    with pytest.raises(Exception, match="no plan fits the budget 50000") as caught:
        compiled(x)
    words = str(cause_of_type(caught.value, InfeasibleBudget))
    line = Broken.forward.__code__.co_firstlineno + 2
    assert f"at test_reporting.py:{line}, `torch._dynamo.graph_break()`: its parts are" in words
    assert 'With outputs="loss" the graph returns only its loss: 100 KiB of other' in words
    assert len(re.findall(r"[\d,]+ bytes", words)) == 1
    relative = {"inductor": False, "split": "off", "outputs": "loss", "time_limit": 3.0}
    with pytest.raises(Exception, match=r"bytes \(.\d+%.\), or .min") as caught:
        remat.compile(nn.Sequential(model.first, nn.Tanh(), model.head), "2%", **relative)(x)
    assert "outputs=" not in str(cause_of_type(caught.value, InfeasibleBudget))


@pytest.mark.slow
def test_a_gpt2_with_labels_is_one_graph() -> None:
    """Transformers has no loss type for it, and Dynamo would break it at a warning about that."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=2000, use_cache=False, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model, ids = transformers.GPT2LMHeadModel(config), torch.randint(0, 2000, (4, 32))
    before = len(remat.compiled_plans())
    compiled = remat.compile(model, "100%", inductor=False)
    compiled(input_ids=ids, labels=ids).loss.backward()
    assert len(remat.compiled_plans()) == before + 1


def test_a_step_without_gradients_is_not_planned_and_warned_of() -> None:
    """Unless the process also trains: then it is an evaluation."""
    plans = remat.compiled_plans()
    for plan in plans:
        unregister_plan(plan)
    try:
        model = nn.Linear(4, 4)
        run = remat.compile(model, "50%", inductor=False)
        with torch.no_grad(), pytest.warns(UserWarning, match="'50%' plans nothing for Linear: "):
            run(torch.randn(2, 4))
        assert remat.compiled_plans() == []
        run = remat.compile(nn.Tanh(), "100%", inductor=False)
        run(torch.randn(2, 4, requires_grad=True)).sum().backward()
        assert len(remat.compiled_plans()) == 1
        with torch.no_grad():
            run(torch.randn(2, 4))  # a warning would be an error
    finally:
        for plan in plans:
            register_plan(plan)


@dataclass(frozen=True)
class Failing:
    """A third-party strategy with a bug."""

    name: str = "failing"

    def run(self, task: Task) -> Solution:
        raise ZeroDivisionError("no strategy at all")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec")
@pytest.mark.parametrize(
    "inductor", [False, pytest.param(True, marks=[pytest.mark.slow, needs_compiler])]
)
def test_unsupported_graphs_are_an_error_or_fall_back_to_torch(inductor: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh())
    case = Case(model, (torch.randn(16, 8),), loss=torch.Tensor.sum)
    options = {"strategy": Failing(), "inductor": inductor}

    def gradients(compiled: Any) -> list[torch.Tensor | None]:
        model.zero_grad()
        torch.manual_seed(1)
        case.loss(compiled(*case.args)).backward()
        return [p.grad for p in model.parameters()]

    with pytest.raises(Exception, match="pass fallback=True") as caught:
        gradients(remat.compile(model, "50%", **options))
    error = cause_of_type(caught.value, TraceError)
    assert "remat cannot plan Sequential [0/0]: ZeroDivisionError: no strategy" in str(error)
    torch._dynamo.reset()
    before = remat.compiled_plans()
    with pytest.warns(UserWarning, match="no strategy at all; torch's own partitioner partitions"):
        actual = gradients(remat.compile(model, "50%", fallback=True, **options))
    assert remat.compiled_plans() == before
    torch._dynamo.reset()
    backend = "inductor" if inductor else "aot_eager_decomp_partition"
    torch.testing.assert_close(actual, gradients(torch.compile(model, backend=backend)))


class Branches(nn.Module):
    """A module with a higher-order operator, for which nothing says that it may be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        x = torch.cond(
            x.sum() > 0, lambda x: self.one(x).sin(), lambda x: self.other(x).cos(), (x,)
        )
        return x.tanh().sin().square().sum()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_higher_order_operator_runs_once() -> None:
    torch.manual_seed(0)
    case = Case(Branches(), (torch.randn(64, 16),), loss=lambda out: out)
    case.loss(case.model(*case.args)).backward()
    expected = [p.grad for p in case.model.parameters()]
    case.model.zero_grad()
    (plan,) = run(case)
    torch.testing.assert_close([p.grad for p in case.model.parameters()], expected)
    graph, recomputed = plan.plan.graph, plan.plan.schedule.recomputed(plan.plan.graph)
    assert recomputed, "other operations are recomputed"
    conditions = [n for n, op in enumerate(graph.operations) if op.name.startswith("cond")]
    assert len(conditions) == 2
    assert not recomputed.keys() & set(conditions)


# -- operations on a compiled plan ----------------------------------------------------------------


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Plans of one model within two budgets."""
    torch._dynamo.reset()
    case = checkpointed()
    return [run(case, budget)[0].plan for budget in ("100%", "min")]


@pytest.mark.slow
def test_a_compiled_plan_is_described_and_explained(plans: list[Plan]) -> None:
    _, plan = plans
    assert "costs of operations, measured" in plan.describe()
    graph, recomputed = plan.graph, plan.schedule.recomputed(plan.graph)
    for op in (next(iter(recomputed)), graph.boundary or 0, len(graph) - 1):
        explanation = plan.explain(graph.operations[op].name)
        assert graph.operations[op].name in explanation
    modules = {op.module for op in graph.operations} - {""}
    assert modules
    assert not [path for path in modules if "[" in path or "self" in path]
    for path in modules:
        assert path in plan.explain(path)
    assert "recomputed 0 -> 1 times" in plans[0].diff(plan)
    names = [op.name for op in graph.operations]
    assert len(names) == len(set(names))
    assert graph.operations[graph.boundary or 0].name == "backward_start"


@pytest.mark.slow
def test_a_compiled_plan_has_pictures(plans: list[Plan], tmp_path: Path) -> None:
    _, plan = plans
    for draw_picture in (view.timeline_svg, view.schedule_svg, view.modules_svg):
        assert "recomp" in draw_picture(plan).lower()
    assert "backward_start" in view.operations_csv(plan)
    assert plan.to_html().count("<svg") >= 3
    assert "backward_start" in view.graph_dot(plan.graph, plan)
    assert "backward_start" in view.graph_graphml(plan.graph)
    for number, figure in enumerate((view.timeline_figure, view.schedule_figure)):
        picture_file = tmp_path / f"{number}.png"
        figure(plan).savefig(picture_file)
        assert picture_file.read_bytes().startswith(b"\x89PNG")


def test_a_compiled_plan_survives_its_document(plans: list[Plan], tmp_path: Path) -> None:
    _, plan = plans
    plan.save(tmp_path / "plan.json.gz")
    assert Plan.load(tmp_path / "plan.json.gz") == plan
    events = json.loads(view.chrome_trace(plan))["traceEvents"]
    ran = [event for event in events if event.get("ph") == "X"]
    assert len(ran) == len(plan.schedule)
    view.save_snapshot(plan, tmp_path / "snapshot.pickle")
    assert (tmp_path / "snapshot.pickle").stat().st_size > 0
