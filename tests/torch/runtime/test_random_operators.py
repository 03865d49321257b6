"""Every random operator of torch samples in eager plans what eager mode samples.

A plan retains everything or recomputes as much as it can. Samples, loss and gradients are equal bit
for bit, and the generator is in the same state after the step.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.training.random_chains import RandomChain, chain_of, difference, run_step
from tests.helpers.training.random_functions import (
    DISTRIBUTIONS,
    FUNCTIONS,
    MODULES,
    READ_VALUES,
    RECURRENT,
    parameters_not_validated,
)
from tests.helpers.training.random_modules import lean_schedule
from tests.helpers.training.random_operators import (
    CALLS,
    CAPTURE_MAY_REFUSE,
    REASONS,
    operator,
    random_operators,
)
from torch import Tensor, nn
from torch.distributions import Distribution

import remat

RECURRENT_CALLS = [name for name in CALLS if name.endswith(".input")]

QUICK_RECURRENT = {"LSTM", "RNN, batch first"}

CAPTURED = [n for n in CALLS if n not in CAPTURE_MAY_REFUSE and n not in RECURRENT_CALLS]

GROUP_SIZE = 25


@pytest.fixture(autouse=True)
def no_validation() -> Iterator[None]:
    with parameters_not_validated():
        yield


def existing(names: Sequence[str]) -> list[str]:
    """Return the operators that this version of torch has."""
    return [name for name in names if name in random_operators()]


def assert_eager(model: RandomChain, x: Tensor, tolerance: float = 0.0) -> remat.Program:
    """Check a step that retains everything and one that recomputes what it can, each time that it
    is read. Return the latter."""
    expected = run_step(model, x)
    trace = remat.measure(remat.trace(model, (x,)), remat.Roofline("cpu"))
    graph = trace.graph()
    leanest = lean_schedule(graph, random.Random(0), retained_share=0.0)
    for schedule in (remat.Schedule.keep_all(graph), leanest):
        program = remat.rewrite(trace, schedule)
        actual = run_step(remat.lower(program, copy.deepcopy(model)), x)
        assert not difference(model.names, actual, expected, tolerance)
    return program


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_optimized_models_sample_as_in_eager_mode(budget: str) -> None:
    model, x = chain_of("dropout", "dropout2d", "aten.rand.default", "gumbel_softmax", "rrelu")
    strategy = remat.Auto(gap=0.05, time_limit=1)
    planned = remat.optimize(
        copy.deepcopy(model), budget, (x,), costs=remat.Roofline("cpu"), strategy=strategy
    )
    assert not difference(model.names, run_step(planned, x), run_step(model, x))
    assert planned.program is not None
    assert is_replayed(planned.program) == (budget == "min")


def is_replayed(program: remat.Program) -> bool:
    """True if a program recomputes a random operation."""
    return any(s.rng_action == "replay" for s in (*program.forward, *program.backward))


def test_every_random_operator_has_a_call_or_a_reason() -> None:
    names = random_operators()
    assert len(names) > 100
    missing = [n for n in names if n not in CALLS and n.rpartition(".")[0] not in REASONS]
    assert not missing, "add a call to random_operators.py, or a reason why there is none"


def test_no_call_is_of_an_operator_that_is_not_random() -> None:
    names = set(random_operators())
    for name in CALLS:
        try:
            operator(name)
        except AttributeError:
            continue  # of another version of torch
        assert name in names
        assert name.rpartition(".")[0] not in REASONS


def test_every_distribution_has_a_sample() -> None:
    classes = {n for n in torch.distributions.__all__ if n[0].isupper() and "Transform" not in n}
    classes |= {"TransformedDistribution"}
    abstract = {"Distribution", "ExponentialFamily"}
    is_distribution = {
        n for n in classes if issubclass(getattr(torch.distributions, n), Distribution)
    }
    assert is_distribution - abstract == DISTRIBUTIONS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start, id=CAPTURED[start], marks=[pytest.mark.slow] * (start > GROUP_SIZE))
        for start in range(0, len(CAPTURED), GROUP_SIZE)
    ],
)
def test_operators_sample_as_in_eager_mode(start: int) -> None:
    assert is_replayed(assert_eager(*chain_of(*existing(CAPTURED[start : start + GROUP_SIZE]))))


@pytest.mark.slow
def test_functions_sample_as_in_eager_mode() -> None:
    assert is_replayed(assert_eager(*chain_of(*FUNCTIONS, *MODULES)))


@pytest.mark.slow
def test_distributions_sample_as_in_eager_mode() -> None:
    names = [name for name in DISTRIBUTIONS if name not in READ_VALUES]
    assert is_replayed(assert_eager(*chain_of(*names)))


@pytest.mark.parametrize("name", [*sorted(CAPTURE_MAY_REFUSE), *sorted(READ_VALUES)])
def test_what_cannot_be_captured_is_refused(name: str) -> None:
    """Versions of torch differ in what they can capture. Nothing samples other numbers."""
    model, x = chain_of(name)
    try:
        remat.trace(model, (x,))
    except remat.TraceError:
        return
    assert_eager(model, x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_RECURRENT else pytest.param(name, marks=pytest.mark.slow)
        for name in (*RECURRENT, *RECURRENT_CALLS)
    ],
)
def test_dropout_between_recurrent_layers_is_eager_modes(name: str) -> None:
    """torch's decompositions leave it out. They round differently from eager mode's kernels."""
    model, x = chain_of(name, "rand")
    assert_eager(model, x, tolerance=1e-5)
    assert sum(node.random for node in remat.trace(model, (x,)).nodes) >= 2


def test_dropout_between_recurrent_layers_is_refused_on_a_gpu() -> None:
    """There cuDNN samples it, from a state of its own."""
    model, x = chain_of("GRU")
    with pytest.raises(remat.TraceError, match="2 layers with dropout between them runs in cuDNN"):
        remat.trace(model, (x,), device="h100")
    remat.trace(model.eval(), (x,), device="h100")
    single = nn.GRU(8, 8)
    remat.trace(single, (torch.randn(3, 2, 8),), device="h100")


# -- layouts and generators -----------------------------------------------------------------------

DESTINATIONS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.zeros(12, 16).t(),
    "every second column": lambda: torch.zeros(16, 24)[:, ::2],
    "every second row, transposed": lambda: torch.zeros(24, 16)[::2].t(),
    "channels last": lambda: torch.zeros(2, 4, 8, 3).to(memory_format=torch.channels_last),
}

IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_, tensor": lambda x: x.bernoulli_(torch.full(x.shape, 0.3)),
    "cauchy_": lambda x: x.cauchy_(1.0, 2.0),
    "exponential_": lambda x: x.exponential_(2.0),
    "geometric_": lambda x: x.geometric_(0.3),
    "log_normal_": lambda x: x.log_normal_(1.0, 0.5),
    "normal_": lambda x: x.normal_(1.0, 2.0),
    "random_": lambda x: x.random_(),
    "random_, between": lambda x: x.random_(-3, 9),
    "random_, to": lambda x: x.random_(9),
    "uniform_": lambda x: x.uniform_(-1.0, 2.0),
    "dropout": lambda x: F.dropout(x + 1, 0.3, inplace=True),
    "rrelu": lambda x: F.rrelu(x - 1, training=True),
}


@pytest.mark.quick_cases("every second column")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name == "every second row, transposed"))
        for name in DESTINATIONS
    ],
)
def test_samples_of_any_layout_are_eager_modes(layout: str) -> None:
    def sampled(name: str, h: Tensor) -> Tensor:
        samples = IN_PLACE[name](DESTINATIONS[layout]())
        return h * samples.float().sin().flatten()[:12]

    names = [n for n in IN_PLACE if (n, layout) != ("normal_", "every second column")]
    torch.manual_seed(0)
    model = RandomChain({n: lambda h, n=n: sampled(n, h) for n in names})
    assert_eager(model, torch.randn(16, 12))


def test_normal_numbers_in_a_part_of_a_tensor_are_refused() -> None:
    """Eager mode samples them one by one, and whole tensors in vectors."""
    part = DESTINATIONS["every second column"]
    model = RandomChain({"normal_": lambda h: h * part().normal_()})
    with pytest.raises(remat.TraceError, match="normal_ on a part of a tensor"):
        remat.trace(model, (torch.randn(16, 12),))


def test_integers_without_an_upper_limit_are_refused() -> None:
    model = RandomChain({"random_": lambda h: h * torch.empty_like(h).random_(3, None)})
    with pytest.raises(remat.TraceError, match=r"random_\(3, None\) samples integers without"):
        remat.trace(model, (torch.randn(16, 12),))


def generator_calls() -> dict[str, Callable[[Tensor, torch.Generator], Any]]:
    """Return a call with a generator for each of torch's functions that takes one."""
    return {
        "bernoulli": lambda h, g: torch.bernoulli(h.sigmoid(), generator=g),
        "bernoulli_": lambda h, g: torch.empty_like(h).bernoulli_(0.3, generator=g),
        "bernoulli_, transposed": lambda h, g: torch.empty(12, 16).t().bernoulli_(0.3, generator=g),
        "exponential_": lambda h, g: torch.empty_like(h).exponential_(generator=g),
        "multinomial": lambda h, g: torch.multinomial(h.sigmoid(), 12, generator=g),
        "normal": lambda h, g: torch.normal(h, 2.0, generator=g),
        "normal_": lambda h, g: torch.empty_like(h).normal_(generator=g),
        "poisson": lambda h, g: torch.poisson(h.exp(), generator=g),
        "rand": lambda h, g: torch.rand(16, 12, generator=g),
        "randint": lambda h, g: torch.randint(9, (16, 12), generator=g),
        "randn": lambda h, g: torch.randn(16, 12, generator=g),
        "random_": lambda h, g: torch.empty_like(h).random_(-3, 9, generator=g),
        "randperm": lambda h, g: torch.randperm(12, generator=g),
        "uniform_": lambda h, g: torch.empty_like(h).uniform_(generator=g),
    }


@pytest.mark.parametrize("name", generator_calls())
def test_a_generator_of_the_model_is_refused(name: str) -> None:
    """A plan could not restore its state."""
    generator, call = torch.Generator(), generator_calls()[name]
    model = RandomChain({name: lambda h: call(h, generator)})
    with pytest.raises(remat.TraceError, match=r"[Gg]enerator"):
        remat.trace(model, (torch.randn(16, 12),))
