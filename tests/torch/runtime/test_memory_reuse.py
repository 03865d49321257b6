"""Operations of the backward that write their result over an argument that nothing reads later."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._ops import OpOverload

import remat
from remat.allocator.prediction import step_allocation_events
from remat.allocator.replay import replay_events
from remat.documents.arguments import Ref
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.documents.writes import OUT_VARIANTS, OutVariant
from remat.errors import DocumentError
from remat.frontend.common.operators import resolve_operator, resolve_out_variant
from remat.frontend.memory.meter import measure_step
from remat.frontend.runtime.lower import lower_program


class Activations(nn.Module):
    """A chain of linear layers and activation functions with a backward of their own."""

    def __init__(self) -> None:
        super().__init__()
        functions = (nn.GELU(), nn.SiLU(), nn.Tanh(), nn.ReLU(), nn.Softplus(), nn.LeakyReLU())
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), function) for function in functions)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def measured_trace() -> Trace:
    torch.manual_seed(0)
    trace = remat.trace(Activations(), torch.randn(64, 16))
    return remat.measure(trace, remat.Roofline("cpu"))


def overloads(target: str) -> tuple[OpOverload, OpOverload]:
    """Return the functional overload of a target and the one with `out=`."""
    operation, variant = resolve_operator(target), resolve_out_variant(target)
    assert isinstance(operation, OpOverload)
    assert isinstance(variant, OpOverload)
    return operation, variant


@pytest.mark.parametrize("target", OUT_VARIANTS)
def test_an_out_variant_takes_the_same_arguments(target: str) -> None:
    operation, variant = overloads(target)
    assert torch.Tag.generated not in variant.tags  # would copy its result
    *arguments, out = variant._schema.arguments
    assert [(a.name, str(a.type)) for a in arguments] == [
        (a.name, str(a.type)) for a in operation._schema.arguments
    ]
    assert out.is_out
    assert out.name == OUT_VARIANTS[target].out_name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("target", OUT_VARIANTS)
def test_writing_over_the_first_argument_gives_the_same_result(
    target: str, dtype: torch.dtype
) -> None:
    """Small and large enough for several threads, transposed, and with a second operand of one
    row."""
    operation, variant = overloads(target)
    *schemas, out = variant._schema.arguments
    generator = torch.Generator().manual_seed(0)

    def arguments_of(shape: tuple[int, ...], is_transposed: bool, second_rows: int) -> list[object]:
        arguments: list[object] = []
        for schema in schemas:
            if str(schema.type) == "Tensor":
                rows = second_rows if arguments else shape[0]
                tensor = torch.rand(rows, shape[1], generator=generator).to(dtype)
                arguments.append(tensor.t().contiguous().t() if is_transposed else tensor)
            elif not schema.kwarg_only and str(schema.type) != "bool":
                arguments.append({"exponent": 3, "threshold": 0.5}.get(schema.name, 1))
            elif not schema.kwarg_only:
                arguments.append(False)
        return arguments

    names = {schema.name for schema in schemas}
    options = (
        [{"approximate": word} for word in ("none", "tanh")] if "approximate" in names else [{}]
    )
    for shape, is_transposed, rows in [
        ((33, 65), False, 33), ((1100, 64), False, 1100),
        ((33, 65), True, 33), ((33, 65), False, 1),
    ]:  # fmt: skip
        if rows != shape[0] and target.rpartition(".")[0].endswith("_backward"):
            continue  # takes tensors of one shape
        for keywords in options:
            arguments = arguments_of(shape, is_transposed, rows)
            expected = operation(*arguments, **keywords)
            first = arguments[0]
            assert isinstance(first, torch.Tensor)
            copied = torch.empty_like(first).copy_(first)  # preserves the strides
            result = variant(copied, *arguments[1:], **keywords, **{out.name: copied})
            assert result is copied
            assert torch.equal(result, expected)
            assert result.stride() == expected.stride()


@pytest.mark.slow
def test_reuse_lowers_the_peak_and_changes_no_gradient() -> None:
    torch.manual_seed(0)
    model = Activations()
    x = torch.randn(4096, 16)
    eager = torch.autograd.grad(model(x), list(model.parameters()))
    gm = remat.optimize(model, "min", x, costs=remat.Roofline("cpu"), split="off")
    program, plan = gm.program, gm.plan
    assert program is not None
    assert plan is not None
    assert sum(bool(s.overwrites) for s in program.backward) >= 5

    def step() -> None:
        gm(x).backward()

    assert measure_step(step, [*gm.parameters(), x]).peak_bytes == plan.peak_bytes
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), eager, strict=True))
    without = remat.solve(without_reuse(plan.graph), "min")
    assert plan.peak_bytes <= without.peak_bytes
    assert plan.overhead < without.overhead


def test_a_backward_that_runs_twice_reads_the_same_tensors() -> None:
    """Nothing that the forward saved is overwritten, nor the gradient that the caller passes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Tanh())
    gm = remat.optimize(model, "100%", torch.randn(4, 8), costs=remat.Roofline("cpu"))
    x, tangent = torch.randn(4, 8), torch.randn(4, 8)
    passed = tangent.clone()
    y = gm(x)
    parameters = list(model.parameters())
    first = torch.autograd.grad(y, parameters, passed, retain_graph=True)
    second = torch.autograd.grad(y, parameters, passed)
    assert all(map(torch.equal, first, second))
    assert torch.equal(passed, tangent)


