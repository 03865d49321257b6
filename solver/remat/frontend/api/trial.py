"""Compare a training step under remat with the same step without it.

`run_eager_trial` compares a planned module with eager mode, `run_compiled_trial` compares
`remat.compile` with plain `torch.compile`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from remat.errors import RematError, TraceError, one_line
from remat.frontend.api.comparison import (
    Equality,
    StepMeasurement,
    StepRunner,
    check_rounds,
    compare_steps,
    deep_copy_step,
)
from remat.frontend.runtime.module import RematModule
from remat.limits.options import OUTPUTS_DROPPED, OUTPUTS_HELD
from remat.limits.units import format_bytes, format_seconds
from remat.plan import Plan
from remat.report.report import Described, Report, Table

if TYPE_CHECKING:
    from remat.frontend.compile.registry import CompiledPlan


@dataclass(frozen=True)
class Trial(Described):
    """The measured peak, time and results of a step without remat (`reference`) and with it.

    `plans` are those that remat ran: one in eager mode, one for each graph under torch.compile,
    where `compiled_plans` has them with their verified peaks. `predicted_reference_bytes` is the
    predicted peak of eager mode, None under torch.compile. The `first_s` are the seconds of the
    first step, in which torch compiles and remat plans.
    """

    reference: StepMeasurement
    remat: StepMeasurement
    equality: Equality
    rounds: int
    plans: tuple[Plan, ...]
    predicted_reference_bytes: int | None = None
    compiled_plans: tuple[CompiledPlan, ...] = ()
    reference_first_s: float = 0.0
    remat_first_s: float = 0.0

    @property
    def plan(self) -> Plan:
        """The plan of the module in eager mode; that of the first graph under torch.compile."""
        return self.plans[0]

    @property
    def is_compiled(self) -> bool:
        """True if both steps ran under torch.compile."""
        return self.predicted_reference_bytes is None

    def report(self) -> Report:
        """Return a table of both steps side by side, and how equal their results are."""
        reference, remat = self.reference, self.remat
        peak = (
            "peak, measured",
            format_bytes(reference.peak_bytes),
            format_bytes(remat.peak_bytes),
            f"{remat.peak_bytes / reference.peak_bytes - 1:+.1%}",
        )
        time = (
            f"time, median of {self.rounds}",
            format_seconds(reference.time_s),
            format_seconds(remat.time_s),
            f"{remat.time_s / reference.time_s - 1:+.1%}",
        )
        loss = ("loss", f"{reference.loss:.6f}", f"{remat.loss:.6f}", "")
        equality = self.equality.text()
        if self.predicted_reference_bytes is None:
            first_s = (format_seconds(s) for s in (self.reference_first_s, self.remat_first_s))
            head = ("", "torch.compile", "remat", "change")
            table = Table([head, peak, time, loss, ("first step", *first_s, "")])
            return Report(compiled_plans_table(self.compiled_plans), table, equality)
        eager, planned, baseline = map(
            format_bytes,
            (
                self.predicted_reference_bytes,
                self.plan.peak_bytes,
                self.plan.baseline_peak_bytes,
            ),
        )
        rows = [
            ("", "eager", "remat", "change"),
            ("peak, predicted", eager, planned, ""),
            peak,
            ("time, predicted", "", "", f"{self.plan.overhead:+.1%}"),
            time,
            loss,
        ]
        note = (
            f"Eager mode takes {eager}, and the plan without recomputation {baseline}: `remat "
            "estimate` says why."
        )
        return Report(Table(rows), equality, "" if eager == baseline else note)

    def to_data(self) -> dict[str, Any]:
        """Return the figures as data for JSON, without the plans' schedules; null stands for a
        difference that is not finite."""
        reference, remat = dataclasses.asdict(self.reference), dataclasses.asdict(self.remat)
        if self.predicted_reference_bytes is None:
            return {
                "torch_compile": reference | {"first_s": self.reference_first_s},
                "remat": remat | {"first_s": self.remat_first_s},
                "rounds": self.rounds,
                **self.equality.to_data(),
            }
        return {
            "eager": reference,
            "remat": remat,
            "predicted": {
                "eager_peak_bytes": self.predicted_reference_bytes,
                "remat_peak_bytes": self.plan.peak_bytes,
                "overhead": self.plan.overhead,
            },
            "budget_bytes": self.plan.budget_bytes,
            "rounds": self.rounds,
            **self.equality.to_data(),
        }


def compiled_plans_table(plans: tuple[CompiledPlan, ...]) -> Table:
    """Return a table with a line for each graph that torch.compile made of the step."""
    lines = [
        ("graph", "module", "plain", "budget", "planned", "verified", "extra time", "recomputed",
         "rounds", "planned in")
    ]  # fmt: skip
    for number, compiled in enumerate(plans, 1):
        plan, verified_bytes = compiled.plan, compiled.verified_bytes
        budget_bytes = compiled.budget_bytes
        lines.append(
            (
                str(number),
                compiled.module,
                format_bytes(compiled.baseline_bytes),
                "min" if budget_bytes is None else format_bytes(budget_bytes),
                format_bytes(plan.peak_bytes),
                "-" if verified_bytes is None else format_bytes(verified_bytes),
                f"{plan.overhead:+.2%}",
                str(sum(plan.schedule.recomputed(plan.graph).values())),
                str(compiled.rounds),
                format_seconds(compiled.planned_s),
            )
        )
    return Table(lines, "llr")


def run_eager_trial(
    model: nn.Module,
    module: RematModule,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    rounds: int = 5,
    seed: int = 1,
    predicted_eager_bytes: int | None = None,
) -> Trial:
    """Run steps of `model` in eager mode and of `module`, the planned model, on one batch.

    Eager mode runs on a copy, and every step starts from `seed`. Outputs are held or dropped before
    the backward, as the plan assumes. Call it under `torch.autocast` if the plan was made under it;
    backward passes run outside of autocast, as torch recommends. Gradients are cleared at the end;
    buffers, such as batch norm's, are as after `rounds + 2` steps. `predicted_eager_bytes` is
    the predicted peak of eager mode, for the table, as from
    `remat.report.eager_step.eager_peak_bytes`; by default it is the plan's baseline.

    Raises `TraceError` where the output has no loss, the model cannot be copied, the module has no
    plan, or a step does not fit the device.
    """
    check_rounds(rounds)
    eager_model, (eager_args, eager_kwargs) = deep_copy_step(model, (args, dict(kwargs)))
    plan = module.plan
    if plan is None:
        raise TraceError("the module has no plan to compare with; make it with remat.optimize")
    program = module.program
    outputs = OUTPUTS_DROPPED if program is not None and program.outputs_dropped else OUTPUTS_HELD
    eager, remat, equality = compare_steps(
        StepRunner("eager mode", eager_model, eager_args, eager_kwargs, outputs=outputs),
        StepRunner("the plan", module, args, dict(kwargs), outputs=outputs),
        rounds,
        seed,
    )
    return Trial(
        reference=eager,
        remat=remat,
        equality=equality,
        rounds=rounds,
        plans=(plan,),
        predicted_reference_bytes=predicted_eager_bytes or plan.baseline_peak_bytes,
    )


def run_compiled_trial(
    model: nn.Module,
    budget: int | str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    rounds: int = 5,
    seed: int = 1,
    outputs: str = OUTPUTS_HELD,
    **options: Any,
) -> Trial:
    """Run steps of `model` under plain torch.compile and under
    `remat.compile(model, budget, **options)`, on one batch. torch's caches are off, so that both
    are compiled, and the step is planned, in this call.

    Plain torch.compile has a copy of the model; every step starts from `seed`. Gradients are
    cleared at the end; buffers are as after `rounds + 2` steps.

    Raises the errors of `remat.compile`, and `TraceError` where the output has no loss, the model
    cannot be copied, torch cannot compile it, or a step does not fit the device.
    """
    from remat.frontend.compile.backend import compile as compile_with_remat
    from remat.frontend.compile.registry import compiled_plans

    check_rounds(rounds)
    plain_model, (plain_args, plain_kwargs) = deep_copy_step(model, (args, dict(kwargs)))
    number_of_plans = len(compiled_plans())
    plain_module: Any = torch.compile(plain_model)
    remat_module = compile_with_remat(model, budget, outputs=outputs, **options)
    settings: dict[str, Any] = {"is_compiled": True, "outputs": outputs}
    plain_runner = StepRunner("torch.compile", plain_module, plain_args, plain_kwargs, **settings)
    remat_runner = StepRunner("the plan", remat_module, args, dict(kwargs), **settings)
    with _without_compile_caches():
        _start_inductor()
        plain, remat, equality = compare_steps(plain_runner, remat_runner, rounds, seed)
    plans = tuple(compiled_plans()[number_of_plans:])
    return Trial(
        reference=plain,
        remat=remat,
        equality=equality,
        rounds=rounds,
        plans=tuple(compiled.plan for compiled in plans),
        compiled_plans=plans,
        reference_first_s=plain_runner.first_s,
        remat_first_s=remat_runner.first_s,
    )


def _start_inductor() -> None:
    """Compile a small function, so that Inductor's own start counts for neither first step."""
    x = torch.ones(4, requires_grad=True)
    torch.compile(lambda x: (x * 2).sin().sum())(x).backward()


@contextmanager
def _without_compile_caches() -> Iterator[None]:
    """Disable torch's caches of compiled graphs inside of this context. An error that torch.compile
    raises because of a `RematError` becomes that `RematError`."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor
    from torch._dynamo.exc import TorchDynamoException

    from remat.frontend.compile.compat import cause_of_type

    try:
        with (
            functorch.patch(enable_autograd_cache=False),
            inductor.patch(fx_graph_cache=False),
        ):
            yield
    except TorchDynamoException as error:
        if (remat_error := cause_of_type(error, RematError)) is not None:
            try:
                raise remat_error from None
            finally:
                del remat_error  # its traceback has this frame: a reference cycle
        raise RematError(f"torch.compile fails: {one_line(error)}") from error
