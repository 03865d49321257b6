"""`Plan.explain` states what the simulator says of the changed schedule."""

from __future__ import annotations

import re
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from tests.helpers.graphs import chain
from tests.helpers.plans import plan_of, plans

from remat.errors import RematError, UnknownName
from remat.graph import Graph, Operation, Value
from remat.plan import Plan
from remat.report.explain import without_recomputation
from remat.report.report import fold_layer_numbers
from remat.schedule import Schedule
from remat.simulate import Copy, simulate
from remat.solve import solve

F0, F1, F2, F3, B3, B2, B1, B0 = range(8)
"""Operations of `chain(4)`; each takes 1 s and writes 1 byte."""


def _plan(graph: Graph, *runs: int, spare_bytes: int = 0) -> Plan:
    plan = plan_of(graph, Schedule(runs))
    return replace(plan, budget_bytes=plan.peak_bytes + spare_bytes)


def test_a_recomputed_operation_is_explained() -> None:
    text = _plan(chain(4), F0, F1, F2, F3, B3, B2, F1, B1, B0).explain("f1")
    for words in (
        "f1: forward operation 1 of 8 in layer.1, 1 s, output 1 B",
        "recomputed: runs 2 times (runs 1, 6)",
        "it costs 1 s, 12.500% of the step",
        "it frees 1 B (f1) between runs 2 and 6, for 3 s: 3 B x s",
        "the peak would be 5 B, in run 4 (b3, backward): 1 B over the budget",
        "f1 (1 B): produced in run 6, freed after run 7 (b1)",
    ):
        assert words in text


def test_recomputations_that_only_serve_an_operation_count_as_its_cost() -> None:
    plan = _plan(chain(4), F0, F1, F2, F3, B3, B2, F0, F1, B1, F0, B0)
    assert "it costs 2 s, 25.000% of the step" in plan.explain("f1")
    assert "including 1 recomputation of its inputs" in plan.explain("f1")
    # The recomputation of f0 that b0 reads stays.
    schedule, was = without_recomputation(plan.graph, plan.schedule, F1)
    assert schedule.runs == (F0, F1, F2, F3, B3, B2, B1, F0, B0)
    assert was == [0, 1, 2, 3, 4, 5, 8, 9, 10]


def test_a_needless_recomputation_is_called_free() -> None:
    plan = _plan(chain(4), F0, F1, F2, F3, B3, B2, F1, B1, B0, spare_bytes=2)
    assert "the peak would be 5 B" in plan.explain("f1")
    assert "it fits, with 1 B to spare" in plan.explain("f1")
    assert "proves no lower bound" in plan.explain("f1")


def test_savings_of_recomputing_a_retained_operation_are_stated() -> None:
    plan = _plan(chain(4), *range(8), spare_bytes=3)
    text = plan.explain("f0")
    assert "not recomputed: runs once (run 0)" in text
    assert "recomputed before run 7 (b0) instead, it would cost 1 s, 12.500%" in text
    assert "free 1 B after run 1 for 5 s" in text
    assert "the peak, in run 4 (b3, backward), would be 1 B less" in text
    assert "3 B to spare" in text
    assert "its output is never idle" in plan.explain("b1")


def test_recomputing_does_not_help_where_its_inputs_would_be_retained() -> None:
    """big -> small, and small is retained at the peak: to recompute it, big would have to be
    retained instead."""
    graph = Graph(
        (
            Operation("big", (), (0,), 1.0, recomputable=False),
            Operation("small", (0,), (1,), 1.0),
            Operation("user", (1,), (2,), 1.0),
            Operation("most", (2,), (3,), 1.0),
            Operation("last", (1, 3), (4,), 1.0),
        ),
        tuple(Value(name, size) for name, size in zip("abcde", (10, 1, 1, 90, 1), strict=True)),
        results=frozenset({4}),
    )
    plan = _plan(graph, *range(5))
    assert "the peak would be 9 B more: its inputs would be retained" in plan.explain("small")
    assert "recomputable=False" in plan.explain("big")
    assert "is a result" in plan.explain("last")