def test_only_temporaries_of_the_backward_are_overwritten() -> None:
    trace = measured_trace()
    backward = {r.storage for n in trace.nodes if n.backward and not n.view for r in n.results}
    gradients = {trace.storage_of[g.name] for g in trace.gradients}
    storages = {trace.storage_of[name] for name in trace.reusable_arguments.values()}
    assert len(storages) == len(trace.reusable_arguments) >= 5
    assert storages <= backward - gradients


def test_the_allocator_gets_no_request_for_memory_that_is_reused() -> None:
    trace = measured_trace()
    schedule = remat.Schedule.keep_all(trace.graph())
    events = list(step_allocation_events(trace, schedule, steps=1))
    peak_bytes = remat.simulate(trace.graph(), schedule).peak_bytes
    assert replay_events(events).requested_bytes == peak_bytes
    allocations = [e for e in events if e.size_bytes is not None]
    assert len(allocations) == len({e.key for e in allocations})


def with_statement(program: Program, index: int, **changes: object) -> Program:
    """Return the program with one statement of the backward changed, validated."""
    changed = program.backward[index].model_copy(update=changes)
    backward = (*program.backward[:index], changed, *program.backward[index + 1 :])
    fields = {name: getattr(program, name) for name in Program.model_fields}
    return Program(**fields | {"backward": backward})


def test_a_program_cannot_overwrite_what_it_reads_later() -> None:
    trace = measured_trace()
    program = remat.rewrite(trace, remat.Schedule.keep_all(trace.graph()))
    assert Program.from_json(program.to_json()) == program
    index, saved = next(
        (index, name)
        for index, statement in enumerate(program.backward)
        for name in statement.operand_names
        if statement.overwrites and name in program.saved
    )
    statement = program.backward[index]
    with pytest.raises(ValueError, match="must not overwrite"):
        with_statement(program, index, target="aten.mm.default")
    with pytest.raises(ValueError, match="must not overwrite"):
        with_statement(program, index, overwrites=saved)
    with pytest.raises(ValueError, match="must not overwrite"):
        with_statement(program, index, args=tuple(reversed(statement.args)))
    with pytest.raises(ValueError, match=f"reads {statement.overwrites} after it was overwritten"):
        with_statement(program, index + 1, args=(Ref(statement.overwrites),))


@pytest.mark.parametrize(
    ("target", "arguments"), [("aten.alias.default", ()), ("aten._unsafe_view.default", ((-1,),))]
)
def test_a_program_cannot_overwrite_a_view_of_a_saved_tensor(
    target: str, arguments: tuple[tuple[int, ...], ...]
) -> None:
    trace = measured_trace()
    program = remat.rewrite(trace, remat.Schedule.keep_all(trace.graph()))
    statement = next(s for s in program.backward if s.overwrites)
    index = next(
        i for i, s in enumerate(program.backward)
        if statement.overwrites in {binding.name for binding in s.results}
    )  # fmt: skip
    saved = program.saved[0]
    viewed = with_statement(program, index, target=target, args=(Ref(saved), *arguments))
    with pytest.raises(DocumentError, match=f"{statement.overwrites}, which is a view of {saved}"):
        lower_program(viewed)


def test_a_variant_that_torch_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = {**OUT_VARIANTS, "aten.mm.default": OutVariant("aten.mm.nowhere", "out")}
    monkeypatch.setattr("remat.frontend.common.operators.OUT_VARIANTS", variants)
    with pytest.raises(DocumentError, match=r"has no operation mm\.nowhere"):
        resolve_out_variant("aten.mm.default")


def without_reuse(graph: remat.Graph) -> remat.Graph:
    """Return the graph in which no operation overwrites an argument."""
    return replace(graph, operations=tuple(replace(o, overwrites=()) for o in graph.operations))
