"""The options of a plan: type, meaning, default and check of each, declared once for all doors.

A door is a function, a command or a route of the service that takes options of a plan.
`PlanOptions` are the options as users write them. `read_options` checks them for a door and returns
`CheckedOptions`, whose `request` makes the `PlanRequest` for one step. The signatures that `help`
shows, the options of commands and the fields of requests come from here.
"""

# Without `from __future__ import annotations`: the annotations below are read at run time.

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ForwardRef, TypedDict, TypeVar

from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.plan_request import PlanRequest
from remat.costs.devices import Link
from remat.costs.roofline import Roofline
from remat.documents.base import NAMESPACES
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.errors import similar_names_hint, wrong_type
from remat.limits.budget import Budget, is_auto
from remat.limits.limits import INFEASIBLE, INFEASIBLE_ERROR, Limits, is_smallest_accepted
from remat.limits.options import (
    MAX_PIECES,
    OFFLOAD_AUTO,
    OFFLOAD_OFF,
    OUTPUTS,
    OUTPUTS_HELD,
    SPLIT_AUTO,
    SPLIT_OFF,
    are_dropped,
    is_offload_allowed,
    parse_host_budget,
    parse_reserve,
    pieces_to_try,
)
from remat.plan import Plan
from remat.progress import ProgressCallback
from remat.strategies.auto import Auto
from remat.strategies.base import Strategy, checked_strategy

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from remat.frontend.costs.cost_cache import CostCache

MODEL, BLOCKS, AUTO = SCOPES = ("model", "blocks", "auto")
"""Values of the option `scope`: plan the model as a whole, its repeated blocks separately, or the
model as a whole if it can be captured and else its blocks."""

Service = Callable[[Trace, int | str], tuple[Plan, Program]]
"""Solves a trace within a budget in another process, such as a remat server."""

MEASURED_BY_SERVICE = "elsewhere"
"""A value of the option `costs`: the `service` that solves also measures the costs."""


@dataclass(frozen=True)
class Option:
    """The default of an option, and a function that raises an error for a wrong value.

    `help` is a sentence for the command line and the OpenAPI document. `metavar` describes the
    values on the command line, `schema` in JSON; None where the option is for Python only.
    """

    default: Any = None
    check: Callable[[Any], object] = lambda value: None
    help: str = ""
    metavar: str | None = None
    schema: Mapping[str, Any] | None = None


def _check_strategy_option(strategy: object) -> None:
    if strategy is not None:
        checked_strategy(strategy)


def _check_progress_option(progress: object) -> None:
    if not (callable(progress) or isinstance(progress, bool | None)):
        remedy = "pass progress=print, or leave it out"
        raise wrong_type("progress", "a bool or a callable", progress, remedy)


def _check_reserve_option(reserve: object) -> None:
    if isinstance(reserve, int | str):  # the state of an optimizer is measured later
        parse_reserve(reserve)


def _check_link_option(link: object) -> None:
    if not isinstance(link, Link | None):
        raise wrong_type("link", "a remat.Link", link, "pass link=remat.Link(55e9, 55e9)")


def _check_in_flight_option(in_flight: object) -> None:
    if isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1:
        raise ValueError(f"in_flight is {in_flight!r}; pass the number of calls, 1 or more")


def _check_scope_option(scope: object) -> None:
    if scope not in SCOPES:
        near = similar_names_hint(scope, SCOPES) if isinstance(scope, str) else ""
        raise ValueError(
            f"scope is {scope!r}{near}; pass {MODEL!r} to plan the whole model, {BLOCKS!r} to plan "
            f"its repeated blocks, or {AUTO!r}: the whole if that can be captured, else blocks"
        )


_BYTES_SCHEMA = {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**62}
_SPLIT_SCHEMA = {
    "anyOf": [
        {"enum": [SPLIT_AUTO, SPLIT_OFF]},
        {"type": "integer", "minimum": 1, "maximum": MAX_PIECES},
    ]
}


