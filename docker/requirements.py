"""Print this package's dependencies: `requirements.py EXTRA,... [WITHOUT,...]`, one a line.

The images install them before the package itself, so that a change of ours does not install them
anew; and the server's image leaves torch out, which pip itself has no way to do.
"""

import re
import sys
import tomllib
from pathlib import Path


def requirements(extras: list[str], without: list[str]) -> list[str]:
    """The dependencies with those of the extras, but for the named ones."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return sorted({each for each in found if re.split(r"[^\w.-]", each)[0] not in without})


if __name__ == "__main__":
    extras, without = (each.split(",") for each in [*sys.argv[1:], ""][:2])
    print("\n".join(requirements(extras, without)))
