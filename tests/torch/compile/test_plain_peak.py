"""The peak of plain torch.compile as a limit: a budget at or above it is never refused, and "min"
is never more than it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.compiled_steps import (
    Step,
    assert_same,
    blocks,
    compiled_as_without,
    convolutions,
    dropout_case,
    measured_peak,
    step,
    with_state,
)
from tests.helpers.training.models import FAMILIES, PLAIN, Case
from tests.helpers.training.random_modules import KINDS, ROWS, WIDTH, RandomModule
from tests.helpers.training.random_modules import Step as RandomStep
from torch import fx, nn

import remat
from remat.errors import InfeasibleBudget
from remat.frontend.compile.compat import cause_of_type
from remat.frontend.compile.partitioner import Partitioner
from remat.frontend.compile.registry import CompiledPlan

pytestmark = [needs_compiler, pytest.mark.usefixtures("empty_compile_caches")]


class Unrolled(nn.Module):
    """A recurrent cell that runs once for each step of a sequence, with dropout in between."""

    def __init__(self, cell: nn.Module, width: int, every_output: bool) -> None:
        super().__init__()
        self.cell, self.every_output = cell, every_output
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(x.shape[0], self.head.in_features)
        state: Any = (h, h) if isinstance(self.cell, nn.LSTMCell) else h
        outputs: list[torch.Tensor] = []
        for position in range(x.shape[1]):
            state = self.cell(x[:, position], state)
            if isinstance(state, tuple):
                state = (self.dropout(state[0]), state[1])
            else:
                state = self.dropout(state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        last = torch.stack(outputs, 1) if self.every_output else outputs[-1]
        return self.head(last).square().mean()


def unrolled(
    make_cell: Callable[[int, int], nn.Module] = nn.GRUCell,
    shape: tuple[int, int, int] = (64, 12, 64),
    every_output: bool = False,
) -> Case:
    torch.manual_seed(0)
    width = shape[-1]
    model = Unrolled(make_cell(width, width), width, every_output)
    return Case(model, (torch.randn(*shape),), loss=lambda out: out)


def transformer() -> Case:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(layer, nn.Linear(32, 32))
    return Case(model, (torch.randn(4, 16, 32),), loss=lambda out: out.square().mean())


def random_module(seed: int) -> Case:
    numbers = random.Random(seed)
    torch.manual_seed(seed)
    length = numbers.randint(4, 9)
    steps = [RandomStep(numbers.choice(KINDS), numbers.randrange(4)) for _ in range(length)]
    return Case(RandomModule(steps), (torch.randn(ROWS, WIDTH),), loss=lambda out: out)


class _PlanReady(Exception):
    """Raised to end a compilation before Inductor generates code."""


class PlanOnly(Partitioner):
    """A partitioner that ends the compilation once the step is planned."""

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Any, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        super().__call__(gm, joint_inputs, **options)
        raise _PlanReady


def planned(case: Case, budget: int | str) -> CompiledPlan:
    """Plan a step without generating code."""
    partitioner = PlanOnly(budget, time_limit=2.0)
    torch._dynamo.reset()
    run = torch.compile(case.model.train(), options=partitioner.settings())
    try:
        with torch.autocast("cpu", dtype=case.autocast, enabled=case.autocast is not None):
            run(*case.args, **case.kwargs)
    except Exception as error:
        if cause_of_type(error, _PlanReady) is None:
            raise
    assert partitioner.compiled is not None
    return partitioner.compiled


QUICK: dict[str, Callable[[], Case]] = {
    "random-0": lambda: random_module(0),
}

SLOW: dict[str, Callable[[], Case]] = {
    "lstm": lambda: unrolled(nn.LSTMCell, (16, 4, 32)),
    "gru": unrolled,
    "transformer": transformer,
    "gru-every-output": lambda: unrolled(every_output=True),
    "rnn": lambda: unrolled(nn.RNNCell, (32, 8, 32)),
    "blocks": blocks,
    "convolutions": convolutions,
    "dropout": dropout_case,
    **PLAIN,
    **FAMILIES,
    **{f"random-{seed}": lambda seed=seed: random_module(seed) for seed in (2, 3, 4, 5, 7, 8)},
}

MODELS = [
    *(pytest.param(make, id=name) for name, make in QUICK.items()),
    *(pytest.param(make, id=name, marks=pytest.mark.slow) for name, make in SLOW.items()),
]


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_plain_torch_compile_is_a_candidate(make: Callable[[], Case]) -> None:
    """A budget of its peak is met, with nothing recomputed, and no smallest peak is above it."""
    whole = planned(make(), "100%")
    assert whole.budget_bytes == whole.baseline_bytes
    assert len(whole.plan.schedule) == len(whole.plan.graph)
    assert whole.is_plain or whole.plan.peak_bytes <= whole.baseline_bytes
    smallest = planned(make(), "min")
    assert smallest.is_plain or smallest.plan.peak_bytes <= smallest.baseline_bytes


@pytest.mark.slow
@pytest.mark.parametrize("every_output", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_unrolled_cell_fits_in_half_of_its_plain_peak(every_output: bool) -> None:
    """Once, the gradients of all steps were in memory at the same time."""
    compiled = planned(unrolled(every_output=every_output), "50%")
    assert compiled.plan.peak_bytes <= compiled.baseline_bytes // 2


@pytest.mark.slow
def test_an_infeasible_budget_says_what_it_is_proved_of() -> None:
    """Inductor may make other kernels than those that are planned."""
    with pytest.raises(Exception, match="proved of the kernels that remat plans with") as caught:
        planned(random_module(0), "5%")
    error = cause_of_type(caught.value, InfeasibleBudget)
    assert error is not None
    assert not error.is_proved


# -- measured -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: unrolled(nn.RNNCell, (16, 3, 16)), id="short-rnn", marks=pytest.mark.slow
        ),
        *(pytest.param(m, id=n, marks=pytest.mark.slow) for n, m in (QUICK | SLOW).items()),
    ],
)
def test_measured_peaks_are_within_that_of_plain_torch_compile(make: Callable[[], Case]) -> None:
    """With its measured peak as the budget, and with "min"; with the same results."""
    case, state = with_state(make())

    def run(**options: Any) -> tuple[list[Step], int]:
        torch._dynamo.reset()
        case.model.load_state_dict(state)
        compiled = torch.compile(case.model, **options)
        steps = [step(case, compiled, seed) for seed in (1, 2)]
        return steps, measured_peak(case, compiled)

    expected, plain_bytes = run()
    for budget in (plain_bytes, "min"):
        options = {"budget": budget, "time_limit": 2.0}
        actual, peak_bytes = run(backend="remat", options=options)
        assert_same(actual, expected, 1e-5)
        assert peak_bytes <= plain_bytes
    assert remat.compiled_plans()[-1].baseline_bytes <= 1.02 * plain_bytes


@pytest.mark.slow
def test_inductors_own_kernels_run_where_every_plan_would_recompute() -> None:
    """Their verified peak is the one that the budget was relative to."""
    _, (compiled,) = compiled_as_without(random_module(4), "100%", 0.0)
    assert compiled.is_plain
    assert compiled.rounds == 1
    assert compiled.plan.peak_bytes > compiled.baseline_bytes
    assert compiled.verified_bytes == compiled.baseline_bytes == compiled.budget_bytes
    assert "Inductor's own kernels" in repr(compiled)