class KeywordOptions(TypedDict, total=False):
    """The options of a plan, as users write them, that are never positional arguments."""

    costs: Annotated[str | Roofline | None, Option()]
    cache: Annotated["str | CostCache | None", Option()]
    differentiate: Annotated[str | Sequence[str], Option("auto")]
    max_plans: Annotated[int, Option(8)]
    progress: Annotated[ProgressCallback | bool | None, Option(None, _check_progress_option)]
    namespaces: Annotated[Collection[str], Option(NAMESPACES)]
    reserve: Annotated[
        "int | str | Optimizer | None",
        Option(
            None,
            _check_reserve_option,
            "Part of the budget to reserve for other users, such as an optimizer's state: 2GiB.",
            "BYTES",
            _BYTES_SCHEMA,
        ),
    ]
    cuda_graphs: Annotated[bool, Option(False)]
    outputs: Annotated[
        str,
        Option(
            OUTPUTS_HELD,
            are_dropped,
            "Outputs are in memory to the end of the backward, or are released before it, or "
            "only the loss is returned.",
            "|".join(OUTPUTS),
        ),
    ]
    split: Annotated[
        str | int,
        Option(
            SPLIT_AUTO,
            pieces_to_try,
            "Pieces of the operations that need the most memory: auto, off, or a number.",
            "PIECES",
            _SPLIT_SCHEMA,
        ),
    ]
    offload: Annotated[
        str,
        Option(
            OFFLOAD_OFF,
            is_offload_allowed,
            "Offload tensors to the host between forward and backward where that pays.",
            f"{OFFLOAD_AUTO}|{OFFLOAD_OFF}",
            {"enum": [OFFLOAD_AUTO, OFFLOAD_OFF]},
        ),
    ]
    host_budget: Annotated[
        int | str | None,
        Option(
            None,
            parse_host_budget,
            "The most bytes of offloaded tensors, e.g. 16GiB; by default half of what is free "
            "where the plan is made for this machine, else any number.",
            "SIZE",
            _BYTES_SCHEMA,
        ),
    ]
    link: Annotated[
        Link | None,
        Option(
            None,
            _check_link_option,
            "The bandwidth between device and host; by default that of the data sheet or the "
            "device that the costs come from.",
        ),
    ]
    in_flight: Annotated[int, Option(1, _check_in_flight_option)]
    infeasible: Annotated[
        str,
        Option(
            INFEASIBLE_ERROR,
            is_smallest_accepted,
            "If no plan fits the budget: fail, or plan for the smallest peak, with a warning.",
            "|".join(INFEASIBLE),
            {"enum": list(INFEASIBLE)},
        ),
    ]


class PlanOptions(KeywordOptions, total=False):
    """The options of a plan, as users write them; `remat.optimize` describes them in full."""

    strategy: Annotated[Strategy | None, Option(None, _check_strategy_option)]


class EnableOptions(PlanOptions, total=False):
    """The options of `remat.enable`: the options of a plan, and `scope`."""

    scope: Annotated[str, Option(MODEL, _check_scope_option)]


_ANNOTATIONS: dict[str, Any] = {
    name: annotation
    for kind in (PlanOptions, KeywordOptions, EnableOptions)
    for name, annotation in inspect.get_annotations(kind).items()
}

OPTIONS: dict[str, Option] = {name: a.__metadata__[0] for name, a in _ANNOTATIONS.items()}
"""All options by name."""


def type_of_option(name: str) -> Any:
    """Return the declared type of an option: a type, or a string that names one of torch."""
    declared = _ANNOTATIONS[name].__origin__
    return declared.__forward_arg__ if isinstance(declared, ForwardRef) else declared


@dataclass(frozen=True)
class OffloadOptions:
    """The options of offloading where it is allowed: the most bytes on the host, and the bandwidth
    of copies; None for the defaults."""

    host_bytes: int | None = None
    link: Link | None = None


@dataclass(frozen=True)
class CheckedOptions:
    """The options of a plan after they were checked.

    `budget` is None for "auto": what the device has free. `offload` is None if nothing may be
    offloaded. A `progress` that is not a function is for `planning_line`.
    """

    budget: Budget | None
    strategy: Strategy | None
    costs: str | Roofline | None
    cache: "str | CostCache | None"
    differentiate: str | tuple[str, ...]
    max_plans: int
    progress: ProgressCallback | bool | None = field(repr=False, compare=False)
    namespaces: frozenset[str] = field(repr=False)
    reserve: "int | str | Optimizer | None"
    cuda_graphs: bool
    outputs: str
    scope: str
    in_flight: int
    split: str | int
    offload: OffloadOptions | None
    infeasible: str
    service: Service | None = None

    @property
    def progress_callback(self) -> ProgressCallback | None:
        """The function that receives the progress of solves; None if there is none."""
        return self.progress if callable(self.progress) else None

    @property
    def fixed_limits(self) -> Limits:
        """The limits that a budget and a reserve in bytes set. Raises `BudgetError` for another
        reserve."""
        assert self.budget is not None
        reserve: Any = self.reserve or 0
        return Limits(self.budget, parse_reserve(reserve))

    def for_door(self, door: "Door") -> dict[str, Any]:
        """Return the options that another door takes, as its keyword arguments."""
        offload = self.offload
        values = vars(self) | {
            "offload": OFFLOAD_OFF if offload is None else OFFLOAD_AUTO,
            "host_budget": offload and offload.host_bytes,
            "link": offload and offload.link,
        }
        return {name: values[name] for name in door.options}

    def request(self, limits: Limits, offload: OffloadLimits | None) -> PlanRequest:
        """Return the request for a plan of a step within these limits."""
        return PlanRequest(
            limits,
            self.strategy or Auto(),
            pieces_to_try(self.split),
            offload,
            self.infeasible,
            self.in_flight,
        )


