"""Buffers that Inductor overwrites after their last read: predicted, planned, measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers.cpp_compiler import needs_compiler
from tests.helpers.training.compiled_steps import (
    blocks,
    compiled,
    convolutions,
    measured_peak,
    plans_of,
)
from tests.helpers.training.recorded_steps import Case
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.virtualized import V

import remat
from remat.frontend.compile.inductor import peak_check
from remat.graph import Graph, Operation, Value
from remat.schedule import Schedule
from remat.simulate import simulate

pytestmark = [needs_compiler, pytest.mark.usefixtures("empty_compile_caches")]


@pytest.mark.slow
@pytest.mark.parametrize("make", [blocks, convolutions])
def test_inductor_reuses_the_predicted_buffers(
    make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    predicted_reuses: set[tuple[int, str, str]] = set()
    applied_reuses: set[tuple[int, str, str]] = set()
    graphs: dict[int, Any] = {}  # those that code was generated for, not the observed ones
    ask, write = peak_check.in_place_buffers, PythonWrapperCodegen.codegen_inplace_reuse
    generate = PythonWrapperCodegen.generate

    def predict_reuses(nodes: Any, graph_inputs: Any) -> dict[str, str]:
        reuses = ask(nodes, graph_inputs)
        predicted_reuses.update(
            (id(V.graph), new_buffer, before) for new_buffer, before in reuses.items()
        )
        graphs[-id(V.graph)] = V.graph  # kept alive, so that no other object gets its id
        return reuses

    def written(self: Any, before: ir.Buffer, new_buffer: ir.Buffer) -> None:
        applied_reuses.add((id(V.graph), new_buffer.get_name(), before.get_name()))
        write(self, before, new_buffer)

    def generated(self: Any, is_inference: bool) -> Any:
        graphs[id(V.graph)] = V.graph
        return generate(self, is_inference)

    monkeypatch.setattr(peak_check, "in_place_buffers", predict_reuses)
    monkeypatch.setattr(PythonWrapperCodegen, "codegen_inplace_reuse", written)
    monkeypatch.setattr(PythonWrapperCodegen, "generate", generated)
    (plan,) = plans_of(make(), "90%", time_limit=5.0)
    relevant = {reuse for reuse in predicted_reuses if reuse[0] in graphs}
    assert len({graph for graph, _, _ in relevant}) >= 2  # forward and backward, of each round
    assert relevant <= applied_reuses
    operations = plan.plan.graph.operations
    assert not any(o.overwrites for o in operations if o.recomputable or not o.backward)


@pytest.mark.slow
def test_the_smallest_peak_relies_on_buffer_reuse() -> None:
    """The blocks have their peak at an activation's gradient, which overwrites another one."""
    case = blocks()
    run, (smallest,), _ = compiled(case, "min", time_limit=5.0)
    measured, plan = measured_peak(case, run), smallest.plan
    counted = [
        v for o in plan.graph.operations for v in o.overwrites if plan.graph.values[v].size_bytes
    ]
    assert counted
    assert smallest.verified_bytes is not None
    assert 0.95 * plan.peak_bytes <= smallest.verified_bytes <= 1.01 * plan.peak_bytes
    assert measured == pytest.approx(smallest.verified_bytes, rel=0.02)


def test_buffers_that_are_read_later_are_not_overwritten() -> None:
    operations = (
        Operation("a", (), (0,), 1.0),
        Operation("b", (0,), (1,), 1.0, backward=True, recomputable=False, overwrites=(0,)),
        Operation("c", (1,), (2,), 1.0, backward=True),
    )
    graph = Graph(operations, tuple(Value(f"v{i}", 4) for i in range(3)), frozenset({2}))
    assert simulate(graph, Schedule.of((0, 1, 2))).during_bytes == (4, 4, 8)
    reading = (*operations[:2], Operation("c", (0, 1), (2,), 1.0, backward=True))
    graph = Graph(reading, graph.values, graph.results)
    assert simulate(graph, Schedule.of((0, 1, 2))).during_bytes == (4, 8, 12)
    assert simulate(graph, Schedule.of((0, 1, 0, 2))).during_bytes == (4, 4, 8, 12)
    assert remat.solve(graph, "min").peak_bytes == 12
