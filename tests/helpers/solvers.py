"""The solvers on this machine, for tests that need one."""

from __future__ import annotations

import math
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from remat.errors import SolverError
from remat.milp.solvers.program import AT_LEAST, AT_MOST, EQUAL, Program
from remat.milp.solvers.pulp_solvers import require_solver


def why_unavailable(name: str) -> str:
    """Return the reason why a solver cannot be used; "" where it can."""
    try:
        require_solver(name)
    except SolverError as error:
        return str(error)
    return ""


needs_cbc = pytest.mark.skipif(
    bool(why_unavailable("CBC")), reason=why_unavailable("CBC") or "CBC is here"
)


def solver_scripts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that puts a shell script of some name on the path, where PuLP finds only
    that."""
    monkeypatch.setitem(sys.modules, "cbcbox", None)  # PuLP prefers the package of `remat[cbc]`

    def install(name: str, script: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        others = os.environ["PATH"].split(os.pathsep)
        others = [
            folder_on_path for folder_on_path in others if not Path(folder_on_path, name).exists()
        ]
        monkeypatch.setenv("PATH", os.pathsep.join([str(folder), *others]))

    return install


def small() -> Program:
    """Return the program: minimise 3 a + 2 b + 5 subject to a + b >= 2.5, b <= 2, a - c = 0, c
    at most 4."""
    program = Program()
    c = program.add_column("c", -math.inf, 4)
    b = program.add_column("b")
    a = program.add_column("a", 0, 9, is_integer=True)
    program.costs, program.offset = {b: 2.0, a: 3.0}, 5.0
    program.add_row({b: 1.0, a: 1.0}, AT_LEAST, 2.5)
    program.add_row({b: 1.0}, AT_MOST, 2)
    program.add_row({a: 1.0, c: -1.0}, EQUAL, 0)
    return program
