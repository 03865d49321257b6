"""Compute the figures of the published cases: see `benchmarks.sources`.

Figures that the newest result in the folder has already, of the same case and version, are taken
from it. The result is written after each case, so that an interrupted run can be continued.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.harness import machine, report
from benchmarks.sources.cases import CASES, PublishedCase
from benchmarks.sources.figures import TIME_LIMIT_S, VERSION, Row, case_figures

NAME = "sources"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, and write its result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=CASES, metavar="NAME", help=", ".join(CASES))
    add("--out", type=Path, default=report.RESULTS, help="folder of the result file")
    options = parser.parse_args(argv)
    rows = stored_rows(options.out)
    for name in options.only or CASES:
        if name in rows:
            print(f"{name}: stored already")
            continue
        rows[name] = case_figures(CASES[name], lambda line: print(line, flush=True))
        print("written:", report.write_result(options.out, NAME, _result(rows)), flush=True)
    return 0


def stored_rows(folder: Path) -> dict[str, Row]:
    """Return the figures of the newest result in a folder that are those of today's cases."""
    paths = sorted(folder.glob(f"????-??-??-{NAME}.json"))
    if not paths:
        return {}
    rows: list[Row] = json.loads(paths[-1].read_text())["rows"]
    return {row["case"]: row for row in rows if _is_current(row, CASES.get(row["case"]))}


def _is_current(row: Row, case: PublishedCase | None) -> bool:
    return case is not None and row["fingerprint"] == case.fingerprint and row["version"] == VERSION


def _result(rows: dict[str, Row]) -> Row:
    return {
        "benchmark": "published figures",
        "machine": machine.describe(torch.device("cpu")),
        "time_limit_s": TIME_LIMIT_S,
        "cases": {name: _description(CASES[name]) for name in CASES if name in rows},
        "rows": [rows[name] for name in CASES if name in rows],
    }


def _description(case: PublishedCase) -> Row:
    """Return what is published, and what is assumed, as JSON has it."""
    return {
        "title": case.title,
        "source": case.source.title,
        "address": case.source.address,
        "read_on": case.source.read_on,
        "points": [
            {
                "method": point.method,
                "peak_bytes": point.peak_bytes,
                "extra": point.extra,
                "as_published": point.as_published,
            }
            for point in case.points
        ],
        "gpu": case.device.name,
        "size": case.size,
        "size_unit": case.size_unit,
        "optimizer": case.optimizer,
        "assumptions": list(case.assumptions),
    }


if __name__ == "__main__":
    sys.exit(main())
