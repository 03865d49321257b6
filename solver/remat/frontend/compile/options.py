"""What `torch.compile(backend="remat", options={...})` takes: remat's options and Inductor's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from remat.errors import BudgetError, nearest
from remat.frontend.compile.external_memory import ModelBytes
from remat.limits.budget import Budget
from remat.limits.outputs import HELD, are_dropped
from remat.limits.reserve import less_reserve, parse_reserve
from remat.progress import ProgressCallback
from remat.strategies import Auto, Strategy

TIME_LIMIT_S = 8.0
"""Of planning, where no limit is given: somebody waits for the first step."""

OURS = frozenset(
    {
        "custom_partitioner_fn",
        "inductor_choices_class",
        "_pre_fusion_custom_pass",
        "_post_fusion_custom_pass",
        "reorder_for_peak_memory",
        "memory_planning",
    }
)
"""Options of Inductor by which it is held to a plan, or that change what was verified."""


NO_MODEL = ModelBytes()

_INNER = ("model", "reserve_bytes", "within_s")
_COSTS = ("kernels", "operations")


@dataclass(frozen=True)
class CompileOptions:
    """`reserve_bytes` are left of a budget in bytes. Without `inductor`, AOTAutograd's graphs run
    as they are, operation by operation. With `fallback`, torch's own partitioner takes a graph that
    cannot be planned. `costs` are of "kernels", or, to compare with, of "operations" as if each
    were a kernel of its own. Of `model` the graphs are, where that is known. Where planning is to
    end `within_s` seconds, solving has what is left of them. `outputs` are "held" by the caller
    while the backward runs, or "dropped" before it.
    `progress` is told how far a solve is: a function, or True for a line on a terminal."""

    budget: Budget
    strategy: Strategy
    reserve_bytes: int = 0
    inductor: bool = True
    fallback: bool = False
    costs: str = "kernels"
    model: ModelBytes = NO_MODEL
    within_s: float | None = None
    outputs: str = HELD
    # Decides no plan, so that torch's caches need not know it.
    progress: ProgressCallback | bool | None = field(default=None, repr=False, compare=False)

    def budget_bytes(self, baseline_bytes: int) -> int | None:
        """What the step may take, where torch.compile's would take so much; None for "min"."""
        if self.budget.size_bytes is not None:
            return less_reserve(self.budget, self.reserve_bytes)
        return self.budget.in_bytes(baseline_bytes)


def read_options(
    options: Mapping[str, Any], model: ModelBytes = NO_MODEL
) -> tuple[CompileOptions, dict[str, Any]]:
    """remat's options, and the rest, which is Inductor's to check.

    Raises `BudgetError` for a budget that is none, or is missing, and ValueError for what is no
    option, or has the wrong type.
    """
    left = dict(options)
    if "budget" not in left:
        meant = next((f" ({key!r} is no option)" for key in left if nearest(key, ["budget"])), "")
        raise BudgetError(
            'the remat backend needs a budget: options={"budget": "60%"}, or "8GiB", or "min"'
            + meant
        )
    budget = Budget.parse(left.pop("budget"))
    strategy = left.pop("strategy", None)
    own = {
        key: left.pop(key)
        for key in ("gap", "time_limit", "threads", "solver", "seed")
        if key in left
    }
    if strategy is not None and own:
        raise ValueError(
            f"give {next(iter(own))} to the strategy itself, or leave the strategy out"
        )
    within_s = TIME_LIMIT_S if strategy is None and "time_limit" not in own else None
    if strategy is None:
        strategy = Auto(**{"time_limit": TIME_LIMIT_S, **own})
    elif not hasattr(strategy, "run"):
        raise ValueError(f"strategy is a {type(strategy).__name__}; pass one such as remat.Auto()")
    reserve_bytes = parse_reserve(left.pop("reserve", 0))
    if reserve_bytes:
        less_reserve(budget, reserve_bytes)
    switches = {name: left.pop(name) for name in ("inductor", "fallback") if name in left}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it is True or False")
    costs = left.pop("costs", _COSTS[0])
    if costs not in _COSTS:
        raise ValueError(f"costs is {costs!r}; it is one of {', '.join(map(repr, _COSTS))}")
    outputs = left.pop("outputs", HELD)
    are_dropped(outputs)
    progress: Any = left.pop("progress", None)
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise ValueError(
            f"progress is {progress!r}; it is True, for a line on a terminal, or a function of a "
            "remat.Progress"
        )
    found = CompileOptions(
        budget,
        strategy,
        reserve_bytes,
        costs=costs,
        model=model,
        within_s=within_s,
        outputs=outputs,
        progress=cast(Any, progress),
        **switches,
    )
    _check_known(left)
    return found, left


def _check_known(options: Mapping[str, Any]) -> None:
    """Inductor's own error lists some 300 options and none of remat's."""
    from torch._inductor import config

    if taken := OURS.intersection(options):
        raise ValueError(
            f"{min(taken)} is what remat plans by; leave it out, or compile without remat"
        )
    known = config.get_config_copy()
    own = ["strategy", "gap", "time_limit", "threads", "solver", "seed", "reserve"]
    own += [f.name for f in fields(CompileOptions) if f.name not in _INNER]
    for key in options:
        if key.replace("-", "_") not in known:
            near = nearest(key, [*own, *known])
            raise ValueError(
                f"there is no option {key!r}{near}; remat's are {', '.join(sorted(set(own)))}, all "
                "others are Inductor's"
            )
