"""A recorded step has the operators of torch's own capture, in the same order."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._functorch.config
from tests.helpers.training.models import FAMILIES, PLAIN, WithParts
from torch import fx, nn
from torch._functorch._aot_autograd import descriptors as d
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

import remat
from remat.documents.arguments import Ref, rename_refs
from remat.documents.records import Node
from remat.documents.targets import COPY_TARGET
from remat.frontend.capture import attempts
from remat.frontend.capture.model.flat_model import FlatModel
from remat.frontend.capture.reading.reader import GraphInput, JointGraph

_DETACH = "aten.detach.default"


_UNLIKE_TORCH = "shared"
"""Torch gives a parameter of two names one graph input, if the forward also writes a buffer."""

_CASES: list[Any] = [
    *((name, autocast) for name in PLAIN if name != _UNLIKE_TORCH for autocast in (False, True)),
    *((name, False) for name in ("llama", "resnet")),
    *(pytest.param(name, False, marks=pytest.mark.slow) for name in ("t5", "unet", "vit")),
    *(pytest.param(name, True, marks=pytest.mark.slow) for name in FAMILIES),
]


@pytest.mark.slow_cases("resnet-False", "llama-False")
@pytest.mark.parametrize(("name", "autocast"), _CASES)
def test_torch_records_the_same_operators(
    name: str, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {**PLAIN, **FAMILIES}[name]()

    def trace() -> remat.Trace:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return remat.trace(case.model, case.args, case.kwargs)

    recorded = trace()
    monkeypatch.setattr(attempts, "record_joint_graph", exported_joint_graph)
    assert comparable(recorded) == comparable(trace())


class WritesInBackward(torch.autograd.Function):
    """Adds one to a tensor in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        ctx.count = count
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.count.add_(1)
        return gradients[0] * 2, None


class Writes(nn.Module):
    """Writes into its input, or into its buffer, as `write` does."""

    def __init__(self, write: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        count = torch.zeros(4)
        self.register_buffer("count", count)
        self.register_buffer("part", count[:2])
        self.register_buffer("calls", torch.zeros(()))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.write(self, x))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda module, x: x + module.count.add_(1), "buffer count, which shares memory with"),
        (lambda module, x: x.t_(), "changes shape or strides of input 0 in place"),
        (
            lambda module, x: WritesInBackward.apply(module.linear(x), module.calls),
            "backward of the model writes in place",
        ),
    ],
    ids=["shared memory", "shape", "in the backward"],
)
def test_a_write_that_no_graph_can_stand_for_is_refused(
    write: Callable[[Any, torch.Tensor], torch.Tensor], message: str
) -> None:
    with pytest.raises(remat.TraceError, match=message):
        remat.trace(Writes(write), torch.randn(4, 4))
    assert not torch._is_functional_tensor(torch.zeros(2))


class Statistics:
    """An object that stores tensors."""

    def __init__(self) -> None:
        self.means: list[torch.Tensor] = []


class Slots(Statistics):
    """The same without a dictionary of attributes of its own."""

    __slots__ = ("means",)


@pytest.mark.parametrize("stores", [Statistics, Slots, deque, list], ids=lambda cls: cls.__name__)
def test_a_tensor_that_a_call_stores_is_not_read_by_the_next(stores: Callable[[], Any]) -> None:
    """The mean of the first batch would be computed in each step."""

    class Normalizes(WithParts, linear=(4, 4), statistics=stores):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            means = getattr(self.statistics, "means", self.statistics)
            if not means:
                means.append(x.mean())
            return self.linear(x - means[0])

    model = Normalizes()
    with pytest.raises(remat.TraceError, match="adds a tensor to statistics"):
        remat.trace(model, torch.randn(4, 4))
    model(torch.randn(4, 4)).sum().backward()  # on no tensor of the capture
    assert model.linear.weight.grad is not None


LAST: list[torch.Tensor] = []
mask: torch.Tensor | None = None


