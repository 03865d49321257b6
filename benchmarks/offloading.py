"""Recomputation, offloading, both, and both with splitting: extra time within memory budgets.

    python -m benchmarks.offloading                          # all models, to benchmarks/results
    python -m benchmarks.offloading --only gpt2 --gpus h100 --budgets 50% --out DIR

Each model is traced for an absent GPU without memory for its parameters, and has the costs of a
roofline. The link is that of the GPU: PCIe 5 for an H100, NVLink-C2C for a GH200. Budgets are
shares of the step's peak without recomputation. `overhead` is the time in addition to that step's,
waiting for copies included (`waiting` is their part), by simulation; `bound` is what every plan of
the order takes at least, whatever it offloads. `solve_s` is the time of the choice and of solving.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import remat
from benchmarks.harness import machine, report
from benchmarks.models.traced import TRACED_MODELS
from benchmarks.splitting import Loss
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.plan_request import PlanRequest
from remat.choice.step import plan_step
from remat.costs.roofline import Roofline
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.limits.options import PIECES
from remat.progress import Clock

Row = dict[str, Any]
Build = Callable[[], tuple[torch.nn.Module, dict[str, Any]]]

RESULTS = Path(__file__).parent / "results"
GPUS = ("h100", "gh200")
BUDGETS = ("50%", "30%", "20%", "10%")
METHODS = ("recompute", "offload", "both", "both and split")
WITHOUT_PIECES = ("llama3-8b-128k",)
"""Models whose operations are not split as well: within 10%, this one has 12,000 operations with
pieces, which take minutes to solve."""

TIME_LIMIT_S = 10.0
"""The limit of each solve; all solves of a plan together have `LIMIT_S`."""

LIMIT_S = 60.0


def _llama(rows: int, tokens: int) -> Build:
    def build() -> tuple[torch.nn.Module, dict[str, Any]]:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            num_hidden_layers=8, vocab_size=1024, hidden_size=4096, intermediate_size=14336,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072,
            use_cache=False,
        )  # fmt: skip
        model = Loss(LlamaForCausalLM(config).bfloat16())
        return model, {"ids": torch.zeros(rows, tokens, dtype=torch.long)}

    return build


def _qwen3(rows: int, tokens: int) -> Build:
    def build() -> tuple[torch.nn.Module, dict[str, Any]]:
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            num_hidden_layers=8, vocab_size=1024, hidden_size=5120, intermediate_size=17408,
            num_attention_heads=40, num_key_value_heads=8, head_dim=128, use_cache=False,
        )  # fmt: skip
        model = Loss(Qwen3ForCausalLM(config).bfloat16())
        return model, {"ids": torch.zeros(rows, tokens, dtype=torch.long)}

    return build


def _gpt2() -> tuple[torch.nn.Module, dict[str, Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = Loss(GPT2LMHeadModel(GPT2Config(use_cache=False)).bfloat16())
    return model, {"ids": torch.zeros(16, 1024, dtype=torch.long)}


MODELS: dict[str, tuple[str, Build]] = {
    "llama3-8b-8k": ("8 layers of Llama 3 8B, 4 x 8,192 tokens", _llama(4, 8192)),
    "llama3-8b-32k": ("8 layers of Llama 3 8B, 1 x 32,768 tokens", _llama(1, 32768)),
    "llama3-8b-128k": ("8 layers of Llama 3 8B, 1 x 131,072 tokens", _llama(1, 131072)),
    "qwen3-14b-3328": ("8 layers of Qwen3 14B, 4 x 3,328 tokens", _qwen3(4, 3328)),
    "gpt2": ("GPT-2, 16 x 1,024 tokens", _gpt2),
    "resnet152": ("ResNet-152, 32 images", TRACED_MODELS["resnet152"].make),
    "unet": ("diffusion U-Net, 16 images", TRACED_MODELS["unet"].make),
}
"""Models by name: a description, and what builds a model and its arguments."""


@cache
def trace_of(name: str, gpu: str) -> remat.Trace:
    """Return the trace of a model's step on a GPU, with costs."""
    with torch.device("meta"):
        model, arguments = MODELS[name][1]()
        traced = remat.trace(model.train(), (), arguments, device=gpu)
    return remat.measure(traced, Roofline(gpu))


