"""Validates request bodies against the service's limits, and submits them as jobs."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass

from sqlalchemy.exc import IntegrityError

import remat
from remat.costs.roofline import Roofline
from remat.costs.trace_costs import with_roofline_costs
from remat.documents.base import NAMESPACES, parse_strict_json
from remat.documents.trace import Trace
from remat.errors import DocumentError, SolverError
from remat.limits.budget import Budget
from remat.milp.solvers.pulp_solvers import is_highs
from remat.service.wire import (
    BudgetData,
    DryRunResult,
    FitRequest,
    JobKind,
    JobView,
    SolveRequest,
    SweepRequest,
    WhyRequest,
    graph_of_request,
)
from remat.simulate import baseline_of
from remat_server.problems import ServiceProblem
from remat_server.settings import Settings
from remat_server.store import jobs, leases
from remat_server.store.database import Database
from remat_server.store.jobs import IdempotencyConflict, NewJob
from remat_server.work.solving import Request, read_request

_PARTS_PER_OPERATION = 60
"""Limit of objects, lists and items in a document, per operation. Real traces have 40."""

_MAX_STRUCTURE_NODES = 50_000
"""Limit of nodes in the structures of a model's arguments and results."""


@dataclass(frozen=True, slots=True)
class RequestIntake:
    """Validates requests and submits them to the job store."""

    settings: Settings
    database: Database

    def submit(
        self, kind: JobKind, body: bytes, owner: str, idempotency_key: str | None, request_id: str
    ) -> JobView:
        """Submit a body; return its job, or the earlier job with the same idempotency key.

        A body for which the store has an answer is not validated, since it is the same byte for
        byte. Raises `ServiceProblem` and `DocumentError`.
        """
        content = content_digest(kind, body)
        with self.database.read() as connection:
            if job := self._job_with_key(connection, owner, idempotency_key, content):
                return job
            is_answered = jobs.is_answered(connection, content)
            active = jobs.active_count(connection, owner)
            devices = leases.available_devices(connection, 3 * self.settings.lease_s)
        model, device = "", ""
        if not is_answered:
            request = self.validate(kind, body)
            model = request.trace.model if request.trace is not None else ""
            model = model.replace("\0", "")  # PostgreSQL refuses NUL in text
            device = self._required_device(request, devices)
            if active >= self.settings.queued_per_key:
                raise ServiceProblem(
                    429,
                    f"{active} of your jobs have not ended, which is the limit of this service; "
                    "wait for some of them, or cancel them",
                    name="queue-full",
                    headers={"Retry-After": "30"},
                )
        new_job = NewJob(
            owner=owner,
            kind=kind,
            content=content,
            request=gzip.compress(body, compresslevel=1, mtime=0),
            model=model,
            needs=device,
            idempotency_key=idempotency_key,
            request_id=request_id,
        )
        try:
            with self.database.write() as connection:
                id = jobs.submit(connection, new_job)
                view_and_revision = jobs.view(connection, owner, id)
        except IntegrityError:  # a concurrent request with the same key was first
            with self.database.read() as connection:
                if job := self._job_with_key(connection, owner, idempotency_key, content):
                    return job
            raise
        assert view_and_revision is not None
        return view_and_revision[0]

    def _job_with_key(
        self, connection: jobs.Connection, owner: str, key: str | None, content: str
    ) -> JobView | None:
        """Return the owner's job with this idempotency key; None if there is none. Raises
        `ServiceProblem` 409 if the key belongs to another request."""
        if key is None:
            return None
        try:
            id = jobs.by_idempotency_key(connection, owner, key, content)
        except IdempotencyConflict:
            raise ServiceProblem(
                409,
                "this Idempotency-Key was used for another request; use a new key for each request",
                name="idempotency-key-reused",
            ) from None
        view_and_revision = None if id is None else jobs.view(connection, owner, id)
        return None if view_and_revision is None else view_and_revision[0]

    def validate(self, kind: JobKind, body: bytes) -> Request:
        """Return the parsed request if it is within the service's limits.

        Sizes are checked first, because validation takes far more time and memory. Of a snapshot,
        only the opcodes are checked here. Raises `ServiceProblem` and `DocumentError`.
        """
        if kind == "why":
            return read_request(kind, body)
        self._check_parts(body)
        document = parse_strict_json(body, "request")
        self._check_counts(document)
        request = read_request(kind, body)
        assert not isinstance(request, WhyRequest)
        if request.trace is not None:
            self._check_operations(request.trace)
        if isinstance(request, FitRequest):
            self._check_time_limit(request.time_limit or 0.0)
        else:
            self._check_strategy(request, _field(_field(document, "options"), "strategy"))
        return request

    def _check_parts(self, body: bytes) -> None:
        parts = sum(map(body.count, (b"{", b"[", b",")))
        limit = _PARTS_PER_OPERATION * self.settings.operations
        if parts > limit:
            raise ServiceProblem(
                413,
                f"the document has {parts:,} parts (objects, lists, items); this service accepts "
                f"up to {limit:,}, {_PARTS_PER_OPERATION} for each operation that it accepts. "
                "The operator may raise REMAT_OPERATIONS",
            )

    def _check_counts(self, document: object) -> None:
        trace, graph = _field(document, "trace"), _field(document, "graph")
        limits = self.settings.operations, self.settings.values
        for name, limit, lists in (
            ("operations", limits[0], (_field(trace, "nodes"), _field(graph, "operations"))),
            ("values", limits[1], (_field(trace, "storage_bytes"), _field(graph, "values"))),
        ):
            count = max(len(items) if isinstance(items, list) else 0 for items in lists)
            if count > limit:
                raise ServiceProblem(
                    413,
                    f"the graph has {count:,} {name}; this service accepts up to {limit:,}. The "
                    f"operator may raise REMAT_{name.upper()}",
                )
        if _has_more_nodes(
            [_field(trace, "inputs"), _field(trace, "result")], _MAX_STRUCTURE_NODES
        ):
            raise ServiceProblem(
                413, f"the model's arguments and results have over {_MAX_STRUCTURE_NODES:,} items"
            )

    def _check_operations(self, trace: Trace) -> None:
        allowed = allowed_namespaces(self.settings)
        for node in trace.nodes:
            if node.target.partition(".")[0] not in allowed:
                raise DocumentError(
                    f"operation {node.name} is {node.target}; this service accepts only operators "
                    f"of {', '.join(sorted(allowed))}. The operator of the service may allow more "
                    "with REMAT_NAMESPACES"
                )

    def _check_time_limit(self, limit_s: float) -> None:
        longest_s = self.settings.solve_limit_s
        if limit_s > longest_s:
            raise ServiceProblem(
                422,
                f"the time limit is {limit_s:g} s; this service accepts up to {longest_s:g} s",
            )

    def _check_strategy(self, request: SolveRequest | SweepRequest, strategy_data: object) -> None:
        """Raise `ServiceProblem` or `SolverError` if this service does not offer the strategy.

        `strategy_data` is the strategy as the request has it. A time limit that it does not name is
        at most the limit of the service.
        """
        strategy = request.options.strategy
        if not is_dataclass(strategy):
            return
        options = {f.name: getattr(strategy, f.name) for f in fields(strategy)}
        if _field(strategy_data, "time_limit") is not None:
            self._check_time_limit(options.get("time_limit", 0.0))
        solver = options.get("solver", "HiGHS")
        allowed = [name.lower() for name in self.settings.solvers]
        if not is_highs(solver) and solver.lower() not in allowed:
            raise SolverError(
                f"this service does not offer the solver {solver[:80]!r}, only "
                f"{', '.join(self.settings.solvers)}; the operator may add it to REMAT_SOLVERS"
            )

    def _required_device(self, request: Request, devices: set[str]) -> str:
        """Return the device type that must measure the costs; "" if the request has costs. Raises
        `ServiceProblem` 409 if no worker has it now."""
        if not request.needs_measurement or request.trace is None:
            return ""
        device = request.trace.device.partition(":")[0]
        if device not in devices:
            raise ServiceProblem(
                409,
                f"the costs of this trace must be measured on {device[:40]}, which no worker of "
                'this service has; set options.costs to "roofline:h200" (or another device with '
                "a data sheet), or measure it where you traced it: remat.measure(trace)",
                name="no-device",
            )
        return device

    def dry_run_sizes(self, kind: JobKind, body: bytes) -> DryRunResult:
        """Validate a request, and return the sizes that a dry run reports."""
        if kind == "why":
            raise ServiceProblem(422, "a snapshot has no sizes to report: post it without dry_run")
        request = self.validate(kind, body)
        assert not isinstance(request, WhyRequest)
        if isinstance(request, FitRequest):
            gpu = request.gpu or request.trace.gpu
            graph_or_trace, costs = request.trace, f"roofline:{gpu}"
        else:
            graph_or_trace, costs = graph_of_request(request), request.options.costs or ""
        if request.needs_measurement and isinstance(graph_or_trace, Trace):
            operations, values, peak = (
                len(graph_or_trace.operations),
                len(graph_or_trace.storage_bytes),
                None,
            )
            constants, costs = 0, "to be measured"
        else:
            if isinstance(graph_or_trace, Trace) and costs:
                graph_or_trace = with_roofline_costs(
                    graph_or_trace, Roofline(costs.partition(":")[2])
                )
            graph = graph_or_trace.graph() if isinstance(graph_or_trace, Trace) else graph_or_trace
            costs = graph_or_trace.cost_source if isinstance(graph_or_trace, Trace) else "as given"
            operations, values = len(graph), len(graph.values)
            constants = graph.constant_bytes
            peak = baseline_of(graph).peak_bytes
            for budget in _budgets(request):
                Budget.parse(budget).in_bytes(peak, graph.library_bytes)
        return DryRunResult(
            operations=operations,
            values=values,
            constant_bytes=constants,
            baseline_peak_bytes=peak,
            costs=costs,
        )


def _budgets(request: Request) -> Sequence[BudgetData]:
    match request:
        case SolveRequest():
            return [request.budget]
        case SweepRequest():
            return request.budgets or ()
        case FitRequest() | WhyRequest():
            return ()


def allowed_namespaces(settings: Settings) -> frozenset[str]:
    """Return the namespaces of the operations that traces may use."""
    return NAMESPACES | {"remat", *settings.namespaces}


def _field(document: object, key: str) -> object:
    return document.get(key) if isinstance(document, dict) else None


def _has_more_nodes(structures: list[object], limit: int) -> bool:
    """True if the structures (see `remat.documents.structure.Structure`) have more than `limit`
    nodes."""
    count = 0
    while structures and count <= limit:
        node = structures.pop()
        children = _field(node, "children")
        if isinstance(children, list):
            structures += children
        count += 1
    return count > limit


def content_digest(kind: JobKind, body: bytes) -> str:
    """Return a digest of a request: its bytes, its kind, and the version of the solver."""
    header = f"{kind} {remat.__version__}\n".encode()
    return hashlib.sha256(header + body).hexdigest()
