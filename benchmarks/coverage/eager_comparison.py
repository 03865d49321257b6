"""Check of one architecture: a step in eager mode, then one under `remat.enable`."""

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
    EQUAL: "gradients equal eager's bit for bit",
    CLOSE: "gradients equal eager's within 1e-5",
    WRONG: "gradients differ",
    REFUSED: "remat raised an error of its own",
    FAILED: "another error",
    HUNG: "not finished in time, or its process died",
    NOT_EAGER: "it could not be built small, or does not train in eager mode: not counted",
}
TOLERANCE = 1e-5

Row = dict[str, Any]


def send_row(sender: Any, check: Callable[[str, str], Row], kind: str, name: str) -> None:
    """Check one architecture in this process, and send its row through a pipe."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sender.send(check(kind, name))


def check_enable(kind: str, name: str) -> Row:
    """Return the outcome for one architecture under `remat.enable`, and the reason."""
    try:
        model, batch = build_small_model(kind, name)
        model(**batch)  # some models create parameters in their first call, from random numbers
        eager = copy.deepcopy(model)
        expected = gradients(eager, eager, batch)
        if not expected:
            raise ValueError("no gradient")
    except Exception as error:
        return failure_row(NOT_EAGER, error)
    try:
        strategy = remat.Auto(time_limit=5.0, gap=0.1)
        costs = remat.Roofline("cpu")
        remat.enable(model, "min", scope="auto", outputs="loss", costs=costs, strategy=strategy)
        actual = gradients(model, model, batch)
    except remat.RematError as error:
        return failure_row(REFUSED, error)
    except Exception as error:
        return failure_row(FAILED, error)
    plan = remat.plans(model)[-1]
    error = largest_error(expected, actual)
    outcome = EQUAL if error == 0.0 else CLOSE if error <= TOLERANCE else WRONG
    return {"outcome": outcome, "why": "", "error": error, **_how(plan)}


def _how(plan: remat.Plan) -> Row:
    """Return how a model was planned: as a whole or by blocks, and the modules without a plan."""
    if not isinstance(plan, BlocksPlan):
        recomputed = len(plan.schedule) - len(plan.graph)
        smallest = plan.stats.get("unsplit_min_bytes", plan.peak_bytes)
        return {
            "planned": "whole",
            "recomputed": recomputed,
            "baseline_bytes": plan.baseline_peak_bytes,
            "peak_bytes": plan.peak_bytes,
            "unsplit_min_bytes": smallest,
            "splits": [[s.module, s.pieces] for s in plan.graph.splits],
        }
    block_plans = [c.plan for c in plan.calls if c.plan is not None]
    reasons = sorted(
        {
            f"{c.class_name}: {_without_folders(c.unplanned_reason)}"[:300]
            for c in plan.unplanned
            if c.unplanned_reason
        }
    )
    return {
        "planned": "blocks" if block_plans else "nothing",
        "recomputed": sum(len(p.schedule) - len(p.graph) for p in block_plans),
        "left": sorted({c.class_name for c in plan.unplanned}),
        "because": _without_folders(plan.not_whole_reason),
        "reasons": reasons,
    }


def _without_folders(message: str) -> str:
    """Return a message without the path of this machine's site-packages."""
    return re.sub(r"\S*/site-packages/", "", message)


def failure_row(outcome: str, error: Exception) -> Row:
    """Return the row of an architecture that raised an error."""
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return {"outcome": outcome, "why": f"{type(error).__name__}: {first}"[:500]}


def gradients(
    run: Callable[..., Any], model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run a step of `run` from a fixed seed; return the model's gradients by parameter name."""
    torch.manual_seed(2)
    run(**batch).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def largest_error(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]
) -> float:
    """Return the largest relative difference of two sets of gradients.

    The scale is the gradient's largest element, but at least a hundredth of the largest element of
    all gradients: the gradient of a key's bias before a softmax consists of rounding errors only.
    """
    if expected.keys() != actual.keys():
        return float("inf")
    errors = [0.0]
    expected = {name: gradient for name, gradient in expected.items() if gradient.numel()}
    sizes = {name: gradient.abs().max().item() for name, gradient in expected.items()}
    min_scale = 1e-2 * max(sizes.values())
    for name, gradient in expected.items():
        if not torch.equal(gradient, actual[name]):
            scale = max(sizes[name], min_scale) or 1.0
            errors.append((gradient - actual[name]).abs().max().item() / scale)
    return max(errors)
