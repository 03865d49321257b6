"""Small graphs, made by hand and at random."""

from __future__ import annotations

import random
from dataclasses import replace
from random import Random

import networkx as nx
from hypothesis import assume
from hypothesis import strategies as st

from remat.graph import Graph, Operation, Value
from remat.heuristics.peak_bounds import peak_lower_bound_bytes
from remat.schedule import Schedule
from remat.simulate import simulate


def chain(length: int, size: int = 1, cost: float = 1.0) -> Graph:
    """Return a forward chain of `length` operations with a backward operation for each, as
    autograd makes it: the backward of operation i reads its output and the gradient of the next
    operation."""
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
    draw_from: st.DrawFn, operations: list[Operation], values: list[Value], results: set[int]
) -> tuple[Operation, ...]:
    """Let some operations overwrite values that they read."""
    result: list[Operation] = []
    for operation in operations:
        over: list[int] = []
        room = sum(values[v].size_bytes for v in operation.outputs)
        for v in operation.inputs:
            fits = v not in results and values[v].size_bytes <= room
            if fits and draw_from(st.booleans()):
                over.append(v)
                room -= values[v].size_bytes
        result.append(replace(operation, overwrites=tuple(over)))
    return tuple(result)


def renewing(
    draw_from: st.DrawFn, operations: tuple[Operation, ...], results: set[int]
) -> tuple[Operation, ...]:
    """Let some operations that run once renew a value of before, which is no result, and some need
    the copies that another one read."""
    result: list[Operation] = []
    renewed, produced = set(results), set[int]()
    for index, operation in enumerate(operations):
        earlier = [i for i in range(index) if set(operations[i].inputs) & set(operation.inputs)]
        if not operation.recomputable and earlier and draw_from(st.booleans()):
            operation = replace(operation, same_copy_as=draw_from(st.sampled_from(earlier)))
        renewable = sorted(produced - renewed - set(operation.inputs))
        if not operation.recomputable and renewable and draw_from(st.booleans()):
            value = draw_from(st.sampled_from(renewable))
            renewed.add(value)
            operation = replace(
                operation, outputs=(*operation.outputs, value), renews=(value,), overwrites=()
            )
        produced.update(operation.outputs)
        result.append(operation)
    return tuple(result)


@st.composite
def small_graphs(
    draw_from: st.DrawFn, max_operations: int = 7, max_values: int = 9, *, renews: bool = True
) -> Graph:
    """Graphs of up to 7 operations: several outputs, results, workspace, constant memory, values
    of zero bytes, operations that run once, some of which renew a value, some whose order is fixed,
    a boundary."""
    count = draw_from(st.integers(2, max_operations))
    boundary = draw_from(st.one_of(st.none(), st.integers(1, count - 1)))
    operations: list[Operation] = []
    values: list[Value] = []
    for op in range(count):
        inputs = (
            draw_from(st.sets(st.sampled_from(range(len(values))), max_size=3)) if values else set()
        )
        room = max_values - len(values) - (count - op - 1)
        outputs = draw_from(st.integers(1, 2 if room > 1 else 1))
        first = len(values)
        values += [Value(f"v{first + i}", draw_from(st.integers(0, 6))) for i in range(outputs)]
        operations.append(
            Operation(
                name=f"op{op}",
                inputs=tuple(sorted(inputs)),
                outputs=tuple(range(first, first + outputs)),
                cost_s=float(draw_from(st.integers(0, 5))),
                workspace_bytes=draw_from(st.sampled_from((0, 0, 0, 1, 3))),
                backward=boundary is not None and op >= boundary,
                recomputable=op != boundary
                and draw_from(st.sampled_from((True, True, True, False))),
                order_sensitive=draw_from(st.sampled_from((False, False, True))),
            )
        )
    results = draw_from(st.sets(st.sampled_from(range(len(values))), max_size=3))
    changed = overwriting(draw_from, operations, values, results)
    return Graph(
        renewing(draw_from, changed, results) if renews else changed,
        tuple(values),
        results=frozenset(results),
        constant_bytes=draw_from(st.sampled_from((0, 0, 5))),
        boundary=boundary,
    )


