"""Which tests use torch: the rows of `make test-versions` choose by the mark `torch`.

A test file that imports torch, or imports another of these that does, has the mark by itself. One
that only starts processes which use torch says so: `pytestmark = pytest.mark.torch`.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
TORCH_IS_HERE = find_spec("torch") is not None

_TORCH = ("torch", "transformers", "diffusers", "remat.frontend")


@cache
def imports_torch(file: Path) -> bool:
    """Whether importing this file of tests/ imports torch."""
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            if any(f"{name}.".startswith(f"{each}.") for each in _TORCH):
                return True
            package, _, rest = name.partition(".")
            other = FOLDER / f"{rest.partition('.')[0]}.py"
            if package == "tests" and other.exists() and imports_torch(other):
                return True
    return False
