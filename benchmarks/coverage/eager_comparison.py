"""One architecture: a step in eager mode, then one under `remat.enable`."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.coverage.small_models import build_small_model
from remat.blockwise.blocks_plan import BlocksPlan

EQUAL, CLOSE, WRONG = "equal", "close", "wrong"
REFUSED, FAILED, HUNG = "refused", "failed", "killed"
NOT_EAGER = "not in eager mode"
OUTCOMES = {
    EQUAL: "gradients are eager's, bit for bit",
    CLOSE: "gradients are eager's within 1e-5",
    WRONG: "gradients are others",
    REFUSED: "an error of remat's",
    FAILED: "another error",
    HUNG: "not done in time, or its process died",
    NOT_EAGER: "it could not be made small, or does not train in eager mode: not counted",
}
TOLERANCE = 1e-5

Row = dict[str, Any]


def send_row(sender: Any, ask: Callable[[str, str], Row], kind: str, name: str) -> None:
    """Of one architecture, in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sender.send(ask(kind, name))


def check_enable(kind: str, name: str) -> Row:
    """The outcome for one architecture, and why."""
    try:
        model, batch = build_small_model(kind, name)
        model(**batch)  # some make parts of themselves in their first call, from random numbers
        eager = copy.deepcopy(model)
        expected = gradients(eager, eager, batch)
        if not expected:
            raise ValueError("no gradient")
    except Exception as error:
        return failure_row(NOT_EAGER, error)
    try:
        strategy = remat.Auto(time_limit=5.0, gap=0.1)
        costs = remat.Roofline("cpu")
        remat.enable(model, "min", scope="auto", costs=costs, strategy=strategy)
        actual = gradients(model, model, batch)
    except remat.RematError as error:
        return failure_row(REFUSED, error)
    except Exception as error:
        return failure_row(FAILED, error)
    plan = remat.plans(model)[-1]
    error = largest_error(expected, actual)
    outcome = EQUAL if error == 0.0 else CLOSE if error <= TOLERANCE else WRONG
    return {"outcome": outcome, "why": "", "error": error, **_how(plan)}


def _how(plan: remat.Plan | BlocksPlan) -> Row:
    """Planned as a whole, or by blocks, and what was left to eager mode then."""
    if isinstance(plan, remat.Plan):
        return {"planned": "whole", "recomputed": len(plan.schedule) - len(plan.graph)}
    own = [c.plan for c in plan.calls if c.plan is not None]
    reasons = sorted(
        {
            f"{c.class_name}: {_anywhere(c.unplanned_reason)}"[:300]
            for c in plan.unplanned
            if c.unplanned_reason
        }
    )
    return {
        "planned": "blocks" if own else "nothing",
        "recomputed": sum(len(p.schedule) - len(p.graph) for p in own),
        "left": sorted({c.class_name for c in plan.unplanned}),
        "because": _anywhere(plan.not_whole_reason),
        "reasons": reasons,
    }


def _anywhere(why: str) -> str:
    """Without the folders of this machine."""
    return re.sub(r"\S*/site-packages/", "", why)


def failure_row(outcome: str, error: Exception) -> Row:
    """Of one that did not come to a step."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return {"outcome": outcome, "why": f"{type(error).__name__}: {first}"[:500]}


def gradients(
    run: Callable[..., Any], model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Of one step of `run`, by the names of the model's parameters."""
    torch.manual_seed(2)
    run(**batch).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def largest_error(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]
) -> float:
    """The largest difference, relative to the largest number of a gradient or, where all of it is
    rounding (the bias of a key before a softmax), to a hundredth of the largest of all."""
    if expected.keys() != actual.keys():
        return float("inf")
    errors = [0.0]
    sizes = {name: gradient.abs().max().item() for name, gradient in expected.items()}
    least = 1e-2 * max(sizes.values())
    for name, gradient in expected.items():
        if not torch.equal(gradient, actual[name]):
            scale = max(sizes[name], least) or 1.0
            errors.append((gradient - actual[name]).abs().max().item() / scale)
    return max(errors)
