"""Solves a request, within a solving process."""

from __future__ import annotations

import gzip
import re
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from pydantic import ValidationError

from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.plan_request import TracePlan
from remat.choice.step import plan_step
from remat.costs.roofline import Roofline
from remat.costs.trace_costs import with_roofline_costs
from remat.documents.base import validate_json
from remat.documents.plan import PlanDocument
from remat.documents.trace import Trace
from remat.errors import DocumentError, InfeasibleBudget, RematError
from remat.fitting.answer import fit_trace
from remat.fitting.question import DEFAULT_STRATEGY
from remat.plan import Plan
from remat.plan_data import with_reserve
from remat.plan_options import POST_SOLVE, POST_SWEEPS, OffloadOptions
from remat.progress import Progress, ProgressCallback
from remat.rewrite import rewrite
from remat.service import wire
from remat.snapshots.unpickle import PICKLE_START, check_opcodes
from remat.snapshots.why import why
from remat.solution import FAILURES
from remat.solve import solve, sweep
from remat.strategies.base import Strategy, with_limits
from remat_server.problems import make_problem, problem_from_error
from remat_server.work.messages import AnswerMessage, FailureMessage, ProgressMessage

ProgressSink = Callable[[ProgressMessage], None]
"""Receives the progress of a solve."""
SolvingRequest = wire.SolveRequest | wire.SweepRequest
Request = wire.AnyRequest | wire.WhyRequest

_REQUESTS: dict[wire.JobKind, type[wire.AnyRequest]] = {
    "solve": wire.SolveRequest,
    "sweep": wire.SweepRequest,
    "fit": wire.FitRequest,
}
_PROGRESS_INTERVAL_S = 0.5
_REMEDY = "/docs describes requests, and remat.Client sends them"
_UNKNOWN_FIELD = re.compile(r"request: (\w+): Extra inputs are not permitted")


def read_request(kind: wire.JobKind, body: bytes) -> Request:
    """Parse and validate a request. Raises `DocumentError`."""
    if kind == "why":
        if body[:1] == PICKLE_START:
            check_opcodes(body)
        return wire.WhyRequest(body)
    try:
        return validate_json(_REQUESTS[kind], body, "request", _REMEDY)
    except DocumentError as error:
        field = _UNKNOWN_FIELD.match(str(error))
        if field is None or kind == "fit":
            raise
        door = POST_SOLVE if kind == "solve" else POST_SWEEPS
        raise DocumentError(door.reason_without(field[1])) from None


def solve_request(
    kind: wire.JobKind,
    body: bytes,
    *,
    threads: int,
    time_limit_s: float,
    device: str,
    on_progress: ProgressSink,
) -> tuple[AnswerMessage, bytes] | FailureMessage:
    """Solve a request; return the answer with its gzipped body, or the failure.

    Raises MemoryError.
    """
    try:
        request = read_request(kind, body)
        if isinstance(request, wire.WhyRequest):
            result = wire.WhyResult(explanation=why(request.content))
            message = AnswerMessage(summary=(), is_shared=True)
            return message, _zipped(result.model_dump_json())
        if isinstance(request, wire.FitRequest):
            return _fit_answer(request, threads, time_limit_s, _throttled(on_progress))
        strategy = with_limits(request.options.strategy, threads=threads, time_limit=time_limit_s)
        graph = wire.graph_of_request(request)
        costs = "as given"
        if isinstance(graph, Trace):
            graph = _with_costs(graph, request, device)
            costs = graph.cost_source
        progress = _throttled(on_progress)
        if isinstance(request, wire.SweepRequest):
            plans = sweep(graph, request.budgets, strategy, progress=progress)
            if not plans:
                raise InfeasibleBudget(
                    'none of the budgets is feasible; include "min" to get the smallest peak'
                )
            documents = tuple(PlanDocument.of(plan) for plan in plans)
            answer = wire.SweepResult(plans=documents, costs=costs).model_dump_json()
        else:
            if isinstance(graph, Trace):
                graph, plan = _planned_step(graph, request, strategy, progress, device)
            else:
                checked = request.checked_options
                limits = checked.fixed_limits
                with limits.infeasible_with_reserve():
                    plan = solve(
                        graph,
                        limits.budget_after_reserve,
                        strategy,
                        progress=progress,
                        infeasible=checked.infeasible,
                    )
                plan = with_reserve(plan, limits.reserve_bytes)
            plans = [plan]
            program = rewrite(graph, plan.schedule) if isinstance(graph, Trace) else None
            answer = wire.SolveResult(
                plan=PlanDocument.of(plan), program=program, costs=costs
            ).model_dump_json()
    except InfeasibleBudget as error:
        return FailureMessage(status="infeasible", problem=problem_from_error(error, 200))
    except RematError as error:
        return FailureMessage(status="failed", problem=problem_from_error(error))
    except ValidationError as error:
        detail = f"this trace is invalid, and not written by remat: {error.errors()[0]['msg']}"
        return FailureMessage(status="failed", problem=make_problem(422, detail, "document"))
    except RecursionError:
        too_deep = make_problem(422, "the graph is nested too deeply")
        return FailureMessage(status="failed", problem=too_deep)
    has_failed = any(failure in plan.solve for plan in plans for failure in FAILURES)
    is_shared = not (request.needs_measurement or has_failed)
    message = AnswerMessage(summary=tuple(map(summarize_plan, plans)), is_shared=is_shared)
    return message, _zipped(answer)


