"""What crosses the wire between `remat.Client` and the service: plain, strict documents.

No weights, no pickle, no code: a request carries a `Trace` (or a bare graph), an answer a plan and
a `Program`. Errors are RFC 9457 problem documents, whose `type` says which exception they are.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)

from remat import errors
from remat.costs.devices import DEVICES
from remat.costs.roofline import Roofline
from remat.documents.base import Record, check_header
from remat.documents.plan import GraphRecord, PlanDocument
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.graph import Graph
from remat.limits.budget import Budget
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy
from remat.strategies.registry import from_data, json_schema, to_data

PROBLEMS = "urn:remat:problem:"
"""What the `type` of every problem document begins with."""

ENDED = frozenset({"succeeded", "infeasible", "failed", "cancelled"})
"""The states that a job does not leave."""

State = Literal["queued", "running", "succeeded", "infeasible", "failed", "cancelled"]
Kind = Literal["solve", "sweep"]

_EXCEPTIONS: dict[str, type[errors.RematError]] = {
    "budget": errors.BudgetError,
    "document": errors.DocumentError,
    "graph": errors.GraphError,
    "infeasible": errors.InfeasibleBudget,
    "solver": errors.SolverError,
    "timeout": errors.SolverTimeout,
    "trace": errors.TraceError,
}


def _check_trace(trace: Trace) -> Trace:
    check_header({"format": trace.format, "version": trace.version}, Trace.FORMAT, Trace.VERSION)
    return trace


def _check_costs(costs: str) -> str:
    how, _, device = costs.partition(":")
    if how == "roofline":
        Roofline(device)
    elif costs != "measure":
        raise ValueError(f'costs are "measure" or "roofline:DEVICE", not {costs[:80]!r}')
    return costs


def _read_strategy(data: object) -> Strategy:
    if not hasattr(data, "run"):
        return from_data(data)
    to_data(cast(Strategy, data))  # refuses one that is none of remat's
    return cast(Strategy, data)


class _StrategySchema:
    """Made when it is asked for: solving processes start without it."""

    def __get_pydantic_json_schema__(self, core: object, handler: object) -> dict[str, Any]:
        return json_schema()


# The schemas promise the usual ways to write things; a few more are understood.
_NUMBER = {"type": "number", "minimum": 1, "exclusiveMaximum": 1e100}
_AMOUNT = {
    "type": "string",
    "pattern": "^(min"
    r"|[1-9][0-9]{0,15}(\.[0-9]{1,9})?( ?(([kMGT]i?)?B|%))?"
    r"|0\.[1-9][0-9]{0,8} ?([kMGT]i?B|%))$",
    "examples": ["60%", "8GiB", "min"],
}
_COSTS = {"enum": ["measure", *(f"roofline:{device}" for device in DEVICES)]}

BudgetData = Annotated[
    Budget | int | float | str,  # as it may be passed; what is there is always a `Budget`
    PlainValidator(Budget.parse),
    PlainSerializer(lambda budget: budget.requested),
    WithJsonSchema({"anyOf": [_NUMBER, _AMOUNT]}),
]
StrategyData = Annotated[
    Strategy,
    PlainValidator(_read_strategy),
    PlainSerializer(to_data),
    _StrategySchema(),
]


class Options(Record):
    """How to solve. `costs` is "measure" (on the service's own device), "roofline:DEVICE" (by a
    device's data sheet), or null: those of the trace, which is measured where it has none."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    strategy: StrategyData = Field(default_factory=Auto)
    costs: (
        Annotated[str, Field(max_length=100), AfterValidator(_check_costs), WithJsonSchema(_COSTS)]
        | None
    ) = None


_NULL: dict[str, Any] = {"type": "null"}
_ONE_SUBJECT: dict[str, Any] = {
    "oneOf": [
        {"required": ["trace"], "properties": {"trace": {"type": "object"}, "graph": _NULL}},
        {
            "required": ["graph"],
            "properties": {
                "graph": {"type": "object"},
                "trace": _NULL,
                "options": {"properties": {"costs": _NULL}},
            },
        },
    ]
}


class _Problem(Record):
    """A trace or a bare graph, and how to solve it."""

    model_config = ConfigDict(json_schema_extra=_ONE_SUBJECT)

    trace: Annotated[Trace, AfterValidator(_check_trace)] | None = None
    graph: GraphRecord | None = None
    options: Options = Field(default_factory=Options)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.trace is None) == (self.graph is None):
            raise ValueError("one of `trace` and `graph` is needed, not both")
        if self.graph is not None:
            self.graph.graph()  # raises GraphError, a ValueError, where it breaks a rule
            if self.options.costs is not None:
                raise ValueError("a bare graph has costs of its own: leave out options.costs")
        return self

    @property
    def is_measured_here(self) -> bool:
        """Whether the service must measure the costs, with torch and the device."""
        if self.trace is None:
            return False
        costs = self.options.costs
        return costs == "measure" or (costs is None and not self.trace.measured)


