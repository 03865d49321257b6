"""From a request to an answer: what a solving process does, without the process."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

from pydantic import ValidationError

from remat.costs.trace_costs import with_roofline_costs
from remat.costs.roofline import Roofline
from remat.documents.base import validate_json
from remat.documents.plan import PlanDocument
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, RematError
from remat.plan import Plan
from remat.progress import Progress, ProgressCallback
from remat.rewrite import rewrite
from remat.service import wire
from remat.solution import FAILURES
from remat.solve import solve, sweep
from remat.strategies.base import Strategy
from remat_server.problems import of_error, problem
from remat_server.work.messages import Advanced, Answered, Failed

Told = Callable[[Advanced], None]
Request = wire.SolveRequest | wire.SweepRequest

_EVERY_S = 0.5
_REMEDY = "/docs describes requests, and remat.Client writes them"


def read_request(kind: wire.Kind, body: bytes) -> Request:
    """The validated request. Raises `DocumentError`."""
    return validate_json(
        wire.SolveRequest if kind == "solve" else wire.SweepRequest, body, "request", _REMEDY
    )


def perform(
    kind: wire.Kind, body: bytes, *, threads: int, device: str, tell: Told
) -> tuple[Answered, bytes] | Failed:
    """The answer with its gzipped body, or what is wrong. Lets MemoryError pass."""
    try:
        request = read_request(kind, body)
        strategy = with_threads(request.options.strategy, threads)
        graph, costs = _priced(request, device)
        progress = _teller(tell)
        if isinstance(request, wire.SweepRequest):
            plans = sweep(graph, request.budgets, strategy, progress=progress)
            if not plans:
                raise InfeasibleBudget(
                    'none of the budgets is feasible; include "min" to learn the smallest peak'
                )
            documents = tuple(PlanDocument.of(plan) for plan in plans)
            answer = wire.SweepAnswer(plans=documents, costs=costs).model_dump_json()
        else:
            plan = solve(graph, request.budget, strategy, progress=progress)
            plans = [plan]
            program = rewrite(graph, plan.schedule) if isinstance(graph, Trace) else None
            answer = wire.Answer(
                plan=PlanDocument.of(plan), program=program, costs=costs
            ).model_dump_json()
    except InfeasibleBudget as error:
        return Failed(status="infeasible", problem=of_error(error, 200))
    except RematError as error:
        return Failed(status="failed", problem=of_error(error))
    except ValidationError as error:
        wrong = f"this trace makes no program: {error.errors()[0]['msg']}; it was not made by remat"
        return Failed(status="failed", problem=problem(422, wrong, "document"))
    except RecursionError:
        return Failed(status="failed", problem=problem(422, "the graph is nested too deeply"))
    zipped = gzip.compress(answer.encode(), compresslevel=5, mtime=0)
    has_failed = any(failure in plan.stats for plan in plans for failure in FAILURES)
    is_shared = not (request.is_measured_here or has_failed)
    return Answered(summary=tuple(map(summarise, plans)), is_shared=is_shared), zipped


def with_threads(strategy: Strategy, threads: int) -> Strategy:
    """The strategy with no more threads than the service gives to a solve."""
    options: dict[str, Any] = {}
    if is_dataclass(strategy) and any(f.name == "threads" for f in fields(strategy)):
        options["threads"] = min(threads, getattr(strategy, "threads", threads))
        return replace(strategy, **options)
    return strategy


def summarise(plan: Plan) -> wire.Summary:
    """A plan in figures."""
    return wire.Summary(
        status=plan.status.name,
        budget_bytes=plan.budget_bytes,
        peak_bytes=plan.peak_bytes,
        baseline_peak_bytes=plan.baseline_peak_bytes,
        time_s=plan.time_s,
        baseline_time_s=plan.baseline_time_s,
        overhead=plan.overhead,
        lower_bound=plan.lower_bound,
        gap=plan.gap,
        operations=len(plan.graph),
        library_bytes=plan.graph.library_bytes,
    )


def _priced(request: Request, device: str) -> tuple[Any, str]:
    """The graph or the trace with costs, and where these come from."""
    graph = wire.graph_of(request)
    if not isinstance(graph, Trace):
        return graph, "as given"
    costs = request.options.costs
    if request.is_measured_here:
        from remat.frontend.costs.measure import measure

        graph = measure(graph, device=device)
    elif costs is not None:
        graph = with_roofline_costs(graph, Roofline(costs.partition(":")[2]))
    return graph, graph.cost_source


def _teller(tell: Told) -> ProgressCallback:
    """Passes on what is of use: each better schedule, else how things stand twice a second."""
    told: Progress | None = None
    told_at_s = float("-inf")

    def progress(now: Progress) -> None:
        nonlocal told, told_at_s
        is_incumbent = now.incumbent is not None and (
            told is None
            or (now.phase, now.budget_bytes, now.incumbent)
            != (told.phase, told.budget_bytes, told.incumbent)
        )
        # `elapsed_s` begins anew at each budget of a sweep.
        if not is_incumbent and time.monotonic() - told_at_s < _EVERY_S:
            return
        told, told_at_s = now, time.monotonic()
        tell(Advanced(progress=wire.ProgressRecord(**asdict(now)), is_incumbent=is_incumbent))

    return progress