def row_of(name: str, gpu: str, budget: str, method: str) -> Row:
    """Return the figures of a plan."""
    trace, costs = trace_of(name, gpu), Roofline(gpu)
    if method == "offload":
        nodes = tuple(n.model_copy(update={"recomputable": False}) for n in trace.nodes)
        trace = trace.replace(nodes=nodes)
    started_s = time.perf_counter()
    row: Row = {"model": name, "gpu": gpu, "budget": budget, "method": method}
    row["operations"] = len(trace.operations)
    try:
        request = PlanRequest(
            Limits(Budget.parse(budget)),
            remat.Auto(time_limit=TIME_LIMIT_S),
            pieces=PIECES if method == "both and split" else (),
            offload=None if method == "recompute" else OffloadLimits(costs.link),
        )
        step = plan_step(
            trace,
            request,
            measure=lambda t: remat.measure(t, costs),
            clock=Clock.of(LIMIT_S),
        )
    except remat.RematError as error:
        failure = type(error).__name__
        return row | {"is_feasible": False, "failure": failure, "solve_s": _since(started_s)}
    plan, step_s = step.plan, step.plan.baseline_time_s
    return row | {
        "is_feasible": True,
        "peak": round(plan.share, 4),
        "overhead": round(plan.overhead, 4),
        "bound": None if plan.lower_bound is None else round(plan.lower_bound, 4),
        "waiting": round(float(plan.stats.get("waiting_s", 0.0)) / step_s, 4),
        "copies": round(float(plan.stats.get("copies_s", 0.0)) / step_s, 4),
        "host_bytes": plan.host_bytes,
        "pieces": [split.pieces for split in plan.graph.splits],
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "baseline_s": step_s,
        "solve_s": _since(started_s),
    }


def _since(started_s: float) -> float:
    return round(time.perf_counter() - started_s, 1)


def _line(row: Row) -> str:
    figures = "infeasible"
    if row["is_feasible"]:
        figures = (
            f"+{100 * row['overhead']:.1f}%, waiting {100 * row['waiting']:.1f}%, "
            f"host {row['host_bytes'] / 2**30:.1f} GiB"
        )
        figures += "" if row["bound"] is None else f", bound {100 * row['bound']:.1f}%"
    where = f"{row['model']} on {row['gpu']}, {row['budget']}, {row['method']}"
    return f"{where}: {figures} ({row['solve_s']:.0f} s)"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and write its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=MODELS, metavar="MODEL", help=", ".join(MODELS))
    add("--gpus", nargs="+", default=GPUS, help="GPUs with a data sheet")
    add("--budgets", nargs="+", default=BUDGETS, help="percentages of the peak")
    add("--methods", nargs="+", default=METHODS, choices=METHODS, metavar="METHOD")
    add("--out", type=Path, default=RESULTS, help="folder of the result file")
    options = parser.parse_args(argv)
    rows: list[Row] = []
    result = {
        "benchmark": "offloading",
        "machine": machine.describe(torch.device("cpu")),
        "costs": "rooflines of the GPUs",
        "models": {name: MODELS[name][0] for name in options.only or MODELS},
        "rows": rows,
    }
    for name in options.only or MODELS:
        for gpu in options.gpus:
            for budget in options.budgets:
                for method in options.methods:
                    if method == "both and split" and name in WITHOUT_PIECES:
                        continue
                    rows.append(row_of(name, gpu, budget, method))
                    print(_line(rows[-1]), flush=True)
        print("written:", report.write_result(options.out, "offloading", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