@st.composite
def tight_cases(
    draw_from: st.DrawFn, max_operations: int = 7, max_values: int = 10
) -> tuple[Graph, int]:
    """A graph and a budget that mostly needs recomputation.

    An early value is read last, and an operation in between needs memory. Some operations may
    run only once, before the boundary and after it. The budget is below the peak without
    recomputation, and at least what some operation needs, so a few are infeasible.
    """
    count = draw_from(st.integers(5, max_operations))
    crowded = draw_from(st.integers(3, count - 2))
    boundary = draw_from(st.one_of(st.none(), st.integers(2, count - 1)))
    operations: list[Operation] = []
    values: list[Value] = []
    early = 0
    for op in range(count):
        inputs = (
            draw_from(st.sets(st.sampled_from(range(len(values))), max_size=2)) if values else set()
        )
        if op == 2:
            early = draw_from(st.sampled_from(range(len(values))))
        if op == count - 1:
            inputs.add(early)
        room = max_values - len(values) - (count - op - 1)
        outputs = draw_from(st.sampled_from((1, 1, 1, 2))) if room > 1 else 1
        first = len(values)
        sizes = st.integers(1, 9) if op < 2 else st.sampled_from((0, 1, 2, 3, 5, 7))
        values += [Value(f"v{first + i}", draw_from(sizes)) for i in range(outputs)]
        operations.append(
            Operation(
                name=f"op{op}",
                inputs=tuple(sorted(inputs)),
                outputs=tuple(range(first, first + outputs)),
                cost_s=float(draw_from(st.integers(1, 9))),
                workspace_bytes=draw_from(
                    st.integers(6, 12) if op == crowded else st.sampled_from((0, 0, 4, 8))
                ),
                backward=boundary is not None and op >= boundary,
                recomputable=op != boundary and (op < 2 or draw_from(st.integers(0, 3)) > 0),
                order_sensitive=draw_from(st.sampled_from((False, False, True))),
            )
        )
    chosen = draw_from(st.sets(st.sampled_from(range(len(values))), max_size=2))
    graph = Graph(
        renewing(draw_from, overwriting(draw_from, operations, values, chosen), chosen - {early}),
        tuple(values),
        results=frozenset(chosen - {early}),
        constant_bytes=draw_from(st.sampled_from((0, 0, 5))),
        boundary=boundary,
    )
    low = peak_lower_bound_bytes(graph)
    high = simulate(graph, Schedule.keep_all(graph)).peak_bytes
    assume(low < high)
    return graph, draw_from(st.integers(low, high - 1))


@st.composite
def training_graphs(draw_from: st.DrawFn, max_operations: int = 6, *, renews: bool = True) -> Graph:
    """Graphs of a forward and its backward, on most of which recomputing lowers the peak: the
    backward of an operation reads its output and the gradient before it, most forward operations
    may be recomputed, and some values have one more reader."""
    depth = max_operations // 2
    sizes = st.integers(1, 60)
    values = [Value(f"v{i}", draw_from(sizes)) for i in range(depth)]
    values += [Value(f"g{i}", draw_from(sizes)) for i in reversed(range(depth))]
    operations: list[Operation] = []
    for op in range(2 * depth):
        source = op if op < depth else 2 * depth - 1 - op
        inputs = {op - 1} if 0 < op < depth else {source} if op >= depth else set()
        inputs |= {op - 1} if op > depth else set()
        inputs |= (
            {draw_from(st.integers(0, op - 1))}
            if op and draw_from(st.integers(0, 3)) == 3
            else set()
        )
        operations.append(
            Operation(
                name=f"op{op}",
                inputs=tuple(sorted(inputs)),
                outputs=(op,),
                cost_s=float(draw_from(st.integers(0, 5))),
                workspace_bytes=draw_from(st.sampled_from((0, 0, 0, 1, 3))),
                backward=op >= depth,
                recomputable=op < depth and draw_from(st.integers(0, 4)) < 4,
            )
        )
    results = {2 * depth - 1, *draw_from(st.sampled_from(((), (), (), (0,), (1,))))}
    changed = overwriting(draw_from, operations, values, results)
    return Graph(
        renewing(draw_from, changed, results) if renews else changed,
        tuple(values),
        results=frozenset(results),
        constant_bytes=draw_from(st.sampled_from((0, 0, 5))),
        boundary=depth,
    )


