"""Benchmark of the service: load, killed processes, and overhead over the library.

    python -m benchmarks.service                                     # on SQLite
    python -m benchmarks.service --database-url postgresql://...     # on an empty database
    python -m benchmarks.service --postgres                          # on a new PostgreSQL

Sections:

* load:     many clients submit many different jobs at once; every answer is checked;
* kill:     the server, or its worker, is killed (SIGKILL) at random moments with jobs in flight;
* overhead: the time of `remat.Client` against `remat.solve` on the same graph.

All run against a real server process on loopback. The benchmark fails if a job is lost, done twice
or has a wrong result.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import machine, report
from benchmarks.service import kill, load, overhead

SECTIONS: dict[str, Callable[[Path, dict[str, str], Any], dict[str, Any]]] = {
    "load": load.run,
    "kill": kill.run,
    "overhead": overhead.run,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the sections and write the dated result."""
    options = _options(arguments)
    with _store(options) as (name, settings):
        result: dict[str, Any] = {
            "benchmark": "service",
            "units": "seconds",
            "store": name,
            "machine": machine.describe(torch.device("cpu")),
            "sections": {},
        }
        for section in options.sections:
            with tempfile.TemporaryDirectory() as folder:
                answers = SECTIONS[section](Path(folder), settings, options)
            result["sections"][section] = answers
            print(section, *(f"  {key}: {value}" for key, value in answers.items()), sep="\n")
            report.write_result(options.out, f"service-{name}", result)
    return 0


@contextmanager
def _store(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, str]]]:
    if options.database_url:
        yield "given", {"REMAT_DATABASE_URL": options.database_url}
    elif options.postgres:
        from tests.helpers.service import postgres

        with tempfile.TemporaryDirectory() as folder, postgres.running(Path(folder)) as url:
            yield "postgresql", {"REMAT_DATABASE_URL": url}
    else:
        yield "sqlite", {}


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.service",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--database-url", default="")
    parser.add_argument("--postgres", action="store_true", help="start a PostgreSQL for this run")
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--kills", type=int, default=10, help="of server and worker each")
    parser.add_argument("--in-flight", type=int, default=20)
    parser.add_argument("--trace", type=Path, help="a trace for `overhead`; default: a small GPT-2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
