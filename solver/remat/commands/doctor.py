"""`remat doctor`: the state of the installation, and a remedy for each problem."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict

import typer

from remat.commands.common import files
from remat.commands.common.command_options import Json
from remat.commands.common.exits import EXIT_FAILED
from remat.commands.common.summaries import to_json_text

_MARKS = {"ok": "ok", "untested": "??", "missing": "--", "wrong": "!!"}


def doctor(as_json: Json = False) -> None:
    """Check versions, devices, solvers, cost cache and packages."""
    from remat.commands.diagnosis import run_checks

    checks = run_checks()
    is_well = all(check.state != "wrong" for check in checks)
    if as_json:
        check_records = [asdict(check) for check in checks]
        files.print_json(to_json_text({"is_well": is_well, "checks": check_records}))
    else:
        width = max((len(check.name) for check in checks), default=0)
        columns = shutil.get_terminal_size().columns
        for check in checks:
            remedy = f"; {check.remedy}" if check.remedy else ""
            lead = f"{_MARKS[check.state]}  {check.name:<{width}}  "
            lines = textwrap.wrap(
                f"{check.text}{remedy}",
                max(columns, 80),
                initial_indent=lead,
                subsequent_indent=" " * len(lead),
                break_long_words=False,
                break_on_hyphens=False,
            )
            files.print_text("\n".join(lines))
    if not is_well:
        raise typer.Exit(EXIT_FAILED)