def test_a_module_is_explained_as_a_table() -> None:
    text = _plan(chain(4), F0, F1, F2, F3, B3, B2, F1, B1, B0).explain("layer")
    assert text.startswith("layer: 4 operations, 1 recomputed")
    assert re.search(r"f1 +forward +recomputed 1x +1 B +1 s +1 s", text)
    assert re.search(r"f2 +forward +retained +1 B +1 s +0 s", text)
    assert re.search(r"total +4 B +4 s +1 s", text)
    assert _plan(chain(4), *range(8)).explain("layer.2").startswith("layer.2: 1 operation,")


def test_the_rest_of_a_large_module_is_one_line() -> None:
    graph = chain(100)
    text = _plan(graph, *range(200)).explain("layer")
    assert "40 more" in text
    assert len(text.splitlines()) == 64


def test_unknown_names_are_refused_with_similar_ones() -> None:
    plan = _plan(chain(4), *range(8))
    with pytest.raises(KeyError) as caught:
        plan.explain("layer.9")
    assert isinstance(caught.value, UnknownName)
    assert isinstance(caught.value, RematError)
    assert str(caught.value).startswith("no operation and no module is called 'layer.9'; near: la")
    assert str(caught.value).endswith("plan.graph.operations has all names and modules")
    with pytest.raises(UnknownName, match="''"):
        plan.explain("")


def test_a_module_may_be_named_as_tables_name_it() -> None:
    """`describe` writes `*` for the numbers of layers."""
    plan = _plan(chain(4), *range(8))
    modules = {operation.module for operation in plan.graph.operations if operation.module}
    folded = {fold_layer_numbers(module) for module in modules}
    numbered = [name for name in folded if "*" in name]
    assert numbered
    for name in numbered:
        members = sum(fold_layer_numbers(o.module) == name for o in plan.graph.operations)
        assert plan.explain(name).startswith(f"{name}: {members} operation")


@settings(max_examples=50, deadline=None)
@hypothesis.given(plans(), st.integers(0, 8))
def test_the_stated_peak_is_that_of_the_changed_schedule(plan: Plan, spare_bytes: int) -> None:
    plan = replace(plan, budget_bytes=plan.peak_bytes + spare_bytes)
    graph = plan.graph
    for op, operation in enumerate(graph.operations):
        text = plan.explain(operation.name)
        if plan.schedule.runs.count(op) == 1:
            assert "not recomputed: runs once" in text
            continue
        expected = simulate(graph, _by_hand(plan, op))
        stated = re.search(r"the peak would be (\d+) B", text)
        assert stated is not None
        assert int(stated[1]) == expected.peak_bytes
        over = expected.peak_bytes - plan.budget_bytes
        assert (f"{over} B over the budget" in text) == (over > 0)
        assert (f"it fits, with {-over} B to spare" in text) == (over <= 0)


def _by_hand(plan: Plan, op: int) -> Schedule:
    """Remove the recomputations of `op`; then remove, one at a time, the runs that no operation
    reads any more, but not those that were unread before."""
    graph = plan.graph
    idle = _idle(graph, list(enumerate(plan.schedule.runs)))
    first = plan.schedule.runs.index(op)
    runs = [(i, o) for i, o in enumerate(plan.schedule.runs) if o != op or i == first]
    removed = _idle(graph, runs, spare=idle)
    return Schedule.of(o for i, o in runs if i not in removed)


def _idle(
    graph: Graph, runs: list[tuple[int, int]], spare: frozenset[int] = frozenset()
) -> frozenset[int]:
    removed: set[int] = set()
    while True:
        remaining = [(i, o) for i, o in runs if i not in removed]
        copies = simulate(graph, Schedule.of(o for _, o in remaining)).copies
        useless = [
            i
            for run, (i, o) in enumerate(remaining)
            if i not in spare
            and o in {other for _, other in remaining[:run]}
            and not any(c.start == run and _is_read(graph, c) for c in copies)
        ]
        if not useless:
            return frozenset(removed)
        removed.add(useless[-1])


def _is_read(graph: Graph, copy: Copy) -> bool:
    return copy.value not in graph.results and copy.end > copy.start


def test_every_operation_of_a_solved_plan_is_explained() -> None:
    plan = solve(chain(8, size=1 << 20, cost=0.001), "60%")
    recomputed = plan.schedule.recomputed(plan.graph)
    assert recomputed
    for op, operation in enumerate(plan.graph.operations):
        text = plan.explain(operation.name)
        assert ("over the budget" in text or "it fits" in text) == (op in recomputed)
