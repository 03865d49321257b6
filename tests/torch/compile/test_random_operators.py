"""Every random operator of torch samples under the backend "remat" what it samples without it.

With Inductor's option `fallback_random` that is what eager mode samples. Plain Inductor advances
the generator further, because it samples some operators a second time in the backward.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.random_chains import (
    RandomChain,
    Step,
    chain_of,
    difference,
    run_step,
)
from tests.helpers.training.random_functions import FUNCTIONS
from tests.helpers.training.random_operators import (
    CALLS,
    TORCH_COMPILE_REFUSES,
    random_operators,
)
from torch import Tensor, nn

import remat

pytestmark = [
    needs_compiler,
    pytest.mark.usefixtures("empty_compile_caches"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

TOLERANCE = 1e-4
"""Kernels of Inductor round differently. Other random numbers differ by 1e-2 and more."""

MISCOMPILED = {"aten.rrelu_with_noise.out", *(n for n in CALLS if n.endswith(".input"))}
"""Operators that torch's decompositions and functionalization change, with any backend: recurrent
networks lose the dropout between layers. Modules of them run in eager mode."""

COMPILED = [name for name in CALLS if name not in TORCH_COMPILE_REFUSES | MISCOMPILED]

COMMON = (
    "dropout", "dropout2d", "alpha_dropout", "rrelu", "rand", "randint", "bernoulli", "multinomial",
    "unused samples", "aten.normal_.default",
)  # fmt: skip
"""The operations that Inductor compiles in each run of the tests; the others are slow."""

GROUPS = {
    "common": COMMON,
    **{COMPILED[i]: tuple(COMPILED[i : i + 20]) for i in range(0, len(COMPILED), 20)},
}

EACH_GROUP = pytest.mark.parametrize(
    "group",
    [
        "common",
        *(pytest.param(name, marks=pytest.mark.slow) for name in GROUPS if name != "common"),
    ],
)


def chain_of_group(group: str) -> tuple[RandomChain, Tensor]:
    available = random_operators()
    return chain_of(*(n for n in GROUPS[group] if n not in CALLS or n in available))


def compiled_step(model: RandomChain, x: Tensor, budget: str | None, **options: Any) -> Step:
    """Run the first step of a newly compiled chain, by plain Inductor if there is no budget."""
    torch._dynamo.reset()
    if options.get("inductor") is False:
        with inductor_config.patch(fallback_random=options.pop("fallback_random")):
            return _compiled_step(model, x, budget, options)
    return _compiled_step(model, x, budget, options)


def _compiled_step(
    model: RandomChain, x: Tensor, budget: str | None, options: dict[str, Any]
) -> Step:
    if budget is not None:
        options |= {"budget": budget, "strategy": remat.Auto(gap=0.05, time_limit=1)}
    backend = "inductor" if budget is None else "remat"
    return run_step(model, x, torch.compile(model, backend=backend, options=options))


def assert_same(model: RandomChain, actual: Step, expected: Step) -> None:
    assert not difference(model.names, actual, expected, TOLERANCE)


@pytest.mark.slow
@EACH_GROUP
def test_with_fallback_random_samples_are_eager_modes(group: str) -> None:
    model, x = chain_of_group(group)
    expected = run_step(model, x)
    for budget in ("min",) if group == "common" else ("min", "100%"):
        actual = compiled_step(model, x, budget, fallback_random=True)
        assert_same(model, actual, expected)
    if group == "common":
        assert any(c.plan.schedule.recomputed(c.plan.graph) for c in remat.compiled_plans()[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_samples_are_plain_inductors(group: str) -> None:
    model, x = chain_of_group(group)
    expected = compiled_step(model, x, None)
    for budget in ("min",) if group == "common" else ("min", "100%"):
        assert_same(model, compiled_step(model, x, budget), expected)


@pytest.mark.slow
@pytest.mark.parametrize("group", [name for name in GROUPS if name != "common"])
def test_without_inductor_samples_are_eager_modes(group: str) -> None:
    model, x = chain_of_group(group)
    expected = run_step(model, x)
    actual = compiled_step(model, x, "min", fallback_random=True, inductor=False)
    assert_same(model, actual, expected)


@pytest.mark.slow
def test_masks_of_dropout2d_are_sampled_in_order() -> None:
    """Inductor's scheduler names the node of the first mask only. The others had no place among its
    kernels, and were sampled before the first."""
    torch.manual_seed(0)
    part = (nn.Conv2d(4, 4, 3, padding=1), nn.GELU(), nn.Dropout2d(0.3))
    model, x = nn.Sequential(*part, *part, *part), torch.randn(4, 4, 8, 8)

    def step(run: Any) -> tuple[Tensor, list[Tensor | None], Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = run(x).square().sum()
        loss.backward()
        return loss.detach(), [p.grad for p in model.parameters()], torch.get_rng_state()

    expected = step(model)
    options = {"budget": "100%", "fallback_random": True}
    actual = step(torch.compile(model, backend="remat", options=options))
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


class _NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * torch.rand(16, 12) + torch.rand(16, 12)


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated")
def test_samples_of_the_backward_follow_those_of_the_forward() -> None:
    """torch's partitioner also leaves them in the forward, if their inputs are available there."""
    torch.manual_seed(0)
    functions = {n: FUNCTIONS[n] for n in ("dropout", "rand")}
    model = RandomChain({**functions, "noisy gradient": lambda h: _NoisyGradient.apply(h)})
    x = torch.randn(16, 12)
    expected = run_step(model, x)
    actual = compiled_step(model, x, "100%", fallback_random=True, inductor=False)
    assert_same(model, actual, expected)
