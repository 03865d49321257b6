"""What Inductor writes over what it has read for the last time: foreseen, planned, measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compilers import needs_compiler
from tests.harness import Case
from tests.test_compile import blocks, convolutions, measured_peak, plans_of
from torch._inductor import ir
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.virtualized import V

import remat
from remat.frontend.compile.inductor import peak_check
from remat.graph import Graph, Operation, Value
from remat.schedule import Schedule
from remat.simulate import simulate

pytestmark = [needs_compiler, pytest.mark.usefixtures("compiled_anew")]


@pytest.mark.slow
@pytest.mark.parametrize("make", [blocks, convolutions])
def test_inductor_does_what_was_foreseen(
    make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    foreseen: set[tuple[int, str, str]] = set()
    done: set[tuple[int, str, str]] = set()
    graphs: dict[int, Any] = {}  # those that code was generated for, not the observed ones
    ask, write = peak_check.overwritten, PythonWrapperCodegen.codegen_inplace_reuse
    generate = PythonWrapperCodegen.generate

    def asked(nodes: Any, given: Any) -> dict[str, str]:
        found = ask(nodes, given)
        foreseen.update((id(V.graph), made, before) for made, before in found.items())
        graphs[-id(V.graph)] = V.graph  # so that no other takes its number
        return found

    def written(self: Any, before: ir.Buffer, made: ir.Buffer) -> None:
        done.add((id(V.graph), made.get_name(), before.get_name()))
        write(self, before, made)

    def generated(self: Any, is_inference: bool) -> Any:
        graphs[id(V.graph)] = V.graph
        return generate(self, is_inference)

    monkeypatch.setattr(peak_check, "overwritten", asked)
    monkeypatch.setattr(PythonWrapperCodegen, "codegen_inplace_reuse", written)
    monkeypatch.setattr(PythonWrapperCodegen, "generate", generated)
    options = {"budget": "90%", "time_limit": 5.0}
    (compiled,) = plans_of({"backend": "remat", "options": options}, make())
    ours = {each for each in foreseen if each[0] in graphs}
    assert len({graph for graph, _, _ in ours}) >= 2  # forward and backward, of each round
    assert ours <= done
    operations = compiled.plan.graph.operations
    assert not any(o.overwrites for o in operations if o.recomputable or not o.backward)


@pytest.mark.slow
def test_the_smallest_peak_counts_on_it() -> None:
    """The peak of the blocks is at an activation's gradient, which is written over another."""
    case, options = blocks(), {"budget": "min", "time_limit": 5.0}
    run = torch.compile(case.model, backend="remat", options=options)
    measured = measured_peak(case, run)
    compiled = remat.compiled_plans()[-1]
    plan = compiled.plan
    counted = [
        v for o in plan.graph.operations for v in o.overwrites if plan.graph.values[v].size_bytes
    ]
    assert counted
    assert compiled.verified_bytes is not None
    assert 0.95 * plan.peak_bytes <= compiled.verified_bytes <= 1.01 * plan.peak_bytes
    assert measured == pytest.approx(compiled.verified_bytes, rel=0.02)


def test_what_is_read_later_is_not_overwritten() -> None:
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