class MasksByGlobal(WithParts, linear=(4, 4)):
    """A model that computes a tensor in the first call, and keeps it in a global variable."""

    @torch.autocast("cpu", enabled=False)  # the function is in a wrapper
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        global mask
        if mask is None:
            mask = torch.ones(4, 4).triu()
        return self.linear(x * mask)


class StoresInGlobal(WithParts, linear=(4, 4)):
    """A model that leaves its last hidden state in a global list, and never reads it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        LAST[:] = [self.linear(x)]
        return LAST[0].tanh()


class Proxy:
    """It stands for an object that is absent, as of a request that has ended."""

    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        raise RuntimeError("working outside of a context")


REQUEST = Proxy()


class NamesProxy(WithParts, linear=(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert REQUEST is not None
        return self.linear(x)


def test_a_global_variable_that_gives_no_attributes_is_left_alone() -> None:
    assert remat.trace(NamesProxy(), torch.randn(4, 4)).nodes


def test_a_tensor_in_a_global_variable_is_not_read_by_the_next_call() -> None:
    model, x = MasksByGlobal(), torch.randn(4, 4)
    with pytest.raises(remat.TraceError, match=r"stores a tensor in .*\.mask, which a planned"):
        remat.trace(model, x)
    assert mask is None
    model(x).sum().backward()
    assert isinstance(mask, torch.Tensor)


def test_a_tensor_of_the_capture_does_not_stay_in_a_global_variable() -> None:
    with pytest.raises(remat.TraceError, match=r"stores a tensor in .*\.LAST, which a planned"):
        remat.trace(StoresInGlobal(), torch.randn(4, 4))
    assert not LAST


def test_later_calls_count_if_the_first_one_changes_what_a_module_stores() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.seen: deque[float] = deque(maxlen=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            y = y + self.seen[-1] if self.seen else y
            self.seen.append(1.0)
            return y

    trace = remat.trace(Counts(), torch.randn(4, 4))
    assert "aten.add.Tensor" in {node.target for node in trace.nodes}


def test_operations_of_the_backward_belong_to_the_module_of_their_forward() -> None:
    class Residual(WithParts, first=(4, 4), last=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            return hidden.sin() + self.last(hidden)

    nodes = remat.trace(Residual(), torch.randn(4, 4)).nodes
    modules = {(n.target, n.module) for n in nodes if n.backward}
    assert {("aten.mm.default", "last"), ("aten.sum.dim_IntList", "first")} <= modules
    assert {("aten.cos.default", ""), ("aten.add.Tensor", "")} <= modules


def test_a_higher_order_operator_is_named_in_the_error() -> None:
    def branch(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with pytest.raises(remat.TraceError, match="uses cond, which is not a single operator"):
        remat.trace(Writes(branch), torch.randn(4, 4))


class Initialises(nn.Module):
    """Writes the mean of the first batch into a buffer."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.is_ready = True
            self.mean.copy_(x.mean(0))
        return self.linear(x - self.mean)


def test_a_write_of_the_first_call_alone_is_refused() -> None:
    model = Initialises()
    with pytest.raises(remat.TraceError, match="only the first call of Initialises writes into bu"):
        remat.trace(model, torch.randn(4, 4))
    model = Initialises()
    model(torch.randn(4, 4))
    assert not any(
        node.target == COPY_TARGET for node in remat.trace(model, torch.ones(4, 4)).nodes
    )


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda module, x: torch.from_numpy(x.detach().numpy()), "Tensor.numpy of a tensor witho"),
        (lambda module, x: torch.tensor(x.tolist()), "a branch, index or shape depends on tensor"),
        (lambda module, x: x * x.data_ptr(), "Tensor.data_ptr of a tensor without data"),
        (lambda module, x: (module.linear(x).sum().backward(), x)[1], r"calls backward\(\)"),
    ],
    ids=["numpy", "tolist", "address", "backward"],
)
def test_a_step_outside_of_operators_is_refused(
    read: Callable[[Any, torch.Tensor], torch.Tensor], message: str
) -> None:
    with pytest.raises(remat.TraceError, match=message):
        remat.trace(Writes(read), torch.randn(4, 4))


