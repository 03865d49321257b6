"""One architecture under torch.compile: a plain step, then one by the backend "remat"."""

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
from remat.frontend.memory.allocator_peak import allocated_peak
from remat.frontend.memory.meter import unique_bytes

OVER, NOT_COMPILED = "over", "not compiled"
OUTCOMES = {
    EQUAL: "gradients are plain torch.compile's, bit for bit",
    CLOSE: "gradients are plain torch.compile's within 1e-5",
    WRONG: "gradients are others",
    OVER: "a step takes more than was verified",
    REFUSED: "an error of remat's",
    FAILED: "another error",
    HUNG: "not done in time, or its process died",
    NOT_COMPILED: "it could not be made small, or plain torch.compile does not train it, or not "
    "twice with the same gradients: not counted",
}

Compiled = Callable[..., Any]


def check_compiled(kind: str, name: str) -> Row:
    """The outcome for one architecture with the budget "min", and why."""
    torch._inductor.config.compile_threads = 1
    keep_freed_memory()
    with (
        torch._functorch.config.patch(enable_autograd_cache=False),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        try:
            model, batch = build_small_model(kind, name)
            model(**batch)  # some make parts of themselves in their first call
            plain, planned = copy.deepcopy(model), copy.deepcopy(model)
            expected, plain_bytes = _step(torch.compile(plain), plain, batch)
            repeated, _ = _step(torch.compile(plain), plain, batch)
            if not expected or largest_error(expected, repeated) > TOLERANCE:
                raise ValueError("no gradient, or another one each time")
        except Exception as error:
            return failure_row(NOT_COMPILED, error)
        try:
            options = {"budget": "min", "gap": 0.05, "time_limit": 5.0}
            remat_step = torch.compile(planned, backend="remat", options=options)
            actual, peak_bytes = _step(remat_step, planned, batch)
        except remat.RematError as error:
            return failure_row(REFUSED, error)
        except Exception as error:
            inside = error.__cause__ or error.__context__
            is_ours = isinstance(inside, remat.RematError)
            return failure_row(REFUSED if is_ours else FAILED, error)
    return _judged(largest_error(expected, actual), peak_bytes, plain_bytes)


def _judged(error: float, peak_bytes: int, plain_bytes: int) -> Row:
    plans = remat.compiled_plans()
    verified_bytes = [p.verified_bytes for p in plans]
    outcome = EQUAL if error == 0.0 else CLOSE if error <= TOLERANCE else WRONG
    # Of several graphs, a later one may hold more than an earlier one knew.
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
    """Gradients of a first step, and the peak bytes of another, of what takes part in it."""
    actual = {n: g.clone() for n, g in gradients(run, model, batch).items()}
    used = [p for name, p in model.named_parameters() if name in actual]
    model.zero_grad(set_to_none=True)

    def step() -> None:
        run(**batch).loss.backward()

    there = unique_bytes([*used, *model.buffers(), *batch.values()])
    peak_bytes = allocated_peak(step) + there
    model.zero_grad(set_to_none=True)
    return actual, peak_bytes
