"""The JSON documents that `remat.Client` and the service exchange.

They contain no weights, no pickle and no code. A request has a `Trace` (or a bare graph), a result
has a plan and a `Program`. Errors are RFC 9457 problem documents, whose `type` names the exception.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self, cast

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
    create_model,
    model_validator,
)

from remat import errors
from remat.costs.devices import DEVICES, Link
from remat.costs.optimizer_memory import OPTIMIZERS, check_optimizer
from remat.costs.roofline import Roofline
from remat.costs.sharding import MAX_GPUS
from remat.documents.base import Record, check_header
from remat.documents.plan import GraphRecord, PlanDocument
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.fitting.answer import GPUS, gpu_name
from remat.fitting.eager import AS_WRITTEN
from remat.fitting.question import MAX_ACCUMULATE, LoopOptions
from remat.graph import Graph
from remat.limits.budget import Budget
from remat.limits.options import OFFLOAD_AUTO, OFFLOAD_OFF, SPLIT_OFF, pieces_to_try
from remat.plan_options import (
    OPTIONS,
    POST_SOLVE,
    CheckedOptions,
    Door,
    check_option,
    read_options,
)
from remat.report.fit import Fit
from remat.report.sharded_memory import check_mixed_precision
from remat.snapshots.explain import Explanation
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy
from remat.strategies.registry import from_data, json_schema, to_data

PROBLEM_TYPE_PREFIX = "urn:remat:problem:"
"""The start of the `type` of every problem document."""

ENDED_STATES = frozenset({"succeeded", "infeasible", "failed", "cancelled"})
"""The final states of a job."""

JobState = Literal["queued", "running", "succeeded", "infeasible", "failed", "cancelled"]
JobKind = Literal["solve", "sweep", "fit", "why"]

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
    """Return the trace, if this remat reads its format and version. Raises `DocumentError`."""
    check_header({"format": trace.format, "version": trace.version}, Trace.FORMAT, Trace.VERSION)
    return trace


def _check_costs(costs: object) -> object:
    """Return `costs` if they are "measure" or "roofline:DEVICE". Raises ValueError for others."""
    method, _, device = str(costs).partition(":")
    if method == "roofline":
        Roofline(device)  # raises ValueError for an unknown device
    elif costs != "measure":
        raise ValueError(f'costs are "measure" or "roofline:DEVICE", not {str(costs)[:80]!r}')
    return costs


def _read_strategy(data: object) -> Strategy:
    """Return the strategy in JSON data, or the strategy itself if it is one of remat's."""
    if not hasattr(data, "run"):
        return from_data(data)
    to_data(cast(Strategy, data))  # raises for a strategy that is not remat's
    return cast(Strategy, data)


class _StrategySchema:
    """The JSON schema of a strategy, built on demand, because solver processes do not need it."""

    def __get_pydantic_json_schema__(self, core: object, handler: object) -> dict[str, Any]:
        return json_schema()


# The schemas document the usual notations; the parser accepts a few more.
_BUDGET_NUMBER_SCHEMA = {"type": "number", "minimum": 1, "exclusiveMaximum": 1e100}
_BUDGET_TEXT_SCHEMA = {
    "type": "string",
    "pattern": "^(min"
    r"|[1-9][0-9]{0,15}(\.[0-9]{1,9})?( ?(([kMGT]i?)?B|%))?"
    r"|0\.[1-9][0-9]{0,8} ?([kMGT]i?B|%))$",
    "examples": ["60%", "8GiB", "min"],
}
_COSTS_SCHEMA = {"enum": ["measure", *(f"roofline:{device}" for device in DEVICES)]}

BudgetData = Annotated[
    Budget | int | float | str,  # accepted types; the parsed field is always a `Budget`
    PlainValidator(Budget.parse),
    PlainSerializer(lambda budget: budget.requested),
    WithJsonSchema({"anyOf": [_BUDGET_NUMBER_SCHEMA, _BUDGET_TEXT_SCHEMA]}),
]
StrategyData = Annotated[
    Strategy,
    PlainValidator(_read_strategy),
    PlainSerializer(to_data),
    _StrategySchema(),
]

_DESCRIBED = ConfigDict(use_attribute_docstrings=True)
"""The docstrings of fields are their descriptions in the OpenAPI document."""


class LinkRecord(Record):
    """The JSON form of a `remat.Link`."""

    model_config = _DESCRIBED

    to_host_bytes_per_s: Annotated[float, Field(gt=0, le=1e18)]
    """The bandwidth of copies from the device to the host."""
    to_device_bytes_per_s: Annotated[float, Field(gt=0, le=1e18)]
    """The bandwidth of copies from the host to the device."""

    def to_link(self) -> Link:
        """Return the link."""
        return Link(self.to_host_bytes_per_s, self.to_device_bytes_per_s)


