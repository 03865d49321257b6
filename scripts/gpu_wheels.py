"""Download remat's dependencies except torch, for a machine with a GPU and no network.

    python scripts/gpu_wheels.py                 # PuLP, highspy, pydantic: 8 MB
    python scripts/gpu_wheels.py networkx numpy  # these too, if that machine lacks them

The wheels, at the versions of constraints.txt, go to build/gpu-wheels, where `make gpu` finds them.
They are for CPython 3.12 on Linux, x86-64; `GPU_PYTHON=3.13` selects another version. A machine
with torch has networkx, numpy and typing_extensions already.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "gpu-wheels"

NEEDED = ("pulp", "highspy", "pydantic", "pydantic-core", "annotated-types", "typing-inspection")
LINUX = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux_2_17", "manylinux2014")

EXCLUDED = re.compile(r"pulp/solverdir/cbc/")
"""CBC for three systems, 15 of PuLP's 16 MB. remat solves with HiGHS."""


def pins(text: str, names: tuple[str, ...]) -> list[str]:
    """Return the lines of constraints.txt for these names. Raises `SystemExit` for a missing one.

    >>> pins("PuLP==3.3.2", ("pulp",))
    ['PuLP==3.3.2']
    """
    lines = [line for line in text.splitlines() if "==" in line and not line.startswith("#")]
    pin_by_name = {_normalized(line.partition("==")[0]): line for line in lines}
    missing = [name for name in names if _normalized(name) not in pin_by_name]
    if missing:
        raise SystemExit(f"constraints.txt has no {', '.join(missing)}")
    return [pin_by_name[_normalized(name)] for name in names]


def _normalized(name: str) -> str:
    """Return a package name in pip's normalized form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def lighten(wheel: Path) -> None:
    """Rewrite a wheel without the `EXCLUDED` files. Its RECORD still lists them."""
    lighter = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(lighter, "w") as new:
        for item in old.infolist():
            if not EXCLUDED.match(item.filename):
                new.writestr(item, old.read(item), zipfile.ZIP_DEFLATED)
    lighter.replace(wheel)


def main(extra_names: list[str]) -> int:
    """Download the wheels, and print their sizes."""
    python = os.environ.get("GPU_PYTHON", "3.12")
    requirements = pins((ROOT / "constraints.txt").read_text(), (*NEEDED, *extra_names))
    shutil.rmtree(FOLDER, ignore_errors=True)
    platforms = [word for name in LINUX for word in ("--platform", f"{name}_x86_64")]
    completed = subprocess.run(
        [
            sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet",
            "--no-deps", "--only-binary=:all:", "--python-version", python, *platforms,
            "--dest", str(FOLDER), *requirements,
        ],
        check=False,
    )  # fmt: skip
    if completed.returncode:
        return completed.returncode
    for wheel in FOLDER.glob("pulp-*.whl"):
        lighten(wheel)
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(FOLDER.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size / 1e6:6.2f} MB  {name}")
    print(
        f"{sum(sizes.values()) / 1e6:6.2f} MB in {FOLDER.relative_to(ROOT)}, for `make gpu` there"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
