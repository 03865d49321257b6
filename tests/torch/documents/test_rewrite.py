"""`rewrite`: the statements of a program, on small traces."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.helpers.programs import keep_all, recompute_all, traced
from tests.helpers.training.models import PLAIN, Case, WithParts
from tests.helpers.training.recorded_steps import assert_same, eager_step, run_step
from torch import nn
from torch._ops import OpOverload

import remat
from remat.documents.arguments import Ref, referenced_names
from remat.documents.program import Statement
from remat.documents.targets import ACCUMULATE_TARGET, ADD_INTO_TARGET, COPY_TARGET
from remat.documents.trace import Trace
from remat.errors import GraphError
from remat.frontend.common.operators import resolve_operator
from remat.passes.gradient_accumulation import with_gradient_accumulation
from remat.rewrite import (
    BATCH_NORM,
    BATCH_NORM_RECOMPUTES,
    BATCH_NORM_WITHOUT_STATS,
    tensor_of_variable,
)


class Net(WithParts, linear=(8, 8), norm=lambda: nn.BatchNorm1d(8)):
    """Linear, dropout, a view that the backward reads, batch norm; it contains the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(nn.functional.dropout(self.linear(x), 0.5))
        h = self.norm(h.view(4, 4, 8).transpose(0, 1).reshape(16, 8))
        return torch.sigmoid(h).square().mean()


@pytest.fixture(scope="module")
def net() -> Trace:
    torch.manual_seed(0)
    return traced(Net(), torch.randn(16, 8))


def reads(statement: Statement) -> set[str]:
    used = set(statement.operand_names)
    return used | ({statement.rng_state} if statement.rng_action == "replay" else set())


def only(statements: tuple[Statement, ...], target: str) -> Statement:
    (statement,) = [s for s in statements if s.target == target]
    return statement


def view_targets(trace: Trace) -> set[str]:
    return {node.target for node in trace.nodes if node.view}


def test_keep_all_runs_every_operation_once(net: Trace) -> None:
    program = keep_all(net)
    for phase, backward in ((program.forward, False), (program.backward, True)):
        expected = [n.target for n in net.nodes if not n.view and n.backward == backward]
        targets = [s.target for s in phase if s.target not in view_targets(net)]
        assert targets == expected
        assert not any(s.recomputation or s.rng_action for s in phase)
    assert (
        program.predicted_peak_bytes
        == remat.simulate(net.graph(), remat.Schedule.keep_all(net.graph())).peak_bytes
    )


def test_views_are_recreated_where_they_are_read(net: Trace) -> None:
    """A view is neither saved nor retained: the owner of its storage is."""
    views = {r.name for node in net.nodes if node.view for r in node.results}
    assert views
    for program in (keep_all(net), recompute_all(net)):
        assert not views & set(program.saved)
        written = [
            b.name for s in program.backward for b in s.results if b.name.split("__")[0] in views
        ]
        assert written, "the backward of a linear layer reads a transposed view"
        for phase in (program.forward, program.backward):
            for statement in phase:
                if statement.target in view_targets(net):
                    assert not statement.recomputation
                    assert not statement.rng_action


def test_views_of_a_recomputed_value_show_the_new_copy(net: Trace) -> None:
    """Every read is of the latest copy of a value, or of a view of it."""
    program = recompute_all(net, times=2)
    is_view = {r.name: node.view for node in net.nodes for r in node.results}
    latest: dict[str, str] = {}  # value -> the variable of its latest copy
    copy_of: dict[
        str, tuple[str, str]
    ] = {}  # variable -> the value that it is or views, and its copy
    looked: set[tuple[str, str]] = set()
    for statement in program.backward:
        sources = [copy_of[variable] for variable in reads(statement) if variable in copy_of]
        for source_value, variable in sources:
            assert latest[source_value] == variable, statement
        for bound in statement.results:
            name = bound.name.split("__")[0]
            if not is_view[name]:
                latest[name] = bound.name
                copy_of[bound.name] = (name, bound.name)
            elif sources:
                (copy_of[bound.name],) = sources
                looked.add((statement.target, bound.name))
    for target in ("aten.view.default", "aten.transpose.int", "aten._unsafe_view.default"):
        assert len([name for seen, name in looked if seen == target]) >= 2, "one in each round"


