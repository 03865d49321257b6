"""The atlas of checkpointing: graphs, results, and scores of solvers.

    python -m benchmarks.atlas graphs                     # trace the models, write their graphs
    python -m benchmarks.atlas run --processes 2          # solve what is missing of all cells
    python -m benchmarks.atlas run --ray local            # on a Ray cluster
    python -m benchmarks.atlas check                      # validate graphs and results
    python -m benchmarks.atlas score greedy python docs/atlas/greedy.py

`run` goes on where it was interrupted. docs/atlas/index.md describes the rows, docs/atlas/format.md
the files.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.atlas.graph_file import GRAPHS, path_of
from benchmarks.atlas.results import BUDGETS, GPUS, RESULTS, Cell, ResultFolder
from benchmarks.atlas.tracing import MODELS


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 1 if something failed."""
    options = _parser().parse_args(argv)
    try:
        return options.run(options)
    except KeyboardInterrupt:
        print("interrupted: finished cells are stored, and the next run goes on", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.atlas",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    graphs = commands.add_parser("graphs", help="trace models, and write their graphs")
    run = commands.add_parser("run", help="solve the missing cells")
    check = commands.add_parser("check", help="validate graphs and results")
    score = commands.add_parser("score", help="score the schedules of a program")
    graphs.set_defaults(run=_graphs)
    run.set_defaults(run=_run)
    check.set_defaults(run=_check)
    score.set_defaults(run=_score)
    for command in (graphs, run, check, score):
        command.add_argument(
            "--models", nargs="+", choices=MODELS, default=[*MODELS], metavar="MODEL"
        )
    for command in (run, check, score):
        command.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    for command in (run, score):
        command.add_argument("--gpus", nargs="+", choices=GPUS, default=GPUS)
        command.add_argument("--budgets", nargs="+", choices=BUDGETS, default=BUDGETS)
        command.add_argument(
            "--processes", type=int, choices=range(1, 1025), default=2, metavar="N",
            help="of this machine",
        )  # fmt: skip
    run.add_argument("--ray", metavar="ADDRESS", help='a Ray cluster, or "local"')
    score.add_argument("--limit", type=float, default=60.0, help="seconds for each schedule")
    score.add_argument("name", help="of the solver, in the leaderboard")
    score.add_argument("command", nargs=argparse.REMAINDER, help="the program with its arguments")
    return parser


def _graphs(options: argparse.Namespace) -> int:
    from benchmarks.atlas.tracing import graph_of, trace_of

    GRAPHS.mkdir(parents=True, exist_ok=True)
    for name in options.models:
        graph = graph_of(name, trace_of(name))
        graph.save(path_of(name))
        size = path_of(name).stat().st_size / 1024
        print(f"{name:18} {len(graph.graph.operations):6} operations  {size:6.0f} KiB", flush=True)
    return 0


def _run(options: argparse.Namespace) -> int:
    from benchmarks.atlas.running import run

    failures = run(
        options.models,
        options.gpus,
        options.budgets,
        ResultFolder(options.results),
        processes=options.processes,
        ray_address=options.ray,
    )
    return 1 if failures else 0


def _check(options: argparse.Namespace) -> int:
    from benchmarks.atlas.checking import problems_of

    if not options.results.is_dir():
        sys.exit(f"there is no folder {options.results}")
    problems = [p for name in options.models for p in problems_of(name, options.results)]
    print("\n".join(problems) or f"{len(options.models)} models: graphs and results are valid")
    return 1 if problems else 0


def _score(options: argparse.Namespace) -> int:
    from benchmarks.atlas.leaderboard import load_all, standings, table
    from benchmarks.atlas.scoring import score

    if not options.command:
        sys.exit("name the program: python -m benchmarks.atlas score NAME PROGRAM ARGUMENT ...")
    if misplaced := {"--models", "--gpus", "--budgets", "--results"} & {*options.command}:
        sys.exit(
            f"{', '.join(sorted(misplaced))}: options of `score` come before the solver's name"
        )
    cells = [
        Cell(model, gpu, budget)
        for gpu in options.gpus
        for model in options.models
        for budget in options.budgets
        if budget.endswith("%")
    ]
    if options.results == RESULTS:  # the leaderboard compares with rows that are stored
        stored = {(r.model, row.gpu) for r in load_all(RESULTS)[0] for row in r.rows}
        cells = [cell for cell in cells if (cell.model, cell.gpu) in stored]
    folder = ResultFolder(options.results)
    limit_s, processes = options.limit, options.processes
    score(options.name, options.command, cells, folder, limit_s=limit_s, processes=processes)
    results, solvers = load_all(options.results)
    if not results:
        print(f"no leaderboard: {options.results} has no results of `run` to compare with")
        return 0
    print(table(standings(results, solvers)))
    return 0


def _run_with_fixed_hashes() -> None:
    """Start this program once more unless the hashes of strings are fixed: transformers' Gemma 3
    iterates over a set, so that the order of its operations would differ between processes."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        command = [sys.executable, "-m", "benchmarks.atlas", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})


if __name__ == "__main__":
    _run_with_fixed_hashes()
    sys.exit(main())
