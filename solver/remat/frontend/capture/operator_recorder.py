"""`OperatorRecorder`: a dispatch mode that records operators in a graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from remat.errors import TraceError
from remat.frontend.capture.eager_kernels.fake_layouts import STORAGE_COPIES, in_copied_storage
from remat.frontend.capture.model.module_paths import ModulePaths
from remat.frontend.capture.reading.joint_graph import GraphInput
from remat.frontend.capture.symbol_values import SYMBOLIC_TYPES, SymbolicNumber

Tensor = torch.Tensor

_aten = torch.ops.aten


class ForeignTensorError(Exception):
    """The model reads a tensor that is none of its inputs, and no result of its operations: one
    that an earlier call or capture stored."""


class OperatorRecorder(TorchDispatchMode):
    """A mode that appends each operator to a graph. The `val` of a node is its fake result; its
    `module` is the path of the module whose forward called it, or whose backward it belongs to."""

    supports_higher_order_operators = True

    def __init__(self, module_paths: ModulePaths) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.inputs: dict[GraphInput, fx.Node] = {}
        self.is_backward = False
        self._module_paths = module_paths
        self._nodes: dict[int, tuple[fx.Node, Tensor]] = {}
        """The node of each tensor, by the tensor's `id`, with the tensor: no other gets its id."""
        self._last_input = self.graph._root

    def add_input(self, name: str, key: GraphInput, tensor: Tensor) -> None:
        """Add a placeholder after the others; `tensor` is its fake tensor."""
        with self.graph.inserting_after(self._last_input):
            self._last_input = self.inputs[key] = self.graph.placeholder(name)
        self._set_value(self._last_input, tensor)

    def node_of(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor. A tensor that no recorded operation returned is a constant:
        `torch.tensor` makes such."""
        if id(tensor) not in self._nodes:
            if isinstance(tensor, FakeTensor):
                raise ForeignTensorError(f"a tensor of shape {tuple(tensor.shape)}")
            name = f"_tensor_constant{len(self.constants)}"
            self.constants[name] = tensor
            self._set_value(self.graph.create_node("get_attr", name), tensor)
        return self._nodes[id(tensor)][0]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            raise TraceError(
                f"the model uses {func}, which is not a single operator (but a higher-order "
                "operator or the Python function of a custom kernel); run that part outside of the "
                "model"
            )
        if func is _aten.lift_fresh.default:
            func = _aten.lift_fresh_copy.default  # a constant must not be written into
        result = func(*args, **kwargs)
        if func in STORAGE_COPIES:
            result = in_copied_storage(args[0])
        if isinstance(result, (Tensor, list, tuple)):
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func: OpOverload, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        node = self.graph.create_node(
            "call_function",
            func,
            tuple(map(self._argument, args)),
            {name: self._argument(value) for name, value in kwargs.items()},
            name=self.graph._target_to_str(func.overloadpacket.__name__),
        )
        node.meta["module"] = self._module_paths.current
        node.meta["is_backward"] = self.is_backward
        self._set_value(node, result)

    def _argument(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self.node_of(item)
        if isinstance(item, (list, tuple)):
            return [self._argument(i) for i in item]
        if isinstance(item, SYMBOLIC_TYPES):
            return SymbolicNumber(item.node.expr)
        return item

    def _set_value(self, node: fx.Node, value: Any) -> None:
        node.meta["val"] = value
        if isinstance(value, Tensor):
            self._nodes[id(value)] = node, value
            return
        for index, item in enumerate(value):
            getter = self.graph.create_node("call_function", operator.getitem, (node, index))
            if isinstance(item, Tensor):
                self._set_value(getter, item)
