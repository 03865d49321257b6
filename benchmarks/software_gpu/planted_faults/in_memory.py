"""Faults in the prediction of memory: lifetimes, workspaces, alignment, the allocator."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from benchmarks.software_gpu.planted_faults.fault import Fault, patched
from benchmarks.software_gpu.planted_faults.session import AttentionNet
from remat.documents import trace as trace_module
from remat.documents.trace import Trace
from remat.frontend.costs.measure import measure
from remat.frontend.planning import planner
from remat.graph import Graph

simulator = importlib.import_module("remat.simulate")  # `remat.simulate` is the function


def faults() -> list[Fault]:
    """Return the faults of this module."""
    return [
        Fault(
            "copies counted to one run before their last use",
            patched((simulator, "_live_bytes_between_runs", _live_bytes_until(-1))),
        ),
        Fault(
            "copies counted to some runs after their last use",
            patched((simulator, "_live_bytes_between_runs", _live_bytes_until(12))),
        ),
        Fault(
            "library workspaces not counted",
            patched((planner, "measure", _without_library_bytes)),
            devices=("cuda",),
        ),
        Fault(
            "workspaces of operations not counted",
            patched((planner, "measure", _without_workspaces)),
            devices=("cuda",),
            is_saving=True,
            build_model=AttentionNet,
        ),
        Fault(
            "alignment of the allocator not counted",
            patched((trace_module, "CUDA_ALIGNMENT_BYTES", 1)),
            devices=("cuda",),
        ),
    ]


_live_bytes_between_runs = simulator._live_bytes_between_runs


def _live_bytes_until(shift: int) -> Any:
    """Return a simulation in which copies end some runs later than they do."""

    def live_bytes(graph: Graph, spans: Any, run_count: int) -> Any:
        values, starts, ends = spans
        shifted = np.maximum(starts, np.minimum(run_count - 1, ends + shift))
        shifted = np.where(ends >= run_count, ends, shifted)
        return _live_bytes_between_runs(graph, (values, starts, shifted), run_count)

    return live_bytes


def _without_library_bytes(*args: Any, **kwargs: Any) -> Trace:
    return measure(*args, **kwargs).replace(library_bytes=0)


def _without_workspaces(*args: Any, **kwargs: Any) -> Trace:
    trace = measure(*args, **kwargs)
    nodes = tuple(node.model_copy(update={"workspace_bytes": 0}) for node in trace.nodes)
    return trace.replace(nodes=nodes)
