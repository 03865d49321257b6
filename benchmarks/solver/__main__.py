"""Benchmark of the quality and time of schedules, against published results and baselines.

    python -m benchmarks.solver                                   # sections without published files
    python -m benchmarks.solver --instances DIR                   # all sections
    python -m benchmarks.solver --sections traced --models gpt12 unet --budgets 50% min

Sections:

* published: Checkmate's graphs in their own order, against published optima;
* random:    random layered graphs, in the file's order and with the order searched;
* traced:    training steps of real architectures, roofline costs, at shares of their peak;
* baselines: baseline strategies on the same traced graphs at the same budgets;
* table2:    Checkmate's Table 2 repeated: the cost of heuristics as a ratio to the optimum;
* peers:     the models that Rockmate was measured on, run at the same peaks.

`published`, `random` and `table2` read published graphs from `--instances`. Solves run one after
the other, each in a process of its own. The result file is written after every row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.harness import machine, report
from benchmarks.models.traced import TRACED_MODELS, default_cache
from benchmarks.solver import baselines, peers, published, traced_graphs
from benchmarks.solver.baseline_worker import NAMES
from benchmarks.solver.record import ResultRecord

SECTIONS: dict[str, Callable[[ResultRecord, argparse.Namespace], None]] = {
    "published": published.run_published,
    "random": published.run_random,
    "traced": traced_graphs.run_traced,
    "baselines": baselines.run_baselines,
    "table2": baselines.run_table2,
    "peers": peers.run_peers,
}
NEED_FILES = ("published", "random", "table2")
PATHS = ("instances", "cache", "out")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sections, print and write their rows. Return 0 even if a target is missed."""
    options = _options(argv)
    is_partial = options.sections != list(SECTIONS)
    name = "-".join(["solver", *(options.sections if is_partial else ())])
    head = {
        "benchmark": "solver",
        "units": "bytes (units of the file for random graphs), seconds; overhead, bounds and gaps "
        "as shares of the time without recomputation (gap: of the plan's)",
        "machine": machine.describe(torch.device("cpu")),
        "options": {k: str(v) for k, v in vars(options).items() if k not in PATHS},
    }
    record = ResultRecord(None if options.out == "none" else Path(options.out), name, head)
    try:
        for section in options.sections:
            SECTIONS[section](record, options)
    except KeyboardInterrupt:
        record.print_progress("interrupted; the rows above are stored")
    if record.path is not None:
        print("\nwritten:", record.path)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--sections", nargs="+", choices=list(SECTIONS), help="default: all that can run")
    add("--instances", type=Path, help="folder with the published graphs")
    add(
        "--models",
        nargs="+",
        choices=list(TRACED_MODELS),
        default=list(TRACED_MODELS),
        help="traced graphs",
    )
    add("--budgets", nargs="+", default=list(traced_graphs.BUDGETS), help="of the traced graphs")
    add("--cache", type=Path, default=default_cache(), help="folder with the traces")
    add("--gaps", nargs="+", type=float, default=[5e-5, 5e-4], help="requested gaps in `published`")
    add("--time-limit", type=float, default=180.0, help="largest seconds for a solve")
    add("--strategies", nargs="+", choices=NAMES, default=list(NAMES), help="the baselines")
    add("--baseline-limit", type=float, default=60.0, help="seconds for a baseline at a budget")
    add("--peer-costs", nargs="+", choices=("flops", "measured"), default=["flops"])
    add("--peer-models", nargs="+", choices=("gpt", "resnet"), default=["gpt", "resnet"])
    add("--orders", nargs="+", choices=("on", "off"), default=["on", "off"])
    add("--threads", type=int, default=2, help="of torch, in `peers`")
    add("--out", default=str(report.RESULTS), help='folder for the result, or "none"')
    options = parser.parse_args(argv)
    if options.sections is None:
        options.sections = [s for s in SECTIONS if options.instances or s not in NEED_FILES]
    elif options.instances is None and (needy := set(options.sections) & set(NEED_FILES)):
        parser.error(f"--instances is needed for {', '.join(sorted(needy))}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
