"""A launcher runs exactly the operations of its graph, frees dead values, and has little
overhead."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.training.models import FAMILIES
from tests.helpers.training.recorded_steps import RecordedCalls, assert_same, eager_step, run_step
from torch import fx, nn

import remat
from remat.errors import GuardError
from remat.frontend.common.operators import resolve_operator
from remat.frontend.common.pytree import flatten
from remat.frontend.runtime.guards import ModelTracker, call_signature
from remat.frontend.runtime.launcher import PYTHON_FUNCTIONS, generate_launcher

COSTS = remat.Roofline("cpu")


X = torch.rand(4, 6)
Y = torch.rand(6, 4)
IMAGE = torch.rand(1, 2, 5, 5)

CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("aten._log_softmax.default", (X, 1, False), {}),
    ("aten._softmax.default", (X, -1, False), {}),
    ("aten.add.Tensor", (X, X), {}),
    ("aten.add.Tensor", (X, X), {"alpha": 2}),
    ("aten.addmm.default", (torch.rand(4), X, Y), {}),
    ("aten.addmm.default", (torch.rand(4), X, Y), {"beta": 0.5, "alpha": 2}),
    ("aten.bernoulli.p", (X, 0.5), {}),
    ("aten.bmm.default", (X[None], Y[None]), {}),
    ("aten.cat.default", ([X, X],), {}),
    ("aten.cat.default", ([X, X], -1), {}),
    ("aten.clone.default", (X,), {}),
    ("aten.clone.default", (X,), {"memory_format": torch.contiguous_format}),
    (
        "aten.convolution.default",
        (IMAGE, torch.rand(3, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        {},
    ),
    ("aten.detach.default", (X,), {}),
    ("aten.div.Tensor", (X, X), {}),
    ("aten.expand.default", (X, [3, 4, 6]), {}),
    ("aten.expand.default", (X, [4, -1]), {}),
    ("aten.gelu.default", (X,), {}),
    ("aten.gelu.default", (X,), {"approximate": "tanh"}),
    ("aten.mm.default", (X, Y), {}),
    ("aten.mul.Tensor", (X, X), {}),
    ("aten.mul.Tensor", (X, torch.tensor(2.0)), {}),
    ("aten.native_dropout.default", (X, 0.5, True), {}),
    ("aten.native_layer_norm.default", (X, [6], X[0], None, 1e-5), {}),
    ("aten.permute.default", (X, [1, 0]), {}),
    ("aten.permute.default", (IMAGE, [-1, 0, 1, 2]), {}),
    ("aten.relu.default", (X,), {}),
    ("aten.sub.Tensor", (X, X), {"alpha": 3}),
    ("aten.sum.dim_IntList", (X, [0]), {}),
    ("aten.sum.dim_IntList", (X, [0, 1], True), {"dtype": torch.float64}),
    ("aten.sum.dim_IntList", (X, None), {}),
    ("aten.t.default", (X,), {}),
    ("aten.tanh.default", (X,), {}),
    ("aten.transpose.int", (X, 0, -1), {}),
    ("aten.unsqueeze.default", (X, 1), {}),
    ("aten.view.default", (X, [24]), {}),
    ("aten.view.default", (X, [2, -1]), {}),
]


def test_every_python_function_has_a_test_call() -> None:
    assert {target for target, _, _ in CALLS} == set(PYTHON_FUNCTIONS)


@pytest.mark.parametrize(("target", "args", "kwargs"), CALLS)
def test_a_python_function_calls_its_overload(
    target: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """With the arguments of the call, and no other overload."""
    graph = fx.Graph()
    values: list[torch.Tensor] = []

    def node(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            values.append(item)
            return graph.placeholder(f"x{len(values)}")
        return [node(inner) for inner in item] if isinstance(item, list) else item

    operator = resolve_operator(target)
    nodes = tuple(node(item) for item in args)
    graph.output([graph.call_function(operator, nodes, kwargs)])
    launch = generate_launcher(graph)
    assert PYTHON_FUNCTIONS[target] in launch.__closure__[1].cell_contents.__globals__.values()  # type: ignore[index]
    torch.manual_seed(0)
    with torch.no_grad(), RecordedCalls() as wanted:
        expected = operator(*args, **kwargs)
    torch.manual_seed(0)
    with torch.no_grad(), RecordedCalls() as reached:
        (actual,) = launch(list(values))
    assert [call[0] for call in reached.calls] == [operator]
    torch.testing.assert_close(reached.calls[0][1], wanted.calls[0][1], rtol=0, atol=0)
    assert reached.calls[0][2] == wanted.calls[0][2]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_a_number_in_place_of_a_tensor_is_not_left_to_a_python_function() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(resolve_operator("aten.mul.Tensor"), (x, 2.0))])
    launch = generate_launcher(graph)
    bound = launch.__closure__[1].cell_contents.__globals__.values()  # type: ignore[index]
    assert torch.ops.aten.mul.Tensor._op in bound
    assert torch.equal(launch([X])[0], X * 2)


def test_values_are_freed_after_their_last_use() -> None:
    """As in `_BoxedCodeGen`: inputs too, and unused values at once."""
    alive: list[list[bool]] = []
    watched: list[weakref.ref[torch.Tensor]] = []

    def refresh(*tensors: torch.Tensor) -> torch.Tensor:
        alive.append([ref() is not None for ref in watched])
        tensor = torch.zeros(1)
        watched.append(weakref.ref(tensor))
        return tensor

    graph = fx.Graph()
    first, unread = graph.placeholder("first"), graph.placeholder("boxed")
    a = graph.call_function(refresh, (first,))
    b = graph.call_function(refresh, (a,))
    graph.call_function(refresh, (b,))  # unused
    graph.output([graph.call_function(refresh, (b,))])
    inputs = [torch.zeros(1), torch.zeros(1)]
    watched += [weakref.ref(inputs[0]), weakref.ref(inputs[1])]
    generate_launcher(graph)(inputs)
    assert inputs == []
    assert alive == [
        [True, False],
        [False, False, True],
        [False, False, False, True],
        [False, False, False, True, False],
    ]
    assert unread.name == "boxed"


def test_names_and_strings_of_a_document_are_never_code() -> None:
    """Variables are numbered; strings and numbers are bound as constants."""
    graph = fx.Graph()
    x = graph.placeholder("launch")
    x._rename("g0")
    text = "floor'); raise SystemExit('"
    seen: list[Any] = []

    def take(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append((args, kwargs))
        return args[0]

    call = graph.call_function(
        take, (x, text, [1, [x, float("inf")]], torch.float16), {"from": 3, "n": -0.0}
    )
    graph.output([call])
    assert generate_launcher(graph)([X])[0] is X
    assert seen == [((X, text, [1, [X, float("inf")]], torch.float16), {"from": 3, "n": -0.0})]


def test_versions_and_views_are_tracked_below_autograd() -> None:
    """Otherwise a tensor that was saved and then written to would silently give wrong gradients."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(resolve_operator("aten.tanh.default"), (x,))
    z = graph.call_function(resolve_operator("aten.view.default"), (y, [24]))
    graph.output([y, z])
    with torch.no_grad():
        y_, z_ = generate_launcher(graph)([X])
    assert z_._is_view()
    z_.add_(1)
    assert y_._version == z_._version == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_graphs_can_be_read_copied_and_pickled(name: str) -> None:
    case = FAMILIES[name]()
    trace = remat.measure(remat.trace(case.model, case.args, case.kwargs), COSTS)
    program = remat.rewrite(trace, remat.solve(trace, "100%").schedule)
    gm = remat.lower(program, case.model)
    expected = eager_step(case)
    for twin in (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        assert_same(run_step(twin, case), expected)
        for graph in (twin.forward_graph, twin.backward_graph):
            assert "torch.ops.aten." in graph.code
            assert str(graph.graph)
            assert copy.deepcopy(graph).code == graph.code


def nested() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0)))


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "nothing is changed": lambda model: None,
    "a parameter is another": lambda model: setattr(
        model[0], "weight", nn.Parameter(torch.rand(3, 3).double())
    ),
    "a parameter's data is another": lambda model: model.double(),
    "a stride": lambda model: setattr(model[0].weight, "data", model[0].weight.data.t()),
    "frozen": lambda model: model[0].weight.requires_grad_(False),
    "a module is another": lambda model: model[1].__setitem__(0, nn.Linear(3, 3).double()),
    "a module is new": lambda model: model[1].add_module("new", nn.Linear(3, 3)),
    "a module is gone": lambda model: model[1].__delitem__(0),
    "a flag": lambda model: model.get_submodule("1.1").eval(),
    "all flags": lambda model: model.eval(),
    "a gradient": lambda model: setattr(model[0].weight, "grad", torch.zeros(3, 3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_tracker_sees_the_changes_that_a_traversal_sees(change: str) -> None:
    model = nested()
    leaves, structure = flatten(((X[:, :3],), {}), "")
    tracker = ModelTracker(model)
    before = call_signature(tracker, structure, leaves)
    CHANGES[change](model)
    tracker.refresh()
    after = call_signature(tracker, structure, leaves)
    assert after == call_signature(ModelTracker(model), structure, leaves)
    assert (after == before) == (change == "nothing is changed")
    assert (after.parameters is before.parameters) == (
        change in ("nothing is changed", "a flag", "all flags", "a gradient")
    )


def test_a_program_from_a_file_is_rechecked_after_a_change() -> None:
    model = nested()
    trace = remat.measure(remat.trace(model, (X[:, :3],)), COSTS)
    gm = remat.lower(remat.rewrite(trace, remat.solve(trace, "100%").schedule), model)
    for _ in range(2):
        gm(X[:, :3]).sum().backward()
    with pytest.raises(GuardError, match="shape"):
        gm(X[:2, :3])
    model.get_submodule("1.1").eval()
    for _ in range(2):
        with pytest.raises(GuardError, match="training flags"):
            gm(X[:, :3])
    model.train()
    gm(X[:, :3]).sum().backward()
