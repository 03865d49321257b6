"""Splitting the head of language models: peak and time of plans, by the number of pieces.

    python -m benchmarks.splitting                            # all models, to benchmarks/results
    python -m benchmarks.splitting --only llama-8-128256 --pieces auto 8 --out DIR

Each model is traced for an absent H100 without memory for its parameters (bfloat16, 4 x 2,048
tokens), returns its loss only, and has the costs of a roofline. The region that makes the peak is
found, split, and the graph solved within shares of the unsplit step's peak without recomputation;
with "auto" the number of pieces is chosen, as in `remat.optimize`. `overhead` is the time in
addition to that step's, `solve_s` the time of the choice and of solving. Solving takes seconds on
the CPU; costs on a real GPU may differ.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.harness import machine, report
from remat.choice.plan_request import PlanRequest
from remat.choice.step import plan_step
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.limits.options import PIECES as SPLIT_CHOICES
from remat.passes.split.regions import TraceIndex
from remat.passes.split.rewriting import split_regions
from remat.passes.split.splits import find_peak_region, large_operations
from remat.progress import Clock

Row = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
BATCH, TOKENS = 4, 2048
AUTO = "auto"
PIECES = (AUTO, "1", "4", "8", "16")
BUDGETS = ("90%", "70%", "50%", "30%", "20%", "min")
TIME_LIMIT_S = 10.0
COSTS = remat.Roofline("h100")


class Loss(nn.Module):
    """A language model that returns its loss only."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each token from those before it."""
        return self.model(input_ids=ids, labels=ids).loss


def llama(layers: int, vocabulary: int) -> nn.Module:
    """Return a Llama of width 2,048 with tied weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=layers, vocab_size=vocabulary, hidden_size=2048, intermediate_size=8192,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, use_cache=False,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gemma(layers: int, vocabulary: int) -> nn.Module:
    """Return a Gemma 2 of width 2,048, whose logits are capped by tanh."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        num_hidden_layers=layers, vocab_size=vocabulary, hidden_size=2048, intermediate_size=8192,
        num_attention_heads=8, num_key_value_heads=4, head_dim=256, use_cache=False,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


MODELS: dict[str, tuple[Callable[[int, int], nn.Module], int, int]] = {
    "llama-8-128256": (llama, 8, 128256),
    "llama-16-128256": (llama, 16, 128256),
    "llama-28-151936": (llama, 28, 151936),
    "llama-16-32000": (llama, 16, 32000),
    "gemma2-16-262144": (gemma, 16, 262144),
}
"""Models by name: their builder, number of layers and vocabulary."""


def trace_of(name: str) -> remat.Trace:
    """Return the trace of a model's step, with costs."""
    build, layers, vocabulary = MODELS[name]
    with torch.device("meta"):
        model = Loss(build(layers, vocabulary).to(torch.bfloat16)).train()
        ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    return remat.measure(remat.trace(model, ids, device="h100"), COSTS)


def rows_of(name: str, pieces: Sequence[str], budgets: Sequence[str]) -> list[Row]:
    """Return a row for each number of pieces and budget."""
    trace = trace_of(name)
    unsplit = trace.graph()
    peak_bytes = remat.simulate(unsplit, remat.Schedule.keep_all(unsplit)).peak_bytes
    rows: list[Row] = []
    for count in pieces:
        started_s = time.perf_counter()
        graph = unsplit if count in (AUTO, "1") else split_graph(trace, int(count))
        split_s = time.perf_counter() - started_s
        for budget in budgets:
            row = {"model": name, "pieces": count, "budget": budget, "operations": len(graph)}
            row |= {"unsplit_peak_bytes": peak_bytes, "split_s": round(split_s, 2)}
            if count == AUTO:
                rows.append(row | chosen_figures(trace, budget))
            else:
                rows.append(row | plan_figures(graph, budget, peak_bytes, unsplit.total_cost_s))
            print(_line(rows[-1]), flush=True)
    return rows


def split_graph(trace: remat.Trace, pieces: int) -> remat.Graph:
    """Return the graph of a trace whose region at the peak is split."""
    largest = large_operations(trace.graph_of_sizes, 0)[0]
    region = find_peak_region(TraceIndex(trace), largest)
    assert region is not None
    return remat.measure(split_regions([region], [pieces]), COSTS).graph()


def plan_figures(graph: remat.Graph, budget: str, peak_bytes: int, unsplit_s: float) -> Row:
    """Solve a graph, and return the plan's figures. A percentage is one of `peak_bytes`."""
    limit: int | str = budget
    if budget.endswith("%"):
        limit = int(peak_bytes * int(budget.removesuffix("%")) / 100)
    started_s = time.perf_counter()
    try:
        plan = remat.solve(graph, limit, remat.Auto(time_limit=TIME_LIMIT_S))
    except remat.InfeasibleBudget as error:
        least_bytes = error.min_feasible_bytes
        return {"is_feasible": False, "least_bytes": least_bytes, "solve_s": _since(started_s)}
    return {
        "is_feasible": True,
        "peak": round(plan.peak_bytes / peak_bytes, 4),
        "overhead": round(plan.time_s / unsplit_s - 1, 4),
        "gap": plan.gap,
        "solve_s": _since(started_s),
    }


def chosen_figures(trace: remat.Trace, budget: str) -> Row:
    """Choose the number of pieces for a budget, and return the plan's figures."""
    started_s = time.perf_counter()
    try:
        split = plan_step(
            trace,
            PlanRequest(
                Limits(Budget.parse(budget)), remat.Auto(time_limit=TIME_LIMIT_S), SPLIT_CHOICES
            ),
            measure=lambda t: remat.measure(t, COSTS),
            clock=Clock.of(math.inf),
        )
    except remat.InfeasibleBudget as error:
        least_bytes = error.min_feasible_bytes
        return {"is_feasible": False, "least_bytes": least_bytes, "solve_s": _since(started_s)}
    plan = split.plan
    return {
        "is_feasible": True,
        "chosen": [[s.module, s.pieces] for s in plan.graph.splits],
        "peak": round(plan.peak_bytes / plan.baseline_peak_bytes, 4),
        "overhead": round(plan.overhead, 4),
        "gap": plan.gap,
        "solve_s": _since(started_s),
    }


def _since(started_s: float) -> float:
    return round(time.perf_counter() - started_s, 1)


def _line(row: Row) -> str:
    figures = "infeasible"
    if row["is_feasible"]:
        figures = f"peak {row['peak']:.3f}, +{100 * row['overhead']:.1f}%"
    where = f"{row['model']}, {row['pieces']} pieces, {row['budget']}"
    return f"{where}: {figures} ({row['solve_s']:.0f} s)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and write its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    add("--pieces", nargs="+", default=PIECES, help="numbers of pieces, or auto; 1: unsplit")
    add("--budgets", nargs="+", default=BUDGETS, help="percentages of the unsplit peak, or min")
    add("--out", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(argv)
    result = {
        "benchmark": "splitting",
        "machine": machine.describe(torch.device("cpu")),
        "batch": [BATCH, TOKENS],
        "costs": "roofline h100",
        "rows": [
            row
            for name in options.only or MODELS
            for row in rows_of(name, options.pieces, options.budgets)
        ],
    }
    print("written:", report.write_result(options.out, "splitting", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