def test_a_batch_norm_updates_its_statistics_once(net: Trace) -> None:
    program = recompute_all(net, times=2)
    first = only(program.forward, BATCH_NORM)
    reruns = [s for s in program.backward if s.target == BATCH_NORM_WITHOUT_STATS]
    assert len(reruns) == 2
    for rerun in reruns:
        assert rerun.recomputation
        assert rerun.args[1:3] == first.args[1:3]  # weight and bias
        assert rerun.args[3:] == first.args[5:]  # without the running statistics
        assert all(b.position < 3 for b in rerun.results)
    assert not any(s.target in (BATCH_NORM, COPY_TARGET) for s in program.backward)
    assert sum(s.target == COPY_TARGET for s in program.forward) == 3


@pytest.mark.parametrize("target", BATCH_NORM_RECOMPUTES)
def test_a_recomputed_batch_norm_keeps_its_arguments_by_name(target: str) -> None:
    """As torch names them. Where it needs statistics, tensors of their shape and dtype stand in;
    its updates of those come last and are dropped."""
    rerun = BATCH_NORM_RECOMPUTES[target]
    operations = resolve_operator(target), resolve_operator(rerun.target)
    first, second = (op._schema for op in operations if isinstance(op, OpOverload))
    stands_for = {"running_mean": "bias", "running_var": "weight"}
    argument_names = [first.arguments[i].name for i in rerun.arguments]
    assert argument_names == [stands_for.get(a.name, a.name) for a in second.arguments]
    assert rerun.results == len(first.returns) - 2


def test_statistics_come_from_the_first_run(net: Trace) -> None:
    graph = net.graph()
    targets = [node.target if node else "" for node in net.operations]
    norm = targets.index(BATCH_NORM)
    runs = list(range(len(graph)))
    runs.insert(norm + 1, norm)  # before the statistics are copied into the buffers
    program = remat.rewrite(net, remat.Schedule(tuple(runs)))
    statistics = {b.name for b in only(program.forward, BATCH_NORM).results}
    written = [s.args[1] for s in program.forward if s.target == COPY_TARGET]
    assert [ref.name in statistics for ref in written if isinstance(ref, Ref)].count(True) == 2
    (rerun,) = [s for s in program.forward if s.recomputation]
    assert not {b.name for b in rerun.results} & {r for a in written for r in referenced_names(a)}
    assert {b.position for b in rerun.results} == {0, 1, 2}


def test_an_operation_may_have_any_name(net: Trace) -> None:
    """Also a name of another library, before remat's own in the alphabet or after it."""
    same = only(keep_all(net).forward, BATCH_NORM)
    for name in ("acme.norm.default", "zeta.norm.default"):
        nodes = tuple(
            n.model_copy(update={"target": name}) if n.target == BATCH_NORM else n
            for n in net.nodes
        )
        statement = only(keep_all(net.replace(nodes=nodes)).forward, name)
        assert len(statement.results) > 1
        assert statement == same.model_copy(update={"target": name})


def test_dropout_is_replayed_from_its_rng_state(net: Trace) -> None:
    assert not keep_all(net).rng_states
    program = recompute_all(net, times=2)
    (saved,) = [s for s in program.forward if s.rng_action]
    replays = [s for s in program.backward if s.rng_action]
    assert saved.rng_action == "save"
    assert [s.rng_action for s in replays] == ["replay", "replay"]
    assert {s.rng_state for s in (saved, *replays)} == set(program.rng_states)
    assert {s.device for s in (saved, *replays)} == {"cpu"}
    assert {s.target for s in (saved, *replays)} == {saved.target}


def test_a_replay_within_the_forward_saves_no_state(net: Trace) -> None:
    graph = net.graph()
    op = next(i for i, n in enumerate(net.operations) if n is not None and n.random)
    runs = list(range(len(graph)))
    runs.insert(op + 1, op)
    program = remat.rewrite(net, remat.Schedule(tuple(runs)))
    assert [s.rng_action for s in program.forward if s.rng_action] == ["save", "replay"]
    assert not program.rng_states


