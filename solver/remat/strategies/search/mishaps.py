"""A part of a solve that fails takes no plan in hand with it: it is told of, and left out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

from remat.errors import SolverWarning, one_line
from remat.solution import Stats

T = TypeVar("T")


def attempt(stats: Stats, part: str, work: Callable[[], T], otherwise: T) -> T:
    """What `work` comes to; `otherwise` where it fails, for whatever reason."""
    try:
        return work()
    except Exception as error:
        tell(stats, part, error)
        return otherwise


def tell(stats: Stats, part: str, error: BaseException) -> None:
    """Warn that a part of a solve has failed, and keep why in `stats`."""
    told = f"{part}: {one_line(error)}"
    known = stats.get("search_error")
    stats["search_error"] = f"{known}; {told}" if known else told
    warnings.warn(
        f"{told}. The plan is the best that is known without this part of the search; please "
        "report this with the graph",
        SolverWarning,
        stacklevel=2,
    )
