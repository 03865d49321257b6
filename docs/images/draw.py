"""Draws the pictures of the documentation: `python docs/images/draw.py`.

One training step of GPT-2 (124 million parameters, 8 x 512 tokens, bfloat16) with the costs that
the roofline model gives for an H200, at half of its memory. No GPU is needed, and the weights need
not be initialised: nothing is computed. The picture of offloading is of four layers with the shapes
of Llama 3 8B (32,768 tokens) on an H100.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights

import remat
from remat import view
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.plan_request import PlanRequest
from remat.choice.step import plan_step
from remat.limits.budget import Budget
from remat.limits.limits import Limits

HERE = Path(__file__).parent
BUDGETS = ("40%", "55%", "70%", "85%", "100%")


def plan_of_gpt2() -> remat.Plan:
    """The plan that is drawn."""
    config = GPT2Config(use_cache=False)
    with no_init_weights():
        model = cast(nn.Module, GPT2LMHeadModel(config)).to(torch.bfloat16)
    ids = torch.zeros(8, 512, dtype=torch.long)
    trace = remat.trace(model, (), {"input_ids": ids, "labels": ids})
    return remat.solve(remat.measure(trace, remat.Roofline("h200")), "50%")


def draw_plan(plan: remat.Plan, folder: Path) -> None:
    """Write every picture of a plan into a folder."""
    (folder / "timeline.svg").write_text(view.timeline_svg(plan))
    (folder / "schedule.svg").write_text(view.schedule_svg(plan))
    (folder / "modules.svg").write_text(view.modules_svg(plan))
    plans = remat.sweep(plan.graph, BUDGETS, remat.Auto(gap=0.01))
    (folder / "frontier.svg").write_text(view.frontier_svg(plans))


def offloading_plan_of_llama() -> remat.Plan:
    """Return the plan of the picture of offloading."""
    config = LlamaConfig(
        num_hidden_layers=4, vocab_size=1024, hidden_size=4096, intermediate_size=14336,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=32768,
        use_cache=False,
    )  # fmt: skip
    costs = remat.Roofline("h100")
    with torch.device("meta"):
        model = cast(nn.Module, LlamaForCausalLM(config)).to(torch.bfloat16)
        ids = torch.zeros(1, 32768, dtype=torch.long)
        trace = remat.trace(
            model, (), {"input_ids": ids, "labels": ids}, device="h100"
        )
    request = PlanRequest(
        Limits(Budget.parse("35%")), offload=OffloadLimits(costs.link)
    )
    return plan_step(
        remat.measure(trace, costs), request, measure=lambda step: step
    ).plan


def draw_offloading(plan: remat.Plan, folder: Path) -> None:
    """Write the picture of a plan with offloading into a folder."""
    (folder / "offloading.svg").write_text(view.timeline_svg(plan))


if __name__ == "__main__":
    draw_plan(plan_of_gpt2(), HERE)
    draw_offloading(offloading_plan_of_llama(), HERE)
