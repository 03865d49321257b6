"""Benchmark of batches of many lengths: captures, cost of a new length, and step times.

    python -m benchmarks.lengths
    python -m benchmarks.lengths --layers 12 --budgets 60% --rounds 7

GPT-2 trains under `remat.enable` for three epochs on ten lengths, in another order each time. Then
these run interleaved for each length: a step in eager mode, one of the enabled model, and one of
`remat.optimize` for that length only, with the budget of the enabled model at that length.
"""

from __future__ import annotations

import argparse
import copy
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import remat
from benchmarks.harness import machine, report
from benchmarks.harness.measurement import keep_freed_memory
from remat.frontend.memory.meter import measure_step, unique_bytes
from remat.frontend.planning.planner import Planner
from remat.limits.units import format_bytes

LENGTHS = (64, 96, 128, 160, 208, 256, 304, 368, 448, 512)
ROWS, VOCABULARY, EPOCHS = 4, 8192, 3

Batch = dict[str, torch.Tensor]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark for each budget, print its table, and write the result file."""
    options = _options(argv)
    keep_freed_memory()
    result: dict[str, Any] = {
        "benchmark": "lengths",
        "units": "bytes, seconds; ratios are of medians of interleaved steps",
        "machine": machine.describe(torch.device("cpu")),
        "model": f"GPT-2, {options.layers} layers of width 256, {ROWS} rows, dropout 0.1",
        "budgets": {budget: _run(budget, options) for budget in options.budgets},
    }
    print("written:", report.write_result(Path(options.out), "lengths-cpu", result))
    return 0


def _run(budget: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train on all lengths under one budget, and return the figures of each length."""
    model = _model(options.layers)
    enabled = remat.enable(copy.deepcopy(model), budget, outputs="dropped")
    firsts: dict[int, float] = {}
    order = random.Random(0)
    for _ in range(EPOCHS):
        for length in order.sample(LENGTHS, len(LENGTHS)):
            began = time.perf_counter()
            _step(enabled, _batch(length))
            firsts.setdefault(length, time.perf_counter() - began)
    rows = [_compared(length, model, enabled, firsts[length], options) for length in LENGTHS]
    result = {
        "captures": _planner(enabled).trace_cache.capture_count,
        "batches": EPOCHS * len(LENGTHS),
        "solved": len({row["solved"] for row in rows} - {""}),
        "slowest": max(row["time_to_fixed"] for row in rows),
        "kept": all(row["peak_bytes"] <= row["budget_bytes"] for row in rows),
        "equal": all(row["equal"] for row in rows),
        "rows": rows,
    }
    _show(f"{budget}: {result['captures']} captures for {result['batches']} batches", rows)
    return result


def _compared(
    length: int, model: nn.Module, enabled: nn.Module, first_s: float, options: argparse.Namespace
) -> dict[str, Any]:
    """Compare a step of the enabled model at one length with eager mode and a plan for it."""
    batch = _batch(length)
    _step(enabled, batch)
    plan = remat.plans(enabled)[-1]
    assert isinstance(plan, remat.Plan)
    model.zero_grad()
    fixed = remat.optimize(model, plan.budget_bytes, (), batch, outputs="dropped")
    assert fixed.plan is not None
    equal = _are_equal(enabled, model, batch)
    constants = [*enabled.parameters(), *enabled.buffers(), *batch.values()]
    enabled.zero_grad()
    peak_bytes = measure_step(lambda: _step(enabled, batch), constants).peak_bytes
    runs: dict[str, Callable[[], None]] = {
        "eager": lambda: _step(model, batch),
        "enabled": lambda: _step(enabled, batch),
        "fixed": lambda: _step(fixed, batch),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds + 1):
        for name, run in runs.items():
            gc.collect()
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    median = {name: statistics.median(step_s[1:]) for name, step_s in times.items()}
    strategy = str(plan.stats["strategy"])
    return {
        "length": length,
        "first_s": first_s,
        "by": strategy,
        "solved": str(length) if strategy == "auto" else "",
        "budget_bytes": plan.budget_bytes,
        "planned_bytes": plan.peak_bytes,
        "peak_bytes": peak_bytes,
        "constants_bytes": unique_bytes(constants),
        "baseline_bytes": plan.baseline_peak_bytes,
        "overhead": plan.overhead,
        "overhead_of_fixed": fixed.plan.overhead,
        "equal": equal,
        "step_s": median,
        "time_to_eager": median["enabled"] / median["eager"],
        "time_to_fixed": median["enabled"] / median["fixed"],
        "all_s": times,
    }


def _show(title: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{title}")
    heads = ("length", "first step", "budget", "peak", "planned", "to eager", "to fixed", "by")
    print("".join(f"{head:>12}" for head in heads))
    for row in rows:
        sizes = (format_bytes(row["budget_bytes"]), format_bytes(row["peak_bytes"]))
        cells = (
            str(row["length"]),
            f"{row['first_s']:.2f} s",
            *sizes,
            f"{1 + row['overhead']:.3f}",
        )
        times = (f"{row['time_to_eager']:.3f}", f"{row['time_to_fixed']:.3f}")
        print("".join(f"{cell:>12}" for cell in (*cells, *times)), " ", row["by"], flush=True)


def _model(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers, n_embd=256, n_head=4, vocab_size=VOCABULARY, n_positions=max(LENGTHS),
        use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def _batch(length: int) -> Batch:
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(0, VOCABULARY, (ROWS, length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def _step(module: nn.Module, batch: Batch) -> None:
    module.zero_grad(set_to_none=True)
    module(**batch).loss.backward()


def _are_equal(one: nn.Module, other: nn.Module, batch: Batch) -> bool:
    """True if two modules have bit-identical gradients from the same seed."""
    for module in (one, other):
        torch.manual_seed(0)
        _step(module, batch)
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(
        a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs
    )


def _planner(model: nn.Module) -> Planner:
    """Return the planner of a model under `remat.enable`."""
    planner = model.__dict__["_remat_forward"].planner
    assert isinstance(planner, Planner)
    return planner


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=4)
    add("--budgets", nargs="+", default=["60%", "min"])
    add("--rounds", type=int, default=5)
    add("--out", default=str(report.RESULTS), help="a folder for the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