class Options(Record):
    """The strategy and the costs of a solve."""

    model_config = _DESCRIBED | ConfigDict(arbitrary_types_allowed=True)

    strategy: StrategyData = Field(default_factory=Auto)
    """The algorithm and its options, among them the time limit."""
    costs: (
        Annotated[
            str,
            PlainValidator(_check_costs),
            WithJsonSchema(_COSTS_SCHEMA),
        ]
        | None
    ) = None
    """"measure" (on the service's device), "roofline:DEVICE" (by a device's data sheet), or null.
    With null, the costs are those of the trace, which is measured if it has none."""


_NULL_SCHEMA: dict[str, Any] = {"type": "null"}
_TRACE_OR_GRAPH_SCHEMA: dict[str, Any] = {
    "oneOf": [
        {
            "required": ["trace"],
            "properties": {"trace": {"type": "object"}, "graph": _NULL_SCHEMA},
        },
        {
            "required": ["graph"],
            "properties": {
                "graph": {"type": "object"},
                "trace": _NULL_SCHEMA,
                "options": {"properties": {"costs": _NULL_SCHEMA}},
            },
        },
    ]
}


class _Request(Record):
    """A trace or a bare graph, and the options to solve it with."""

    model_config = _DESCRIBED | ConfigDict(json_schema_extra=_TRACE_OR_GRAPH_SCHEMA)

    trace: Annotated[Trace, AfterValidator(_check_trace)] | None = None
    """The document that `remat.Trace.save` writes. The result has a program for it."""
    graph: GraphRecord | None = None
    """Operations, values and costs alone, instead of a trace. The result has no program."""
    options: Options = Field(default_factory=Options)
    """The strategy and the costs."""

    @model_validator(mode="after")
    def _check_trace_or_graph(self) -> Self:
        """Raise ValueError unless the request has either a trace, or a valid graph without
        `options.costs`."""
        if (self.trace is None) == (self.graph is None):
            raise ValueError("give either `trace` or `graph`: one of them is needed, and only one")
        if self.graph is not None:
            self.graph.to_graph()  # raises GraphError, a ValueError, if it is invalid
            if self.options.costs is not None:
                raise ValueError("a bare graph includes its costs: leave out options.costs")
        return self

    @property
    def needs_measurement(self) -> bool:
        """True if the service must measure the costs, which takes torch and the device."""
        if self.trace is None:
            return False
        costs = self.options.costs
        return costs == "measure" or (costs is None and not self.trace.measured)


def _option_validator(name: str) -> Callable[[Any], Any]:
    """Return a function that returns its argument if it is a valid value of an option of a plan,
    and raises the option's error otherwise."""

    def check(value: Any) -> Any:
        check_option(name, value)
        return value

    return check


def _option_field(door: Door, name: str) -> tuple[Any, Any]:
    """Return the pydantic type and field of an option of a plan, with the door's default."""
    option, default = OPTIONS[name], door.default(name)
    schema = dict(option.schema or {})
    if schema.get("type") == "integer":
        limits = Field(ge=schema["minimum"], lt=schema["exclusiveMaximum"])
        json_type: Any = Annotated[int, limits]
    else:
        json_type = Annotated[Any, PlainValidator(_option_validator(name)), WithJsonSchema(schema)]
    return json_type if default is not None else json_type | None, Field(
        default=default, description=option.help
    )


def _request_class_with_options(door: Door) -> type[_Request]:
    """Return a subclass of `_Request` with a field for each option of the door that has a JSON
    form."""
    names = [name for name in door.options if OPTIONS[name].schema is not None]
    fields: Any = {name: _option_field(door, name) for name in names}
    return create_model("_RequestWithOptions", __base__=_Request, __module__=__name__, **fields)


_SolveOptions = _request_class_with_options(POST_SOLVE)

_OF_TRACES: dict[str, Any] = {
    "if": {"required": ["graph"], "properties": {"graph": {"type": "object"}}},
    "then": {
        "properties": {
            "split": {"enum": [SPLIT_OFF, 1, None]},
            "offload": {"enum": [OFFLOAD_OFF, None]},
        }
    },
}
_OF_OFFLOADING: dict[str, Any] = {
    "anyOf": [
        {"required": ["offload"], "properties": {"offload": {"const": OFFLOAD_AUTO}}},
        {"properties": {"host_budget": _NULL_SCHEMA, "link": _NULL_SCHEMA}},
    ]
}
_SOLVE_SCHEMA: Any = _TRACE_OR_GRAPH_SCHEMA | {"allOf": [_OF_TRACES, _OF_OFFLOADING]}


