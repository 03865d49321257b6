"""Check which architectures of Transformers train under remat, with eager's gradients.

    python -m benchmarks.coverage                                  # all of the installed version
    python -m benchmarks.coverage --kinds causal --only gpt2 llama

Each architecture is built small (see `small_models.py`), with random weights, on the CPU, in a
process of its own. It runs a step in eager mode, then one under
`remat.enable(model, "min", scope="auto", outputs="loss")` from the same seed. A row has the
difference of the gradients, how the model was planned (as a whole or by blocks), and the smallest
peaks with and without splitting, or the error that was raised.

    python -m benchmarks.coverage --sizes

checks each architecture that is captured as a whole: do two captures serve three lengths of text
(or numbers of images), and do they give the same steps as a capture at each size?

    python -m benchmarks.coverage --compiled

checks if each architecture trains under `torch.compile(model, backend="remat")` at "min", with the
gradients of plain torch.compile and a peak not above the verified one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.coverage import compiled, eager_comparison, sizes
from benchmarks.coverage.eager_comparison import (
    CLOSE,
    EQUAL,
    HUNG,
    NOT_EAGER,
    REFUSED,
    Row,
    send_row,
)
from benchmarks.coverage.small_models import KINDS, architectures
from benchmarks.harness import machine, report

_CHECKS = {
    "": (eager_comparison.check_enable, eager_comparison.OUTCOMES),
    "sizes": (sizes.check_sizes, sizes.OUTCOMES),
    "compiled": (compiled.check_compiled, compiled.OUTCOMES),
}
"""The checks by option, each with the outcomes that it can have."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check the architectures, print a line for each, and write the result file."""
    options = _options(argv)
    selected = [(k, name) for k in options.kinds for name in architectures(k)]
    selected = [(k, name) for k, name in selected if not options.only or name in options.only]
    with ThreadPoolExecutor(options.jobs) as pool:  # a thread for each running process
        rows = list(pool.map(lambda pair: _check_in_process(options, *pair), selected))
    counted = [row for row in rows if row["outcome"] not in (NOT_EAGER, compiled.NOT_COMPILED)]
    name = f"coverage-{options.check}" if options.check else "coverage"
    result = {
        "benchmark": name,
        "units": "relative errors",
        "machine": machine.describe(torch.device("cpu")),
        "transformers": _version(),
        "outcomes": _CHECKS[options.check][1],
        "counts": {kind: _counts(rows, kind) for kind in options.kinds},
        "planned": dict(Counter(row["planned"] for row in rows if "planned" in row)),
        "splitting": _splitting(rows),
        "rows": rows,
    }
    good = sum(row["outcome"] in (EQUAL, CLOSE, sizes.ONE) for row in counted)
    if options.check == "sizes":
        whole = sum(row["outcome"] != REFUSED for row in counted)
        print(f"{good} of {whole} models captured as a whole need one capture for all sizes")
    else:
        mode = "plain torch.compile" if options.check else "eager mode"
        print(f"{good} of {len(counted)} models that train in {mode} have its gradients")
    if options.out or not options.only:
        folder = Path(options.out or report.RESULTS)
        print("written:", report.write_result(folder, f"{name}-cpu", result))
    return 0


def _counts(rows: list[Row], kind: str) -> dict[str, int]:
    return dict(Counter(row["outcome"] for row in rows if row["kind"] == kind))


def _splitting(rows: list[Row]) -> dict[str, Any]:
    """Return how many of the models that were planned as a whole are split at "min", and the
    smallest, median and largest fall of their smallest peak."""
    planned = [row for row in rows if "unsplit_min_bytes" in row]
    falls = sorted(
        1 - row["peak_bytes"] / row["unsplit_min_bytes"] for row in planned if row["splits"]
    )
    figures = {"whole": len(planned), "split": len(falls)}
    if not falls:
        return figures
    quantiles = {"smallest": falls[0], "median": statistics.median(falls), "largest": falls[-1]}
    return figures | {f"{name}_fall": round(fall, 4) for name, fall in quantiles.items()}


def _version() -> str:
    import transformers

    return transformers.__version__


def _check_in_process(options: argparse.Namespace, kind: str, name: str) -> Row:
    """Check one architecture in a new process, print its outcome, and return its row."""
    timeout_s = options.timeout_s
    check = _CHECKS[options.check][0]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["remat", "transformers"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=send_row, args=(sender, check, kind, name), daemon=True)
    began = time.monotonic()
    process.start()
    sender.close()
    row: Row = {"kind": kind, "model": name, "outcome": HUNG, "why": f"within {timeout_s:.0f} s"}
    try:
        if receiver.poll(timeout_s):
            row |= receiver.recv()
    except EOFError:
        row["why"] = "its process died"
    process.kill()
    process.join()
    row["seconds"] = round(time.monotonic() - began, 1)
    planned = row.get("planned", "")
    print(f"{kind} {name}: {row['outcome']} {planned} {row['why'][:120]}", flush=True)
    return row


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    add("--only", nargs="+", metavar="MODEL", help="model types; writes a file only with --out")
    check_group = parser.add_mutually_exclusive_group()
    for name, what in (("sizes", "captures of several sizes"), ("compiled", "torch.compile")):
        check_group.add_argument(
            f"--{name}", dest="check", action="store_const", const=name, default="", help=what
        )
    add("--jobs", type=int, default=2, help="processes at once")
    add("--timeout-s", type=float, default=180.0)
    add("--out", help="a folder for the results")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
