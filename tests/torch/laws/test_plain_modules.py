"""Laws 1 to 3 on plain modules with one difficulty each, under budgets from all memory to the
smallest."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers.training.models import PLAIN
from tests.helpers.training.recorded_steps import (
    RELATIVE_ERROR,
    assert_same,
    eager_step,
    run_step,
)

import remat

COSTS = remat.Roofline("cpu")
STRATEGY = remat.Auto(time_limit=3.0)

LATE = {"mlp", "mlp-input-grad", "shared", "tied", "weights"}
"""Modules whose structure others have, too."""

# The loss is outside of these models; its memory is not planned.
EXTERNAL_LOSS = {"two-heads", "alias"}


@pytest.mark.slow_cases("checkpointed-min", "mlp-bf16-min")
@pytest.mark.parametrize("budget", [pytest.param("100%", marks=pytest.mark.slow), "min"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in LATE)) for n in PLAIN]
)
def test_plain_modules_train_as_eager_mode(name: str, budget: str) -> None:
    torch.manual_seed(0)
    case = PLAIN[name]()
    eager = eager_step(case)
    if case.autocast is None:
        gm = remat.optimize(
            copy.deepcopy(case.model),
            budget,
            case.args,
            case.kwargs,
            costs=COSTS,
            strategy=STRATEGY,
        )
    else:
        gm = remat.optimize(copy.deepcopy(case.model), budget, costs=COSTS, strategy=STRATEGY)
    step = run_step(gm, case)
    if case.autocast is not None:
        step = run_step(gm, case)  # the first call planned inside the metered region
    # The sum of several pieces is rounded after each of them.
    assert_same(step, eager, tolerance=RELATIVE_ERROR if case.autocast is None else 0.02)
    program = gm.program
    assert program is not None
    if name not in EXTERNAL_LOSS:
        assert step.peak_bytes <= program.predicted_peak_bytes
        assert step.peak_bytes >= 0.99 * program.predicted_peak_bytes


def test_batch_norm_statistics_are_updated_once() -> None:
    """Eager `torch.utils.checkpoint` updates them twice."""
    torch.manual_seed(0)
    case = PLAIN["norms"]()
    gm = remat.optimize(copy.deepcopy(case.model), "min", case.args, costs=COSTS, strategy=STRATEGY)
    run_step(gm, case)
    assert int(gm.get_buffer("conv.1.num_batches_tracked")) == 1
    assert int(gm.get_buffer("steps")) == 1