class SolveRequest(_SolveOptions):
    """The body of `POST /solve`: `{"trace" or "graph", "budget", "options"}`, and options of a
    plan. A field that is null is treated as missing."""

    model_config = ConfigDict(json_schema_extra=_SOLVE_SCHEMA)

    budget: BudgetData
    """The largest peak: bytes, "8GiB", "60%" of the peak without recomputation, or "min"."""
    link: LinkRecord | None = Field(default=None, description=OPTIONS["link"].help)

    @property
    def checked_options(self) -> CheckedOptions:
        """The options of the plan. Raises ValueError for those that contradict each other."""
        fields = {name: getattr(self, name, None) for name in POST_SOLVE.options}
        fields |= {"strategy": self.options.strategy, "link": self.link and self.link.to_link()}
        values = {name: value for name, value in fields.items() if value is not None}
        return read_options(POST_SOLVE, self.budget, values)

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        """Raise ValueError for options that contradict each other, that a bare graph cannot have,
        or that lack costs."""
        checked = self.checked_options
        is_split = bool(pieces_to_try(checked.split))
        if self.trace is None and is_split:
            raise ValueError("only a trace can be split: post it instead of its graph")
        if self.trace is None and checked.offload is not None:
            raise ValueError("only tensors of a trace can be offloaded: post it, not its graph")
        if self.trace is None or self.options.costs is not None or not self.trace.measured:
            return self
        if checked.offload is not None and checked.offload.link is None:
            raise ValueError(
                "copies between device and host need costs, too: add a link, or options.costs, "
                '"roofline:DEVICE" or "measure"'
            )
        if is_split:
            raise ValueError(
                "the pieces of an operation need costs, too: add options.costs, "
                '"roofline:DEVICE" or "measure"'
            )
        return self


class SweepRequest(_Request):
    """The body of `POST /sweeps`. A field that is null is treated as missing."""

    budgets: Annotated[tuple[BudgetData, ...], Field(min_length=1, max_length=100)] | None = None
    """The largest peak of each plan; by default 100%, 95%, ... of the peak without recomputation,
    and "min"."""


FIT_LIMIT_S = 60.0
"""The default of `FitRequest.time_limit`."""


class FitRequest(Record):
    """The body of `POST /fit`: will a training loop fit a GPU? All fields but `trace` and
    `optimizer` may be null."""

    model_config = _DESCRIBED

    trace: Annotated[Trace, AfterValidator(_check_trace)]
    """A trace for a GPU, which may be another one. It needs no costs."""
    optimizer: Annotated[str, WithJsonSchema({"enum": list(OPTIMIZERS)})] = OPTIMIZERS[0]
    """The optimizer of the training loop, for its state and the memory of its step."""
    gpu: Annotated[str, Field(min_length=1), WithJsonSchema({"enum": list(GPUS)})] | None = None
    """The GPU that the question is about; by default that of the trace."""
    memory_bytes: Annotated[int, Field(ge=1, lt=2**62)] | None = None
    """The bytes that torch's allocator may reserve; by default nearly all of the GPU's memory."""
    batch: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """The batch size of the trace, to repeat it in the answer."""
    checkpoint: Annotated[str, Field(max_length=20)] = AS_WRITTEN
    """The checkpoints of the loop: "as written" in the model's code when it was traced, "none",
    "blocks", "every:2" or "selective"."""
    accumulate: Annotated[int, Field(ge=1, le=MAX_ACCUMULATE)] = 1
    """The number of batches before a step of the optimizer, whose gradients are accumulated."""
    keeps_gradients: bool = False
    """True if gradients stay in memory: `zero_grad(set_to_none=False)`."""
    keeps_outputs: bool = False
    """True if the outputs of a step stay in memory until the next forward returns."""
    gpus: Annotated[int, Field(ge=1, le=MAX_GPUS)] = 1
    """The GPUs that share the loop, each with a batch of the trace's size."""
    shard: Annotated[str, Field(max_length=20)] = ""
    """The kind of shards of several GPUs: "full" (the default), "grad-op", "optimizer",
    "hybrid:4", or "none" (DDP)."""
    mixed_precision_param: Literal["", "bfloat16", "float16"] = ""
    """The dtype of the trace's parameters, if their shards are float32 (FSDP2)."""
    mixed_precision_reduce: Literal["", "float32", "bfloat16", "float16"] = ""
    """The dtype of the reduction of gradients, by default float32."""
    gradient_as_bucket_view: bool = False
    """True if gradients are views of DDP's buckets."""
    node_gpus: Annotated[int, Field(ge=1, le=MAX_GPUS)] = 8
    """The GPUs of a node."""
    network: Annotated[float, Field(gt=0)] | None = None
    """The bytes per second that each GPU has of its node's network; by default by the GPU."""
    time_limit: Annotated[float, Field(gt=0)] | None = None
    """The seconds after which the search for plans ends, at most the limit of the service; by
    default 60, or that limit if it is less."""

    @model_validator(mode="after")
    def _check_optimizer_and_gpu(self) -> Self:
        """Raise ValueError for an optimizer or a GPU that remat does not know."""
        try:
            check_optimizer(self.optimizer)
            gpu_name(self.trace, self.gpu)
            check_mixed_precision(self.trace, self.loop)
        except errors.RematError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def loop(self) -> LoopOptions:
        """The options of the training loop."""
        return LoopOptions(**{f.name: getattr(self, f.name) for f in fields(LoopOptions)})

    @property
    def needs_measurement(self) -> bool:
        """False for all requests: costs come from the data sheet."""
        return False