@pytest.mark.parametrize("name", ["mlp", "norms", "two-heads", "alias", "tied", "weights"])
@pytest.mark.parametrize("rewritten", [keep_all, recompute_all])
def test_the_forward_saves_what_the_backward_reads(name: str, rewritten) -> None:
    """Exactly that is saved; outputs and gradients are complete."""
    torch.manual_seed(0)
    case = PLAIN[name]()
    trace = traced(case.model, *case.args, **case.kwargs)
    program = rewritten(trace)
    computed = {b.name for s in program.backward for b in s.results}
    not_saved = {p.name for p in program.placeholders if p.kind in ("tangent", "constant")}
    read = {name for s in program.backward for name in reads(s)}
    read |= {g.name for g in program.gradients}
    assert read - computed - not_saved == {*program.saved, *program.rng_states}
    assert [o.tangent for o in program.outputs] == [o.tangent for o in trace.outputs]
    assert [g.placeholder for g in program.gradients] == [g.placeholder for g in trace.gradients]
    assert program.result == trace.result


@pytest.mark.parametrize("name", ["mlp", "norms", "two-heads", "alias", "tied", "weights"])
def test_every_computed_value_is_read(name: str) -> None:
    """Every variable has a reader, every statement a variable or an effect."""
    torch.manual_seed(0)
    case = PLAIN[name]()
    program = keep_all(traced(case.model, *case.args, **case.kwargs))
    ends = {
        "forward": {*(o.name for o in program.outputs), *program.saved, *program.rng_states},
        "backward": {g.name for g in program.gradients},
    }
    for phase, statements in (("forward", program.forward), ("backward", program.backward)):
        read = ends[phase] | {name for s in statements for name in reads(s)}
        for statement in statements:
            assert statement.results or statement.target in (COPY_TARGET, ADD_INTO_TARGET), (
                statement
            )
            assert all(b.name in read for b in statement.results), statement


def test_accumulation_adds_each_gradient_as_soon_as_it_is_computed(net: Trace) -> None:
    trace = with_gradient_accumulation(net)
    assert with_gradient_accumulation(trace) is trace
    trace = remat.measure(trace, remat.Roofline("cpu"))
    program = keep_all(trace)
    assert program.accumulates_gradients
    # As if read from a file: equal strings are different objects.
    read = tuple(n.model_copy(update={"target": "".join([*n.target])}) for n in trace.nodes)
    assert keep_all(trace.replace(nodes=read)) == program
    sinks = [s for s in program.backward if s.target == ACCUMULATE_TARGET]
    owners = {g.placeholder: g.name for g in net.gradients}
    assert {s.args for s in sinks} == {(Ref(owner), Ref(g)) for owner, g in owners.items()}
    assert {g.name for g in program.gradients} == {f"accumulate_{owner}" for owner in owners}
    for at, statement in enumerate(program.backward):
        if statement.target == ACCUMULATE_TARGET:
            gradient = statement.args[1]
            before = program.backward[at - 1]
            assert isinstance(gradient, Ref)
            assert before.target == ACCUMULATE_TARGET or gradient.name in (
                reads(before) | {b.name for b in before.results}
            )
    extra = program.predicted_peak_bytes - keep_all(net).predicted_peak_bytes
    gradients = sum(p.tensor.shape[0] * (p.tensor.stride[0] if p.tensor.stride else 1) * 4
                    for p in trace.placeholders if p.name in owners)  # fmt: skip
    assert 0 < extra <= gradients


def test_tied_parameters_have_one_gradient() -> None:
    torch.manual_seed(0)
    case = PLAIN["tied"]()
    trace = traced(case.model, *case.args)
    for program in (keep_all(trace), recompute_all(trace)):
        (owner,) = [p for p in program.placeholders if p.kind == "parameter"]
        assert owner.aliases
        (gradient,) = program.gradients
        added = only(program.backward, ADD_INTO_TARGET)
        assert added.args[0] == Ref(gradient.name)
        assert added.args[1] != added.args[0]
        assert not added.results
        assert program.backward[-1] == added or program.backward.index(added) > max(
            i
            for i, s in enumerate(program.backward)
            if gradient.name in {b.name for b in s.results}
        )


