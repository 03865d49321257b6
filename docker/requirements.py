"""Prints this package's dependencies, one per line: `requirements.py EXTRA,... [EXCLUDED,...]`.

The images install them before the package, so that a change of the package does not reinstall them.
The server's image excludes torch, for which pip has no option.
"""

import re
import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str], excluded: list[str]) -> list[str]:
    """Return the dependencies, including those of the extras, without the excluded packages."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    return sorted({line for line in lines if re.split(r"[^\w.-]", line)[0] not in excluded})


if __name__ == "__main__":
    extras, excluded = (argument.split(",") for argument in [*sys.argv[1:], ""][:2])
    print("\n".join(requirements(extras, excluded)))