@dataclass(frozen=True, slots=True)
class WhyRequest:
    """The body of `POST /why`: the bytes of a memory snapshot, or the text of an out-of-memory
    error, not JSON."""

    content: bytes

    @property
    def trace(self) -> None:
        """None: there is no trace."""
        return None

    @property
    def needs_measurement(self) -> bool:
        """False for all requests."""
        return False


AnyRequest = SolveRequest | SweepRequest | FitRequest
"""The JSON body of a request that creates a job."""


class WhyResult(Record):
    """The result of `POST /why`: the fields of `remat.snapshots.explain.Explanation`."""

    explanation: Explanation


class FitResult(Record):
    """The result of `POST /fit`: the fields of `remat.report.fit.Fit`."""

    fits: bool
    fit: Fit


class SolveResult(Record):
    """The result of a solve. `program` is null for a bare graph; `costs` says where the costs come
    from."""

    plan: PlanDocument
    program: Program | None
    costs: str


class SweepResult(Record):
    """The result of a sweep: plans, smallest budget first. `costs` says where the costs come
    from."""

    plans: tuple[PlanDocument, ...]
    costs: str


class ProgressRecord(Record):
    """The JSON form of `remat.Progress`."""

    phase: str
    elapsed_s: float
    incumbent: float | None = None
    bound: float | None = None
    gap: float | None = None
    budget_bytes: int | None = None
    stage: str = ""


class PlanSummary(Record):
    """The figures of a plan: bytes, seconds, and fractions of the time without recomputation."""

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
    """The bytes of libraries on the device: part of the peaks, but excluded from percentages."""


class ProblemDetails(Record):
    """An RFC 9457 problem document. `detail` says what is wrong, why, and what to do. The last two
    fields are those of `InfeasibleBudget`."""

    model_config = ConfigDict(extra="ignore")

    type: str = "about:blank"
    title: str = ""
    status: int = 500
    detail: str = ""
    min_feasible_bytes: int | None = None
    is_proved: bool | None = None

    def exception(self) -> errors.RematError:
        """Return the exception that the library would have raised."""
        kind = _EXCEPTIONS.get(self.type.removeprefix(PROBLEM_TYPE_PREFIX), errors.ServiceError)
        text = self.detail or self.title
        if kind is errors.InfeasibleBudget:
            return errors.InfeasibleBudget(
                text, min_feasible_bytes=self.min_feasible_bytes, is_proved=bool(self.is_proved)
            )
        return kind(text)


def problem_type_name(error: errors.RematError) -> str:
    """Return the last part of the problem type of one of remat's exceptions; "remat" if it has no
    type of its own."""
    return next((n for n, kind in _EXCEPTIONS.items() if isinstance(error, kind)), "remat")


class JobView(Record):
    """A job as `GET /jobs/{id}` returns it. Times are seconds since 1970."""

    id: str
    kind: JobKind
    status: JobState
    model: str = ""
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    position: int | None = None
    """The number of jobs that are queued before this one."""
    progress: ProgressRecord | None = None
    summary: tuple[PlanSummary, ...] = ()
    problem: ProblemDetails | None = None


class JobPage(Record):
    """One page of `GET /jobs`, newest first. Pass `next` as `cursor` to get the next page."""

    jobs: tuple[JobView, ...]
    next: str | None = None


class DryRunResult(Record):
    """The size of a request that would be accepted, as `?dry_run=true` returns it."""

    operations: int
    values: int
    constant_bytes: int
    baseline_peak_bytes: int | None
    """None if the costs, which the graph needs, are still to be measured."""
    costs: str


def graph_of_request(request: _Request) -> Graph | Trace:
    """Return the trace of a request, or else its graph, to pass to `remat.solve`."""
    if request.trace is not None:
        return request.trace
    assert request.graph is not None
    return request.graph.to_graph()
