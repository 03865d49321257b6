"""The places at which Dynamo broke a model into several graphs, for errors about a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx

_MAX_NAMED_BREAKS = 3


@dataclass(frozen=True)
class GraphBreak:
    """A line of Python code that Dynamo could not trace: its graph ends there."""

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}, `{self.code}`"


def graph_break_after(gm: fx.GraphModule) -> GraphBreak | None:
    """Return the break that ends Dynamo's graph; None if it ends with the function, or torch does
    not report it (the parts of a graph under DDP)."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break or not reason.user_stack:
        return None
    frame = reason.user_stack[-1]
    return GraphBreak(frame.filename, frame.lineno or 0, (frame.line or "").strip())


def graph_breaks_hint(breaks: Sequence[GraphBreak]) -> str:
    """Return a sentence without its full stop about the breaks of a model; "" without any."""
    if not breaks:
        return ""
    places = ", ".join(str(place) for place in breaks[:_MAX_NAMED_BREAKS])
    if len(breaks) > _MAX_NAMED_BREAKS:
        places += f" and {len(breaks) - _MAX_NAMED_BREAKS} more"
    return (
        f"Dynamo broke the model's graph at {places}: its parts are planned one by one, and what "
        "passes from one to the next is neither split nor recomputed. Without the break a smaller "
        "budget may be feasible; TORCH_LOGS=graph_breaks says why it is there"
    )
