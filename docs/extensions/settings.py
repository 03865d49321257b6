"""Sphinx directive `{settings}`: the service's settings, from the class that reads them."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from tables import table

from remat.limits.units import format_bytes
from remat_server.settings import Settings as ServiceSettings

_OF_THIS_MACHINE = {
    "data_dir": "~/.local/share/remat",
    "concurrent_solves": "number of cores",
}


class Settings(SphinxDirective):
    """The directive `{settings}`: a table of the `REMAT_*` environment variables."""

    def run(self) -> list[nodes.Node]:
        """Return the table with variable, default and meaning of each setting."""
        rows = [
            (
                f"`REMAT_{name.upper()}`",
                f"`{_default(name)}`",
                field.description or "",
            )
            for name, field in ServiceSettings.model_fields.items()
        ]
        return [table(("variable", "default", "meaning"), rows)]


def _default(name: str) -> str:
    if name in _OF_THIS_MACHINE:
        return _OF_THIS_MACHINE[name]
    value = ServiceSettings.model_fields[name].default
    if name.endswith("_bytes"):
        return format_bytes(value).replace(".00", "").replace(".0", "")
    if isinstance(value, tuple):
        return ",".join(value) or "(none)"
    if isinstance(value, bool):
        return str(value).lower()
    return (
        f"{value:g}"
        if isinstance(value, float) and value < 1e4
        else str(value) or "(none)"
    )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive with Sphinx."""
    app.add_directive("settings", Settings)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
