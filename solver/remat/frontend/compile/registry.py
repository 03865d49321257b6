"""The plans of all graphs that were compiled in this process, and the feedback between them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from remat.limits.limits import Limits, warn_of_smallest
from remat.limits.units import format_bytes
from remat.plan import Plan

_plan_numbers = itertools.count()
_plans: dict[int, CompiledPlan] = {}
"""Plans by number, in the order of compilation."""

_MAX_PLANS = 1_000


@dataclass
class CompiledPlan:
    """The plan of a compiled graph, with the memory that Inductor's kernels need for it.

    What was compiled: `module` is the class of the module or the name of the function, with the
    line at which it resumes after a graph break; "" if torch does not report it. `compile_id` is
    the number of the compilation in torch's own logs, and `operations` counts the operations that
    torch traced, before fusion.

    Limits: `budget_bytes` is the budget of this graph, None for "min": the budget without `reserve`
    and without the `external_bytes` that are allocated outside this graph. The plan itself was
    solved for less if the kernels of earlier plans exceeded the budget; `rounds` counts these
    plans, this one included. `baseline_bytes` is the peak without recomputation.

    Where `is_plain`, the graph keeps Inductor's own kernels, as under plain torch.compile: these
    fit the budget, and no plan without recomputation does. Then `plan` describes them by the model
    that plans are made with, whose peak may be above the budget; `verified_bytes` is exact.

    Peaks: the verified peak must not exceed `limit_bytes`, which is the budget, and for "min" the
    peak under plain torch.compile or None. `verified_by_half` has the peak of Inductor's kernels
    for "forward" and "backward", read before code generation; it is empty without Inductor and for
    code from torch's cache. `primals_bytes` are parameters, buffers and batch, and
    `batch_copy_bytes` the copy of the batch that CUDA graphs read. During the backward, the caller
    retains `retained_bytes` that the backward does not read and the inputs `retained_names` that it
    does read; `layout_copy_bytes` are parameters in another layout; `donated_bytes` are the
    tangents that are freed once they are read, by name. Only where `is_plain`, `storages` are the
    storages of the inputs of the backward, as in `InputLifetimes`, and `workspace_bytes` is the
    largest workspace of an extern kernel that cannot be measured in Inductor's layouts.

    `infeasible_limits` are the limits of a `Partitioner` that no plan fits, with
    `infeasible="smallest"`.

    Between forward and backward, `saved_bytes` stay allocated, and `baseline_saved_bytes` would
    without recomputation. Other graphs of the same step (`group`) run during that time.
    """

    plan: Plan
    budget_bytes: int | None
    module: str = ""
    compile_id: str = ""
    baseline_bytes: int = 0
    external_bytes: int = 0
    primals_bytes: int = 0
    batch_copy_bytes: int = 0
    retained_bytes: int = 0
    layout_copy_bytes: int = 0
    retained_names: frozenset[str] = frozenset()
    donated_bytes: Mapping[str, int] = field(default_factory=dict[str, int])
    saved_bytes: int = 0
    baseline_saved_bytes: int = 0
    group: object = None
    rounds: int = 1
    operations: int = 0
    planned_s: float = 0.0
    verified_by_half: dict[str, int] = field(default_factory=dict[str, int])
    limit_bytes: int | None = None
    is_plain: bool = False
    storages: Mapping[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    workspace_bytes: int = 0
    infeasible_limits: Limits | None = None
    number: int = field(default_factory=lambda: next(_plan_numbers))

    @property
    def verified_bytes(self) -> int | None:
        """The verified peak: the larger one of forward and backward, constant memory included.
        None if it was not verified in this process or by the cache."""
        return max(self.verified_by_half.values(), default=None)

    @property
    def planned_bytes(self) -> int:
        """The peak (verified, if it was verified) plus external memory."""
        peak_bytes = self.plan.peak_bytes if self.verified_bytes is None else self.verified_bytes
        return peak_bytes + self.external_bytes

    @property
    def offloads(self) -> bool:
        """True if tensors are on the host for a part of the step."""
        return bool(self.plan.graph.renewal)

    @property
    def frame_id(self) -> int | None:
        """The number of the frame in torch's logs: 1 for the compile id "1/0"."""
        number = self.compile_id.rpartition("!")[-1].partition("/")[0]
        return int(number) if number.isdecimal() else None

    @property
    def title(self) -> str:
        """The name of the compiled graph in log lines and errors."""
        return graph_title(self.module, self.compile_id)

    def __repr__(self) -> str:
        budget = "min" if self.budget_bytes is None else format_bytes(self.budget_bytes)
        verified = (
            "" if self.verified_bytes is None else f", verified {format_bytes(self.verified_bytes)}"
        )
        module = f"{self.module}: " if self.module else ""
        plan = "Inductor's own kernels" if self.is_plain else repr(self.plan)
        return f"CompiledPlan({module}{plan}, budget {budget}{verified})"


