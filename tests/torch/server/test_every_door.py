"""One question gets one answer: the same plan from the library, the command line and the service,
with torch's allocator within the budget."""

from __future__ import annotations

import logging
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.command_line import quick
from tests.helpers.service.server import Server
from transformers import LlamaConfig, LlamaForCausalLM

import remat
from remat.simulate import baseline_of

STRATEGY = remat.Auto(gap=0.01, time_limit=60.0, threads=1)
OPTIONS = {"gap": "0.01", "time_limit": "60", "threads": "1"}
GPU = "h100"

Figures = tuple[int, int, float, float | None]
"""Peak and budget in bytes, seconds, and the proved bound."""


@cache
def traced() -> remat.Trace:
    """Return the step of a Llama of 2 layers on an absent GPU, with roofline costs."""
    config = LlamaConfig(
        num_hidden_layers=2, hidden_size=512, intermediate_size=1408, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(2, 1024, dtype=torch.long)
    logging.getLogger("remat.costs.trace_costs").setLevel(logging.ERROR)
    batch = {"input_ids": ids, "labels": ids}
    return remat.measure(remat.trace(model, (), batch, device=GPU), remat.Roofline(GPU))


def figures(plan: remat.Plan) -> Figures:
    bound = None if plan.lower_bound is None else round(plan.lower_bound, 9)
    return plan.peak_bytes, plan.budget_bytes, round(plan.time_s, 9), bound


def answers(
    server: Server, folder: Path, budget: str, options: dict[str, Any]
) -> dict[str, remat.Plan]:
    """Return the plans of all doors that take a trace."""
    trace, file = traced(), folder / "step.trace.json.gz"
    trace.save(file)
    arguments = [f"--option={key}={value}" for key, value in OPTIONS.items()]
    arguments += [f"--{key}={value}" for key, value in options.items()]
    ended = quick("solve", file, "--budget", budget, "--json", *arguments)
    assert ended.code == 0, ended.err
    plans = {
        "solve_step": remat.solve_step(trace, budget, STRATEGY, **options).plan,
        "command line": remat.Plan.from_json(ended.out),
    }
    with server.client() as client:
        costs = f"roofline:{GPU}"
        plans["service"] = client.plan(trace, budget, STRATEGY, costs=costs, **options)[0]
        if not options:
            plans["solve"] = remat.solve(trace, budget, STRATEGY)
            (plans["sweep"],) = remat.sweep(trace, [budget], STRATEGY)
            (row,) = remat.compare(trace, [budget], [STRATEGY]).rows
            assert row.plan is not None
            plans["compare"] = row.plan
            (plans["sweep of the service"],) = client.sweep(trace, [budget], STRATEGY)
    return plans


RESERVED = "reserved"
"""80% of the peak in bytes, and the reserve."""


@pytest.mark.parametrize(
    ("budget", "options"),
    [
        ("80%", {}),
        (RESERVED, {"reserve": 1 << 20}),
        pytest.param("50%", {"split": "auto"}, marks=pytest.mark.slow),
        pytest.param("40%", {"split": "auto", "offload": "auto"}, marks=pytest.mark.slow),
    ],
)
def test_every_door_gives_the_same_plan_within_the_allocators_budget(
    server: Server, tmp_path: Path, budget: str, options: dict[str, Any]
) -> None:
    if budget == RESERVED:
        peak_bytes = baseline_of(traced().graph()).peak_bytes
        budget = str(peak_bytes * 4 // 5 + options["reserve"])
    plans = answers(server, tmp_path, budget, options)
    assert {p.terms.reserved_for_others_bytes for p in plans.values()} == {options.get("reserve")}
    assert len({*map(figures, plans.values())}) == 1, {k: figures(p) for k, p in plans.items()}
    plan = plans["solve_step"]
    prediction = plan.allocator
    assert prediction is not None
    requested_bytes = plan.stats.get("requested_budget_bytes", plan.budget_bytes)
    assert isinstance(requested_bytes, int)
    assert prediction.allocated_peak_bytes <= requested_bytes