_OF_CAPTURE = "it is a property of the trace: pass it to remat.trace"
_OF_COSTS = "the trace has its costs: pass them to remat.measure"
_OF_CALLS = "a trace is one call of the model: remat.optimize plans for several"
_OF_CACHE = "one step is planned: remat.optimize plans for several kinds of inputs"
_OF_EAGER = "it is an option of remat.optimize and remat.enable"
_OF_PYTHON = "it is an option of Python functions only"
_IN_A_SWEEP = "infeasible budgets are left out"
_ONE_BUDGET = "post each budget to /solve"

_NOT_OF_A_TRACE = {
    "differentiate": _OF_CAPTURE,
    "outputs": _OF_CAPTURE,
    "namespaces": "a plan of a trace runs no operators: pass it to remat.lower",
    "cuda_graphs": _OF_EAGER,
    "in_flight": _OF_CALLS,
    "max_plans": _OF_CACHE,
    "scope": "a trace is planned as a whole: remat.enable plans blocks",
}
_NOT_OF_THE_SERVICE = {
    "cache": "the service keeps the costs that it measures",
    "progress": "GET /jobs/{id}/events has the progress",
    **_NOT_OF_A_TRACE,
}
_NOT_OF_A_COMMAND = {
    "cache": _OF_PYTHON,
    "progress": "a terminal shows the progress",
    "link": "it comes from where the costs of the trace come from",
    **_NOT_OF_A_TRACE,
}


@dataclass(frozen=True, eq=False)
class Door:
    """A function, command or route that takes options of a plan.

    `missing` has the options that it does not take, each with the reason; `defaults` has the
    defaults that differ. `has_device` is True if the budget "auto" has a meaning. The options of a
    command are spelled `--host-budget`.
    """

    name: str
    missing: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_device: bool = False
    is_command: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """The names of the options that this door takes."""
        return tuple(name for name in OPTIONS if name not in self.missing)

    def default(self, name: str) -> Any:
        """Return the default of an option."""
        return self.defaults.get(name, OPTIONS[name].default)

    def spell(self, name: str, value: str = "") -> str:
        """Return an option as it is written here, with a value if one is passed."""
        if self.is_command:
            return f"--{name.replace('_', '-')}{value and f' {value}'}"
        return name + (value and f'="{value}"')

    def reason_without(self, name: str) -> str:
        """Return the error text for an option that this door does not take, or that does not
        exist."""
        option = repr(self.spell(name))
        if name in self.missing:
            return f"{self.name} has no option {option}: {self.missing[name]}"
        near = similar_names_hint(name, self.options)
        return f"there is no option {option}{near}; there are {', '.join(self.options)}"


