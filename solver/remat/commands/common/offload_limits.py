"""The limits of offloading that `--offload` and `--host-budget` set for a trace."""

from __future__ import annotations

from remat.choice.offloaded_forms import OffloadLimits
from remat.commands.common.exits import UsageError
from remat.costs.trace_costs import roofline_of
from remat.documents.trace import Trace
from remat.limits.options import is_offload_allowed, parse_host_budget


def check_offload_options(offload: str, host_budget: str | None) -> None:
    """Raise `UsageError` for an unknown value of `--offload`, or for `--host-budget` without it;
    `BudgetError` for a host budget that is no size."""
    try:
        is_allowed = is_offload_allowed(offload)
    except ValueError as error:
        raise UsageError(f"--{error}") from None
    if parse_host_budget(host_budget) is not None and not is_allowed:
        raise UsageError("--host-budget is for offloaded tensors: add --offload auto")


def offload_limits(
    offload: str, host_budget: str | None, trace: Trace, *, is_here: bool
) -> OffloadLimits | None:
    """Return the limits for a trace; None if nothing may be offloaded. The bandwidth comes from
    where the costs of the trace came from: a data sheet, or this machine. `is_here` says that the
    step runs on this machine."""
    if not is_offload_allowed(offload):
        return None
    from remat.frontend.planning.host_limits import host_limits

    costs = roofline_of(trace)
    return host_limits(offload, host_budget, None, trace, costs, None, is_here=is_here)
