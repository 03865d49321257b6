"""Programs of small models, rewritten for a schedule that a test chooses."""

from __future__ import annotations

from typing import Any

from torch import nn

import remat
from remat.documents.program import Program
from remat.documents.trace import Trace


def traced(model: nn.Module, *args: Any, **kwargs: Any) -> Trace:
    """Return the trace of a model with costs from the roofline."""
    return remat.measure(remat.trace(model, args, kwargs), remat.Roofline("cpu"))


def keep_all(trace: Trace) -> Program:
    """Return the program that retains every value."""
    return remat.rewrite(trace, remat.Schedule.keep_all(trace.graph()))


def recompute_all(trace: Trace, times: int = 1) -> Program:
    """Return the program that recomputes the whole recomputable forward at the start of the
    backward."""
    graph = trace.graph()
    assert graph.boundary is not None
    runs = list(range(len(graph)))
    repeated = [op for op in runs[: graph.boundary] if graph.operations[op].recomputable]
    runs[graph.boundary + 1 : graph.boundary + 1] = repeated * times
    return remat.rewrite(trace, remat.Schedule(tuple(runs)))
