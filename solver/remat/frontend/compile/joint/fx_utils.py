"""What is asked of single fx nodes: their bytes, whose storage they show, whether they run again.

Sizes that are symbols count as the largest that they may be (`sizes.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from math import prod

import torch
from torch import fx
from torch._ops import OpOverload

from remat.allocator.replay import rounded
from remat.frontend.common.operators import is_seeded
from remat.frontend.compile.joint.symbolic_sizes import largest

_VIEWS = frozenset({"aten._unsafe_view.default", "aten.detach.default", "aten.alias.default"})
"""Views that torch's schemas do not call so, or not in all versions."""

_PURE = frozenset({"aten", "prims", "quantized_decomposed", "torchvision"})
"""Namespaces of operations that may run again."""

_KEPT = frozenset({"prims.inductor_seed.default", "prims.inductor_seeds.default"})
"""A second run would draw other numbers; what reads a seed draws the same again."""

_GATHERS = frozenset({"aten.index.Tensor", "aten.embedding.default", "aten.index_select.default"})

_ELEMENTWISE = _GATHERS | {"prims.convert_element_type.default", "aten.full.default"}
"""Beside what torch tags as such."""

FUNCTIONS = frozenset(
    f"aten.{name}.default"
    for name in ("exp", "expm1", "log", "log1p", "tanh", "sigmoid", "erf", "sin", "cos")
)
"""What takes longer than moving a number. Inductor's code on CPUs calls the same vector functions
as eager mode does."""

_DRAWS = frozenset({"prims.inductor_random.default", "prims.inductor_randint.default"})

_SEED_OF = "prims.inductor_lookup_seed.default"

_CHECKS = ("aten._assert_async.", "aten._assert_scalar.", "aten._assert_tensor_metadata.")

_PRODUCTS = frozenset({"aten.mm.default", "aten.bmm.default"})


def tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """The tensors that an operation makes; none for one that makes numbers."""
    value = node.meta.get("val")
    for each in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(each, torch.Tensor):
            yield each


def elements(tensor: torch.Tensor) -> int:
    """How many numbers it has."""
    return prod(map(largest, tensor.shape))


def storage_bytes(tensor: torch.Tensor) -> int:
    """What it takes where it owns its storage: as far as its strides reach, and on CUDA as the
    allocator rounds."""
    reach = elements(tensor)
    if tensor.layout == torch.strided and reach:
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        reach = 1 + sum((largest(size) - 1) * largest(stride) for size, stride in pairs)
    size_bytes = reach * tensor.element_size()
    return rounded(size_bytes) if tensor.device.type == "cuda" else size_bytes


def node_bytes(node: fx.Node) -> int:
    """Of all tensors that it makes."""
    return sum(map(storage_bytes, tensors(node)))


def is_item(node: fx.Node) -> bool:
    """Whether it takes one result of several."""
    return node.target is operator.getitem


def makes_several(node: fx.Node) -> bool:
    """Whether it has several results, which others take one by one."""
    return isinstance(node.meta.get("val"), (tuple, list))


def is_view(node: fx.Node) -> bool:
    """Whether it shows the storage of its first argument."""
    target = node.target
    if is_item(node):
        source = node.args[0]
        return isinstance(source, fx.Node) and is_view(source)
    if not isinstance(target, OpOverload):
        return False
    return bool(target.is_view) or str(target) in _VIEWS


def is_number(node: fx.Node) -> bool:
    """Whether it computes sizes and other numbers: it takes no memory."""
    return node.op == "call_function" and not any(True for _ in tensors(node))


def is_work(node: fx.Node) -> bool:
    """Whether it is an operation that runs: no view, no part of a result, no number."""
    return node.op == "call_function" and not (is_view(node) or is_item(node) or is_number(node))


def source(node: fx.Node) -> fx.Node:
    """The node whose storage it shows: itself, but for views."""
    while node.op == "call_function" and is_view(node):
        first = node.args[0]
        assert isinstance(first, fx.Node)
        node = first
    return node


def maker(node: fx.Node) -> fx.Node:
    """The operation that makes this storage."""
    node = source(node)
    first = node.args[0] if is_item(node) else node
    assert isinstance(first, fx.Node)
    return first


def changes(node: fx.Node) -> list[fx.Node]:
    """The arguments that it writes into."""
    target = node.target
    if not isinstance(target, OpOverload):
        return []
    found: list[fx.Node] = []
    for argument, given in zip(target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            items = given if isinstance(given, (list, tuple)) else (given,)
            found += [item for item in items if isinstance(item, fx.Node)]
    return found


def is_check(node: fx.Node) -> bool:
    """Whether it makes nothing, and raises where something does not hold: `assert` of the user."""
    return is_number(node) and str(node.target).startswith(_CHECKS)


def has_effect(node: fx.Node) -> bool:
    """Whether it runs also where nobody reads what it makes."""
    return is_check(node) or bool(changes(node))


def is_collective(node: fx.Node) -> bool:
    """Whether other processes take part."""
    target = node.target
    return isinstance(target, OpOverload) and (
        "c10d" in target.namespace or target.namespace == "_dtensor"
    )


def may_run_again(node: fx.Node) -> bool:
    """Whether a second run gives the same and changes nothing."""
    target = node.target
    if is_item(node):
        return True
    if not isinstance(target, OpOverload) or str(target) in _KEPT:
        return False
    if target.namespace not in _PURE or target._schema.is_mutable:
        return False
    return not is_seeded(node)


def read_by(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes whose storages these operations read."""
    return {source(n) for node in nodes for n in node.all_input_nodes}


def is_elementwise(node: fx.Node) -> bool:
    """Whether each number that it makes is made by itself, and is the same each time."""
    target = node.target
    if not isinstance(target, OpOverload) or not is_work(node) or not may_run_again(node):
        return False
    return torch.Tag.pointwise in target.tags or str(target) in _ELEMENTWISE


def takes_long(node: fx.Node) -> bool:
    """Whether it takes longer to make again than to read: exponentials and their kin, on CPUs."""
    on_cpu = any(tensor.device.type == "cpu" for tensor in tensors(node))
    return on_cpu and str(node.target) in FUNCTIONS


def is_draw(node: fx.Node) -> bool:
    """Whether it makes random numbers of a seed: the same each time."""
    return str(node.target) in _DRAWS


def is_seed(node: fx.Node) -> bool:
    """Whether it takes one seed of several."""
    return str(node.target) == _SEED_OF


def is_sum(node: fx.Node) -> bool:
    """Whether it makes one number of several, of each of many places."""
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.reduction in target.tags


def is_gather(node: fx.Node) -> bool:
    """Whether it takes numbers from places that others name."""
    return str(node.target) in _GATHERS


def is_joined(node: fx.Node) -> bool:
    """Whether it is a part of a concatenation, or shown by one."""
    return any(
        str(u.target) == "aten.cat.default" or (is_view(u) and is_joined(u)) for u in node.users
    )


def is_written_anyway(node: fx.Node) -> bool:
    """Whether Inductor calls one kernel of a library for it, which writes its result: a
    convolution, but that a GPU adds its bias apart."""
    if node.target is not torch.ops.aten.convolution.default:
        return False
    return node.args[2] is None or node.meta["val"].device.type == "cpu"


def is_product(node: fx.Node) -> bool:
    """Whether it multiplies matrices."""
    return str(node.target) in _PRODUCTS


def is_fusible(node: fx.Node) -> bool:
    """Whether a compiler makes one kernel of it and its neighbours: it is no call of a library."""
    from torch._inductor.fx_passes.fusion_regions import is_fusible_node

    return is_fusible_node(node) and not changes(node)
