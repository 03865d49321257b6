"""Run one part of the acceptance run: `python -m benchmarks.gpu.child KEY FOLDER [--dry]`.

Its checks are appended to `FOLDER/KEY.jsonl`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.steps import PARTS
from benchmarks.gpu.verdicts import json_lines_report


def main(argv: list[str]) -> int:
    """Run the part. An exception of the part ends this process."""
    key, folder, *dry = argv
    (part,) = (part for part in PARTS if part.key == key)
    part.run(
        Setting(Path(folder), dry == ["--dry"], key, part.is_timed),
        json_lines_report(Path(folder, f"{key}.jsonl")),
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
