"""`compiled_trial`: a training step under plain torch.compile and under its backend "remat"."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.errors import RematError, one_line
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
from remat.frontend.compile.backend import compile as within
from remat.frontend.compile.inductor.compat import raised_inside
from remat.frontend.compile.registry import CompiledPlan, compiled_plans
from remat.limits.budget import format_bytes, format_seconds
from remat.limits.outputs import HELD
from remat.report.tables import aligned


@dataclass(frozen=True)
class CompiledTrial:
    """Both, compared. `plain_first_s` and `remat_first_s` are the seconds of the first step, in
    which torch compiles, and remat plans; `plans` has one for each graph."""

    plain: Measured
    remat: Measured
    equality: Equality
    rounds: int
    plans: tuple[CompiledPlan, ...]
    plain_first_s: float
    remat_first_s: float

    def describe(self) -> str:
        """The plans, the table of both, and how equal their results are."""
        compiled = (format_seconds(s) for s in (self.plain_first_s, self.remat_first_s))
        lines = [
            row("", "torch.compile", "remat", "change"),
            peak_row(self.plain, self.remat),
            *time_rows(self.plain, self.remat, self.rounds),
            row("first step", *compiled),
            "",
            *self.equality.describe(),
        ]
        return "\n\n".join((plans_table(self.plans), "\n".join(lines)))

    def to_data(self) -> dict[str, Any]:
        """Everything but the plans' schedules, for JSON."""
        return {
            "torch_compile": dataclasses.asdict(self.plain) | {"first_s": self.plain_first_s},
            "remat": dataclasses.asdict(self.remat) | {"first_s": self.remat_first_s},
            "rounds": self.rounds,
            **self.equality.to_data(),
        }


def plans_table(plans: tuple[CompiledPlan, ...]) -> str:
    """A line for each graph that torch.compile made of the step."""
    lines = [
        ("graph", "of", "plain", "budget", "planned", "verified", "extra time", "again", "rounds",
         "planned in")
    ]  # fmt: skip
    for number, one in enumerate(plans, 1):
        plan, verified = one.plan, one.verified_bytes
        lines.append(
            (
                str(number),
                one.module,
                format_bytes(one.baseline_bytes),
                "min" if one.budget_bytes is None else format_bytes(one.budget_bytes),
                format_bytes(plan.peak_bytes),
                "-" if verified is None else format_bytes(verified),
                f"{plan.overhead:+.2%}",
                str(sum(plan.schedule.recomputed(plan.graph).values())),
                str(one.rounds),
                format_seconds(one.planned_s),
            )
        )
    return "\n".join(aligned(lines, left=2))


def compiled_trial(
    model: nn.Module,
    budget: int | str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    rounds: int = 5,
    seed: int = 1,
    outputs: str = HELD,
    **options: Any,
) -> CompiledTrial:
    """Compare `model` under plain torch.compile with `remat.compile(model, budget, **options)`, on
    one batch. torch's caches are off, so that both are compiled, and planned, here.

    Plain torch.compile has a copy; every step starts from `seed`. Gradients are cleared at the end;
    buffers are as after `rounds + 2` steps.

    Raises what `remat.compile` does, and `TraceError` where the output has no loss, the model
    cannot be copied, torch cannot compile it, or a step does not fit the device.
    """
    check_rounds(rounds)
    other, (other_args, other_kwargs) = copied(model, (args, dict(kwargs)))
    before = len(compiled_plans())
    as_ever: Any = torch.compile(other)
    run = within(model, budget, outputs=outputs, **options)
    sides: dict[str, Any] = {"compiled": True, "outputs": outputs}
    plain = Side("torch.compile", as_ever, other_args, other_kwargs, **sides)
    planned = Side("the plan", run, args, dict(kwargs), **sides)
    with _compiled_here():
        _warm_up()
        measured, ours, equality = run_both(plain, planned, rounds, seed)
    return CompiledTrial(
        plain=measured,
        remat=ours,
        equality=equality,
        rounds=rounds,
        plans=tuple(compiled_plans()[before:]),
        plain_first_s=plain.first_s,
        remat_first_s=planned.first_s,
    )


def _warm_up() -> None:
    """Whoever compiles first waits for Inductor's own start, and shall not be charged for it."""
    x = torch.ones(4, requires_grad=True)
    torch.compile(lambda x: (x * 2).sin().sum())(x).backward()


@contextmanager
def _compiled_here() -> Iterator[None]:
    """Nothing comes from torch's caches; what it raises for an error of ours is ours."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._dynamo.exc import TorchDynamoException

    try:
        with (
            functorch.patch(enable_autograd_cache=False),
            inductor.patch(fx_graph_cache=False),
        ):
            yield
    except TorchDynamoException as error:
        if (ours := raised_inside(error, RematError)) is not None:
            raise ours from None
        raise RematError(f"torch.compile fails: {one_line(error)}") from error
