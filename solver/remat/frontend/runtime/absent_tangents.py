"""Backward graphs without the tangents of outputs that the loss does not use.

In eager mode, autograd runs no backward for such an output. Parameters that only this output
depends on keep `.grad` None, and optimizers skip them. If zeros replaced the absent tangent, these
parameters would get zeros as gradients, and infinite derivatives would give NaN.

So the backward graph is rewritten. A backward is linear in its tangents: a value that depends on
absent tangents only is absent, too. A sum with an absent summand becomes the other summand. Any
other operation with absent and present arguments reads zeros for the absent ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.graph import _BoxedCodeGen

from remat.documents.records import TensorMeta
from remat.frontend.common.operators import returns_alias
from remat.frontend.common.torch_modes import run_with_grad_mode
from remat.frontend.runtime.operations import (
    accumulate_grad,
    add_in_place,
    run_with_generator_state,
)

_ADDITION = torch.ops.aten.add.Tensor


class _Layout(NamedTuple):
    """The sizes, strides, dtype and device of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def graph_without_tangents(
    graph: fx.Graph,
    tangents: Mapping[str, TensorMeta],
    absent: Collection[str],
    needed_outputs: Sequence[bool],
    inputs: Sequence[Any],
) -> fx.Graph:
    """Return a backward graph with the same inputs that does not read the `absent` tangents.

    `tangents` has the metadata of all tangents, and `inputs` the values of the graph's inputs in
    one call, None for the absent ones. `needed_outputs` has a flag for each output: other outputs
    are None, and needed ones that depend on absent tangents only are zeros.

    Raises `NotImplementedError` if the layouts of the graph's values cannot be determined, as for
    tensors that come back from the host.
    """
    layouts = _value_layouts(graph, tangents, inputs)
    return _AbsentTangentWriter(graph, tangents, absent, layouts).written(needed_outputs)


def zeros_like_meta(meta: TensorMeta) -> torch.Tensor:
    """Return a tensor of zeros with this layout, dtype and device."""
    dtype = getattr(torch, meta.dtype)
    return _zeros_in_layout(_Layout(meta.shape, meta.stride, dtype, torch.device(meta.device)))


class _AbsentTangentWriter:
    """Writes a backward graph without absent tangents. `_new` maps present nodes of the old graph
    to new nodes; absent nodes of the old graph are in `_absent`."""

    def __init__(
        self,
        graph: fx.Graph,
        tangents: Collection[str],
        absent: Collection[str],
        layouts: Mapping[fx.Node, _Layout],
    ) -> None:
        self._old = graph
        self._value_layouts = layouts
        self._graph = fx.Graph()
        self._graph.set_codegen(_BoxedCodeGen())
        self._new: dict[fx.Node, fx.Node] = {}
        self._absent: set[fx.Node] = set()
        self._derived: set[fx.Node] = set()
        """Values that depend on a tangent."""
        self._order = {node: number for number, node in enumerate(graph.nodes)}
        for node in graph.nodes:
            if node.op == "placeholder":
                self._new[node] = self._graph.placeholder(node.name)
                if node.name in tangents:
                    self._derived.add(node)
                if node.name in absent:
                    self._absent.add(node)

    def written(self, needed_outputs: Sequence[bool]) -> fx.Graph:
        """Write the graph, and return it. `needed_outputs` has a flag for each output."""
        for node in self._old.nodes:
            if node.op == "output":
                self._write_output(node, needed_outputs)
            elif node.op != "placeholder":
                self._write(node)
        _remove_unread_nodes(self._graph)
        return self._graph

    def _write(self, node: fx.Node) -> None:
        """Write a call: unchanged, with zeros for absent arguments, or as another call; or mark its
        result as absent."""
        derived = [n for n in node.all_input_nodes if n in self._derived]
        absent = [n for n in derived if n in self._absent]
        if derived:
            self._derived.add(node)
        if not absent:
            self._copy(node)
        elif node.target is add_in_place:
            self._write_addition_in_place(node)
        elif len(absent) == len(derived):
            self._absent.add(node)
        elif node.target is _ADDITION and "alpha" not in node.kwargs:
            self._write_addition(node)
        else:
            self._copy(node)

    def _copy(self, node: fx.Node) -> None:
        """Copy a call into the new graph, with zeros for absent arguments."""
        self._new[node] = self._graph.node_copy(node, self._new_value)

    def _new_value(self, node: fx.Node) -> fx.Node:
        """Return the new node for a node of the old graph: zeros if it is absent."""
        if node not in self._absent:
            return self._new[node]
        return self._graph.call_function(_zeros_in_layout, (self._value_layouts[node],))

    def _write_addition(self, node: fx.Node) -> None:
        """Write the present summand in place of an addition: the same tensor if it has the layout
        of the sum and is not read later, else a copy in that layout."""
        (summand,) = [n for n in node.all_input_nodes if n not in self._absent]
        has_layout = self._value_layouts[summand] == self._value_layouts[node]
        if has_layout and self._is_dead_after(summand, node):
            self._new[node] = self._new[summand]
        else:
            arguments = self._new[summand], self._value_layouts[node]
            self._new[node] = self._graph.call_function(_copy_in_layout, arguments)

    def _write_addition_in_place(self, node: fx.Node) -> None:
        """Write the in-place addition of a tied weight's gradient to the total. Skip an absent
        summand; replace an absent total by a copy of the summand in the layout of the total."""
        total, summand = node.all_input_nodes
        if summand in self._absent:
            return
        arguments = self._new[summand], self._value_layouts[total]
        self._new[total] = self._graph.call_function(_copy_in_layout, arguments)
        self._absent.discard(total)

    def _is_dead_after(self, value: fx.Node, reader: fx.Node) -> bool:
        """True if no node reads the memory of `value` after `reader`, so that the value may be
        passed on. False for an input or a view."""
        if value.op == "placeholder" or _may_be_view(value):
            return False
        users = [user for user in value.users if user is not reader]
        return all(self._order[u] < self._order[reader] and not _may_be_view(u) for u in users)

    def _write_output(self, node: fx.Node, needed_outputs: Sequence[bool]) -> None:
        """Write the outputs of the graph: None for outputs that are not needed."""
        values = [
            self._new_value(item) if isinstance(item, fx.Node) and is_needed else None
            for item, is_needed in zip(node.args[0], needed_outputs, strict=True)  # type: ignore[arg-type]
        ]
        self._graph.output(values)


