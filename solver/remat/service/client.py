"""`Client`: the library with the service behind it. Same calls, same results, same errors."""

from __future__ import annotations

import gzip
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from remat.budget import parse_budget
from remat.costs.roofline import Roofline
from remat.documents.base import R, validated
from remat.documents.plan import GraphRecord
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.errors import DocumentError, InfeasibleBudget, RematError, ServiceError
from remat.graph import Graph
from remat.plan import Plan
from remat.progress import Cancel, Progress, ProgressCallback
from remat.service.wire import (
    ENDED,
    Answer,
    JobView,
    Options,
    Problem,
    ProgressRecord,
    Sizes,
    SolveRequest,
    SweepAnswer,
    SweepRequest,
)
from remat.solve import warn_of_failure
from remat.strategies import Auto, Strategy
from remat.version import VERSION

if TYPE_CHECKING:
    from torch import nn

    from remat.frontend.costs.cache import CostCache
    from remat.frontend.reserve import Reserve
    from remat.frontend.runtime.module import RematModule

PATIENCE_S = 60.0
"""How long a service may be gone (restarted, say) before a call gives up."""

_BUSY = (429, 503)
"""What a service says that is to be asked again."""
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
_SILENCE_S = 2.0
"""How often a wait without news looks whether it was cancelled."""
_BY_SERVICE = ("measure", "roofline:")
"""Costs that the service finds."""
_COMPRESSION = 6


