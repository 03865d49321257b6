"""`trial`: a training step in eager mode and under a plan, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from remat.errors import TraceError
from remat.frontend.api.comparison import (
    Equality,
    Measured,
    Side,
    check_rounds,
    copied,
    peak_row,
    row,
    run_both,
    time_rows,
)
from remat.frontend.runtime.module import RematModule
from remat.limits.budget import format_bytes
from remat.limits.outputs import DROPPED, HELD
from remat.plan import Plan


@dataclass(frozen=True)
class Trial:
    """Eager mode and the plan, compared."""

    eager: Measured
    remat: Measured
    equality: Equality
    rounds: int
    plan: Plan
    predicted_eager_bytes: int

    def describe(self) -> str:
        """The table of both, side by side, and how equal their results are."""
        before, after, plan = self.eager, self.remat, self.plan
        predicted = format_bytes(self.predicted_eager_bytes), format_bytes(plan.peak_bytes)
        lines = [
            row("", "eager", "remat", "change"),
            row("peak, predicted", *predicted),
            peak_row(before, after),
            row("time, predicted", "", "", f"{plan.overhead:+.1%}"),
            *time_rows(before, after, self.rounds),
            "",
            *self.equality.describe(),
        ]
        return "\n".join(lines)

    def to_data(self) -> dict[str, Any]:
        """Everything but the plan's schedule, for JSON. A difference that is not finite is null."""
        plan = self.plan
        return {
            "eager": dataclasses.asdict(self.eager),
            "remat": dataclasses.asdict(self.remat),
            "predicted": {
                "eager_peak_bytes": self.predicted_eager_bytes,
                "remat_peak_bytes": plan.peak_bytes,
                "overhead": plan.overhead,
            },
            "budget_bytes": plan.budget_bytes,
            "rounds": self.rounds,
            **self.equality.to_data(),
        }


def trial(
    model: nn.Module,
    module: RematModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    rounds: int = 5,
    seed: int = 1,
    predicted_eager_bytes: int | None = None,
) -> Trial:
    """Compare `model` in eager mode with `module`, its plan, on one batch.

    Eager mode runs on a copy, and every step starts from `seed`. Outputs are held during the
    backward, or let go of, as the plan counts on. Call it under `torch.autocast`
    where the plan was made under it; backward passes run outside of it, as they should. Gradients
    are cleared at the end; buffers such as those of batch norm are as after `rounds + 2` steps.
    `predicted_eager_bytes` stands beside the peak that eager mode is measured to have: that of
    `remat.report.estimate.eager_peak_bytes`, or else the plan's baseline.

    Raises `TraceError` where the output has no loss, the model cannot be copied, or a step does not
    fit the device.
    """
    check_rounds(rounds)
    other, (other_args, other_kwargs) = copied(model, (args, dict(kwargs)))
    plan = module.plan
    if plan is None:
        raise TraceError("the module has no plan to compare with; make it with remat.optimize")
    program = module.program
    outputs = DROPPED if program is not None and program.outputs_dropped else HELD
    eager, planned, equality = run_both(
        Side("eager mode", other, other_args, other_kwargs, outputs=outputs),
        Side("the plan", module, args, dict(kwargs), outputs=outputs),
        rounds,
        seed,
    )
    return Trial(
        eager=eager,
        remat=planned,
        equality=equality,
        rounds=rounds,
        plan=plan,
        predicted_eager_bytes=predicted_eager_bytes or plan.baseline_peak_bytes,
    )
