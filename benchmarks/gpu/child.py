"""One part of the run, in this process: `python -m benchmarks.gpu.child KEY FOLDER [--dry]`. Lines
go to `FOLDER/KEY.jsonl`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.gpu import lines
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.steps import PARTS


def main(argv: list[str]) -> int:
    """Run it. What it raises is its end."""
    key, folder, *dry = argv
    (part,) = (part for part in PARTS if part.key == key)
    part.run(Setting(Path(folder), dry == ["--dry"], key), lines.into(Path(folder, f"{key}.jsonl")))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
