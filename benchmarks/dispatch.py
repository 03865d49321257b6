"""Benchmark of dispatch time: a step that consists of kernel launches, by remat and in eager mode.

    python -m benchmarks.dispatch                  # GPT-2 with 12 layers, 1 x 4 tokens, width 16
    python -m benchmarks.dispatch --quick

The tensors are so small that no kernel takes longer than its launch. So the step time is the CPU
time between kernels, which a GPU waits for when its kernels are short. One thread; eager mode and
remat (at the budget "100%") share the model and take turns in one process. The ratio compares the
shortest steps, because other load of the machine only lengthens steps.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import remat
from benchmarks.harness import machine, report
from remat.strategies import KeepAll

LIMIT = 1.05


def gpt2(layers: int, dropout: float) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a GPT-2 with tiny kernels, and its arguments."""
    config = GPT2Config(
        n_layer=layers,
        n_embd=16,
        n_head=2,
        vocab_size=32,
        n_positions=8,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        attn_pdrop=dropout,
        embd_pdrop=dropout,
    )
    ids = torch.randint(0, 32, (1, 4))
    return GPT2LMHeadModel(config).train(), {"input_ids": ids, "labels": ids}


def run(layers: int, dropout: float, rounds: int) -> dict[str, Any]:
    """Return the times of forward and backward in eager mode and by remat, in turns.

    Gradients are cleared outside of the timed part.
    """
    torch.manual_seed(0)
    model, inputs = gpt2(layers, dropout)
    parameters = list(model.parameters())
    costs = remat.Roofline("h200")
    planned = remat.optimize(model, "100%", example_kwargs=inputs, costs=costs, strategy=KeepAll())
    assert planned.program is not None
    modules: dict[str, nn.Module] = {"eager": model, "remat": planned}
    step_times: dict[str, list[float]] = {method: [] for method in modules}
    gc.collect()
    gc.disable()
    try:
        for round_index in range(rounds + 5):
            for method, module in modules.items():
                start = time.perf_counter()
                module(**inputs).loss.backward()
                if round_index >= 5:
                    step_times[method].append(time.perf_counter() - start)
                for parameter in parameters:
                    parameter.grad = None
    finally:
        gc.enable()
    ratio = min(step_times["remat"]) / min(step_times["eager"])
    return {
        "layers": layers,
        "dropout": dropout,
        "statements": len(planned.program.forward) + len(planned.program.backward),
        "rounds": rounds,
        "min_s": {method: min(times) for method, times in step_times.items()},
        "median_s": {method: statistics.median(times) for method, times in step_times.items()},
        "ratio_of_mins": ratio,
        "ratio_median": statistics.median(
            remat_s / eager_s
            for remat_s, eager_s in zip(step_times["remat"], step_times["eager"], strict=True)
        ),
        "aim": f"at most {LIMIT} of eager's dispatch time",
        "met": ratio <= LIMIT,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write the result. Return 0 even if the aim is missed."""
    options = _options(argv)
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "benchmark": "dispatch",
        "quick": options.quick,
        "units": "seconds of a forward and backward; ratios are remat to eager mode",
        "machine": machine.describe(torch.device("cpu")),
        "steps": [],
    }
    for dropout in (0.0, 0.1):
        row = run(options.layers, dropout, options.rounds)
        result["steps"].append(row)
        print(
            f"GPT-2, {row['layers']} layers, dropout {dropout:g}: eager "
            f"{row['min_s']['eager'] * 1e3:.2f} ms, remat {row['min_s']['remat'] * 1e3:.2f} ms for "
            f"{row['statements']:,} statements, ratio {row['ratio_of_mins']:.3f} "
            f"({'met' if row['met'] else 'MISSED'}: {row['aim']})"
        )
    out = options.out or (None if options.quick else report.RESULTS)
    if out:
        print("written:", report.write_result(Path(out), "dispatch-cpu", result))
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dispatch", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--layers", type=int, help="of GPT-2 (default 12; 2 if quick)")
    add("--rounds", type=int, help="timed steps of each method (default 300; 30 if quick)")
    add("--quick", action="store_true", help="few layers and steps, to test this command")
    add("--out", help="folder for the result (default benchmarks/results; if quick, none)")
    options = parser.parse_args(argv)
    options.layers = options.layers or (2 if options.quick else 12)
    options.rounds = options.rounds or (30 if options.quick else 300)
    return options


if __name__ == "__main__":
    raise SystemExit(main())