def _remove_unread_nodes(graph: fx.Graph) -> None:
    """Remove the calls of a graph whose results nothing reads, except in-place additions."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and node.target is not add_in_place:
            graph.erase_node(node)


def _may_be_view(node: fx.Node) -> bool:
    """True if the node may return the memory of an argument: a view, a tuple access, an operation
    that returns an argument, or a function that is not an operator of torch."""
    if not isinstance(node.target, OpOverload):
        return True
    return returns_alias(node.target)


def _value_layouts(
    graph: fx.Graph, tangents: Mapping[str, TensorMeta], inputs: Sequence[Any]
) -> dict[fx.Node, _Layout]:
    """Return the layout of each tensor of a graph, by running it on fake tensors. Raises
    `NotImplementedError` if that fails."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    remaining = iter(inputs)
    values: dict[fx.Node, Any] = {}
    try:
        with mode, torch.no_grad():
            for node in graph.nodes:
                if node.op == "placeholder":
                    value = next(remaining)
                    if node.name in tangents:
                        value = zeros_like_meta(tangents[node.name])
                    elif isinstance(value, torch.Tensor):
                        value = mode.from_tensor(value.detach())
                    values[node] = value
                elif node.op == "call_function":
                    values[node] = _run_on_fake_tensors(node, values)
    except Exception as error:  # operations on handles, or without a fake kernel
        raise NotImplementedError(str(error)) from error
    return {
        node: _Layout(tuple(value.shape), value.stride(), value.dtype, value.device)
        for node, value in values.items()
        if isinstance(value, FakeTensor)
    }


def _run_on_fake_tensors(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Return the result of a call for the fake `values` of its inputs, without side effects on
    generators and gradients."""
    args: Any = fx.map_arg(node.args, values.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, values.__getitem__)
    target: Any = node.target
    if target is accumulate_grad:
        return args[1]
    if target is run_with_generator_state:
        _, _, target, args, kwargs = args
    elif target is run_with_grad_mode:
        target, args, kwargs = args
    return target(*args, **kwargs)


def _zeros_in_layout(layout: _Layout) -> torch.Tensor:
    """Return zeros in this layout."""
    shape, stride, dtype, device = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


def _copy_in_layout(tensor: torch.Tensor, layout: _Layout) -> torch.Tensor:
    """Return a copy of a tensor in this layout."""
    shape, stride, dtype, device = layout
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(tensor)
