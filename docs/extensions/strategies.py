"""Sphinx directive `{strategies}`: the strategies with their names, from the registry."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import remat
from remat.strategies.registry import STRATEGIES


class Strategies(SphinxDirective):
    """The names of the strategies, with the docstring of each class."""

    def run(self) -> list[nodes.Node]:
        """Return a paragraph of the names, and the documentation of each class."""
        names = ", ".join(f"`{name}`" for name in STRATEGIES)
        classes = "\n".join(
            f".. autoclass:: {_home(kind)}.{kind.__name__}"
            for kind in STRATEGIES.values()
        )
        text = f"Their names, for the command line and the service: {names}."
        return self.parse_text_to_nodes(
            f"{text}\n\n```{{eval-rst}}\n{classes}\n```\n"
        )


def _home(kind: type[object]) -> str:
    return "remat" if kind.__name__ in remat.__all__ else "remat.strategies"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive with Sphinx."""
    app.add_directive("strategies", Strategies)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
