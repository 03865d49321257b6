"""Real training steps at small budgets, with and without splitting, on the CPU.

    python -m benchmarks.split_steps                          # all models, to benchmarks/results
    python -m benchmarks.split_steps --compiled               # the same under torch.compile
    python -m benchmarks.split_steps --only gpt2 t5 --out DIR

Each model is small, in float32, with random weights, dropout and ignored labels where it has them,
and returns its loss only. Two steps run in eager mode, of which the second adds to the gradients of
the first; then the same two steps, from the same seeds, under `remat.optimize` with a budget of 50%
and of 30%. A row has the peaks of live storages (parameters, gradients and batch included), the
budgets, and the largest differences of losses and gradients. Without splitting it says if the
budget is infeasible, or the extra time.

With `--compiled`, the step is that of `remat.compile`, without dropout, since Inductor samples
other numbers than eager mode. Its peak is the allocator's, and its budget a share of plain
torch.compile's peak, whose differences to eager mode are in the row, too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import machine, report
from benchmarks.split_steps.compiled import compiled_rows_of
from benchmarks.split_steps.eager import rows_of
from benchmarks.split_steps.models import MODELS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and write its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=MODELS, metavar="MODEL")
    parser.add_argument("--compiled", action="store_true", help="steps under torch.compile")
    parser.add_argument(
        "--out", type=Path, default=report.RESULTS, help="folder of the result file"
    )
    options = parser.parse_args(argv)
    name = "split-steps-compiled" if options.compiled else "split-steps"
    check = compiled_rows_of if options.compiled else rows_of
    result = {
        "benchmark": name,
        "machine": machine.describe(torch.device("cpu")),
        "costs": "measured" if options.compiled else "roofline cpu",
        "rows": [row for model in options.only or MODELS for row in check(model)],
    }
    print("written:", report.write_result(options.out, f"{name}-cpu", result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
