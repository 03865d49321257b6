"""Run remat's tests in every environment that it promises: `make test-versions`.

    python -m scripts.versions                      # all rows but `pinned`, which is `make test`
    python -m scripts.versions newest new-user      # these
    python -m scripts.versions newest --debian      # with Debian's Python, even if there is another

Environments are made where they are missing, outside of the repository: in VERSIONS_DIR, by default
`remat-versions` in the user's cache directory. They are kept, and made anew when pyproject.toml,
constraints.txt or the row has changed. Each with a CUDA build of torch takes 5 to 7 GB;
TORCH_INDEX, as of scripts/install_torch.sh, can name an index of smaller builds.

What cannot be had here is skipped, with the reason. Ends with 1 if a row failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from scripts.versions.pythons import Failed, Skipped
from scripts.versions.rows import ROWS


def main() -> int:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(
        prog="python -m scripts.versions",
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{row.name:12} {row.what}" for row in ROWS),
    )
    parser.add_argument(
        "rows", nargs="*", metavar="ROW", help="which rows; all but `pinned` by default"
    )
    parser.add_argument("--quick", action="store_true", help="leave out tests marked slow")
    parser.add_argument("--fresh", action="store_true", help="make the environments anew")
    parser.add_argument("--debian", action="store_true", help="use no Python of this machine")
    options = parser.parse_args()
    if unknown := [name for name in options.rows if name not in names]:
        parser.error(f"there is no row {unknown[0]!r}; there are {', '.join(names)}")
    ends = {}
    for row in ROWS:
        if row.name in options.rows or (row.by_default and not options.rows):
            print(f"\n== {row.name}: {row.what}", flush=True)
            began = time.monotonic()
            try:
                row.run(versions_dir(), options)
                end = "passed"
            except Skipped as reason:
                end = f"skipped: {reason}"
            except Failed as error:
                end = f"FAILED: {error}"
            ends[row.name] = f"{end} ({time.monotonic() - began:.0f} s)"
            print(f"== {row.name}: {ends[row.name]}", flush=True)
    print()
    for name, end in ends.items():
        print(f"{name:12} {end}")
    return any(end.startswith("FAILED") for end in ends.values())


def versions_dir() -> Path:
    """Where environments are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("VERSIONS_DIR") or Path(cache) / "remat-versions").resolve()


if __name__ == "__main__":
    sys.exit(main())
