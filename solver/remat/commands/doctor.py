"""`remat doctor`: what is here, what is missing, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict

import typer

from remat.commands.common import files
from remat.commands.common.exits import FAILED
from remat.commands.common.figures import json_of
from remat.commands.common.options import Json

_MARKS = {"ok": "ok", "untested": "??", "missing": "--", "wrong": "!!"}


def doctor(as_json: Json = False) -> None:
    """Check versions, devices, solvers, the cost cache and optional packages."""
    from remat.commands.diagnosis import examine

    checks = examine()
    is_well = all(check.state != "wrong" for check in checks)
    if as_json:
        told = [asdict(check) for check in checks]
        files.show_json(json_of({"is_well": is_well, "checks": told}))
    else:
        width = max((len(check.name) for check in checks), default=0)
        for check in checks:
            remedy = f"; {check.remedy}" if check.remedy else ""
            files.show(f"{_MARKS[check.state]}  {check.name:<{width}}  {check.text}{remedy}")
    if not is_well:
        raise typer.Exit(FAILED)
