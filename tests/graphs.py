"""Small graphs, by hand and at random, that the tests share."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
from hypothesis import assume
from hypothesis import strategies as st

from remat.graph import Graph, Operation, Value
from remat.heuristics.floor import least_peak_bytes
from remat.schedule import Schedule
from remat.simulate import simulate


def chain(length: int, size: int = 1, cost: float = 1.0) -> Graph:
    """A forward chain of `length` operations and a backward operation for each, as autograd makes
    it: the backward of operation i reads its output and the gradient of the one after it."""
    g = nx.DiGraph()
    for i in range(length):
        g.add_node(f"f{i}", cost=cost, size=size, module=f"layer.{i}")
        if i:
            g.add_edge(f"f{i - 1}", f"f{i}")
    for i in reversed(range(length)):
        g.add_node(f"b{i}", cost=cost, size=size, backward=True, result=i == 0)
        g.add_edge(f"f{i}", f"b{i}")
        if i < length - 1:
            g.add_edge(f"b{i + 1}", f"b{i}")
    forward = [f"f{i}" for i in range(length)]
    return Graph.from_networkx(g, order=forward + [f"b{i}" for i in reversed(range(length))])


def overwriting(
    draw: st.DrawFn, operations: list[Operation], values: list[Value], results: set[int]
) -> tuple[Operation, ...]:
    """The operations, some of which write over what they read: those that run once."""
    made: list[Operation] = []
    for operation in operations:
        over: list[int] = []
        room = sum(values[v].size_bytes for v in operation.outputs)
        for v in operation.inputs:
            fits = v not in results and values[v].size_bytes <= room
            if not operation.recomputable and fits and draw(st.booleans()):
                over.append(v)
                room -= values[v].size_bytes
        made.append(replace(operation, overwrites=tuple(over)))
    return tuple(made)


@st.composite
def small_graphs(draw: st.DrawFn, max_operations: int = 7, max_values: int = 9) -> Graph:
    """Graphs of up to 7 operations: several outputs, results, workspace, constant memory, values
    without bytes, operations that run once, some whose order counts, a boundary."""
    count = draw(st.integers(2, max_operations))
    boundary = draw(st.one_of(st.none(), st.integers(1, count - 1)))
    operations: list[Operation] = []
    values: list[Value] = []
    for op in range(count):
        inputs = draw(st.sets(st.sampled_from(range(len(values))), max_size=3)) if values else set()
        room = max_values - len(values) - (count - op - 1)
        outputs = draw(st.integers(1, 2 if room > 1 else 1))
        first = len(values)
        values += [Value(f"v{first + i}", draw(st.integers(0, 6))) for i in range(outputs)]
        operations.append(
            Operation(
                name=f"op{op}",
                inputs=tuple(sorted(inputs)),
                outputs=tuple(range(first, first + outputs)),
                cost_s=float(draw(st.integers(0, 5))),
                workspace_bytes=draw(st.sampled_from((0, 0, 0, 1, 3))),
                backward=boundary is not None and op >= boundary,
                recomputable=op != boundary and draw(st.sampled_from((True, True, True, False))),
                sequenced=draw(st.sampled_from((False, False, True))),
            )
        )
    results = draw(st.sets(st.sampled_from(range(len(values))), max_size=3))
    return Graph(
        overwriting(draw, operations, values, results),
        tuple(values),
        results=frozenset(results),
        constant_bytes=draw(st.sampled_from((0, 0, 5))),
        boundary=boundary,
    )


@st.composite
def tight_cases(
    draw: st.DrawFn, max_operations: int = 7, max_values: int = 10
) -> tuple[Graph, int]:
    """A graph and a budget that it mostly takes recomputation to meet.

    A value made early is read last, and an operation in between needs room. Some operations may run
    only once, before the boundary and after it. The budget is below the peak without recomputation,
    and at least what some operation needs, so a few are infeasible.
    """
    count = draw(st.integers(5, max_operations))
    crowded = draw(st.integers(3, count - 2))
    boundary = draw(st.one_of(st.none(), st.integers(2, count - 1)))
    operations: list[Operation] = []
    values: list[Value] = []
    early = 0
    for op in range(count):
        inputs = draw(st.sets(st.sampled_from(range(len(values))), max_size=2)) if values else set()
        if op == 2:
            early = draw(st.sampled_from(range(len(values))))
        if op == count - 1:
            inputs.add(early)
        room = max_values - len(values) - (count - op - 1)
        outputs = draw(st.sampled_from((1, 1, 1, 2))) if room > 1 else 1
        first = len(values)
        sizes = st.integers(1, 9) if op < 2 else st.sampled_from((0, 1, 2, 3, 5, 7))
        values += [Value(f"v{first + i}", draw(sizes)) for i in range(outputs)]
        operations.append(
            Operation(
                name=f"op{op}",
                inputs=tuple(sorted(inputs)),
                outputs=tuple(range(first, first + outputs)),
                cost_s=float(draw(st.integers(1, 9))),
                workspace_bytes=draw(
                    st.integers(6, 12) if op == crowded else st.sampled_from((0, 0, 4, 8))
                ),
                backward=boundary is not None and op >= boundary,
                recomputable=op != boundary and (op < 2 or draw(st.integers(0, 3)) > 0),
                sequenced=draw(st.sampled_from((False, False, True))),
            )
        )
    chosen = draw(st.sets(st.sampled_from(range(len(values))), max_size=2))
    graph = Graph(
        overwriting(draw, operations, values, chosen),
        tuple(values),
        results=frozenset(chosen - {early}),
        constant_bytes=draw(st.sampled_from((0, 0, 5))),
        boundary=boundary,
    )
    low = least_peak_bytes(graph)
    high = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    assume(low < high)
    return graph, draw(st.integers(low, high - 1))


@st.composite
def training_graphs(draw: st.DrawFn, max_operations: int = 6) -> Graph:
    """Graphs of a forward and its backward, on most of which recomputing lowers the peak: the
    backward of an operation reads its output and the gradient before it, forward operations mostly
    may run again, and some values are read once more, somewhere."""
    depth = max_operations // 2
    sizes = st.integers(1, 60)
    values = [Value(f"v{i}", draw(sizes)) for i in range(depth)]
    values += [Value(f"g{i}", draw(sizes)) for i in reversed(range(depth))]
    operations: list[Operation] = []
    for op in range(2 * depth):
        source = op if op < depth else 2 * depth - 1 - op
        inputs = {op - 1} if 0 < op < depth else {source} if op >= depth else set()
        inputs |= {op - 1} if op > depth else set()
        inputs |= {draw(st.integers(0, op - 1))} if op and draw(st.integers(0, 3)) == 3 else set()
        operations.append(
            Operation(
                name=f"op{op}",
                inputs=tuple(sorted(inputs)),
                outputs=(op,),
                cost_s=float(draw(st.integers(0, 5))),
                workspace_bytes=draw(st.sampled_from((0, 0, 0, 1, 3))),
                backward=op >= depth,
                recomputable=op < depth and draw(st.integers(0, 4)) < 4,
            )
        )
    results = {2 * depth - 1, *draw(st.sampled_from(((), (), (), (0,), (1,))))}
    return Graph(
        overwriting(draw, operations, values, results),
        tuple(values),
        results=frozenset(results),
        constant_bytes=draw(st.sampled_from((0, 0, 5))),
        boundary=depth,
    )