def graph_title(module: str, compile_id: str) -> str:
    """Return the name of a graph in log lines and errors: "Net [0/0]", "a graph" if torch reports
    neither its module nor its compile id."""
    return f"{module or 'a graph'} [{compile_id}]" if compile_id else module or "a graph"


def warn_of_smallest_plan(compiled: CompiledPlan) -> None:
    """Warn that a plan has the smallest peak because no plan fits its limits. Does nothing for
    other plans: those without `infeasible_limits`."""
    if (limits := compiled.infeasible_limits) is not None:
        warn_of_smallest(limits.budget, compiled.planned_bytes + limits.reserve_bytes)


class ReplanFeedback(NamedTuple):
    """Feedback from the kernels that Inductor generated for earlier plans of the same graph.

    They exceeded the budget by `excess_bytes`: the next plan has to be smaller by as much. The
    values `separate_buffers`, by name, were planned in place and need memory of their own. With
    `plain_exceeds`, Inductor's own kernels exceeded the budget. With `without_offload`, plans with
    offloaded tensors did, or Inductor moved their copies: none are offloaded.
    """

    excess_bytes: int = 0
    separate_buffers: frozenset[str] = frozenset()
    plain_exceeds: bool = False
    without_offload: bool = False


NO_FEEDBACK = ReplanFeedback()


class UnsplitStep(NamedTuple):
    """A graph's step before its largest operations were split, without recomputation: its peak, the
    bytes that it saves for the backward, and its time."""

    peak_bytes: int
    saved_bytes: int
    time_s: float


class PlannedSplit(NamedTuple):
    """The number of pieces of a graph's largest operations, and the step without them. `unsplit` is
    None until it is known; `unsplit_min_bytes` is the smallest peak that was found for it, None if
    none was searched for."""

    pieces: int
    unsplit: UnsplitStep | None = None
    unsplit_min_bytes: int | None = None


class SavedByOtherGraphs(NamedTuple):
    """Bytes that the other graphs of a step save for their backwards: as planned, and without
    recomputation; and the most bytes that they have on the host."""

    saved_bytes: int = 0
    baseline_saved_bytes: int = 0
    host_bytes: int = 0


def saved_by_other_graphs(group: object) -> SavedByOtherGraphs:
    """Return the bytes that the earlier compiled graphs of the step `group` save for their
    backwards; zeros for None.

    The graphs of a model with graph breaks are nested in time: forward, forward, backward,
    backward. So these bytes stay allocated while another graph of the step runs.
    """
    if group is None:
        return SavedByOtherGraphs()
    plans = [plan for plan in _plans.values() if plan.group is group]
    return SavedByOtherGraphs(
        sum(plan.saved_bytes for plan in plans),
        sum(plan.baseline_saved_bytes for plan in plans),
        sum(plan.plan.host_bytes for plan in plans),
    )


def register_plan(compiled: CompiledPlan) -> None:
    """Add a plan to `compiled_plans`, and remove the oldest one if there are more than 1,000."""
    _plans[compiled.number] = compiled
    while len(_plans) > _MAX_PLANS:
        _plans.pop(next(iter(_plans)))


def unregister_plan(compiled: CompiledPlan) -> None:
    """Remove a plan whose code does not run from `compiled_plans`, if it is there."""
    _plans.pop(compiled.number, None)


def find_compiled_plan(number: int) -> CompiledPlan | None:
    """Return the registered plan with this number, or None."""
    return _plans.get(number)


def compiled_plans() -> list[CompiledPlan]:
    """Return the plans of all graphs that were compiled in this process, oldest first."""
    return list(_plans.values())
