"""`Client`: the library's functions, run by a service, with the same results and errors."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from pydantic import ValidationError

from remat.costs.optimizer_memory import check_optimizer
from remat.documents.base import R
from remat.documents.plan import GraphRecord
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget, RematError, ServiceError, wrong_type
from remat.fitting.answer import gpu_name
from remat.fitting.eager import AS_WRITTEN
from remat.fitting.question import LoopOptions, check_batch, parse_memory
from remat.graph import Graph
from remat.limits.budget import Budget
from remat.limits.limits import INFEASIBLE_ERROR, Limits, warn_of_smallest
from remat.limits.options import SPLIT_OFF
from remat.plan import Plan
from remat.plan_options import (
    CLIENT_OPTIMIZE,
    CLIENT_PLAN,
    MEASURED_BY_SERVICE,
    POST_SOLVE,
    CheckedOptions,
    KeywordOptions,
    PlanOptions,
    read_options,
    shows_options,
)
from remat.progress import Cancel, ProgressCallback
from remat.report.fit import Fit
from remat.service import wire
from remat.service.connection import Connection
from remat.snapshots.explain import Explanation
from remat.snapshots.why import ERROR_WORDS
from remat.solve import warn_of_solver_failure
from remat.strategies import Auto, Strategy

if TYPE_CHECKING:
    from torch import nn

    from remat.frontend.api.criterion import Criterion
    from remat.frontend.runtime.module import RematModule

_SERVICE_COSTS = ("measure", "roofline:")
"""First words of the values of `costs` that let the service determine the costs."""


class Client:
    """A client of a planning service.

    `url` is like "http://host:8000"; `api_key` is what `remat keys add` printed. `timeout_s` limits
    the time of one response; a solve may take as long as its time limit allows. Use the client as a
    context manager, or call `close`.

    Every method raises what the local call would raise, and `ServiceError` if the service cannot be
    reached, rejects the key, or fails.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        self._service = Connection(url, api_key=api_key, timeout_s=timeout_s)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the HTTP connections."""
        self._service.close()

    # -- functions of the library ---------------------------------------------------------------

    @shows_options(CLIENT_OPTIMIZE)
    def optimize(
        self,
        model: nn.Module,
        budget: int | str,
        example_inputs: Any = None,
        example_kwargs: Mapping[str, Any] | None = None,
        *,
        loss: Criterion | None = None,
        **options: Unpack[PlanOptions],
    ) -> RematModule:
        """Like `remat.optimize`, but the service computes the plan.

        With `costs="measure"` the service measures the costs on its device; "roofline:h200" needs
        no device. By default, operations are timed locally, on the model's device.
        """
        from remat.frontend.api.optimize import optimize

        checked = read_options(CLIENT_OPTIMIZE, budget, options)
        costs, strategy = checked.costs, checked.strategy
        service_costs: str | None = None
        if isinstance(costs, str) and costs.startswith(_SERVICE_COSTS):
            service_costs, options["costs"] = costs, MEASURED_BY_SERVICE
            if checked.offload is not None:
                raise ValueError(
                    'offload="auto" needs the bandwidth between the device and the host of this '
                    "machine: leave out `costs`, so that they are measured here"
                )
            if checked.in_flight > 1:
                raise ValueError(
                    f"a plan for in_flight={checked.in_flight} calls needs costs on this machine: "
                    "leave out `costs`, so that they are measured here"
                )
        _request_options(strategy, service_costs)  # raises for a device without a data sheet

        def plan(trace: Trace, budget: int | str) -> tuple[Plan, Program]:
            # Pieces need costs: the side that determines these chooses the pieces.
            is_split_locally = service_costs is None or trace.splits
            return self.plan(
                trace,
                budget,
                strategy,
                costs=service_costs,
                progress=checked.progress_callback,
                split=SPLIT_OFF if is_split_locally else checked.split,
            )

        return optimize(
            model, budget, example_inputs, example_kwargs, loss=loss, service=plan, **options
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
        infeasible: str = INFEASIBLE_ERROR,
    ) -> Plan:
        """Like `remat.solve`, on the service. If `cancel` is set, the job is cancelled and
        `RematError` is raised."""
        options: PlanOptions = {
            "strategy": strategy, "costs": costs, "progress": progress, "infeasible": infeasible
        }  # fmt: skip
        return self._request_plan(graph, budget, cancel, options)[0]

    @shows_options(CLIENT_PLAN)
    def plan(
        self,
        trace: Trace,
        budget: int | float | str,
        strategy: Strategy | None = None,
        *,
        cancel: Cancel | None = None,
        **options: Unpack[KeywordOptions],
    ) -> tuple[Plan, Program]:
        """Return the plan for a trace, and the program for `remat.lower`. With `split`, the service
        may split the trace's largest operations. Pass `costs`, too ("measure", "roofline:h200"): a
        measured trace has no costs for the pieces. With `offload="auto"`, tensors may wait on the
        host: pass `costs`, too, or the `link` between device and host."""
        plan, program = self._request_plan(trace, budget, cancel, {"strategy": strategy, **options})
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
        """Like `remat.sweep`, on the service: return the plans of the frontier of time and memory;
        none if no budget is feasible."""
        parsed = None if budgets is None else tuple(map(Budget.parse, budgets))
        if parsed == ():
            return []
        options = _request_options(strategy, costs)
        request = _checked_record(
            wire.SweepRequest, budgets=parsed, options=options, **_graph_field(graph)
        )
        job = self.submit(request)
        try:
            result = self._service.read(self._finish_job(job, progress, cancel), wire.SweepResult)
        except InfeasibleBudget:  # no budget is feasible
            return []
        return [_warn_if_solver_failed(document.to_plan(Plan)) for document in result.plans]

    def fit(
        self,
        trace: Trace,
        *,
        device: str | None = None,
        optimizer: str = "adamw",
        memory: int | str | None = None,
        batch: int | None = None,
        checkpoint: str = AS_WRITTEN,
        accumulate: int = 1,
        keeps_gradients: bool = False,
        keeps_outputs: bool = False,
        gpus: int = 1,
        shard: str = "",
        mixed_precision_param: str = "",
        mixed_precision_reduce: str = "",
        gradient_as_bucket_view: bool = False,
        node_gpus: int = 8,
        network: float | None = None,
        time_limit: float | None = None,
        progress: ProgressCallback | None = None,
        cancel: Cancel | None = None,
    ) -> Fit:
        """Like `remat.fit`, on the service, for a trace of the training step for a GPU:
        `remat.trace(..., device="h100")`. It needs no costs.

        `device` is a GPU with a data sheet, by default the trace's. Batch and length are the
        trace's, so smaller batches are not among the options; `batch` only names the size in the
        answer. `checkpoint="as written"` means the checkpoints in the code of the traced model.
        With `mixed_precision_param` the trace is of a model in that dtype. The search for plans
        ends after `time_limit` seconds, by default 60.
        """
        if not isinstance(trace, Trace):
            remedy = 'pass remat.trace(model, inputs, device="h100")'
            raise wrong_type("Client.fit", "a Trace", trace, remedy)
        check_optimizer(optimizer)
        memory_bytes = None if memory is None else parse_memory(memory)
        check_batch(batch)
        loop = LoopOptions(
            checkpoint,
            accumulate,
            keeps_gradients,
            keeps_outputs,
            gpus=gpus,
            shard=shard,
            mixed_precision_param=mixed_precision_param,
            mixed_precision_reduce=mixed_precision_reduce,
            gradient_as_bucket_view=gradient_as_bucket_view,
            node_gpus=node_gpus,
            network=network,
        )
        request = _checked_record(
            wire.FitRequest,
            trace=trace,
            optimizer=optimizer,
            gpu=gpu_name(trace, device),
            memory_bytes=memory_bytes,
            batch=batch,
            **asdict(loop),
            time_limit=time_limit,
        )
        job = self.submit(request)
        return self._service.read(self._finish_job(job, progress, cancel), wire.FitResult).fit

    def why(
        self, source: str | os.PathLike[str] | bytes, *, cancel: Cancel | None = None
    ) -> Explanation:
        """Like `remat.why`, on the service, for a snapshot file, its bytes, or the text of an
        error. A snapshot names files and functions of your code; it has no weights and no data."""
        if isinstance(source, str) and ERROR_WORDS in source:
            content = source.encode()
        elif isinstance(source, bytes):
            content = source
        elif isinstance(source, str | os.PathLike):
            content = Path(source).read_bytes()
        else:
            raise wrong_type("Client.why", "a file or bytes", source, "pass the snapshot's path")
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        job = self._service.read(self._service.post_snapshot(content, headers), wire.JobView)
        answer = self._finish_job(job, None, cancel)
        return self._service.read(answer, wire.WhyResult).explanation

    # -- jobs ---------------------------------------------------------------------------------

    def submit(self, request: wire.AnyRequest) -> wire.JobView:
        """Post a request and return its job without waiting for the result. A retry after a lost
        response creates no second job, because each request has an idempotency key."""
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        return self._service.read(self._service.post(request, headers), wire.JobView)

    def sizes(self, request: wire.AnyRequest) -> wire.DryRunResult:
        """Return the size of a request that the service would accept (`dry_run`), without solving
        it."""
        return self._service.read(
            self._service.post(request, {}, dry_run="true"), wire.DryRunResult
        )

    def job(self, id: str) -> wire.JobView:
        """Return the state of a job."""
        return self._service.job(id)

    def cancel(self, id: str) -> None:
        """Cancel a job, or delete one that has ended."""
        self._service.cancel(id)

    def finish(
        self, id: str, progress: ProgressCallback | None = None, cancel: Cancel | None = None
    ) -> bytes:
        """Wait for a job and return its result as JSON. Raises what the solve raised.

        If the wait is interrupted, the job is cancelled.
        """
        return self._finish_job(self.job(id), progress, cancel)

    # -- requests -----------------------------------------------------------------------------

    def _request_plan(
        self,
        graph: Graph | Trace,
        budget: int | float | str,
        cancel: Cancel | None,
        options: PlanOptions,
    ) -> tuple[Plan, Program | None]:
        """Return the plan of the service, and its program: None for a bare graph. Reports to the
        option `progress`, and warns if no plan fits the budget."""
        checked = read_options(CLIENT_PLAN, budget, options)
        limits = _request_limits(checked)
        values = checked.for_door(POST_SOLVE)
        strategy, costs, link = (values.pop(name) for name in ("strategy", "costs", "link"))
        fields = (
            _graph_field(graph)
            | values
            | {
                "budget": checked.budget,
                "options": _request_options(strategy, costs),
                "link": link and wire.LinkRecord(**asdict(link)),
                "reserve": limits.reserve_bytes or None,
            }
        )
        job = self.submit(_checked_record(wire.SolveRequest, **fields))
        answer = self._finish_job(job, checked.progress_callback, cancel)
        result = self._service.read(answer, wire.SolveResult)
        plan = _warn_if_solver_failed(result.plan.to_plan(Plan))
        budget_bytes = limits.available_bytes(plan.baseline_peak_bytes, plan.graph.library_bytes)
        if budget_bytes is not None and plan.budget_bytes > budget_bytes:  # infeasible="smallest"
            warn_of_smallest(limits.budget, plan.peak_bytes + limits.reserve_bytes)
        return plan, result.program

    def _finish_job(
        self, job: wire.JobView, progress: ProgressCallback | None, cancel: Cancel | None
    ) -> bytes:
        """Wait for a job, cancel it if the wait is interrupted, and return its result as JSON."""
        if job.status not in wire.ENDED_STATES:
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


def _request_limits(options: CheckedOptions) -> Limits:
    """Return the budget and reserve of a request. If the reserve is an optimizer, its state is
    measured on this machine."""
    if isinstance(options.reserve, int | str | None):
        return options.fixed_limits
    from remat.frontend.memory.device_memory import reserve_size

    assert options.budget is not None
    return Limits(options.budget, reserve_size(options.reserve).total_bytes)


def _warn_if_solver_failed(plan: Plan) -> Plan:
    """Return the plan, after a `SolverWarning` if its solver failed."""
    warn_of_solver_failure(plan)
    return plan


def _graph_field(graph: Graph | Trace) -> dict[str, Any]:
    """Return the field of a request that has the graph or trace to solve."""
    if isinstance(graph, Trace):
        return {"trace": graph}
    return {"graph": GraphRecord.of(graph)}


def _request_options(strategy: Strategy | None, costs: object) -> wire.Options:
    """Return the strategy and the costs of a request. Raises `RematError` if they are invalid."""
    return _checked_record(wire.Options, strategy=strategy or Auto(), costs=costs)


def _checked_record(kind: type[R], **fields: Any) -> R:
    """Return a record of type `kind` with these fields. Raises `RematError` if they are invalid."""
    try:
        return kind(**fields)
    except ValidationError as error:
        message = error.errors(include_url=False, include_context=False)[0]["msg"]
        reason = message.removeprefix("Value error, ")
        raise RematError(f"this cannot be sent to a service: {reason}") from None