def test_variables_of_recomputations_have_unique_names(net: Trace) -> None:
    program = recompute_all(net, times=3)
    names = [b.name for s in program.backward for b in s.results]
    assert len(names) == len(set(names))
    copies = {name for name in names if name.split("__")[0] == "tanh"}
    assert copies == {"tanh__2", "tanh__3", "tanh__4"}
    assert {tensor_of_variable(name, net.storage_of) for name in names} <= net.storage_of.keys()


@pytest.mark.parametrize(
    ("variable", "tensor"),
    [
        ("mm", "mm"),
        ("mm__2", "mm"),
        ("mm__12", "mm"),
        ("block__2", "block__2"),
        ("block__2__3", "block__2"),
        ("layer__weight", "layer__weight"),
        ("layer__weight__2", "layer__weight"),
    ],
)
def test_a_number_at_the_end_of_a_variable_is_that_of_a_copy(variable: str, tensor: str) -> None:
    """Unless the tensor itself has such a name."""
    assert tensor_of_variable(variable, {"mm", "block__2", "layer__weight"}) == tensor


class Gated(WithParts, layer=(8, 8), gate=(8, 8)):
    """A product, whose backward reads its gradient twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.tanh(self.layer(x)) * torch.sigmoid(self.gate(x))
        return product.square().mean()


def test_an_argument_is_overwritten_unless_it_is_read_later() -> None:
    """As by the second reader of a gradient, unless the first is recomputed after it."""
    trace = traced(Gated(), torch.randn(16, 8))
    operations = trace.graph().operations

    def overwritten(runs: list[int]) -> dict[str, str]:
        program = remat.rewrite(trace, remat.Schedule(tuple(runs)))
        return {s.results[0].name: s.overwrites for s in program.backward if s.overwrites}

    runs = list(range(len(operations)))
    assert overwritten(runs) == trace.reusable_arguments
    ((first, second),) = (
        (reader, op)
        for op in runs
        for reader in range(op)
        if set(operations[op].overwrites) & set(operations[reader].inputs)
    )
    runs.insert(second + 1, first)
    assert overwritten(runs).keys() == trace.reusable_arguments.keys() - {operations[second].name}


class Returned(WithParts, layers=lambda: nn.ModuleList(nn.Linear(32, 32) for _ in range(4))):
    """A module that returns its first activation, which the end of the backward reads."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = h = torch.tanh(self.layers[0](x))
        for layer in self.layers[1:]:
            h = torch.tanh(layer(h))
        return h.square().mean(), first


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_recomputed_output_stays_the_first_copy(where: str) -> None:
    """The caller holds the first copy to the end: reading a second one instead would take memory
    that the plan does not count."""
    torch.manual_seed(0)
    case = Case(Returned(), (torch.randn(64, 32),), loss=lambda out: out[0])
    trace = traced(case.model, *case.args)
    graph = trace.graph()
    assert graph.boundary is not None
    storage = trace.storage_of[trace.outputs[1].name]
    (op, output_name) = next(
        (i, r.name)
        for i, node in enumerate(trace.operations)
        for r in (node.results if node else ())
        if r.storage == storage
    )
    runs = list(range(len(graph)))
    runs.insert(graph.boundary + (where == "backward"), op)
    program = remat.rewrite(trace, remat.Schedule(tuple(runs)))
    (recomputed,) = [s for s in (*program.forward, *program.backward) if s.recomputation]
    assert recomputed.target == "aten.tanh.default"
    assert not recomputed.results
    assert output_name in program.saved
    step = run_step(remat.lower(program, copy.deepcopy(case.model)), case)
    assert_same(step, eager_step(case), tolerance=0.0)
    assert step.peak_bytes == program.predicted_peak_bytes


def test_invalid_schedules_are_refused(net: Trace) -> None:
    graph = net.graph()
    assert graph.boundary is not None
    runs = list(range(len(graph)))
    for wrong in (
        runs[:-1],
        runs[1:],
        runs[: graph.boundary],
        [*runs, len(graph)],
        [*runs, graph.boundary],
    ):
        with pytest.raises(GraphError):
            remat.rewrite(net, remat.Schedule(tuple(wrong)))


def test_rewriting_changes_no_input(net: Trace) -> None:
    before = net.to_json()
    assert recompute_all(net) == recompute_all(net)
    assert net.to_json() == before
