"""The acceptance run: everything that must be true on a GPU, in at most 25 minutes.

    make gpu                                    # with wheels from build/gpu-wheels, where they are
    python -m benchmarks.gpu --steps 3 6        # only these
    python -m benchmarks.gpu --minutes 9        # as much as fits; run it again for the rest
    python -m benchmarks.gpu --dry              # the same code on the CPU, with tiny shapes

Parts run in processes of their own, and what they found is kept in build/gpu: a part that has
finished is not run again, unless with --again, which is for when the code has changed.

Exit codes: 0 everything is met, 1 something is missed or was left out, 2 wrong usage, 3 there is no
CUDA device. Of a dry run, whose times and sizes mean nothing: 0 where every process finished.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu.runner import Result

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"

MINUTES = 25.0
NO_DEVICE = 3
STEPS = range(11)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    options = _options(argv)
    if not options.dry and (why := _no_device()):
        print(f"no acceptance run: {why}; python -m benchmarks.gpu --dry tries its code on the CPU")
        return NO_DEVICE
    # What follows imports remat's own dependencies, of which nothing need be here until now.
    import torch

    from benchmarks import machine, report
    from benchmarks.gpu.runner import FINISHED, run_all
    from benchmarks.gpu.steps import PARTS

    device = torch.device("cpu") if options.dry else torch.device("cuda", 0)
    name = "dry" if options.dry else machine.slug(device)
    parts = [part for part in PARTS if part.step in options.steps]
    results = run_all(
        parts,
        options.folder / name,
        60 * options.minutes,
        dry=options.dry,
        again=options.again,
        tell=_say,
    )
    rows = [row for result in results for row in result.rows()]
    count = {kind: sum(r.verdict == kind for r in rows) for kind in ("met", "missed", "skipped")}
    print("\n" + ", ".join(f"{number} {kind}" for kind, number in count.items()))
    out = options.out or (None if options.dry else RESULTS)
    if out:
        result = {
            "benchmark": "gpu",
            "dry": options.dry,
            "machine": machine.describe(device),
            "steps": _by_step(results),
            **count,
        }
        print("written:", report.write(Path(out), f"gpu-{name}", result))
    if options.dry:
        return int(any(result.ended != FINISHED for result in results))
    return int(count["missed"] + count["skipped"] > 0)


def _no_device() -> str:
    """Why nothing can be run on a GPU here; "" where it can."""
    try:
        import torch
    except ModuleNotFoundError:
        return f"{sys.executable} has no torch"
    if torch.cuda.is_available():
        return ""
    return f"torch {torch.__version__} sees no CUDA device"


def _say(result: Result) -> None:
    """A part's rows of the table."""
    from benchmarks.gpu.steps import TITLES

    title = TITLES[result.step]
    print(f"\n{result.step}. {title}: {result.name} ({result.seconds:.0f} s)", flush=True)
    for row in result.rows():
        verdict = "" if row.verdict == "told" else row.verdict
        want = f" (want: {row.want})" if row.want else ""
        print(f"  {verdict:<8} {row.what}: {row.found}{want}", flush=True)


def _by_step(results: Sequence[Result]) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from benchmarks.gpu.steps import TITLES

    return [
        {
            "step": step,
            "title": TITLES[step],
            "parts": [
                {
                    "name": result.name,
                    "ended": result.ended,
                    "seconds": result.seconds,
                    "rows": [asdict(row) for row in result.rows()],
                }
                for result in results
                if result.step == step
            ],
        }
        for step in sorted({result.step for result in results})
    ]


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--steps", nargs="+", type=int, choices=STEPS, default=list(STEPS), metavar="STEP")
    add("--minutes", type=float, default=MINUTES, help=f"for all of it (default {MINUTES:g})")
    add("--again", action="store_true", help="run what has finished before once more")
    add("--dry", action="store_true", help="on the CPU, with tiny shapes: only to see that it runs")
    add("--folder", type=Path, default=ROOT / "build" / "gpu", help="where finished parts are kept")
    add("--out", help="folder for the result (default benchmarks/results; if dry, none)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
