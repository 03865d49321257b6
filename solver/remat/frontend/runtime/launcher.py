"""Launchers: Python code, generated for a graph, that launches its operations with low overhead.

`torch.ops.aten.mm.default(x, y)` looks up five names and goes through Python's wrapper of the
overload and through autograd, which records nothing there. A launcher binds the C++ function of
each operation once, stores each constant once, and runs below autograd. Where a GPU waits for its
next kernel, this overhead is the time of a step, whatever the kernels do.

The graph itself is not changed, and can be printed, copied or pickled.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from keyword import iskeyword
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._ops import OpOverload

Launcher = Callable[[list[Any]], list[Any]]
"""A function that takes its inputs in a list, empties the list, and returns a list of outputs."""

PYTHON_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "aten._log_softmax.default": torch._log_softmax,
    "aten._softmax.default": torch._softmax,
    "aten.add.Tensor": torch.add,
    "aten.addmm.default": torch.addmm,
    "aten.bernoulli.p": torch.bernoulli,
    "aten.bmm.default": torch.bmm,
    "aten.cat.default": torch.cat,
    "aten.clone.default": torch.clone,
    "aten.convolution.default": torch.convolution,
    "aten.detach.default": torch.Tensor.detach,
    "aten.div.Tensor": torch.div,
    "aten.expand.default": torch.Tensor.expand,
    "aten.gelu.default": F.gelu,
    "aten.mm.default": torch.mm,
    "aten.mul.Tensor": torch.mul,
    "aten.native_dropout.default": torch.native_dropout,
    "aten.native_layer_norm.default": torch.native_layer_norm,
    "aten.permute.default": torch.permute,
    "aten.relu.default": torch.relu,
    "aten.sub.Tensor": torch.sub,
    "aten.sum.dim_IntList": torch.sum,
    "aten.t.default": torch.t,
    "aten.tanh.default": torch.tanh,
    "aten.transpose.int": torch.transpose,
    "aten.unsqueeze.default": torch.unsqueeze,
    "aten.view.default": torch.Tensor.view,
}
"""Python functions of torch that parse their arguments faster than the `OpOverload` of the same
name. For arguments of the types in the schema, each dispatches to that very overload."""


def generate_launcher(graph: fx.Graph) -> Launcher:
    """Return a function that runs an fx graph, and frees each value and input after its last
    use."""
    source = _LauncherSource()
    body = "\n    ".join(source.statements(graph))
    # No text of a document is in the code: variables are numbered, constants are globals.
    exec(compile(f"def launch(boxed):\n    {body}\n", "<launcher>", "exec"), source.globals)
    return _below_autograd(source.globals["launch"])


def _below_autograd(launch: Launcher) -> Launcher:
    """Return a launcher that runs `launch` without autograd's dispatch keys. Its callers have
    gradients disabled, where these would only pass the calls on. Views and tensor versions are
    tracked all the same.
    """
    guard = torch._C._AutoDispatchBelowAutograd

    def run(boxed: list[Any]) -> list[Any]:
        with guard():
            return launch(boxed)

    return run


class _LauncherSource:
    """Writes the statements of a launcher, and collects the globals that they refer to."""

    def __init__(self) -> None:
        self.globals: dict[str, Any] = {}
        self._variables: dict[fx.Node, str] = {}
        self._global_names: dict[object, str] = {}
        self._variable_numbers = itertools.count()

    def statements(self, graph: fx.Graph) -> list[str]:
        """Return the statements of the function that runs the graph, in order."""
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        lines = [f"[{', '.join(self._define(node) for node in inputs)}] = boxed", "boxed.clear()"]
        lines += [f"del {self._variables[node]}" for node in inputs if not node.users]
        last_uses = _last_uses(graph)
        for node in graph.nodes:
            if node.op == "output":
                lines.append(f"return {self._expression(node.args[0])}")
            elif node.op != "placeholder":
                call = self._call(node)
                lines.append(f"{self._define(node)} = {call}" if node.users else call)
                lines += [f"del {self._variables[dead]}" for dead in last_uses.get(node, ())]
        return lines

    def _define(self, node: fx.Node) -> str:
        """Return the name of a new variable for a node's value."""
        name = self._variables[node] = f"v{next(self._variable_numbers)}"
        return name

    def _call(self, node: fx.Node) -> str:
        """Return the Python expression that runs a node."""
        if node.target is operator.getitem:
            return f"{self._expression(node.args[0])}[{self._expression(node.args[1])}]"
        arguments = [self._expression(item) for item in node.args]
        if any(iskeyword(key) for key in node.kwargs):
            arguments.append(f"**{self._expression(dict(node.kwargs))}")
        else:
            arguments += [f"{key}={self._expression(item)}" for key, item in node.kwargs.items()]
        return f"{self._global(_fastest_function(node))}({', '.join(arguments)})"

    def _expression(self, item: object) -> str:
        """Return the Python expression of an argument, of nodes and constants."""
        if isinstance(item, fx.Node):
            return self._variables[item]
        if item is None or type(item) in (bool, int):
            return repr(item)
        if not any(True for _ in _nodes_in_argument(item)):
            return self._global(_builtin_containers(item))
        if isinstance(item, dict):
            return f"{{{', '.join(f'{k!r}: {self._expression(i)}' for k, i in item.items())}}}"
        assert isinstance(item, (list, tuple))
        return f"[{', '.join(self._expression(inner) for inner in item)}]"

    def _global(self, item: object) -> str:
        """Return the name of the global variable for a function or a constant argument. Define it
        if there is none."""
        key = item if callable(item) else (type(item), repr(item))
        if key not in self._global_names:
            name = self._global_names[key] = f"g{len(self._global_names)}"
            self.globals[name] = item
        return self._global_names[key]


def _fastest_function(node: fx.Node) -> Callable[..., Any]:
    """Return the fastest function that runs the same operation as a node: a Python function of
    torch with the same overload, the overload's C++ function, or the node's target."""
    target = node.target
    assert callable(target)
    # An overload that takes script objects has a subclass of its own, with another `__call__`.
    if not isinstance(target, OpOverload) or type(target) is not OpOverload:
        return target
    # With a scalar where the schema has a Tensor, torch's function may pick another overload.
    arguments = target._schema.arguments
    tensor_names = [a.name for a in arguments if str(a.type) == "Tensor"]
    positional = dict(zip((a.name for a in arguments), node.args, strict=False))
    if all(isinstance((positional | node.kwargs).get(name), fx.Node) for name in tensor_names):
        return PYTHON_FUNCTIONS.get(str(target), target._op)
    return target._op


def _nodes_in_argument(item: object) -> Iterable[fx.Node]:
    """Yield the nodes of an argument, inside of containers too."""
    if isinstance(item, fx.Node):
        yield item
    elif isinstance(item, (list, tuple, dict)):
        for inner in item.values() if isinstance(item, dict) else item:
            yield from _nodes_in_argument(inner)


def _builtin_containers(item: object) -> object:
    """Return an argument with lists and dicts in place of fx's immutable containers and tuples."""
    if isinstance(item, dict):
        return {key: _builtin_containers(inner) for key, inner in item.items()}
    if isinstance(item, (list, tuple)):
        return [_builtin_containers(inner) for inner in item]
    return item


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Map each node to the inputs that it is the last to read."""
    last_uses: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for operand in node.all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                last_uses.setdefault(node, []).append(operand)
    return last_uses