def test_constants_of_the_model_may_be_read() -> None:
    def read(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return x * sum(torch.arange(4).tolist()) * float(torch.ones(2).numpy().sum())

    assert "aten.mul.Tensor" in {
        n.target for n in remat.trace(Writes(read), torch.ones(4, 4)).nodes
    }


def test_a_parameter_that_is_a_buffer_too_is_captured() -> None:
    model = Writes(lambda module, x: x * module.same.sum())
    model.register_buffer("same", model.linear.weight)
    assert remat.trace(model, torch.randn(4, 4)).nodes


def comparable(trace: remat.Trace) -> remat.Trace:
    """Return the trace without `detach`, of which torch's capture has more; without arguments that
    are None as by default, which it leaves out; and without paths of modules and the outputs that a
    gradient comes from, which it does not record."""
    detached = {n.name: n for n in trace.nodes if n.target == _DETACH}

    def origin(name: str) -> str:
        while name in detached:
            operand = detached[name].args[0]
            assert isinstance(operand, Ref)
            name = operand.name
        return name

    def comparable_node(node: Node) -> Node:
        return node.model_copy(
            update={
                "args": tuple(rename_refs(item, origin) for item in node.args),
                "kwargs": {
                    key: rename_refs(item, origin)
                    for key, item in node.kwargs.items()
                    if item is not None
                },
                "module": "",
            }
        )

    return trace.model_copy(
        update={
            "nodes": tuple(comparable_node(n) for n in trace.nodes if n.name not in detached),
            "outputs": tuple(
                output.model_copy(update={"name": origin(output.name)}) for output in trace.outputs
            ),
            "gradients": tuple(g.model_copy(update={"sources": ()}) for g in trace.gradients),
        }
    )


def exported_joint_graph(flat_model: FlatModel, leaves: Sequence[torch.Tensor]) -> JointGraph:
    """Return the joint graph that torch exports, in place of `record_joint_graph`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch._functorch.config.patch(backward_pass_autocast="off"))
        exported = aot_export_joint_with_descriptors(stack, flat_model, tuple(leaves))
    module = exported.graph_module
    output = module.graph.find_nodes(op="output")[0]
    inputs = {}
    for node in module.graph.nodes:
        node.meta["module"] = ""
        node.meta["is_backward"] = node.meta.get("partitioner_tag") == "is_backward"
        if node.op == "placeholder":
            inputs[node] = _graph_input(node.meta["desc"])
    nodes = {key: node for node, key in inputs.items()}
    results: list[tuple[fx.Node, Any]] = [
        (node, desc)
        for node, desc in zip(output.args[0], output.meta["desc"], strict=True)
        if node is not None
    ]
    constants = {str(n.target) for n in module.graph.find_nodes(op="get_attr")}
    return JointGraph(
        graph=module.graph,
        constants={name: getattr(module, name) for name in constants},
        inputs=inputs,
        writes=[
            (nodes[_graph_input(desc.mutated_input)], node)
            for node, desc in results
            if isinstance(desc, d.InputMutationAOTOutput)
        ],
        outputs=[node for node, desc in results if isinstance(desc, d.PlainAOTOutput)],
        gradients=[
            (nodes[_graph_input(desc.grad_of)], node)
            for node, desc in results
            if isinstance(desc, d.GradAOTOutput)
        ],
        sources=[frozenset() for _, desc in results if isinstance(desc, d.GradAOTOutput)],
    )


def _graph_input(desc: Any) -> GraphInput:
    match desc:
        case d.ParamAOTInput():
            return GraphInput("parameter", desc.target.removeprefix("model."))
        case d.BufferAOTInput():
            return GraphInput("buffer", desc.target.removeprefix("model."))
        case d.TangentAOTInput():
            return GraphInput("tangent", str(desc.output.idx))
    return GraphInput("input", str(desc.idx))