class Client:
    """A connection to a service.

    `url` is like "http://host:8000"; `api_key` what `remat keys add` printed. `timeout_s` is how
    long one answer may take; a solve may take as long as its time limit says. Use it as a context
    manager, or call `close`.

    Every method raises what the local call would raise, and `ServiceError` where the service
    cannot be reached, wants another key, or fails.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 60.0) -> None:
        try:
            import httpx2
        except ImportError:
            raise ServiceError("remat.Client needs httpx2: pip install 'remat[client]'") from None
        if not url.startswith(("http://", "https://")):
            raise ServiceError(f"{url!r} is no address of a service, like 'http://host:8000'")
        headers = {"User-Agent": f"remat/{VERSION}"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._url = url.rstrip("/")
        self._http = httpx2.Client(base_url=self._url, headers=headers, timeout=timeout_s)
        self._unreachable: type[Exception] = httpx2.TransportError
        self._silent: type[Exception] = httpx2.ReadTimeout

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the connections back."""
        self._http.close()

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
    ) -> RematModule:
        """As `remat.optimize`, with the plan made by the service.

        `costs="measure"` lets the service measure them on its own device; "roofline:h200" needs
        none. By default operations are timed here, on the model's own device.
        """
        from remat.frontend.optimize import optimize
        from remat.frontend.planner import ELSEWHERE

        asked = costs if isinstance(costs, str) and costs.startswith(_BY_SERVICE) else None

        def plan(trace: Trace, budget: int | str) -> tuple[Plan, Program]:
            return self.plan(trace, budget, strategy, costs=asked, progress=progress)

        return optimize(
            model,
            budget,
            example_inputs,
            example_kwargs,
            costs=costs if asked is None else ELSEWHERE,
            cache=cache,
            differentiate=differentiate,
            max_plans=max_plans,
            service=plan,
            reserve=reserve,
            cuda_graphs=cuda_graphs,
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
        wanted = None if budgets is None else tuple(budgets)
        for budget in wanted or ():
            _check(budget)
        if wanted == ():
            return []
        options = _options(strategy, costs)
        job = self.submit(_made(SweepRequest, budgets=wanted, options=options, **_subject(graph)))
        try:
            answer = self._read(self._finish(job, progress, cancel), SweepAnswer)
        except InfeasibleBudget:  # all of them
            return []
        return [_told(document.read(Plan)) for document in answer.plans]

    # -- jobs ---------------------------------------------------------------------------------

    def submit(self, request: SolveRequest | SweepRequest) -> JobView:
        """Post a request and return its job at once. Sending again what got lost makes no second
        job: each request goes under a key of its own."""
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        return self._read(self._post(request, headers), JobView)

    def sizes(self, request: SolveRequest | SweepRequest) -> Sizes:
        """What the service would accept (`dry_run`): nothing is solved."""
        return self._read(self._post(request, {}, dry_run="true"), Sizes)

    def job(self, id: str) -> JobView:
        """How a job stands."""
        return self._read(self._call("GET", f"/jobs/{id}"), JobView)

    def cancel(self, id: str) -> None:
        """Cancel a job, or forget one that has ended."""
        self._call("DELETE", f"/jobs/{id}")

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
        _check(budget)
        options = _options(strategy, costs)
        job = self.submit(_made(SolveRequest, budget=budget, options=options, **_subject(graph)))
        answer = self._read(self._finish(job, progress, cancel), Answer)
        return _told(answer.plan.read(Plan)), answer.program

    def _finish(
        self, job: JobView, progress: ProgressCallback | None, cancel: Cancel | None
    ) -> bytes:
        if job.status not in ENDED:
            try:
                self._watch(job.id, progress, cancel)
            except BaseException:
                self._cancel_quietly(job.id)
                raise
            job = self.job(job.id)
        if job.status == "succeeded":
            headers = {"Accept": "application/json"}
            return self._call("GET", f"/jobs/{job.id}/result", headers=headers)
        if job.problem is not None:
            raise job.problem.exception()
        raise RematError(f"the job {job.id} is {job.status}")

    def _watch(self, id: str, progress: ProgressCallback | None, cancel: Cancel | None) -> None:
        """Follow a job's events to its end, over lost connections."""
        last = "0"
        gone_since: float | None = None
        while True:
            try:
                for kind, data, number in self._events(id, last):
                    last, gone_since = number, None
                    if cancel is not None and cancel.is_set():
                        raise RematError("cancelled before the service had an answer")
                    if kind == "done":
                        return
                    if progress is not None and kind in ("progress", "incumbent"):
                        progress(_progress(data))
                if self.job(id).status in ENDED:
                    return
            except self._silent:
                gone_since = None  # nothing happened for a while: see whether to go on
            except self._unreachable as error:
                gone_since = gone_since or time.monotonic()
                if time.monotonic() > gone_since + PATIENCE_S:
                    raise self._lost(error) from None
            if cancel is not None and cancel.is_set():
                raise RematError("cancelled before the service had an answer")
            if gone_since is not None:
                time.sleep(_PAUSE_S)

    def _events(self, id: str, last: str) -> Iterator[tuple[str, str, str]]:
        headers = {"Last-Event-ID": last}
        path = f"/jobs/{id}/events"
        with self._http.sse(path, headers=headers, timeout=_SILENCE_S) as source:
            if source.response.status_code != 200:
                source.response.read()
                if source.response.status_code in _BUSY:
                    raise self._unreachable(str(_problem(source.response)))
                raise _problem(source.response)
            for event in source:
                yield event.event, event.data, event.id or last

    def _post(
        self, request: SolveRequest | SweepRequest, headers: Mapping[str, str], **query: str
    ) -> bytes:
        where = "/solve" if isinstance(request, SolveRequest) else "/sweeps"
        body = gzip.compress(request.model_dump_json().encode(), compresslevel=_COMPRESSION)
        sent = {"Content-Type": "application/json", "Content-Encoding": "gzip", **headers}
        return self._call("POST", where, content=body, headers=sent, params=query)

    def _call(self, method: str, path: str, **options: Any) -> bytes:
        """One request, again while the service is gone or too busy. Safe: reads, and writes under
        an idempotency key."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                response = self._http.request(method, path, **options)
            except self._unreachable as error:
                if time.monotonic() > until:
                    raise self._lost(error) from None
                time.sleep(_PAUSE_S)
                continue
            if response.status_code in _BUSY and time.monotonic() < until:
                after = response.headers.get("Retry-After", "")
                time.sleep(min(float(after), _LONGEST_PAUSE_S) if after.isdecimal() else _PAUSE_S)
                continue
            if response.status_code >= 400:
                raise _problem(response)
            return response.content

    def _lost(self, error: Exception) -> ServiceError:
        return ServiceError(
            f"the service at {self._url} cannot be reached ({error or type(error).__name__}); is "
            "it running (remat serve), and is the address right?"
        )

    def _cancel_quietly(self, id: str) -> None:
        with suppress(self._unreachable):
            self._http.request("DELETE", f"/jobs/{id}", timeout=5.0)

    def _read(self, body: bytes, kind: type[R]) -> R:
        try:
            return validated(kind, body, kind.__name__)
        except DocumentError as error:
            raise ServiceError(
                f"the service at {self._url} sent what this remat cannot read ({error}); are both "
                f"of the same version ({VERSION} here)?"
            ) from None


def _told(plan: Plan) -> Plan:
    warn_of_failure(plan)
    return plan


def _subject(graph: Graph | Trace) -> dict[str, Any]:
    if isinstance(graph, Trace):
        return {"trace": graph}
    return {"graph": GraphRecord.of(graph)}


def _check(budget: int | float | str) -> None:
    """Raises the same error as without a service."""
    parse_budget(budget, baseline_bytes=1 << 40)


def _options(strategy: Strategy | None, costs: str | None) -> Options:
    return _made(Options, strategy=strategy or Auto(), costs=costs)


def _made(kind: type[R], **parts: Any) -> R:
    try:
        return kind(**parts)
    except ValidationError as error:
        reason = error.errors(include_url=False, include_context=False)[0]["msg"]
        raise RematError(f"this cannot be sent to a service: {reason}") from None


def _progress(data: str) -> Progress:
    record = validated(ProgressRecord, data, "progress")
    return Progress(**dict(record))


def _problem(response: Any) -> RematError:
    try:
        return validated(Problem, response.content, "problem").exception()
    except DocumentError:
        return ServiceError(
            f"the service answered {response.status_code}: {response.text[:200]!r}; is this the "
            "address of a remat service?"
        )
