"""Which solvers are here, for tests that need one."""

from __future__ import annotations

import pytest

from remat.errors import SolverError
from remat.milp.pulp_solvers import require


def why_not(name: str) -> str:
    """Why a solver cannot be used here; "" where it can."""
    try:
        require(name)
    except SolverError as error:
        return str(error)
    return ""


needs_cbc = pytest.mark.skipif(bool(why_not("CBC")), reason=why_not("CBC") or "CBC is here")
