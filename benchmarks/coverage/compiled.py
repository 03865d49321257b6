"""Check of one architecture under torch.compile: a plain step, then one by the backend "remat"."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn

import remat
from benchmarks.coverage.eager_comparison import (
    CLOSE,
    EQUAL,
    FAILED,
    HUNG,
    REFUSED,
    TOLERANCE,
    WRONG,
    Row,
    failure_row,
    gradients,
    largest_error,
)
from benchmarks.coverage.small_models import build_small_model
from benchmarks.harness.measurement import keep_freed_memory
from remat.frontend.memory.meter import allocated_peak, unique_bytes

OVER, NOT_COMPILED = "over", "not compiled"
OUTCOMES = {
    EQUAL: "gradients equal plain torch.compile's bit for bit",
    CLOSE: "gradients equal plain torch.compile's within 1e-5",
    WRONG: "gradients differ",
    OVER: "the step's peak is above the verified one",
    REFUSED: "remat raised an error of its own",
    FAILED: "another error",
    HUNG: "not finished in time, or its process died",
    NOT_COMPILED: "it could not be built small, or plain torch.compile does not train it, or not "
    "twice with the same gradients: not counted",
}

Compiled = Callable[..., Any]


def check_compiled(kind: str, name: str) -> Row:
    """Return the outcome for one architecture at the budget "min", and the reason."""
    torch._inductor.config.compile_threads = 1
    keep_freed_memory()
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        try:
            model, batch = build_small_model(kind, name)
            model(**batch)  # some models create parameters in their first call
            plain, planned = copy.deepcopy(model), copy.deepcopy(model)
            expected, plain_bytes = _step(torch.compile(plain), plain, batch)
            repeated, _ = _step(torch.compile(plain), plain, batch)
            if not expected or largest_error(expected, repeated) > TOLERANCE:
                raise ValueError("no gradients, or different ones in each run")
        except Exception as error:
            return failure_row(NOT_COMPILED, error)
        try:
            options = {"budget": "min", "gap": 0.05, "time_limit": 5.0}
            remat_step = torch.compile(planned, backend="remat", options=options)
            actual, peak_bytes = _step(remat_step, planned, batch)
        except remat.RematError as error:
            return failure_row(REFUSED, error)
        except Exception as error:
            cause = error.__cause__ or error.__context__
            is_remat_error = isinstance(cause, remat.RematError)
            return failure_row(REFUSED if is_remat_error else FAILED, error)
    return _judged(largest_error(expected, actual), peak_bytes, plain_bytes)


def _judged(error: float, peak_bytes: int, plain_bytes: int) -> Row:
    """Return the row of an architecture that trained, with its error and peak."""
    plans = remat.compiled_plans()
    verified_bytes = [p.verified_bytes for p in plans]
    outcome = EQUAL if error == 0.0 else CLOSE if error <= TOLERANCE else WRONG
    # With several graphs, a later one may retain more than an earlier one was planned with.
    if len(plans) == 1 and peak_bytes > (verified_bytes[0] or 0):
        outcome = OVER
    return {
        "outcome": outcome, "why": "", "error": error, "graphs": len(plans),
        "planned": "compiled" if plans else "nothing", "peak_bytes": peak_bytes,
        "inductor_peak_bytes": plain_bytes, "verified_bytes": verified_bytes,
        "recomputed": sum(len(p.plan.schedule) - len(p.plan.graph) for p in plans),
    }  # fmt: skip


def _step(
    run: Compiled, model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients of a first step, and the peak of a second one with its tensors."""
    actual = {n: g.clone() for n, g in gradients(run, model, batch).items()}
    used = [p for name, p in model.named_parameters() if name in actual]
    model.zero_grad(set_to_none=True)

    def step() -> None:
        run(**batch).loss.backward()

    constant_bytes = unique_bytes([*used, *model.buffers(), *batch.values()])
    peak_bytes = allocated_peak(step) + constant_bytes
    model.zero_grad(set_to_none=True)
    return actual, peak_bytes
