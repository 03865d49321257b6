"""A recorded step has the operators of torch's own capture, in the same order."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
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
from remat.frontend.capture import attempts
from remat.frontend.capture.model.flat_model import FlatModel
from remat.frontend.capture.model.values import is_plain_value
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


def test_constants_of_the_model_may_be_read() -> None:
    class Reads(WithParts, linear=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            constant = sum(torch.arange(4).tolist()) * float(torch.ones(2).numpy().sum())
            return self.linear(x * constant)

    nodes = remat.trace(Reads(), torch.ones(4, 4)).nodes
    assert "aten.mul.Tensor" in {node.target for node in nodes}


def test_a_write_leaves_the_values_of_constants_in_other_memory() -> None:
    class Reads(WithParts, linear=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions, mask = torch.arange(4), torch.full((4,), float("nan"))
            array = positions.numpy()
            del positions
            array[0] = 2  # only NumPy sees it
            assert torch.isnan(mask).all()
            assert np.isnan(mask.numpy()).all()
            mask.fill_(1)
            hot = torch.nn.functional.one_hot(torch.arange(4), 4)
            return self.linear(x * mask) * hot.sum().item() * float(array[0])

    model, x = Reads(), torch.ones(4, 4)
    trace = remat.trace(model, x)
    constants = [a for node in trace.nodes if node.target == "aten.mul.Tensor" for a in node.args]
    assert {4, 2.0} <= set(filter(is_plain_value, constants))


def test_a_parameter_that_is_a_buffer_too_is_captured() -> None:
    class Same(WithParts, linear=(4, 4)):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x * self.same.sum())

    model = Same()
    model.register_buffer("same", model.linear.weight)
    assert remat.trace(model, torch.randn(4, 4)).nodes


def comparable(trace: remat.Trace) -> remat.Trace:
    """Return the trace without `detach`, of which torch's capture has more; without arguments that
    are None as by default, which it leaves out; and without paths of modules, checkpoints, held
    tensors and the outputs that a gradient comes from, which it does not record."""
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
                "checkpoint": 0,
                "is_saved": False,
                "frees": (),
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
