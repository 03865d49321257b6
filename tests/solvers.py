"""Which solvers are here, for tests that need one."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from remat.errors import SolverError
from remat.milp.solvers.pulp_solvers import require


def why_not(name: str) -> str:
    """Why a solver cannot be used here; "" where it can."""
    try:
        require(name)
    except SolverError as error:
        return str(error)
    return ""


needs_cbc = pytest.mark.skipif(bool(why_not("CBC")), reason=why_not("CBC") or "CBC is here")


def scripted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts a shell script of some name on the path, where it alone is what PuLP finds."""
    monkeypatch.setitem(sys.modules, "cbcbox", None)  # the package of `remat[cbc]` goes first

    def install(name: str, script: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        others = os.environ["PATH"].split(os.pathsep)
        others = [each for each in others if not Path(each, name).exists()]
        monkeypatch.setenv("PATH", os.pathsep.join([str(folder), *others]))

    return install