def _planned_step(
    trace: Trace,
    request: wire.SolveRequest,
    strategy: Strategy,
    progress: ProgressCallback,
    device: str,
) -> TracePlan:
    """Return the plan of a trace whose operations may be split and tensors offloaded, with the
    trace that it is for."""
    checked = replace(request.checked_options, strategy=strategy)
    return plan_step(
        trace,
        checked.request(checked.fixed_limits, _offload_limits(request, checked.offload, device)),
        measure=lambda split: _with_costs(split, request, device, are_pieces=True),
        progress=progress,
    )


def _fit_answer(
    request: wire.FitRequest, threads: int, time_limit_s: float, progress: ProgressCallback
) -> tuple[AnswerMessage, bytes]:
    """Return the answer to a `POST /fit`. It has no plans, whose schedules are of no use without
    their programs."""
    fit = fit_trace(
        request.trace,
        request.optimizer,
        gpu=request.gpu,
        memory_bytes=request.memory_bytes,
        batch=request.batch,
        loop=request.loop,
        strategy=with_limits(DEFAULT_STRATEGY, threads=threads, time_limit=time_limit_s),
        time_limit_s=min(request.time_limit or wire.FIT_LIMIT_S, time_limit_s),
        progress=progress,
    )
    answer = wire.FitResult(fits=fit.fits, fit=fit)
    return AnswerMessage(summary=(), is_shared=True), _zipped(answer.model_dump_json())


def _zipped(answer: str) -> bytes:
    return gzip.compress(answer.encode(), compresslevel=5, mtime=0)


def summarize_plan(plan: Plan) -> wire.PlanSummary:
    """Return the numbers of a plan."""
    return wire.PlanSummary(
        status=plan.status.name,
        budget_bytes=plan.requested_budget_bytes,
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


def _with_costs(
    trace: Trace, request: SolvingRequest, device: str, *, are_pieces: bool = False
) -> Trace:
    """Return the trace with the costs that a request asks for. With `are_pieces`, only the pieces
    of split operations are measured, which have none."""
    costs = request.options.costs
    if request.needs_measurement:
        from remat.frontend.costs.measure import measure, measure_pieces

        return (measure_pieces if are_pieces else measure)(trace, device)
    if costs is not None:
        return with_roofline_costs(trace, Roofline(costs.partition(":")[2]))
    return trace


def _offload_limits(
    request: wire.SolveRequest, offload: OffloadOptions | None, device: str
) -> OffloadLimits | None:
    """Return the limits of offloading; None if nothing may be offloaded."""
    if offload is None:
        return None
    link = offload.link
    if link is None and request.needs_measurement:
        import torch

        from remat.frontend.planning.host_limits import measured_link

        link = measured_link(torch.device(device))
    elif link is None:
        assert request.options.costs is not None
        link = Roofline(request.options.costs.partition(":")[2]).link
    return OffloadLimits(link, offload.host_bytes)


def _throttled(on_progress: ProgressSink) -> ProgressCallback:
    """Return a progress callback that reports each better schedule, each new stage, and other
    progress twice a second."""
    last_sent: Progress | None = None
    sent_at_s = float("-inf")

    def progress(current: Progress) -> None:
        nonlocal last_sent, sent_at_s
        is_incumbent = current.incumbent is not None and (
            last_sent is None
            or (current.phase, current.budget_bytes, current.incumbent)
            != (last_sent.phase, last_sent.budget_bytes, last_sent.incumbent)
        )
        is_new_stage = last_sent is not None and current.stage != last_sent.stage
        # Not `current.elapsed_s`, which starts at 0 for each budget of a sweep.
        if (
            not (is_incumbent or is_new_stage)
            and time.monotonic() - sent_at_s < _PROGRESS_INTERVAL_S
        ):
            return
        last_sent, sent_at_s = current, time.monotonic()
        record = wire.ProgressRecord(**asdict(current))
        on_progress(ProgressMessage(progress=record, is_incumbent=is_incumbent))

    return progress
