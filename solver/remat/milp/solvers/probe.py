"""Try PuLP's classes one by one and print the result of each on one line of JSON.

A separate script (`remat.milp.solvers.availability` runs it), because a solver's library may print,
hang, or crash the process. It imports nothing of remat, and works with PuLP 3.3 and 4.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings
from importlib import metadata

import pulp

LINE_PREFIX = "remat-backend "
"""Prefix of the lines with results: a library may print lines of its own."""

_PACKAGES = {
    "GUROBI": "gurobipy",
    "CPLEX_PY": "cplex",
    "SCIP_PY": "pyscipopt",
    "COPT": "coptpy",
    "XPRESS_PY": "xpress",
    "CUOPT": "cuopt",
}
_TRIAL_LICENCES = ("GUROBI", "CPLEX_PY", "COPT", "XPRESS_PY")
_TRIAL_LIMIT_VARIABLES = 6_000
"""Variables of a program that trial licences refuse: their limits are 1,000 to 5,000."""

_OPTIMAL = 1


def probe_solver_class(class_name: str) -> dict[str, str | bool]:
    """Try a class of PuLP's, and return `usable`, `version` and `reason`: why it is not usable, or
    how far its licence goes. Unknown ones are ""."""
    version = ""
    usable = False
    reason = ""
    if not hasattr(pulp, class_name):
        # PuLP 4 has no PULP_CBC_CMD.
        return {"usable": False, "version": "", "reason": ""}
    try:
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.simplefilter("always")
            backend = getattr(pulp, class_name)(msg=False)
            if not backend.available():
                messages = [str(w.message) for w in caught_warnings if w.category is UserWarning]
                return {"usable": False, "version": "", "reason": "; ".join(messages)}
        version = _solver_version(backend)
        _solve_trivial_program(class_name, 2)
        usable = True
        if class_name in _TRIAL_LICENCES:
            reason = f"its licence refuses programs of {_TRIAL_LIMIT_VARIABLES:,} variables: "
            _solve_trivial_program(class_name, _TRIAL_LIMIT_VARIABLES)
    except Exception as error:
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return {"usable": usable, "version": version, "reason": reason + words}
    return {"usable": True, "version": version, "reason": ""}


def _solve_trivial_program(class_name: str, count: int) -> None:
    """Solve a program with `count` variables and rows, which any presolve removes. Raises
    RuntimeError if the solver does not call it optimal."""
    problem = pulp.LpProblem("probe", pulp.LpMinimize)
    chosen = [problem.add_variable(f"x{i:05d}", 0, 1, pulp.LpInteger) for i in range(count)]
    # The cost of one variable only: looking up the others takes some of PuLP 4's classes a minute.
    problem.setObjective(pulp.lpSum(chosen[:1]))
    for i, x in enumerate(chosen):
        problem.addConstraint(x >= 1, f"c{i}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = problem.solve(getattr(pulp, class_name)(msg=False))
    # PuLP 4 returns statistics, with a status that has the same numbers.
    status = int(getattr(result, "status", result))
    if status != _OPTIMAL:
        word = getattr(result, "status_str", "") or pulp.LpStatus[status]
        raise RuntimeError(f"a program of {count:,} variables has the status {word!r}")


def _solver_version(backend: pulp.LpSolver) -> str:
    """Return the version of the solver's package, or of the command of CBC; "" if unknown."""
    package = _PACKAGES.get(backend.name)
    if package is not None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return ""
    if backend.name in ("PULP_CBC_CMD", "COIN_CMD"):
        command = [str(getattr(backend, "path", "cbc")), "-quit"]
        text = subprocess.run(command, capture_output=True, text=True, timeout=2).stdout
        match = re.search(r"Version:\s*(\S+)", text)
        return match[1] if match else ""
    return ""


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(
            "\n" + LINE_PREFIX + json.dumps({"name": name, **probe_solver_class(name)}), flush=True
        )
