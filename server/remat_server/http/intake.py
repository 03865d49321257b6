"""From a posted body to a job: what is accepted, what it will need, and what is known already."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass, fields, is_dataclass

from sqlalchemy.exc import IntegrityError

import remat
from remat.costs.trace_costs import with_roofline_costs
from remat.costs.roofline import Roofline
from remat.documents.base import NAMESPACES, parse_strict_json
from remat.documents.trace import Trace
from remat.errors import DocumentError, SolverError
from remat.limits.budget import Budget
from remat.milp.solvers.pulp_solvers import is_highs
from remat.schedule import Schedule
from remat.service.wire import JobView, Kind, Sizes, SolveRequest, graph_of
from remat.simulate import simulate
from remat_server.problems import ServiceProblem
from remat_server.settings import Settings
from remat_server.store import jobs, leases
from remat_server.store.database import Database
from remat_server.store.jobs import IdempotencyConflict, NewJob
from remat_server.work.solving import Request, read_request

_PARTS_PER_OPERATION = 60
"""Objects, lists and items of a document for each operation: real traces have 40."""

_STRUCTURE = 50_000
"""Nodes of the structures of a model's arguments and results."""


@dataclass(frozen=True, slots=True)
class Intake:
    """Accepts requests into the store."""

    settings: Settings
    database: Database

    def accept(
        self, kind: Kind, body: bytes, owner: str, idempotency_key: str | None, request_id: str
    ) -> JobView:
        """The job for a body: a new one, or the one that this idempotency key made before.

        A body that was solved before is not even validated again: it is the same, byte for byte.
        Raises `ServiceProblem` and `DocumentError`.
        """
        content = digest(kind, body)
        with self.database.read() as connection:
            if found := self._known(connection, owner, idempotency_key, content):
                return found
            is_answered = jobs.is_answered(connection, content)
            active = jobs.active_count(connection, owner)
            devices = leases.devices_present(connection, 3 * self.settings.lease_s)
        model, needs = "", ""
        if not is_answered:
            request = self.validate(kind, body)
            model = request.trace.model if request.trace is not None else ""
            model = model.replace("\0", "")  # PostgreSQL has no such text
            needs = self._needs(request, devices)
            if active >= self.settings.queued_per_key:
                raise ServiceProblem(
                    429,
                    f"{active} of your jobs have not ended yet, the most that this service keeps; "
                    "wait for some of them, or cancel them",
                    name="queue-full",
                    headers={"Retry-After": "30"},
                )
        job = NewJob(
            owner=owner,
            kind=kind,
            content=content,
            request=gzip.compress(body, compresslevel=1, mtime=0),
            model=model,
            needs=needs,
            idempotency_key=idempotency_key,
            request_id=request_id,
        )
        try:
            with self.database.write() as connection:
                id = jobs.submit(connection, job)
                found = jobs.view(connection, owner, id)
        except IntegrityError:  # the same key at the same time: the other one was first
            with self.database.read() as connection:
                if again := self._known(connection, owner, idempotency_key, content):
                    return again
            raise
        assert found is not None
        return found[0]

    def _known(
        self, connection: jobs.Connection, owner: str, key: str | None, content: str
    ) -> JobView | None:
        if key is None:
            return None
        try:
            id = jobs.by_idempotency_key(connection, owner, key, content)
        except IdempotencyConflict:
            raise ServiceProblem(
                422,
                "this Idempotency-Key was used for another request; use a new one for each",
                name="idempotency-key-reused",
            ) from None
        found = None if id is None else jobs.view(connection, owner, id)
        return None if found is None else found[0]

    def validate(self, kind: Kind, body: bytes) -> Request:
        """The request within this service's limits.

        Sizes come first: to validate takes far more time and memory than to count.
        """
        self._check_parts(body)
        self._check_counts(parse_strict_json(body, "request"))
        request = read_request(kind, body)
        if request.trace is not None:
            self._check_operations(request.trace)
        self._check_strategy(request)
        return request

    def _check_parts(self, body: bytes) -> None:
        parts = sum(map(body.count, (b"{", b"[", b",")))
        most = _PARTS_PER_OPERATION * self.settings.operations
        if parts > most:
            raise ServiceProblem(
                413,
                f"the document has {parts:,} parts (objects, lists, items); this service takes up "
                f"to {most:,}, {_PARTS_PER_OPERATION} for each of the operations that it takes. "
                "The operator may raise REMAT_OPERATIONS",
            )

    def _check_counts(self, document: object) -> None:
        trace, graph = _part(document, "trace"), _part(document, "graph")
        limits = self.settings.operations, self.settings.values
        for what, most, lists in (
            ("operations", limits[0], (_part(trace, "nodes"), _part(graph, "operations"))),
            ("values", limits[1], (_part(trace, "storage_bytes"), _part(graph, "values"))),
        ):
            found = max(len(each) if isinstance(each, list) else 0 for each in lists)
            if found > most:
                raise ServiceProblem(
                    413,
                    f"the graph has {found:,} {what}; this service takes up to {most:,}. The "
                    f"operator may raise REMAT_{what.upper()}",
                )
        if _is_larger([_part(trace, "inputs"), _part(trace, "result")], _STRUCTURE):
            raise ServiceProblem(
                413, f"the model's arguments and results have over {_STRUCTURE:,} items"
            )

    def _check_operations(self, trace: Trace) -> None:
        allowed = NAMESPACES | {"remat", *self.settings.namespaces}
        for node in trace.nodes:
            if node.target.partition(".")[0] not in allowed:
                raise DocumentError(
                    f"operation {node.name} is {node.target}; this service takes operations of "
                    f"{', '.join(sorted(allowed))} only. The operator may allow more by "
                    "REMAT_NAMESPACES"
                )

    def _check_strategy(self, request: Request) -> None:
        strategy = request.options.strategy
        if not is_dataclass(strategy):
            return
        options = {f.name: getattr(strategy, f.name) for f in fields(strategy)}
        limit, most = options.get("time_limit", 0.0), self.settings.solve_limit_s
        if limit > most:
            raise ServiceProblem(
                422, f"the time limit is {limit:g} s; this service solves for up to {most:g} s"
            )
        solver = options.get("solver", "HiGHS")
        allowed = [name.lower() for name in self.settings.solvers]
        if not is_highs(solver) and solver.lower() not in allowed:
            raise SolverError(
                f"this service does not offer the solver {solver[:80]!r}, only "
                f"{', '.join(self.settings.solvers)}; the operator may set REMAT_SOLVERS"
            )

    def _needs(self, request: Request, devices: set[str]) -> str:
        if not request.is_measured_here or request.trace is None:
            return ""
        needed = request.trace.device.partition(":")[0]
        if needed not in devices:
            raise ServiceProblem(
                422,
                f"the costs of this trace are to be measured on {needed[:40]}, and no worker of "
                'this service can; set options.costs to "roofline:h200" (or another known '
                "device), or measure it where you traced it: remat.measure(trace)",
                name="no-device",
            )
        return needed

    def sizes(self, kind: Kind, body: bytes) -> Sizes:
        """What a dry run tells."""
        request = self.validate(kind, body)
        found = graph_of(request)
        if request.is_measured_here and isinstance(found, Trace):
            operations, values, peak = len(found.operations), len(found.storage_bytes), None
            constants, costs = 0, "to be measured"
        else:
            costs = request.options.costs or ""
            if isinstance(found, Trace) and costs:
                found = with_roofline_costs(found, Roofline(costs.partition(":")[2]))
            graph = found.graph() if isinstance(found, Trace) else found
            costs = found.cost_source if isinstance(found, Trace) else "as given"
            operations, values = len(graph), len(graph.values)
            constants = graph.constant_bytes
            peak = simulate(graph, Schedule.keep_all(graph)).peak_bytes
            budgets = [request.budget] if isinstance(request, SolveRequest) else request.budgets
            for budget in budgets or ():
                Budget.parse(budget).in_bytes(peak, graph.library_bytes)
        return Sizes(
            operations=operations,
            values=values,
            constant_bytes=constants,
            baseline_peak_bytes=peak,
            costs=costs,
        )


def _part(document: object, key: str) -> object:
    return document.get(key) if isinstance(document, dict) else None


def _is_larger(structures: list[object], most: int) -> bool:
    """Whether there are more nodes than that; see `remat.documents.structure.Structure`."""
    count = 0
    while structures and count <= most:
        node = structures.pop()
        children = _part(node, "children")
        if isinstance(children, list):
            structures += children
        count += 1
    return count > most


def digest(kind: Kind, body: bytes) -> str:
    """Names what is asked: the same bytes, of the same kind, for the same version of the solver."""
    head = f"{kind} {remat.__version__}\n".encode()
    return hashlib.sha256(head + body).hexdigest()
