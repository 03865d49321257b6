"""`remat plot`: a plan as a picture, a page, a table, a profile or code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remat.commands.common import files
from remat.commands.common.drawings import KINDS, Subject, drawing
from remat.commands.common.options import PictureDevice, check_device


def _complete_kind(incomplete: str) -> list[str]:
    return [kind for kind in KINDS if kind.startswith(incomplete)]


def plot(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A plan's or a sweep's file; - is stdin.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Its ending tells the kind.")
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help=f"{', '.join(KINDS)}; by default as the file's name says.",
            autocompletion=_complete_kind,
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE",
            help="The plan's trace, for kind code and for the code in a page.",
            show_default=False,
        ),
    ] = None,
    device: PictureDevice = None,
) -> None:
    """Draw a plan (.svg, .html, .png, .pdf) or export it for other tools.

    chrome is for Perfetto, snapshot for pytorch.org/memory_viz.
    """
    files.check_one_stdin(plan, trace or "")
    check_device(device)
    suffix = files.suffix_of(output)
    drawing(kind, suffix, is_sweep=False)  # what cannot be is told before anything is read
    files.check_outputs(output)
    plans = files.read_plans(plan)
    traced = None if trace is None else files.read_measured(trace)
    draw = drawing(kind, suffix, is_sweep=len(plans) != 1)
    files.write(output, draw(Subject(plans, traced, device)))
