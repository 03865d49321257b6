"""The JSON form of a plan, `{"format": "remat.plan", "version": 2, ...}`, and of a sweep over
budgets, which has several. Reading simulates schedules and refuses plans whose numbers differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from remat.documents.base import Amount, Cost, Document, Natural, Record, Size, validation_text
from remat.documents.records import BaselineRecord, SplitRecord
from remat.errors import DocumentError, RematError
from remat.graph import Graph, Operation, Value
from remat.plan_data import PLAN_PARTS, CandidateResult, P, PlanData, Status
from remat.schedule import Schedule
from remat.simulate import baseline_of
from remat.solution import BoundScope, Stat

_Values = Annotated[tuple[Natural, ...], Field(json_schema_extra={"uniqueItems": True})]
"""Different values of a graph, by their indices."""


class ValueRecord(Record):
    """The JSON form of a `remat.graph.Value`."""

    name: str
    size_bytes: Size


class OperationRecord(Record):
    """The JSON form of a `remat.graph.Operation`."""

    name: str
    inputs: _Values
    outputs: _Values
    cost_s: Cost
    workspace_bytes: Size
    backward: bool
    recomputable: bool
    module: str
    order_sensitive: bool = False
    overwrites: _Values = ()
    renews: _Values = ()
    same_copy_as: Annotated[int, Field(ge=-1)] = -1
    piece_of: str = ""
    piece: Natural = 0


class GraphRecord(Record):
    """The JSON form of a `remat.graph.Graph`. Results are in ascending order."""

    operations: tuple[OperationRecord, ...]
    values: tuple[ValueRecord, ...]
    results: tuple[Natural, ...]
    constant_bytes: Size
    boundary: Natural | None
    library_bytes: Size = 0
    unsplit: BaselineRecord | None = None
    splits: tuple[SplitRecord, ...] = ()

    @classmethod
    def of(cls, graph: Graph) -> GraphRecord:
        """Return the record of a graph."""
        parts = {field.name: getattr(graph, field.name) for field in fields(graph)}
        parts["results"] = tuple(sorted(graph.results))
        return cls.model_validate(parts, from_attributes=True)

    def to_graph(self) -> Graph:
        """Return the validated graph. Raises `GraphError`."""
        return Graph(
            **dict(self)
            | {
                "operations": tuple(Operation(**dict(record)) for record in self.operations),
                "values": tuple(Value(**dict(record)) for record in self.values),
                "results": frozenset(self.results),
                "unsplit": None if self.unsplit is None else self.unsplit.to_baseline(),
                "splits": tuple(record.to_split() for record in self.splits),
            }
        )


class CandidateRecord(Record):
    """The JSON form of a `remat.plan_data.CandidateResult`."""

    name: str
    outcome: str
    peak_bytes: Natural | None = None
    overhead: Annotated[float, Field(ge=-1)] | None = None
    is_estimate: bool = False


class PlanDocument(Document):
    """The JSON form of a `remat.Plan`. `runs` are the operations of its schedule."""

    FORMAT: ClassVar[str] = "remat.plan"
    VERSION: ClassVar[int] = 2

    status: Literal["OPTIMAL", "FEASIBLE"]
    budget_bytes: Natural
    peak_bytes: Natural
    baseline_peak_bytes: Natural
    time_s: Amount
    baseline_time_s: Amount
    lower_bound: Annotated[float, Field(ge=-1)] | None
    bound_scope: BoundScope
    runs: tuple[Natural, ...]
    stats: dict[str, bool | Stat]
    candidates: tuple[CandidateRecord, ...] = ()
    graph: GraphRecord

    @classmethod
    def of(cls, plan: PlanData) -> PlanDocument:
        """Return the document of a plan."""
        return cls(
            **{name: getattr(plan, name) for name in _SHARED_FIELDS},
            status=plan.status.name,
            runs=plan.schedule.runs,
            stats=dict(plan.stats),
            candidates=tuple(
                CandidateRecord.model_validate(candidate, from_attributes=True)
                for candidate in plan.candidates
            ),
            graph=GraphRecord.of(plan.graph),
        )

    def to_plan(self, kind: type[P]) -> P:
        """Return the plan. Raises `DocumentError` if its numbers are not those of its schedule."""
        # A bound over the slots alone does not make a plan OPTIMAL.
        is_over_slots = self.bound_scope == "slots"
        try:
            plan = kind(
                **{name: getattr(self, name) for name in _SHARED_FIELDS},
                status=Status.FEASIBLE if is_over_slots else Status[self.status],
                schedule=Schedule(self.runs),
                graph=self.graph.to_graph(),
                candidates=tuple(CandidateResult(**dict(record)) for record in self.candidates),
                **_plan_parts_of(self.stats),
            )
            _check_plan_numbers(plan)
        except DocumentError:
            raise
        except ValidationError as error:
            raise DocumentError(validation_text("remat.plan: stats", error)) from None
        except RematError as error:
            raise DocumentError(f"remat.plan: {error}") from None
        return plan


_SHARED_FIELDS = (PlanDocument.model_fields.keys() & {field.name for field in fields(PlanData)}) - {
    *("status", "graph", "candidates")
}
"""The fields that a plan and its document have in common, with the same type."""


def _plan_parts_of(stats: Mapping[str, Stat]) -> dict[str, Any]:
    """Return the fields of a plan that a document has as statistics: its typed parts (see
    `PLAN_PARTS`), and the others as `solve`. Raises `ValidationError`."""
    solve, parts = dict(stats), dict[str, object]()
    for name, kind in PLAN_PARTS.items():
        figures = {f.name: solve.pop(f.name) for f in fields(kind) if f.name in solve}
        if figures:
            parts[name] = TypeAdapter(kind).validate_python(figures)
    return {"solve": solve, **parts}


def _check_plan_numbers(plan: PlanData) -> None:
    """Raise `DocumentError` if a peak, a time, the bound or the status contradicts the plan's
    schedule, or if the peak is over the budget."""
    timeline = plan.timeline()
    baseline = baseline_of(plan.graph)
    pairs = (
        ("peak_bytes", plan.peak_bytes, timeline.peak_bytes),
        ("baseline_peak_bytes", plan.baseline_peak_bytes, baseline.peak_bytes),
        ("time_s", plan.time_s, timeline.time_s),
        ("baseline_time_s", plan.baseline_time_s, baseline.time_s),
    )
    for name, claimed, simulated in pairs:
        # Bytes must be equal; a sum of seconds may differ by rounding.
        is_same = claimed == simulated or (
            isinstance(simulated, float) and math.isclose(claimed, simulated, rel_tol=1e-12)
        )
        if not is_same:
            raise DocumentError(
                f"remat.plan: {name} is {claimed}, but its schedule gives {simulated}"
            )
    if plan.peak_bytes > plan.budget_bytes:
        raise DocumentError(
            f"remat.plan: the peak of {plan.peak_bytes} bytes is over the budget of "
            f"{plan.budget_bytes}"
        )
    if plan.lower_bound is None and plan.status is Status.OPTIMAL:
        raise DocumentError("remat.plan: the status is OPTIMAL, but there is no lower_bound")
    if plan.lower_bound is not None and plan.lower_bound > plan.overhead:
        raise DocumentError(
            f"remat.plan: lower_bound {plan.lower_bound} is over the overhead {plan.overhead}"
        )


class SweepDocument(Document):
    """The plans that `remat.sweep` returns, smallest budget first."""

    FORMAT: ClassVar[str] = "remat.sweep"
    VERSION: ClassVar[int] = 2

    plans: tuple[PlanDocument, ...]

    @classmethod
    def of(cls, plans: Iterable[PlanData]) -> SweepDocument:
        """Return the document of these plans."""
        return cls(plans=tuple(PlanDocument.of(plan) for plan in plans))

    def to_plans(self, kind: type[P]) -> list[P]:
        """Return the plans. Raises `DocumentError` if a plan's figures contradict its schedule."""
        return [document.to_plan(kind) for document in self.plans]
