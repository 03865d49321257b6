"""Acceptance run: check the claims that only a GPU can prove, times first, in at most 25 minutes.

    make gpu                                    # with the wheels in build/gpu-wheels, if any
    python -m benchmarks.gpu --all              # also what the software GPU proves
    python -m benchmarks.gpu --steps 3 6        # only these steps, in full
    python -m benchmarks.gpu --minutes 9        # what fits; a second call does the rest
    python -m benchmarks.gpu --jobs 8           # eight parts at a time; they measure in turns
    python -m benchmarks.gpu --dry              # the same code on the CPU, with tiny shapes

Each part runs in a process of its own, and its checks are stored in build/gpu. A part that has
finished is not repeated; use --again after a change of the code.

Exit codes: 0 all requirements are met, 1 a check is missed or skipped, 2 wrong usage, 3 there is no
CUDA device. A dry run, whose times and sizes mean nothing, exits with 0 if every process finished.
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
STEPS = range(16)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts, print their checks, and write the result file."""
    options = _options(argv)
    if not options.dry and (reason := _no_device_reason()):
        print(
            f"no acceptance run: {reason}; python -m benchmarks.gpu --dry tries its code on the CPU"
        )
        return NO_DEVICE
    # Imported here, because a machine without a GPU may lack remat's dependencies.
    import torch

    from benchmarks.gpu.runner import FINISHED, run_all
    from benchmarks.gpu.steps import PARTS
    from benchmarks.harness import machine, report

    device = torch.device("cpu") if options.dry else torch.device("cuda", 0)
    name = "dry" if options.dry else machine.slug(device)
    parts = [
        part
        for part in PARTS
        if part.step in (options.steps or STEPS)
        and (options.all or options.steps or options.only or not part.is_proved_without_gpu)
        and (not options.only or part.key in options.only)
    ]
    results = run_all(
        parts,
        options.folder / name,
        60 * options.minutes,
        dry=options.dry,
        repeat=options.again,
        jobs=options.jobs,
        on_result=_print_result,
    )
    rows = [row for result in results for row in result.rows()]
    counts = {
        verdict: sum(row.verdict == verdict for row in rows)
        for verdict in ("met", "missed", "skipped")
    }
    print("\n" + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    out = options.out or (None if options.dry else RESULTS)
    if out:
        result = {
            "benchmark": "gpu",
            "dry": options.dry,
            "machine": machine.describe(device),
            "steps": _by_step(results),
            **counts,
        }
        print("written:", report.write_result(Path(out), f"gpu-{name}", result))
    if options.dry:
        return int(any(result.ended != FINISHED for result in results))
    return int(counts["missed"] + counts["skipped"] > 0)


def _no_device_reason() -> str:
    """Return why no GPU can be used on this machine; "" if one can."""
    try:
        import torch
    except ModuleNotFoundError:
        return f"{sys.executable} has no torch"
    if torch.cuda.is_available():
        return ""
    return f"torch {torch.__version__} sees no CUDA device"


def _print_result(result: Result) -> None:
    """Print the checks of one part."""
    from benchmarks.gpu.steps import TITLES

    title = TITLES[result.step]
    print(f"\n{result.step}. {title}: {result.name} ({result.seconds:.0f} s)", flush=True)
    for row in result.rows():
        verdict = "" if row.verdict == "info" else row.verdict
        requirement = f" (required: {row.requirement})" if row.requirement else ""
        print(f"  {verdict:<8} {row.subject}: {row.observed}{requirement}", flush=True)


def _by_step(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the results as JSON data, grouped by step."""
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
    add("--steps", nargs="+", type=int, choices=STEPS, metavar="STEP", help="only these, in full")
    add("--only", nargs="+", metavar="PART", help="only these parts, as 08-resnet50-b128")
    add("--all", action="store_true", help="also the parts that the software GPU proves")
    add("--minutes", type=float, default=MINUTES, help=f"total time (default {MINUTES:g})")
    add("--jobs", type=int, default=1, help="processes at once (default 1)")
    add("--again", action="store_true", help="repeat parts that finished in an earlier run")
    add("--dry", action="store_true", help="run on the CPU with tiny shapes, to test this command")
    add("--folder", type=Path, default=ROOT / "build" / "gpu", help="folder of finished parts")
    add("--out", help="folder for the result (default benchmarks/results; if dry, none)")
    options = parser.parse_args(argv)
    if options.only:
        from benchmarks.gpu.steps import PARTS

        keys = [part.key for part in PARTS]
        if unknown := sorted({*options.only} - {*keys}):
            parser.error(f"there is no part {unknown[0]}; there are {', '.join(keys)}")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
