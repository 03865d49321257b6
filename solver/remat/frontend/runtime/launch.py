"""A graph as one plain function that launches its operations with as little in between as there is.

`torch.ops.aten.mm.default(x, y)` looks five names up, goes through Python's wrapper of the overload
and through autograd, which records nothing in there. A launcher binds the C++ function of each
operation once, writes each constant down once, and runs below autograd. Where a GPU waits for its
next kernel this is what a step takes, whatever the kernels do.

The graph itself stays what it was, to be printed, copied or pickled.
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
"""Takes its inputs in a list, which it empties."""

BINDINGS: dict[str, Callable[..., Any]] = {
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
"""torch's own Python functions, which read their arguments faster than `OpOverload` does. For
arguments of the types that its schema names, each comes to that very overload."""


def launcher(graph: fx.Graph) -> Launcher:
    """The function of a straight-line graph; values die after their last use, inputs too."""
    writer = _Writer()
    body = "\n    ".join(writer.lines(graph))
    # Nothing of a document is in the text: variables are numbered, constants are bound.
    exec(compile(f"def launch(boxed):\n    {body}\n", "<launcher>", "exec"), writer.bound)
    return _below_autograd(writer.bound["launch"])


def _below_autograd(launch: Launcher) -> Launcher:
    """Whoever runs this has gradients disabled: autograd's kernels would only pass calls on. Views
    and versions of tensors are tracked all the same."""
    guard = torch._C._AutoDispatchBelowAutograd

    def run(boxed: list[Any]) -> list[Any]:
        with guard():
            return launch(boxed)

    return run


class _Writer:
    def __init__(self) -> None:
        self.bound: dict[str, Any] = {}
        self._variables: dict[fx.Node, str] = {}
        self._constants: dict[object, str] = {}
        self._numbers = itertools.count()

    def lines(self, graph: fx.Graph) -> list[str]:
        """The statements, in order."""
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        lines = [f"[{', '.join(self._define(node) for node in inputs)}] = boxed", "boxed.clear()"]
        lines += [f"del {self._variables[node]}" for node in inputs if not node.users]
        last = _last_uses(graph)
        for node in graph.nodes:
            if node.op == "output":
                lines.append(f"return {self._text(node.args[0])}")
            elif node.op != "placeholder":
                call = self._call(node)
                lines.append(f"{self._define(node)} = {call}" if node.users else call)
                lines += [f"del {self._variables[dying]}" for dying in last.get(node, ())]
        return lines

    def _define(self, node: fx.Node) -> str:
        name = self._variables[node] = f"v{next(self._numbers)}"
        return name

    def _call(self, node: fx.Node) -> str:
        if node.target is operator.getitem:
            return f"{self._text(node.args[0])}[{self._text(node.args[1])}]"
        texts = [self._text(item) for item in node.args]
        if any(iskeyword(key) for key in node.kwargs):
            texts.append(f"**{self._text(dict(node.kwargs))}")
        else:
            texts += [f"{key}={self._text(item)}" for key, item in node.kwargs.items()]
        return f"{self._constant(_bound(node))}({', '.join(texts)})"

    def _text(self, item: object) -> str:
        if isinstance(item, fx.Node):
            return self._variables[item]
        if item is None or type(item) in (bool, int):
            return repr(item)
        if not any(True for _ in _nodes(item)):
            return self._constant(_plain(item))
        if isinstance(item, dict):
            return f"{{{', '.join(f'{k!r}: {self._text(i)}' for k, i in item.items())}}}"
        assert isinstance(item, (list, tuple))
        return f"[{', '.join(self._text(inner) for inner in item)}]"

    def _constant(self, item: object) -> str:
        """The global that holds a function or an argument."""
        key = item if callable(item) else (type(item), repr(item))
        if key not in self._constants:
            name = self._constants[key] = f"g{len(self._constants)}"
            self.bound[name] = item
        return self._constants[key]


def _bound(node: fx.Node) -> Callable[..., Any]:
    """What to call for a node: the fastest that is the same operation."""
    target = node.target
    assert callable(target)
    # An overload that takes script objects is of a type of its own, which calls otherwise.
    if not isinstance(target, OpOverload) or type(target) is not OpOverload:
        return target
    # An argument that is a number where the schema says Tensor may come to another overload.
    arguments = target._schema.arguments
    tensors = [a.name for a in arguments if str(a.type) == "Tensor"]
    given = dict(zip((a.name for a in arguments), node.args, strict=False))
    if all(isinstance((given | node.kwargs).get(name), fx.Node) for name in tensors):
        return BINDINGS.get(str(target), target._op)
    return target._op


def _nodes(item: object) -> Iterable[fx.Node]:
    if isinstance(item, fx.Node):
        yield item
    elif isinstance(item, (list, tuple, dict)):
        for inner in item.values() if isinstance(item, dict) else item:
            yield from _nodes(inner)


def _plain(item: object) -> object:
    """Without fx's immutable containers."""
    if isinstance(item, dict):
        return {key: _plain(inner) for key, inner in item.items()}
    if isinstance(item, (list, tuple)):
        return [_plain(inner) for inner in item]
    return item


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """The nodes that nobody reads after this one."""
    found: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        for read in node.all_input_nodes:
            if read not in seen:
                seen.add(read)
                found.setdefault(node, []).append(read)
    return found
