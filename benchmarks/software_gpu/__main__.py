"""Tables of what the software GPU shows: memory, code and numbers of CUDA, without a GPU.

    make gpu-in-software                              # all, in an environment with a CUDA build
    python -m benchmarks.software_gpu                 # the same, if this Python has such a build
    python -m benchmarks.software_gpu eager-memory faults
    python -m benchmarks.software_gpu eager-memory --only gpt2 llama

Each case runs in a process of its own, and its rows are stored in build/software-gpu. A case that
has finished is not repeated; use --again after a change of the code, and --finished for the result
of the cases that have finished: all others are rows that say so. No table measures time.

Exit codes: 0 all requirements are met, 1 a requirement is missed, 2 the software GPU cannot be
built, or wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.software_gpu.build import BuildError, build_library
from scripts.software_gpu.environment import DEVICES, ROOT

from benchmarks.software_gpu.runner import CaseResult, run_cases
from benchmarks.software_gpu.tables import TABLES

RESULTS = ROOT / "benchmarks" / "results"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, print a line for each, and write the result file."""
    options = _options(argv)
    try:
        library = build_library()
    except BuildError as error:
        print(error, file=sys.stderr)
        return 2
    tables = [TABLES[name] for name in options.tables or TABLES]
    cases = [
        (table, case)
        for table in tables
        for case in table.cases()
        if not options.only or any(word in case for word in options.only)
    ]
    results = run_cases(
        cases,
        options.folder,
        library,
        device=options.device,
        jobs=options.jobs,
        repeat=options.again,
        only_finished=options.finished,
        on_result=_print_result,
    )
    for table in tables:
        of_table = [result for result in results if result.table == table.name]
        rows = [row for result in of_table for row in result.rows]
        met = sum(bool(row["is_met"]) for row in rows)
        failed = sum(bool(result.failure) for result in of_table)
        print(f"{table.title}: {met} of {len(rows)} rows meet: {table.requirement}", end="")
        print(f"; {failed} cases did not finish or were not run" if failed else "")
    if options.out or not options.only:
        _write(options, results)
    return int(not all(result.is_met for result in results))


def _print_result(result: CaseResult) -> None:
    met = sum(bool(row["is_met"]) for row in result.rows)
    text = result.failure or f"{met} of {len(result.rows)}"
    print(f"{result.table} {result.case}: {text} ({result.seconds:.0f} s)", flush=True)


def _write(options: argparse.Namespace, results: Sequence[CaseResult]) -> None:
    import torch

    from benchmarks.harness import machine, report

    tables: dict[str, Any] = {}
    for result in results:
        table = TABLES[result.table]
        entry = tables.setdefault(
            result.table, {"title": table.title, "requirement": table.requirement, "rows": []}
        )
        entry["rows"] += result.rows
        if result.failure:
            entry["rows"].append({"case": result.case, "is_met": False, "why": result.failure})
    contents = {
        "benchmark": "software-gpu",
        "units": "bytes; no times",
        "device": options.device,
        "machine": machine.describe(torch.device("cpu")),
        "cuda": torch.version.cuda,
        "tables": tables,
    }
    folder = Path(options.out or RESULTS)
    print("written:", report.write_result(folder, f"software-gpu-{options.device}", contents))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("tables", nargs="*", choices=[[], *TABLES], metavar="TABLE", help=", ".join(TABLES))
    add("--only", nargs="+", metavar="TEXT", help="cases whose names contain one of these texts")
    add("--device", choices=DEVICES, default="h100")
    add("--jobs", type=int, default=2, help="processes at once")
    add("--again", action="store_true", help="repeat finished cases")
    add("--finished", action="store_true", help="run nothing; the result of finished cases")
    add("--folder", type=Path, default=ROOT / "build" / "software-gpu", help="of finished cases")
    add("--out", help="folder of the result file; with --only, none is written by default")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
