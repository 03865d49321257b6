"""`remat plot`: a plan as a picture, a page, a table, a profile or code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from remat.commands.common import files
from remat.commands.common.command_options import PlotDevice, check_device
from remat.commands.common.plots import PLOT_KINDS, PlotInput, find_plot_writer


def _complete_kind(incomplete: str) -> list[str]:
    return [kind for kind in PLOT_KINDS if kind.startswith(incomplete)]


def plot(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="The file of a plan or a sweep; - is stdin.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Its ending selects the kind.")
    ],
    kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help=f"{', '.join(PLOT_KINDS)}; by default selected by the file name's ending.",
            autocompletion=_complete_kind,
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE",
            help="The trace of the plan, for kind code and for the code in a page.",
            show_default=False,
        ),
    ] = None,
    device: PlotDevice = None,
) -> None:
    """Draw a plan (.svg, .html, .png, .pdf), or export it.

    Kind chrome is for Perfetto, kind snapshot for pytorch.org/memory_viz.
    """
    files.check_one_stdin(plan, trace or "")
    check_device(device)
    suffix = files.suffix_without_gz(output)
    find_plot_writer(kind, suffix, is_sweep=False)  # reports a wrong kind before it reads a file
    files.check_outputs(output)
    plans = files.read_plans(plan)
    traced = None if trace is None else files.read_measured_trace(trace)
    write_plot = find_plot_writer(kind, suffix, is_sweep=len(plans) != 1)
    files.write_output(output, write_plot(PlotInput(plans, traced, device)))
