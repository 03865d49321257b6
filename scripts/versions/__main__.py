"""Run remat's tests in every supported environment: `make test-versions`.

    python -m scripts.versions                      # all rows except `pinned`, which is `make test`
    python -m scripts.versions newest new-user      # only these rows
    python -m scripts.versions newest --debian      # with Debian's Python, even if another exists

Environments are created outside of the repository: in VERSIONS_DIR, by default `remat-versions` in
the user's cache directory. They are reused until pyproject.toml, constraints.txt or the row
changes. Each with a CUDA build of torch takes 5 to 7 GB; TORCH_INDEX can name an index of smaller
builds, as for scripts/install_torch.sh.

Rows that this machine cannot run are skipped, with the reason. Exits with 1 if a row failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from scripts.versions.pythons import RowFailed, RowSkipped
from scripts.versions.rows import ROWS


def main() -> int:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(
        prog="python -m scripts.versions",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{row.name:12} {row.description}" for row in ROWS),
    )
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help="names of rows; default: all except `pinned`"
    )
    parser.add_argument("--quick", action="store_true", help="skip tests marked slow")
    parser.add_argument("--fresh", action="store_true", help="recreate the environments")
    parser.add_argument("--debian", action="store_true", help="use Debian's Python only")
    options = parser.parse_args()
    if unknown := [name for name in options.rows if name not in names]:
        parser.error(f"there is no row {unknown[0]!r}; there are {', '.join(names)}")
    ends = {}
    for row in ROWS:
        if row.name in options.rows or (row.by_default and not options.rows):
            print(f"\n== {row.name}: {row.description}", flush=True)
            began = time.monotonic()
            try:
                row.run(versions_dir(), options)
                end = "passed"
            except RowSkipped as reason:
                end = f"skipped: {reason}"
            except RowFailed as error:
                end = f"FAILED: {error}"
            ends[row.name] = f"{end} ({time.monotonic() - began:.0f} s)"
            print(f"== {row.name}: {ends[row.name]}", flush=True)
    print()
    for name, end in ends.items():
        print(f"{name:12} {end}")
    return any(end.startswith("FAILED") for end in ends.values())


def versions_dir() -> Path:
    """Return the folder of the environments."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("VERSIONS_DIR") or Path(cache) / "remat-versions").resolve()


if __name__ == "__main__":
    sys.exit(main())
