"""Options of `torch.compile(backend="remat", options={...})`: remat's own and Inductor's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from remat import plan_options
from remat.errors import BudgetError, similar_names_hint
from remat.limits.limits import Limits
from remat.plan_options import COMPILE, CheckedOptions
from remat.strategies import Auto, Strategy

TIME_LIMIT_S = 8.0
"""Default time of planning one graph: the user waits for the first step."""

COMPILED_PIECES = (4, 16)
"""The numbers of pieces that `split="auto"` tries, for "min" and if no plan without pieces fits the
budget. Only two, because each needs a capture."""

RESERVED_INDUCTOR_OPTIONS = frozenset(
    {
        "custom_partitioner_fn",
        "inductor_choices_class",
        "_pre_fusion_custom_pass",
        "_post_fusion_custom_pass",
        "reorder_for_peak_memory",
        "memory_planning",
    }
)
"""Options of Inductor that remat sets, or that would invalidate the verified peak."""

_STRATEGY_OPTIONS = ("gap", "time_limit", "threads", "solver", "seed")
_SWITCHES = ("inductor", "fallback")
_OPTIONS = ("budget", *COMPILE.options, *_STRATEGY_OPTIONS, *_SWITCHES)


@dataclass(frozen=True)
class ModelBytes:
    """The bytes of a model's parameters and buffers, and of its trainable parameters."""

    resident_bytes: int = 0
    trainable_bytes: int = 0

    @classmethod
    def of(cls, model: object) -> ModelBytes:
        """Return the bytes of an `nn.Module`, tied tensors counted once; zeros for a function."""
        if not isinstance(model, nn.Module):
            return cls()
        tensors = (*model.parameters(), *model.buffers())
        storages = {t.untyped_storage().data_ptr(): t for t in tensors}
        trainable = (p for p in model.parameters() if p.requires_grad)
        return cls(sum(t.nbytes for t in storages.values()), sum(p.nbytes for p in trainable))


UNKNOWN_MODEL = ModelBytes()


@dataclass(frozen=True, kw_only=True)
class CompileOptions(CheckedOptions):
    """remat's options for the graphs of one compiled model: the options of a plan, and others.

    `limits` are the budget and the reserve; later plans of a graph get smaller ones. Without
    `inductor`, AOTAutograd's graphs run as they are, one operation after the other. With
    `fallback`, torch's own partitioner splits a graph that cannot be planned. `model` has the bytes
    of the whole model, of which a graph may be a part, if they are known. `planning_s` is the time
    for planning one graph, in which the solver gets what is left after the capture; None if the
    strategy has a time limit of its own.
    """

    limits: Limits
    strategy: Strategy
    inductor: bool = True
    fallback: bool = False
    model: ModelBytes = UNKNOWN_MODEL
    planning_s: float | None = None


def read_options(
    options: Mapping[str, Any], model: ModelBytes = UNKNOWN_MODEL
) -> tuple[CompileOptions, dict[str, Any]]:
    """Return remat's own options, checked, and the other ones, which are passed to Inductor.

    Raises `BudgetError` for a missing or invalid budget, and ValueError for an unknown option or
    one of the wrong type.
    """
    remaining = dict(options)
    if "budget" not in remaining:
        typos = (key for key in remaining if similar_names_hint(key, ["budget"]))
        hint = next((f" ({key!r} is no option)" for key in typos), "")
        raise BudgetError(
            'the remat backend needs a budget: options={"budget": "60%"}, or "8GiB", or "min"'
            + hint
        )
    strategy = remaining.get("strategy")
    strategy_options = {key: remaining.pop(key) for key in _STRATEGY_OPTIONS if key in remaining}
    if strategy is not None and strategy_options:
        raise ValueError(
            f"give {next(iter(strategy_options))} to the strategy, or leave the option `strategy` "
            "out"
        )
    is_default_time = strategy is None and "time_limit" not in strategy_options
    if strategy is None:
        remaining["strategy"] = Auto(**{"time_limit": TIME_LIMIT_S, **strategy_options})
    switches = {name: remaining.pop(name) for name in _SWITCHES if name in remaining}
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; it is True or False")
    budget = remaining.pop("budget")
    options_of_plan = {name: remaining.pop(name) for name in COMPILE.options if name in remaining}
    checked = plan_options.read_options(COMPILE, budget, options_of_plan)
    compile_options = CompileOptions(
        **vars(checked)
        | {
            "limits": checked.fixed_limits,
            "model": model,
            "planning_s": TIME_LIMIT_S if is_default_time else None,
        }
        | switches
    )
    _check_inductor_options(remaining)
    return compile_options, remaining


def check_no_cuda_graphs(options: CompileOptions, inductor_options: Mapping[str, Any]) -> None:
    """Raise ValueError if tensors may be offloaded and Inductor is to use CUDA graphs."""
    from torch._inductor import config

    if options.offload is not None and inductor_options.get(
        "triton.cudagraphs", config.triton.cudagraphs
    ):
        raise ValueError(
            'offload="auto" and CUDA graphs (mode="reduce-overhead", "max-autotune" or '
            "triton.cudagraphs) exclude each other: a CUDA graph cannot contain copies to the "
            'host. Pass offload="off", or another mode'
        )


def _check_inductor_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option that Inductor does not have, or that remat sets. Inductor's
    own error lists some 300 options and none of remat's."""
    from torch._inductor import config

    if reserved := RESERVED_INDUCTOR_OPTIONS.intersection(options):
        raise ValueError(f"{min(reserved)} is set by remat; leave it out, or compile without remat")
    inductor_options = config.get_config_copy()
    for key in options:
        if key in COMPILE.missing:
            raise ValueError(COMPILE.reason_without(key))
        if key.replace("-", "_") not in inductor_options:
            near = similar_names_hint(key, [*_OPTIONS, *inductor_options])
            raise ValueError(
                f"there is no option {key!r}{near}; remat's are {', '.join(sorted(_OPTIONS))}, all "
                "others are Inductor's"
            )