class SolveRequest(_Problem):
    """The body of `POST /solve`: `{"trace" or "graph", "budget", "options"}`. What is null is as
    if it were left out."""

    budget: BudgetData


class SweepRequest(_Problem):
    """The body of `POST /sweeps`. Without `budgets`: 100%, 95%, ... of the peak, and "min". What is
    null is as if it were left out."""

    budgets: Annotated[tuple[BudgetData, ...], Field(min_length=1, max_length=100)] | None = None


class Answer(Record):
    """What a solve made. `program` is null for a bare graph; `costs` tells where they are from."""

    plan: PlanDocument
    program: Program | None
    costs: str


class SweepAnswer(Record):
    """The frontier, smallest budget first; `baseline_*` are those without recomputation."""

    plans: tuple[PlanDocument, ...]
    costs: str


class ProgressRecord(Record):
    """See `remat.Progress`."""

    phase: str
    elapsed_s: float
    incumbent: float | None = None
    bound: float | None = None
    gap: float | None = None
    budget_bytes: int | None = None


class Summary(Record):
    """A plan in figures. Bytes, seconds, and shares of the time without recomputation."""

    status: str
    budget_bytes: int
    peak_bytes: int
    baseline_peak_bytes: int
    time_s: float
    baseline_time_s: float
    overhead: float
    lower_bound: float | None
    gap: float | None
    operations: int
    library_bytes: int = 0
    """Of the peaks, what libraries hold on the device: no part of a percentage."""


class Problem(Record):
    """RFC 9457. `detail` says what is wrong, why, and what to do. Of an infeasible budget the last
    two are those of `InfeasibleBudget`."""

    model_config = ConfigDict(extra="ignore")

    type: str = "about:blank"
    title: str = ""
    status: int = 500
    detail: str = ""
    min_feasible_bytes: int | None = None
    is_proved: bool | None = None

    def exception(self) -> errors.RematError:
        """The exception that the library would have raised."""
        kind = _EXCEPTIONS.get(self.type.removeprefix(PROBLEMS), errors.ServiceError)
        text = self.detail or self.title
        if kind is errors.InfeasibleBudget:
            return errors.InfeasibleBudget(
                text, min_feasible_bytes=self.min_feasible_bytes, is_proved=bool(self.is_proved)
            )
        return kind(text)


def problem_name(error: errors.RematError) -> str:
    """The last part of the problem type for an exception of ours."""
    return next((n for n, kind in _EXCEPTIONS.items() if isinstance(error, kind)), "remat")


class JobView(Record):
    """A job as `GET /jobs/{id}` shows it. Times are seconds since 1970."""

    id: str
    kind: Kind
    status: State
    model: str = ""
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    position: int | None = None
    """How many jobs are queued before this one."""
    progress: ProgressRecord | None = None
    summary: tuple[Summary, ...] = ()
    problem: Problem | None = None


class JobPage(Record):
    """One page of `GET /jobs`, newest first; pass `next` as `cursor` for the page after it."""

    jobs: tuple[JobView, ...]
    next: str | None = None


class Sizes(Record):
    """What `?dry_run=true` tells of a request that would be accepted."""

    operations: int
    values: int
    constant_bytes: int
    baseline_peak_bytes: int | None
    """None where the costs, and so the graph, are not known before they are measured."""
    costs: str


def graph_of(request: _Problem) -> Graph | Trace:
    """What to hand to `remat.solve`."""
    if request.trace is not None:
        return request.trace
    assert request.graph is not None
    return request.graph.graph()
