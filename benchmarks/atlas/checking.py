"""The validator of the atlas: what a graph's file and a model's results must satisfy."""

from __future__ import annotations

from pathlib import Path

import remat
from benchmarks.atlas.graph_file import AtlasGraph, path_of
from benchmarks.atlas.results import AT_BLOCKS, POLICIES, RECOMPUTE, ModelResult, ResultFolder, Row
from remat.schedule import Schedule
from remat.simulate import simulate

_ROUNDING = 1e-5
"""Extra time is stored with five decimals."""


def problems_of(name: str, results: Path) -> list[str]:
    """Return the problems of a model's graph and results, each with the model's name."""
    try:
        graph = AtlasGraph.load(path_of(name))
        graphs = [graph.on(gpu) for gpu in graph.costs_s]
    except remat.RematError as error:
        return [f"{name}: {error}"]
    problems = _graph_problems(graph, graphs)
    path = ResultFolder(results).path(name)
    if path.exists():
        try:
            result = ModelResult.load(path)
        except remat.RematError as error:
            problems.append(str(error))
        else:
            problems += _result_problems(result, graph, graphs[0])
    return [f"{name}: {problem}" for problem in problems]


def _graph_problems(graph: AtlasGraph, graphs: list[remat.Graph]) -> list[str]:
    problems: list[str] = []
    if not any(o.backward for o in graphs[0].operations):
        problems.append("no operation belongs to the backward pass")
    problems += [
        f"{gpu}: a step takes no time"
        for gpu, g in zip(graph.costs_s, graphs, strict=True)
        if g.total_cost_s <= 0
    ]
    return problems


def _result_problems(result: ModelResult, graph: AtlasGraph, plain: remat.Graph) -> list[str]:
    if result.graph != graph.digest:
        return ["the results are of another graph: run the atlas again for this model"]
    problems: list[str] = []
    peak_bytes = simulate(plain, Schedule.keep_all(plain)).peak_bytes
    if peak_bytes != result.baseline_peak_bytes:
        problems.append(f"the peak is {result.baseline_peak_bytes}, simulated {peak_bytes}")
    for row in result.rows:
        problems += [f"{', '.join(row.key)}: {text}" for text in _row_problems(row, result)]
    return problems


def _row_problems(row: Row, result: ModelResult) -> list[str]:
    if row.peak_bytes is None or row.overhead is None:
        return [] if row.note else ["a row without a plan needs a reason"]
    problems: list[str] = []
    budget_bytes = result.budget_bytes(row.gpu, row.budget)
    if budget_bytes is not None and row.peak_bytes > budget_bytes:
        problems.append(f"the peak, {row.peak_bytes}, exceeds the budget, {budget_bytes}")
    if row.bound is not None and row.overhead < row.bound - _ROUNDING:
        problems.append(f"{row.overhead} is below the bound, {row.bound}")
    if row.method in POLICIES and row.budget not in ("min", AT_BLOCKS):
        problems += _policy_problems(row, result)
    return problems


def _policy_problems(row: Row, result: ModelResult) -> list[str]:
    """Return the problem of a policy that is faster than the bound of all schedules."""
    for other in result.rows:
        if other.key == (row.gpu, row.budget, RECOMPUTE) and other.bound is not None:
            assert row.overhead is not None
            if row.overhead < other.bound - _ROUNDING:
                return [f"{row.overhead} is below the bound of all schedules, {other.bound}"]
    return []
