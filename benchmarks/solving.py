"""How fast and how well GPT-2's training step is scheduled, from roofline costs.

    python -m benchmarks.solving

Traces GPT-2 with 12 layers, and solves for several shares of the peak without recomputation.
Nothing of the model is computed: sizes and costs come from shapes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import remat
from benchmarks import machine, report
from remat.budget import format_bytes

BUDGETS = ("90%", "70%", "50%", "35%", "min")
RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solving", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--costs", default="h200", help="device of the roofline (default h200)")
    parser.add_argument("--gap", type=float, default=0.01)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each solve")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--out", default=str(RESULTS))
    options = parser.parse_args(argv)
    start = time.perf_counter()
    trace = _traced(options.batch, options.tokens)
    traced_s = time.perf_counter() - start
    trace = remat.measure(trace, remat.Roofline(options.costs))
    graph = trace.graph()
    rows = [_solved(trace, budget, options) for budget in BUDGETS]
    size = f"12 layers, width 768, batch {options.batch} x {options.tokens} tokens, dropout 0.1"
    print(f"\nGPT-2: {size}; {len(graph)} operations, traced in {traced_s:.1f} s")
    print(f"{'budget':>8} {'peak':>10} {'overhead':>9} {'gap':>7} {'seconds':>8}  status")
    for row in rows:
        print(
            f"{row['budget']:>8} {format_bytes(row['peak_bytes']):>10} {row['overhead']:>9.2%} "
            f"{row['gap']:>7.2%} {row['seconds']:>8.1f}  {row['status']}"
        )
    result: dict[str, Any] = {
        "benchmark": "solving",
        "units": "bytes, seconds; overhead and gap as shares",
        "machine": machine.describe(torch.device("cpu")),
        "model": f"GPT-2: {size}",
        "operations": len(graph),
        "trace_s": traced_s,
        "options": {"costs": options.costs, "gap": options.gap, "time_limit": options.time_limit},
        "solves": rows,
    }
    print("written:", report.write(Path(options.out), "solving", result))
    return 0


def _traced(batch: int, tokens: int) -> remat.Trace:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_positions=tokens, use_cache=False)
    ids = torch.randint(0, config.vocab_size, (batch, tokens))
    model = GPT2LMHeadModel(config).train()
    return remat.trace(model, (), {"input_ids": ids, "labels": ids})


def _solved(trace: remat.Trace, budget: str, options: argparse.Namespace) -> dict[str, Any]:
    start = time.perf_counter()
    strategy = remat.Auto(gap=options.gap, time_limit=options.time_limit)
    plan = remat.solve(trace, budget, strategy)
    return {
        "budget": budget,
        "status": plan.status.name,
        "peak_bytes": plan.peak_bytes,
        "baseline_peak_bytes": plan.baseline_peak_bytes,
        "overhead": plan.overhead,
        "gap": plan.gap,
        "seconds": time.perf_counter() - start,
        "stats": dict(plan.stats),
    }


if __name__ == "__main__":
    raise SystemExit(main())
