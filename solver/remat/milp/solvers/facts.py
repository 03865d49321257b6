"""Which solvers work here, and what to do about those that do not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from remat.milp.solvers.pulp_solvers import FAMILIES, HIGHS, Family

_PATIENCE_S = 4.5
_PROBE = Path(__file__).with_name("probe.py")
_MARK = "remat-backend "


@dataclass(frozen=True, slots=True)
class BackendFact:
    """One solver: whether it solves a small program here.

    `version` is "" where it is not known. `reason` says why it is not usable and what to do, or
    how far its licence goes; "" where there is nothing to say.
    """

    name: str
    usable: bool
    version: str = ""
    reason: str = ""


def usable_backends() -> list[BackendFact]:
    """Every solver that remat has a name for, the default first.

    Tries the others in a process of their own, within 5 s in all; raises and prints nothing.
    """
    others = [family for family in FAMILIES if family is not HIGHS]
    tried = _try([name for family in others for name in family.classes])
    return [_highs(), *(_fact(family, tried) for family in others)]


def _highs() -> BackendFact:
    try:
        return BackendFact(HIGHS.name, True, metadata.version("highspy"))
    except metadata.PackageNotFoundError:
        # Its import has worked, or this module would not have been reached.
        return BackendFact(HIGHS.name, True)


def _fact(family: Family, tried: dict[str, BackendFact]) -> BackendFact:
    """The first of the family's classes that works; else what is known of all."""
    found = [tried[name] for name in family.classes]
    for fact in found:
        if fact.usable:
            return BackendFact(family.name, True, fact.version, fact.reason)
    reasons = dict.fromkeys(fact.reason for fact in found if fact.reason)
    why = "; ".join(reasons) or "not installed"
    return BackendFact(family.name, False, reason=f"{why} ({family.remedy})")


def _try(waiting: list[str]) -> dict[str, BackendFact]:
    """What the probe says of each class; it is run again for those after one that kills it."""
    deadline = time.monotonic() + _PATIENCE_S
    tried: dict[str, BackendFact] = {}
    while waiting:
        output, end = _run_probe(waiting, deadline - time.monotonic())
        tried |= _read(output)
        waiting = [name for name in waiting if name not in tried]
        if waiting:
            tried[waiting[0]] = BackendFact(waiting[0], False, reason=end)
            waiting = waiting[1:]
    return tried


def _run_probe(names: list[str], seconds: float) -> tuple[str, str]:
    """Its output, and what to say of the first class that is missing from it."""
    late = f"did not answer within {_PATIENCE_S:g} s"
    if seconds <= 0:
        return "", late
    # -P: the probe lies among modules that are no top-level ones.
    command = [sys.executable, "-P", str(_PROBE), *names]
    try:
        ended = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), late
    except OSError as error:
        return "", f"could not be tried: {error}"
    return ended.stdout.decode(errors="replace"), f"died when tried (exit {ended.returncode})"


def _read(output: str) -> dict[str, BackendFact]:
    found: dict[str, BackendFact] = {}
    for line in output.splitlines():
        if line.startswith(_MARK):
            try:
                told = json.loads(line.removeprefix(_MARK))
            except ValueError:
                # Cut off when the time was up.
                continue
            found[told["name"]] = BackendFact(**told)
    return found
