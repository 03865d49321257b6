"""Which solvers work on this machine, and what to do about those that do not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from remat.milp.solvers.pulp_solvers import FAMILIES, HIGHS, SolverFamily

_TIMEOUT_S = 4.5
_PROBE = Path(__file__).with_name("probe.py")
_LINE_PREFIX = "remat-backend "


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """The result of solving a small program with one solver on this machine.

    `version` is "" if unknown. `reason` says why the solver is not usable and what to do, or how
    far its licence goes; "" if there is nothing to say.
    """

    name: str
    usable: bool
    version: str = ""
    reason: str = ""


def usable_backends() -> list[BackendStatus]:
    """Return the status of every solver that remat has a name for, the default first.

    The others are tried in a separate process, within 5 s in total; raises and prints nothing.
    """
    others = [family for family in FAMILIES if family is not HIGHS]
    statuses = _probe_classes([name for family in others for name in family.classes])
    return [_highs_status(), *(_family_status(family, statuses) for family in others)]


def _highs_status() -> BackendStatus:
    """Return the status of HiGHS, which is usable wherever this module can be imported."""
    try:
        return BackendStatus(HIGHS.name, True, metadata.version("highspy"))
    except metadata.PackageNotFoundError:
        # Its import has worked, or this module would not have been imported.
        return BackendStatus(HIGHS.name, True)


def _family_status(family: SolverFamily, statuses: dict[str, BackendStatus]) -> BackendStatus:
    """Return the status of the first of the family's classes that works; else the reasons of
    all."""
    class_statuses = [statuses[name] for name in family.classes]
    for status in class_statuses:
        if status.usable:
            return BackendStatus(family.name, True, status.version, status.reason)
    reasons = dict.fromkeys(status.reason for status in class_statuses if status.reason)
    why = "; ".join(reasons) or "not installed"
    return BackendStatus(family.name, False, reason=f"{why} ({family.remedy})")


def _probe_classes(pending: list[str]) -> dict[str, BackendStatus]:
    """Return the status of each of PuLP's classes, as the probe reports it. The probe is restarted
    after a class that kills it."""
    deadline = time.monotonic() + _TIMEOUT_S
    statuses: dict[str, BackendStatus] = {}
    while pending:
        output, reason = _run_probe(pending, deadline - time.monotonic())
        statuses |= _parse_probe_output(output)
        pending = [name for name in pending if name not in statuses]
        if pending:
            statuses[pending[0]] = BackendStatus(pending[0], False, reason=reason)
            pending = pending[1:]
    return statuses


def _run_probe(names: list[str], seconds: float) -> tuple[str, str]:
    """Return the probe's output, and the reason for the first class that is missing from it."""
    timeout_reason = f"did not answer within {_TIMEOUT_S:g} s"
    if seconds <= 0:
        return "", timeout_reason
    # -P: modules next to the probe are no top-level modules.
    command = [sys.executable, "-P", str(_PROBE), *names]
    try:
        process = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), timeout_reason
    except OSError as error:
        return "", f"could not be tried: {error}"
    return process.stdout.decode(errors="replace"), f"died when tried (exit {process.returncode})"


def _parse_probe_output(output: str) -> dict[str, BackendStatus]:
    """Return the status of each class that the probe's output has."""
    statuses: dict[str, BackendStatus] = {}
    for line in output.splitlines():
        if line.startswith(_LINE_PREFIX):
            try:
                fields = json.loads(line.removeprefix(_LINE_PREFIX))
            except ValueError:
                # Truncated at the timeout.
                continue
            statuses[fields["name"]] = BackendStatus(**fields)
    return statuses
