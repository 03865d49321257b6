"""Alias analysis of fx nodes: which nodes share a storage, and which arguments a node writes to.

The analysis reads operator schemas, so it also holds for graphs whose fake tensors do not share
storages. The capture compares the storages of fake tensors instead (`capture/reading`).
"""

from __future__ import annotations

import operator

from torch import fx
from torch._ops import OpOverload

from remat.frontend.common.operators import written_arguments

_UNTAGGED_VIEWS = frozenset(
    {"aten._unsafe_view.default", "aten.detach.default", "aten.alias.default"}
)
"""Views that torch's schemas do not mark as views, or not in all versions."""


def is_getitem(node: fx.Node) -> bool:
    """True if the node selects one of several outputs of another node."""
    return node.target is operator.getitem


def is_view(node: fx.Node) -> bool:
    """True if the node's output shares the storage of its first argument, by its operator's schema;
    for an item of a tuple, if the tuple's node is a view."""
    target = node.target
    if is_getitem(node):
        parent = node.args[0]
        return isinstance(parent, fx.Node) and is_view(parent)
    if not isinstance(target, OpOverload):
        return False
    return bool(target.is_view) or str(target) in _UNTAGGED_VIEWS


def storage_base(node: fx.Node) -> fx.Node:
    """Return the node that owns the storage of this node's output: the node, unless it is a view.
    For a view of a tuple's element this is the `getitem` node."""
    while node.op == "call_function" and is_view(node):
        parent = node.args[0]
        assert isinstance(parent, fx.Node)
        node = parent
    return node


def producer(node: fx.Node) -> fx.Node:
    """Return the node that allocates and writes the storage of this node's output: an operation or
    a graph input."""
    node = storage_base(node)
    operation = node.args[0] if is_getitem(node) else node
    assert isinstance(operation, fx.Node)
    return operation


def mutated_args(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a node writes to, according to its operator's schema."""
    written = written_arguments(node.target, node.args, node.kwargs)
    return [item for item in written if isinstance(item, fx.Node)]
