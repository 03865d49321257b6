"""The published baselines: laws over random graphs, and the values of their papers."""

from __future__ import annotations

import math

import hypothesis
import networkx as nx
import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from tests.helpers.graphs import (
    chain,
    overwriting,
    random_stages,
    small_graphs,
    stages,
    training_graphs,
    uneven_layers,
)
from tests.helpers.laws import LAWS, peak_of
from tests.helpers.strategies import QUICK

from remat.compare import compare
from remat.errors import BudgetError, InfeasibleBudget, RematError
from remat.graph import Graph, Operation, Value
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solve import solve
from remat.strategies import Auto, Exact, Strategy, Task
from remat.strategies.baselines.chen import ArticulationPoints, ChenSqrt, articulation_points
from remat.strategies.baselines.module_blocks import find_blocks
from remat.strategies.baselines.saved_values import Knapsack, Selective
from remat.strategies.baselines.schedule_builder import (
    checkpoint_segments,
    eager_backward_order,
    segmented_count,
)
from remat.strategies.baselines.uniform import PerBlock
from remat.strategies.published.chain_checkpoints import Revolve, Rotor
from remat.strategies.published.checkmate import CheckmateMilp, LpRounding

pytestmark = pytest.mark.usefixtures("short_eviction")


@st.composite
def layered_graphs(draw_from: st.DrawFn) -> Graph:
    """Up to 40 operations in order, each reading a few recent values; with and without a
    backward, with and without module paths."""
    count = draw_from(st.integers(3, 40))
    begin = draw_from(st.sampled_from((None, count // 2)))
    is_named = draw_from(st.booleans())
    operations: list[Operation] = []
    for op in range(count):
        back = draw_from(st.sets(st.integers(1, 8), max_size=3))
        inputs = {op - b for b in back if b <= op}
        is_backward = begin is not None and op >= begin
        if is_backward and begin is not None:
            inputs.add(draw_from(st.integers(0, begin - 1)))
        operations.append(
            Operation(
                f"op{op}",
                tuple(sorted(inputs)),
                (op,),
                cost_s=float(draw_from(st.integers(0, 4))),
                workspace_bytes=draw_from(st.sampled_from((0, 0, 2))),
                backward=is_backward,
                recomputable=draw_from(st.sampled_from((True, True, True, True, False))),
                module=f"net.{op // 4}.part" if is_named else "",
            )
        )
    sizes = draw_from(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    values = tuple(Value(f"v{i}", size) for i, size in enumerate(sizes))
    overwritten = overwriting(draw_from, operations, list(values), {count - 1})
    return Graph(overwritten, values, results=frozenset({count - 1}))


def least(graph: Graph, strategy: Strategy) -> Schedule | None:
    """Return the strategy's schedule with the smallest peak, checked; None if the strategy does
    not apply."""
    try:
        solution = strategy.run(Task(graph))
    except InfeasibleBudget:
        raise
    except RematError as error:
        if "use" not in str(error):
            raise
        return None
    solution.schedule.check(graph)
    return solution.schedule


def within(graph: Graph, strategy: Strategy, budget_bytes: int) -> Schedule | int:
    """Return the strategy's schedule for a budget, or for the smallest peak that it can reach."""
    try:
        return strategy.run(Task(graph, budget_bytes)).schedule
    except InfeasibleBudget as error:
        return error.min_feasible_bytes or 0


@pytest.mark.slow
@settings(LAWS, max_examples=40)
@hypothesis.given(layered_graphs(), st.floats(0.3, 1.1))
def test_baseline_schedules_are_valid_and_fit(graph: Graph, share: float) -> None:
    budget = max(1, int(share * peak_of(graph)))
    for strategy in QUICK:
        schedule = least(graph, strategy)
        if schedule is None:
            continue
        least_bytes = simulate(graph, schedule).peak_bytes
        within_budget = within(graph, strategy, budget)
        if isinstance(within_budget, Schedule):
            assert simulate(graph, within_budget).peak_bytes <= budget
        else:
            # Some baselines search more finely around the budget.
            assert within_budget > budget
            assert within_budget == least_bytes or isinstance(strategy, Rotor | Selective)
            assert within_budget <= least_bytes or isinstance(strategy, Rotor)


@settings(LAWS, max_examples=8)
@hypothesis.given(small_graphs(max_operations=8, max_values=10, renews=False), st.floats(0, 1))
def test_checkmates_program_finds_the_same_optimum(graph: Graph, share: float) -> None:
    try:
        exact = solve(graph, "min", Exact())
    except BudgetError:
        return
    published = solve(graph, "min", CheckmateMilp())
    assert published.peak_bytes == exact.peak_bytes
    low, high = exact.peak_bytes, exact.baseline_peak_bytes
    budget = max(1, round(low + share * (high - low)))
    published = solve(graph, budget, CheckmateMilp())
    assert published.time_s == pytest.approx(solve(graph, budget, Exact()).time_s)
    assert published.bound_scope == "order"


def test_checkmates_program_refuses_an_infeasible_budget() -> None:
    graph = chain(3, size=10)
    with pytest.raises(InfeasibleBudget, match="proved infeasible") as error:
        solve(graph, 15, CheckmateMilp())
    assert error.value.min_feasible_bytes == solve(graph, "min", Exact()).peak_bytes


@pytest.mark.parametrize("length", [3, 5, 10, 21, 34])
@pytest.mark.parametrize("checkpoints", [1, 2, 3, 5, 40])
def test_revolve_advances_as_often_as_griewank_and_walther(length: int, checkpoints: int) -> None:
    ones = [1] * length
    graph = stages(ones, ones, ones)
    schedule = Revolve(checkpoints).run(Task(graph)).schedule
    recomputed_count = sum(schedule.recomputed(graph).values())
    c = min(checkpoints, length)
    r = next(r for r in range(length + 1) if math.comb(c + r, c) >= length)
    assert recomputed_count == r * length - math.comb(c + r, r - 1)


@pytest.mark.parametrize("n", [16, 64, 144])
def test_chens_peak_is_two_square_roots_for_one_more_forward(n: int) -> None:
    graph = chain(n)
    plan = solve(graph, "min", ChenSqrt())
    assert plan.peak_bytes <= 2 * math.isqrt(n) + 3
    assert plan.time_s - plan.baseline_time_s <= n
    assert max(plan.schedule.recomputed(graph).values()) == 1


@pytest.mark.parametrize("seed", range(4))
def test_rotor_is_no_more_expensive_than_revolve(seed: int) -> None:
    graph = random_stages(seed)
    compared = 0
    for share in (40, 50, 60, 70, 80, 90, 99):
        try:
            revolve = solve(graph, f"{share}%", Revolve())
        except InfeasibleBudget:
            continue
        assert solve(graph, f"{share}%", Rotor()).time_s <= revolve.time_s * (1 + 1e-9)
        compared += 1
    assert compared


def test_rotor_retains_everything_where_that_fits() -> None:
    assert solve(random_stages(0), "100%", Rotor()).overhead == 0


def test_per_block_recomputes_the_inside_of_each_block_once() -> None:
    # Each block: widen, narrow; the backward of each reads its input.
    paths = ["stem", *(f"net.h.{i}.{part}" for i in range(3) for part in ("up", "down")), "head"]
    count = len(paths)
    forward = [
        Operation(f"f{i}", (i - 1,) if i else (), (i,), 1.0, module=path)
        for i, path in enumerate(paths)
    ]
    backward = [
        Operation(
            f"b{i}",
            tuple(v for v in (i - 1, 2 * count - 2 - i) if v >= 0 and (v != i or i < count - 1)),
            (2 * count - 1 - i,),
            2.0,
            backward=True,
        )
        for i in reversed(range(count))
    ]
    sizes = [10 if path.endswith("up") else 1 for path in paths] + [1] * count
    values = tuple(Value(f"v{i}", size) for i, size in enumerate(sizes))
    graph = Graph((*forward, *backward), values, results=frozenset({2 * count - 1}))
    assert find_blocks(graph) == [(1, 2), (3, 4), (5, 6)]
    plan = solve(graph, "min", PerBlock())
    recomputed = plan.schedule.recomputed(graph)
    # Early stop: the block's backward does not read the result of `down`.
    assert recomputed == {1: 1, 3: 1, 5: 1}
    runs = plan.schedule.runs
    first = [i for i, op in enumerate(runs) if op == 5][1]
    assert graph.operations[runs[first + 1]].name == "b6"
    assert plan.peak_bytes < plan.baseline_peak_bytes


@pytest.mark.parametrize("is_random", [False, True])
def test_eager_mode_copies_a_saved_tensor_where_the_backward_reads_it(is_random: bool) -> None:
    """Autograd saves a copy of a tensor that is overwritten: an operation of the backward pass that
    reads no gradient. A random one stays where it is, and so do all in a strategy's schedule."""
    operations = (
        Operation("up0", (), (0,), 1.0, module="h.0"),
        Operation("down0", (0,), (1,), 1.0, module="h.0"),
        Operation("up1", (1,), (2,), 1.0, module="h.1"),
        Operation("down1", (2,), (3,), 1.0, module="h.1"),
        Operation("loss", (3,), (4,), 1.0),
        Operation("start", (4,), (5,), 0.0, recomputable=False, backward=True),
        Operation("copy0", (0,), (6,), 1.0, backward=True, order_sensitive=is_random),
        Operation("copy1", (2,), (7,), 1.0, backward=True),
        Operation("grad1", (5, 2, 7), (8,), 1.0, backward=True),
        Operation("grad0", (8, 0, 6), (9,), 1.0, backward=True),
    )
    sizes = (10, 1, 10, 1, 1, 1, 1, 1, 1, 1)
    values = tuple(Value(f"v{i}", size) for i, size in enumerate(sizes))
    graph = Graph(operations, values, results=frozenset({9}), boundary=5)
    assert PerBlock().run(Task(graph)).schedule.keeps_order()
    backward = eager_backward_order(graph)
    schedule = checkpoint_segments(graph, find_blocks(graph), backward=backward)
    schedule.check(graph)
    names = [operations[op].name for op in schedule.runs]
    if is_random:
        assert names[5:] == ["start", "up0", "copy0", "up1", "copy1", "grad1", "grad0"]
    else:
        assert names[5:] == ["start", "up1", "copy1", "grad1", "up0", "copy0", "grad0"]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        # T5's layers of a block are numbered, but differ.
        (
            [f"enc.block.{i}.layer.{j}" for i in (0, 1) for j in ("0.attn.q", "0.norm", "1.ff")],
            [(0, 1, 2), (3, 4, 5)],
        ),
        # A ResNet stage is a list of layers.
        (
            [f"stages.{i}.layers.{j}.conv" for i in (0, 1) for j in (0, 1)],
            [(0,), (1,), (2,), (3,)],
        ),
        # Sequences of layers in a sequence: a layer is no block.
        (
            [f"{i}.{j}" for i in (0, 1) for j in (0, 1, 2)],
            [(0, 1, 2), (3, 4, 5)],
        ),
        # The same, a level deeper.
        (
            [f"{i}.{j}.{k}" for i in (0, 1) for j in (0, 1) for k in (0, 1)],
            [(0, 1), (2, 3), (4, 5), (6, 7)],
        ),
        # Several containers; every submodule of a block belongs to it, whatever its path.
        (
            ["down.0.conv", "", "down.0.norm", "down.1.conv", "mid", "up.0.conv"],
            [(0, 1, 2), (3,), (5,)],
        ),
        (["a.b", "c"], []),
    ],
)
def test_blocks_are_derived_from_module_paths(
    paths: list[str], expected: list[tuple[int, ...]]
) -> None:
    operations = tuple(
        Operation(f"f{i}", (i - 1,) if i else (), (i,), 1.0, module=path)
        for i, path in enumerate(paths)
    )
    graph = Graph(operations, tuple(Value(f"v{i}", 1) for i in range(len(paths))))
    assert find_blocks(graph) == expected


def test_two_diamonds_have_the_expected_articulation_points() -> None:
    inputs = [(), (0,), (0,), (1, 2), (3,), (3,), (4, 5)]
    operations = tuple(Operation(f"f{i}", reads, (i,), 1.0) for i, reads in enumerate(inputs))
    graph = Graph(operations, tuple(Value(f"v{i}", 1) for i in range(7)))
    assert articulation_points(graph) == [3]


def separated_by_removal(graph: Graph) -> list[int]:
    """Return the points by removing each operation from the graph."""
    count = segmented_count(graph)
    g: nx.Graph[int] = nx.Graph()
    g.add_nodes_from(range(count))
    for op in range(count):
        g.add_edges_from((graph.producer[v], op) for v in graph.operations[op].inputs)
    points: list[int] = []
    for point in set(nx.articulation_points(g)).intersection(range(1, count - 1)):
        rest = g.copy()
        rest.remove_node(point)
        connected = nx.node_connected_component(rest, count - 1)
        cost_s = sum(graph.operations[op].cost_s for op in set(range(point)) - connected)
        before_s = sum(graph.operations[op].cost_s for op in range(point))
        if cost_s >= 0.5 * before_s:
            points.append(point)
    return sorted(points)


@LAWS
@hypothesis.given(st.one_of(small_graphs(), training_graphs()))
def test_points_are_those_of_removing_each_operation(graph: Graph) -> None:
    assert articulation_points(graph) == separated_by_removal(graph)


@pytest.mark.parametrize(
    ("strategy", "graph", "message"),
    [
        (PerBlock(), Graph((Operation("f", (), (0,), 1.0),), (Value("v", 1),)), "use EveryK"),
        (Revolve(), Graph((Operation("f", (), (0,), 1.0),), (Value("v", 1),)), "use ChenSqrt"),
        (Rotor(), stages([1] * 2, [1] * 2, [1] * 2), "needs a chain"),
        (Knapsack(), Graph((Operation("f", (), (0,), 1.0),), (Value("v", 1),)), "`backward`"),
        (Selective(), Graph((Operation("f", (), (0,), 1.0),), (Value("v", 1),)), "`backward`"),
        (ArticulationPoints(), chain(1), "none"),
        (LpRounding(max_operations=5), chain(4), "up to 5 operations, not 8"),
        (CheckmateMilp(max_operations=5), chain(4), "up to 5 operations, not 8"),
    ],
)
def test_a_baseline_that_does_not_apply_raises_an_error(
    strategy: Strategy, graph: Graph, message: str
) -> None:
    with pytest.raises(RematError, match=message):
        solve(graph, "min", strategy)


def test_a_comparison_lists_baselines_that_do_not_apply() -> None:
    graph = random_stages(1, count=6)
    strategies = (
        Auto(order="off", time_limit=2),
        Rotor(),
        ChenSqrt(),
        CheckmateMilp(max_operations=2),
    )
    seen: list[str] = []
    comparison = compare(graph, ("80%", "10%", "min"), strategies)
    assert len(comparison.rows) == 12
    for row in comparison.rows:
        seen.append(row.strategy)
        assert (row.plan is None) == bool(row.reason)
        assert row.is_applicable == (row.strategy != "checkmate")
    text = str(comparison)
    assert "80% " in text
    assert "own minimum" in text
    assert "checkmate: checkmate is the published program" in text
    frontier = comparison.frontier()
    assert set(frontier) == {"auto", "rotor", "chen_sqrt"}
    for points in frontier.values():
        assert points == sorted(points)
        assert [time for _, time in points] == sorted((time for _, time in points), reverse=True)
    seen.clear()
    for wrong in ("nonsense", "auto", 0):
        with pytest.raises(BudgetError):
            compare(graph, ["80%", wrong], strategies, on_row=lambda row: seen.append(row.strategy))
    assert not seen, "nothing is solved before all are read"
    row = compare(graph, [" MIN ", 1e9], [ChenSqrt()]).rows
    assert [cell.budget for cell in row] == [" MIN ", 1e9], "as they were given"


def test_lp_rounding_relaxes_every_variable() -> None:
    """The bound is that of the linear program, not of one in which some variables are integer."""
    graph = uneven_layers(3)
    optimum = solve(graph, "75%", Exact())
    solution = LpRounding().run(Task(graph, optimum.budget_bytes))
    assert solution.bound is not None
    assert graph.total_cost_s < solution.bound < optimum.time_s - 1e-3


@settings(LAWS, max_examples=25)
@hypothesis.given(layered_graphs(), st.floats(0.3, 1.0))
def test_selective_recomputes_each_value_once_at_its_first_backward_use(
    graph: Graph, share: float
) -> None:
    assume(any(operation.backward for operation in graph.operations))
    budget = int(share * peak_of(graph))
    schedule = within(graph, Selective(choices=4, time_limit=2.0), max(1, budget))
    if not isinstance(schedule, Schedule):
        return
    begin = next(op for op, operation in enumerate(graph.operations) if operation.backward)
    assert schedule.runs[:begin] == tuple(range(begin))
    recomputed = [op for op in schedule.runs[begin:] if op < begin]
    assert len(set(recomputed)) == len(recomputed)
    order = [op for op in schedule.runs if op >= begin]
    assert order == list(range(begin, len(graph)))
