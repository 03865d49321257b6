"""`remat` on the command line. The service adds its commands by the entry point `remat.commands`,
so that the library need not know it."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from typing import Annotated

try:
    import typer
except ImportError:
    sys.exit("the command line needs typer and rich: pip install 'remat[cli]'")

import remat
from remat.errors import RematError

app = typer.Typer(
    name="remat",
    help="Optimal rematerialization for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(remat.__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version")
    ] = False,
) -> None:
    """Optimal rematerialization for PyTorch."""


def main() -> None:
    """The entry point: every error of ours is one line that says what to do."""
    for point in entry_points(group="remat.commands"):
        point.load()(app)
    try:
        app()
    except RematError as error:
        print(f"remat: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
