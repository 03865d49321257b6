"""`Client`: the library with the service behind it. Same calls, same results, same errors."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from remat.costs.roofline import Roofline
from remat.documents.base import R
from remat.documents.plan import GraphRecord
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, RematError, ServiceError
from remat.graph import Graph
from remat.limits.budget import Budget
from remat.limits.outputs import OUTPUTS_HELD
from remat.plan import Plan
from remat.progress import Cancel, ProgressCallback
from remat.service import wire
from remat.service.connection import Connection
from remat.solve import warn_of_solver_failure
from remat.strategies import Auto, Strategy

if TYPE_CHECKING:
    from torch import nn

    from remat.frontend.costs.cost_cache import CostCache
    from remat.frontend.memory.reserve import Reserve
    from remat.frontend.runtime.module import RematModule

_BY_SERVICE = ("measure", "roofline:")
"""Costs that the service finds."""


class Client:
    """A connection to a service.

    `url` is like "http://host:8000"; `api_key` what `remat keys add` printed. `timeout_s` is how
    long one answer may take; a solve may take as long as its time limit says. Use it as a context
    manager, or call `close`.

    Every method raises what the local call would raise, and `ServiceError` where the service
    cannot be reached, wants another key, or fails.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self._service = Connection(url, api_key=api_key, timeout_s=timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._service.close()

    # -- as the library does ------------------------------------------------------------------

    def optimize(
        self,
        model: nn.Module,
        budget: int | str,
        example_inputs: Any = None,
        example_kwargs: Mapping[str, Any] | None = None,
        *,
        strategy: Strategy | None = None,
        costs: str | Roofline | None = None,
        cache: str | CostCache | None = None,
        differentiate: str | Sequence[str] = "auto",
        max_plans: int = 8,
        progress: ProgressCallback | None = None,
        reserve: Reserve | None = None,
        cuda_graphs: bool = False,
        outputs: str = OUTPUTS_HELD,
    ) -> RematModule:
        """As `remat.optimize`, with the plan made by the service.

        `costs="measure"` lets the service measure them on its own device; "roofline:h200" needs
        none. By default operations are timed here, on the model's own device.
        """
        from remat.frontend.api.optimize import optimize
        from remat.frontend.planning.options import MEASURED_BY_SERVICE

        asked = costs if isinstance(costs, str) and costs.startswith(_BY_SERVICE) else None

        def plan(trace: Trace, budget: int | str) -> tuple[Plan, Program]:
            return self.plan(trace, budget, strategy, costs=asked, progress=progress)

        return optimize(
            model,
            budget,
            example_inputs,
            example_kwargs,
            costs=costs if asked is None else MEASURED_BY_SERVICE,
            cache=cache,
            differentiate=differentiate,
            max_plans=max_plans,
            service=plan,
            reserve=reserve,
            cuda_graphs=cuda_graphs,
            outputs=outputs,
        )

    def solve(
        self,
        graph: Graph | Trace,
        budget: int | float | str,
        strategy: Strategy | None = None,
        *,
        costs: str | None = None,
        progress: ProgressCallback | None = None,
        cancel: Cancel | None = None,
    ) -> Plan:
        """As `remat.solve`. Cancelled, the job ends and `RematError` is raised."""
        return self._solve(graph, budget, strategy, costs, progress, cancel)[0]

    def plan(
        self,
        trace: Trace,
        budget: int | float | str,
        strategy: Strategy | None = None,
        *,
        costs: str | None = None,
        progress: ProgressCallback | None = None,
        cancel: Cancel | None = None,
    ) -> tuple[Plan, Program]:
        """The plan for a trace, and the program for `remat.lower`."""
        plan, program = self._solve(trace, budget, strategy, costs, progress, cancel)
        if program is None:
            raise ServiceError("the service sent a plan without its program")
        return plan, program

    def sweep(
        self,
        graph: Graph | Trace,
        budgets: Iterable[int | float | str] | None = None,
        strategy: Strategy | None = None,
        *,
        costs: str | None = None,
        progress: ProgressCallback | None = None,
        cancel: Cancel | None = None,
    ) -> list[Plan]:
        """As `remat.sweep`: the time/memory frontier."""
        wanted = None if budgets is None else tuple(map(Budget.parse, budgets))
        if wanted == ():
            return []
        options = _options(strategy, costs)
        job = self.submit(
            _made(wire.SweepRequest, budgets=wanted, options=options, **_subject(graph))
        )
        try:
            answer = self._service.read(self._finish(job, progress, cancel), wire.SweepAnswer)
        except InfeasibleBudget:  # all of them
            return []
        return [_told(document.read(Plan)) for document in answer.plans]

    # -- jobs ---------------------------------------------------------------------------------

    def submit(self, request: wire.SolveRequest | wire.SweepRequest) -> wire.JobView:
        """Post a request and return its job at once. Sending again what got lost makes no second
        job: each request goes under a key of its own."""
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        return self._service.read(self._service.post(request, headers), wire.JobView)

    def sizes(self, request: wire.SolveRequest | wire.SweepRequest) -> wire.Sizes:
        """What the service would accept (`dry_run`): nothing is solved."""
        return self._service.read(self._service.post(request, {}, dry_run="true"), wire.Sizes)

    def job(self, id: str) -> wire.JobView:
        """How a job stands."""
        return self._service.job(id)

    def cancel(self, id: str) -> None:
        """Cancel a job, or forget one that has ended."""
        self._service.cancel(id)

    def finish(
        self, id: str, progress: ProgressCallback | None = None, cancel: Cancel | None = None
    ) -> bytes:
        """Wait for a job and return its result's JSON. Raises what the solve raised.

        Where the wait is interrupted, the job is cancelled.
        """
        return self._finish(self.job(id), progress, cancel)

    # -- the wire -----------------------------------------------------------------------------

    def _solve(
        self,
        graph: Graph | Trace,
        budget: int | float | str,
        strategy: Strategy | None,
        costs: str | None,
        progress: ProgressCallback | None,
        cancel: Cancel | None,
    ) -> tuple[Plan, Program | None]:
        parts = _subject(graph) | {"budget": Budget.parse(budget)}
        job = self.submit(_made(wire.SolveRequest, options=_options(strategy, costs), **parts))
        answer = self._service.read(self._finish(job, progress, cancel), wire.Answer)
        return _told(answer.plan.read(Plan)), answer.program

    def _finish(
        self, job: wire.JobView, progress: ProgressCallback | None, cancel: Cancel | None
    ) -> bytes:
        if job.status not in wire.ENDED:
            try:
                self._service.watch(job.id, progress, cancel)
            except BaseException:
                self._service.cancel_quietly(job.id)
                raise
            job = self.job(job.id)
        if job.status == "succeeded":
            headers = {"Accept": "application/json"}
            return self._service.call("GET", f"/jobs/{job.id}/result", headers=headers)
        if job.problem is not None:
            raise job.problem.exception()
        raise RematError(f"the job {job.id} is {job.status}")


def _told(plan: Plan) -> Plan:
    warn_of_solver_failure(plan)
    return plan


def _subject(graph: Graph | Trace) -> dict[str, Any]:
    if isinstance(graph, Trace):
        return {"trace": graph}
    return {"graph": GraphRecord.of(graph)}


def _options(strategy: Strategy | None, costs: str | None) -> wire.Options:
    return _made(wire.Options, strategy=strategy or Auto(), costs=costs)


def _made(kind: type[R], **parts: Any) -> R:
    try:
        return kind(**parts)
    except ValidationError as error:
        reason = error.errors(include_url=False, include_context=False)[0]["msg"]
        words = reason.removeprefix("Value error, ")
        raise RematError(f"this cannot be sent to a service: {words}") from None
