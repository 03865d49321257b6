"""Recomputations inside of backward kernels that have other outputs too, so that activations
need not be retained."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.compiled_steps import (
    compiled,
    compiled_as_without,
    dropout_case,
    measured_peak,
    plans_of,
)
from tests.helpers.training.recorded_steps import Case
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import remat

pytestmark = [needs_compiler, pytest.mark.usefixtures("empty_compile_caches")]


def relu_case() -> Case:
    """Return a case in which Inductor saves where a ReLU was zero and what was dropped, as
    boolean masks."""
    torch.manual_seed(0)
    made_of = [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1)) for _ in range(8)]
    return Case(nn.Sequential(*made_of), (torch.randn(512, 64),), loss=lambda out: out.sum())


# 0.75 would do for what drops, but torch 2.11 holds the gradient of the output to the end.
@pytest.mark.parametrize(("make", "share"), [(dropout_case, 0.8), (relu_case, 0.95)])
@pytest.mark.slow
def test_fused_recomputation_saves_memory_without_extra_kernels(
    make: Callable[[], Case], share: float
) -> None:
    _, (plan,) = compiled_as_without(make(), f"{share:.0%}", 1e-6)
    assert len(plan.plan.schedule) == len(plan.plan.graph)
    assert plan.rounds == 1
    assert plan.verified_bytes is not None
    assert plan.verified_bytes <= share * plan.baseline_bytes


@pytest.mark.slow
def test_recomputed_activations_are_not_retained() -> None:
    """By the allocator, and by name: each activation is computed in the forward and in the
    backward."""
    case = dropout_case()
    plain_bytes = measured_peak(case, torch.compile(case.model))
    run, (plan,), _ = compiled(case, "75%")
    measured_bytes = measured_peak(case, run)
    assert measured_bytes <= 0.76 * plain_bytes
    graph = plan.plan.graph
    assert graph.boundary is not None
    large = {i for i, value in enumerate(graph.values) if value.size_bytes == 512 * 64 * 4}
    retained = {
        v
        for v in large
        if graph.producer[v] < graph.boundary
        and any(reader > graph.boundary for reader in graph.consumers[v])
    }
    assert len(retained) == 4  # the input of each GELU; its output is recomputed


@pytest.mark.slow
def test_nothing_is_recomputed_where_everything_fits() -> None:
    (plan,) = plans_of(relu_case(), "100%")
    assert len(plan.plan.schedule) == len(plan.plan.graph)
    truths = [v for v in plan.plan.graph.values if v.size_bytes == 512 * 64]
    # On CPUs these masks take longer to write and read than to recompute. The mask of the last
    # ReLU, whose result the backward does not read, is smaller than the inputs of its computation.
    assert len(truths) <= 1


@pytest.mark.slow
def test_an_infeasible_budget_names_the_smallest_of_all_variants() -> None:
    with pytest.raises(BackendCompilerFailed) as caught:
        plans_of(dropout_case(), "10%", split="off")
    (smallest,) = plans_of(dropout_case(), "min")
    error = caught.value.inner_exception
    assert isinstance(error, remat.InfeasibleBudget)
    assert error.min_feasible_bytes is not None
    assert smallest.plan.peak_bytes <= error.min_feasible_bytes <= 1.05 * smallest.plan.peak_bytes