def uneven_layers(layers: int = 10) -> Graph:
    """Layers of an expensive matrix product and a cheap activation, with weight gradients as
    results."""
    operations: list[Operation] = []
    values: list[Value] = []
    results: list[int] = []

    def add(name: str, inputs: list[int], sizes: list[int], cost: float, backward: bool) -> int:
        first = len(values)
        values.extend(Value(f"{name}.{i}", size) for i, size in enumerate(sizes))
        outputs = tuple(range(first, first + len(sizes)))
        reads = tuple(sorted(set(inputs)))
        operations.append(Operation(name, reads, outputs, cost, 8, backward, True, name[2:]))
        return first

    x = add("embed", [], [64], 1, False)
    saved: list[tuple[int, int, int]] = []
    for i in range(layers):
        product = add(f"mm{i}", [x], [64], 20, False)
        activation = add(f"relu{i}", [product], [64, 8], 1, False)
        saved.append((x, product, activation))
        x = activation
    values.append(Value("tangent", 1))
    start = Operation("start", (x,), (len(values) - 1,), 0, 0, True, recomputable=False)
    operations.append(start)
    gradient = len(values) - 1
    for i in reversed(range(layers)):
        before, product, activation = saved[i]
        through = add(f"d_relu{i}", [gradient, product, activation + 1], [64], 2, True)
        results.append(add(f"d_w{i}", [through, before], [16], 20, True))
        gradient = add(f"d_x{i}", [through], [64], 20, True)
    boundary = operations.index(start)
    return Graph(tuple(operations), tuple(values), frozenset(results), 32, boundary)


def random_forward_graph(count: int, seed: int) -> Graph:
    """Return a random graph without boundary or results."""
    random = Random(seed)
    operations = [
        Operation(
            name=f"op{op}",
            inputs=tuple(sorted(random.sample(range(op), min(op, random.randint(1, 3))))),
            outputs=(op,),
            cost_s=float(random.randint(1, 9)),
        )
        for op in range(count)
    ]
    values = tuple(Value(f"v{op}", random.randint(1, 9)) for op in range(count))
    return Graph(tuple(operations), values)


def runs(graph: Graph) -> st.SearchStrategy[Schedule]:
    """Schedules that recompute any operations, anywhere after their first run."""

    def build(extra: list[tuple[int, int]]) -> Schedule:
        recomputed_at: list[list[int]] = [[] for _ in graph.operations]
        for stage, op in extra:
            if op < stage and graph.operations[op].recomputable:
                recomputed_at[stage].append(op)
        return Schedule.of(
            run
            for stage in range(len(graph))
            for run in (*sorted(set(recomputed_at[stage])), stage)
        )

    last = len(graph) - 1
    pairs = st.tuples(st.integers(0, last), st.integers(0, last))
    return st.lists(pairs, max_size=8).map(build)


def stages(costs: list[int], states: list[int], tapes: list[int]) -> Graph:
    """Return a chain whose stages write a state and, for the backward only, a tape."""
    count = len(costs)
    operations: list[Operation] = []
    values: list[Value] = []
    for i in range(count):
        values += [Value(f"x{i}", states[i]), Value(f"tape{i}", tapes[i])]
        inputs = (2 * i - 2,) if i else ()
        outputs = (2 * i, 2 * i + 1)
        operations.append(
            Operation(f"f{i}", inputs, outputs, costs[i], module=f"layers.{i}.linear")
        )
    for i in reversed(range(count)):
        values.append(Value(f"g{i}", states[i]))
        inputs = (2 * i + 1, len(values) - 2) if i < count - 1 else (2 * i, 2 * i + 1)
        outputs = (len(values) - 1,)
        operations.append(Operation(f"b{i}", inputs, outputs, 2 * costs[i], backward=True))
    return Graph(tuple(operations), tuple(values), results=frozenset({len(values) - 1}))


def random_stages(seed: int, count: int = 12) -> Graph:
    """Return stages of random costs and sizes."""
    rng = random.Random(seed)
    sizes = [[rng.randint(1, 20) for _ in range(count)] for _ in range(3)]
    return stages(*sizes)