OPTIMIZE = Door(
    "remat.optimize",
    {"scope": "it plans the model as a whole; remat.enable also plans blocks"},
    has_device=True,
)
ENABLE = Door(
    "remat.enable",
    {
        "loss": "it would change the model: compute the loss in its forward, or use remat.optimize",
        "service": "remat.Client.optimize plans by a service",
    },
    {"scope": AUTO},
    has_device=True,
)
CLIENT_OPTIMIZE = Door(
    "Client.optimize",
    {"scope": OPTIMIZE.missing["scope"], "service": "this client is the service"},
    has_device=True,
)
COMPILE = Door(
    "remat.compile",
    {
        "costs": "kernels of Inductor have costs of their own; " + _OF_EAGER,
        "cache": "nothing is measured; " + _OF_EAGER,
        "differentiate": "torch.compile knows which outputs have gradients; " + _OF_EAGER,
        "namespaces": "Inductor compiles all operators; " + _OF_EAGER,
        "max_plans": "Dynamo keeps compiled graphs (torch._dynamo.config.recompile_limit); "
        + _OF_EAGER,
        "cuda_graphs": 'pass mode="reduce-overhead"',
        "in_flight": "a compiled graph is planned for one call; " + _OF_EAGER,
        "scope": "each graph of Dynamo is planned as a whole; remat.enable plans blocks",
        "loss": "compute it in the compiled function; " + _OF_EAGER,
        "service": "Inductor's kernels are known only here; " + _OF_EAGER,
    },
)
SOLVE_STEP = Door("remat.solve_step", {"costs": _OF_COSTS, **_NOT_OF_A_TRACE}, {"split": SPLIT_OFF})
CLIENT_PLAN = Door(
    "Client.plan",
    {"cache": _NOT_OF_THE_SERVICE["cache"], **_NOT_OF_A_TRACE},
    {"split": SPLIT_OFF},
)
POST_SOLVE = Door("POST /solve", _NOT_OF_THE_SERVICE, {"split": SPLIT_OFF})
POST_SWEEPS = Door(
    "POST /sweeps",
    {
        **_NOT_OF_THE_SERVICE,
        **dict.fromkeys(("reserve", "split", "offload", "host_budget", "link"), _ONE_BUDGET),
        "infeasible": _IN_A_SWEEP,
    },
)
COMMAND_SOLVE = Door(
    "remat solve", {"costs": _OF_COSTS, **_NOT_OF_A_COMMAND}, {"split": SPLIT_OFF}, is_command=True
)
COMMAND_SWEEP = Door(
    "remat sweep",
    {
        "costs": _OF_COSTS,
        **_NOT_OF_A_COMMAND,
        "split": "`remat solve --split` plans each budget",
        "reserve": "subtract it from the budgets",
        "infeasible": _IN_A_SWEEP,
    },
    is_command=True,
)
COMMAND_RUN = Door(
    "remat run",
    {
        **{name: _OF_PYTHON for name in _NOT_OF_A_COMMAND if name != "outputs"},
        "costs": "it times operations on the device",
        "progress": _NOT_OF_A_COMMAND["progress"],
        "link": "it measures the bandwidth",
    },
    is_command=True,
)
COMMANDS = {door.name: door for door in (COMMAND_SOLVE, COMMAND_SWEEP, COMMAND_RUN)}


def check_option(name: str, value: object) -> None:
    """Raise the error for a wrong value of an option."""
    OPTIONS[name].check(value)


def read_options(
    door: Door, budget: int | float | str | Budget, options: Mapping[str, Any]
) -> CheckedOptions:
    """Return the options of a door as data.

    Raises `BudgetError`, ValueError and TypeError for a wrong budget or option, for options that
    contradict each other, and for one that the door does not take.
    """
    for name, value in options.items():
        if name not in door.options:
            raise TypeError(door.reason_without(name))
        check_option(name, value)
    values = {name: options.get(name, door.default(name)) for name in OPTIONS}
    host_budget, link = values.pop("host_budget"), values.pop("link")
    offload = None
    if is_offload_allowed(values["offload"]):
        offload = OffloadOptions(parse_host_budget(host_budget), link)
    for name, value in (("host_budget", host_budget), ("link", link)):
        if value is not None and offload is None:
            remedy = f"pass {door.spell('offload', OFFLOAD_AUTO)}"
            raise ValueError(f"{door.spell(name)} is for offloaded tensors: {remedy}")
    if offload is not None and values["cuda_graphs"]:
        raise ValueError(
            "the copies of offloaded tensors cannot be captured in CUDA graphs: pass "
            'offload="off" or cuda_graphs=False'
        )
    split = values["split"]
    if values["scope"] == BLOCKS and split != SPLIT_AUTO and pieces_to_try(split):
        raise ValueError(
            f"split={split!r} needs a plan of the whole model, scope={MODEL!r}: operations of "
            "blocks stay whole"
        )
    if not isinstance(values["differentiate"], str):
        values["differentiate"] = tuple(values["differentiate"])
    checked = CheckedOptions(
        **values
        | {
            "budget": None if door.has_device and is_auto(budget) else Budget.parse(budget),
            "namespaces": frozenset(values["namespaces"]),
            "offload": offload,
        }
    )
    is_absolute = checked.budget is not None and isinstance(checked.reserve, int | str)
    if is_absolute and checked.fixed_limits.reserve_bytes:
        checked.fixed_limits.check_reserve()  # now, not at the first call
    return checked


F = TypeVar("F", bound=Callable[..., Any])


def shows_options(door: Door) -> Callable[[F], F]:
    """Return a decorator that lets `help` and `inspect.signature` show the door's options, with
    their defaults, in place of `**options`."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters += [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=door.default(name),
                annotation=type_of_option(name),
            )
            for name in door.options
            if name not in signature.parameters
        ]
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return decorate
