"""Properties of single FX nodes: their bytes, the storage of their outputs, if they may recompute.

Symbolic sizes count as their upper bounds, because a plan is made for the largest sizes that its
code may receive. All sizes of a step grow with its symbols (batch, tokens), and so does its peak: a
plan that fits at the upper bounds fits at smaller sizes. `torch._dynamo.mark_dynamic(x, dim,
max=...)` sets a bound. A symbol without one gets one here, by a guard: a call with a larger size
recompiles and replans.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from math import prod

import sympy
import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_symbols

from remat.allocator.replay import round_size
from remat.frontend.common.aliases import is_getitem, is_view, mutated_args, storage_base
from remat.frontend.common.operators import is_random

_UNBOUNDED = 1 << 40
"""Upper bounds of this size and more mean that torch knows of no bound."""

_HEADROOM_FACTOR = 2
"""A missing bound becomes the size of the first call times this, rounded up to a power of two."""

ScopedSymbol = tuple[sympy.Symbol, ShapeEnv]
"""A symbol of a size with the shape environment that holds its value and bounds."""


def max_size(size: int | torch.SymInt | torch.SymFloat | torch.SymBool) -> int:
    """Return the upper bound of a size as an int; its hint if it has no bound, 0 without a hint.
    Adds no guard."""
    if isinstance(size, int):
        return size
    node = size.node
    upper = size_upper_bound(node.expr, node.shape_env)
    if upper is not None:
        return upper
    return int(node.hint) if node.hint is not None else 0


def size_upper_bound(expression: sympy.Expr | int, env: ShapeEnv) -> int | None:
    """Return the largest value that an expression of sizes may have, None if it is unbounded."""
    if isinstance(expression, int) or expression.is_Integer:
        return int(expression)
    upper = env.bound_sympy(expression).upper
    is_bounded = isinstance(upper, sympy.Integer) and abs(int(upper)) < _UNBOUNDED
    return int(upper) if is_bounded else None


def add_missing_bounds(placeholders: Iterable[fx.Node]) -> list[ScopedSymbol]:
    """Guard each unbounded symbol in the sizes of these placeholders by an upper bound with
    headroom for larger calls. Return the symbols that had no bound."""
    symbols = list(_size_symbols(placeholders))
    unbounded = [(symbol, env) for symbol, env in symbols if size_upper_bound(symbol, env) is None]
    for symbol, env in unbounded:
        size = _HEADROOM_FACTOR * int(env.backed_var_to_val[symbol])
        _guard_size_symbol(symbol, env, 1 << (size - 1).bit_length())
    return unbounded


def bound_by_current_size(symbols: Iterable[ScopedSymbol]) -> None:
    """Guard each symbol by its value in the current call: larger calls recompile."""
    for symbol, env in symbols:
        _guard_size_symbol(symbol, env, int(env.backed_var_to_val[symbol]))


def size_growth_factor(expression: sympy.Expr | int, env: ShapeEnv) -> float:
    """Return the upper bound of an expression of sizes divided by its value in the first call; 1.0
    if the bound or the value is unknown or 0."""
    first_values = env.backed_var_to_val
    if isinstance(expression, int) or not expression.free_symbols.issubset(first_values):
        return 1.0
    upper = size_upper_bound(expression, env)
    first = int(str(expression.xreplace(first_values)))
    return upper / first if upper is not None and first else 1.0


def _guard_size_symbol(symbol: sympy.Symbol, env: ShapeEnv, upper: int) -> None:
    """Guard a symbol of a size by an upper bound: calls above it recompile."""
    env.evaluate_expr(sympy.Le(symbol, upper))


def _size_symbols(placeholders: Iterable[fx.Node]) -> Iterator[ScopedSymbol]:
    """Yield the symbols in the sizes of placeholders that have a value in the first call."""
    seen: set[sympy.Symbol] = set()
    for node in placeholders:
        value = node.meta.get("val")
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for size in sizes:
            if not isinstance(size, torch.SymInt):
                continue
            env = size.node.shape_env
            for symbol in free_symbols(size) - seen:
                seen.add(symbol)
                if symbol in env.backed_var_to_val:
                    yield symbol, env


PIECE_KEY = "remat_piece"
"""The key in `meta` of the operation of which a node is a piece, and of the piece's index."""

_MODEL_VARIABLE = re.compile(r"[LG]\['\w+'\]\.?")
"""The start of torch's module paths: the Python variable that holds the model."""

_RECOMPUTABLE_NAMESPACES = frozenset({"aten", "prims", "quantized_decomposed", "torchvision"})

_SEED_GENERATORS = frozenset({"prims.inductor_seed.default", "prims.inductor_seeds.default"})
"""Operations that return other seeds at each run. Operations that read a seed are deterministic."""

_GATHERS = frozenset({"aten.index.Tensor", "aten.embedding.default", "aten.index_select.default"})

_UNTAGGED_ELEMENTWISE = _GATHERS | {"prims.convert_element_type.default", "aten.full.default"}
"""Elementwise operations without torch's tag `pointwise`."""

TRANSCENDENTAL = frozenset(
    f"aten.{name}.default"
    for name in ("exp", "expm1", "log", "log1p", "tanh", "sigmoid", "erf", "sin", "cos")
)
"""Functions that take longer on a CPU than moving their elements. Inductor's code for CPUs calls
the same vector functions as eager mode."""

_RANDOM = frozenset({"prims.inductor_random.default", "prims.inductor_randint.default"})

_SEED_LOOKUP = "prims.inductor_lookup_seed.default"

_ASSERTIONS = ("aten._assert_async.", "aten._assert_scalar.", "aten._assert_tensor_metadata.")

_MATMULS = frozenset({"aten.mm.default", "aten.bmm.default"})


def output_tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """Yield the fake tensors that a node outputs; none for a node that computes a scalar."""
    value = node.meta.get("val")
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(item, torch.Tensor):
            yield item


def device_of(items: Iterable[object]) -> torch.device:
    """Return the device of the first tensor that is not on the CPU; else the CPU."""
    devices = (item.device for item in items if isinstance(item, torch.Tensor))
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


def num_elements(tensor: torch.Tensor) -> int:
    """Return the number of elements of a tensor; symbolic sizes count as their upper bounds."""
    return prod(map(max_size, tensor.shape))


def storage_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the storage that a tensor with its strides needs, at the upper bounds of
    symbolic sizes. On CUDA they are rounded as the caching allocator rounds them."""
    extent = num_elements(tensor)
    if tensor.layout == torch.strided and extent:
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
        extent = 1 + sum((max_size(size) - 1) * max_size(stride) for size, stride in pairs)
    size_bytes = extent * tensor.element_size()
    return round_size(size_bytes) if tensor.device.type == "cuda" else size_bytes


def storage_by_schema(node: fx.Node, position: int, tensor: torch.Tensor) -> tuple[Hashable, int]:
    """Return the key and the bytes of the storage that a tensor belongs to, by the schemas of
    operators. The tensor is the output of `node` at `position`. For `TraceBuilder`."""
    base = storage_base(node)
    if is_getitem(base):
        return base.args, storage_bytes(tensor)
    return (base, position if base is node else -1), storage_bytes(tensor)


def node_bytes(node: fx.Node) -> int:
    """Return the bytes of all tensors that a node outputs."""
    return sum(map(storage_bytes, output_tensors(node)))


def has_multiple_outputs(node: fx.Node) -> bool:
    """True if the node outputs a tuple or list, from which `getitem` nodes select."""
    return isinstance(node.meta.get("val"), (tuple, list))


def is_symbolic_scalar(node: fx.Node) -> bool:
    """True if the node is a call without tensor outputs: it computes a size or another scalar and
    allocates nothing."""
    return node.op == "call_function" and not any(True for _ in output_tensors(node))


def is_operation(node: fx.Node) -> bool:
    """True if the node launches work: it is no view, no `getitem`, and no scalar computation."""
    return node.op == "call_function" and not (
        is_view(node) or is_getitem(node) or is_symbolic_scalar(node)
    )


def is_assertion(node: fx.Node) -> bool:
    """True if the node is an assertion: it raises an error if a condition is false, and returns
    nothing."""
    return is_symbolic_scalar(node) and str(node.target).startswith(_ASSERTIONS)


def has_side_effect(node: fx.Node) -> bool:
    """True if the node has to run even if its output is unused: an assertion, or an operation that
    mutates an argument."""
    return is_assertion(node) or bool(mutated_args(node))


def is_collective(node: fx.Node) -> bool:
    """True if the node is a collective operation, which all processes run together."""
    target = node.target
    return isinstance(target, OpOverload) and (
        "c10d" in target.namespace or target.namespace == "_dtensor"
    )


def is_recomputable(node: fx.Node) -> bool:
    """True if running the node a second time returns the same values and has no side effect."""
    target = node.target
    if is_getitem(node):
        return True
    if not isinstance(target, OpOverload) or samples_generator(node):
        return False
    return target.namespace in _RECOMPUTABLE_NAMESPACES and not target._schema.is_mutable


def storages_read_by(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that own the storages which these nodes read."""
    return {storage_base(argument) for node in nodes for argument in node.all_input_nodes}


def is_elementwise(node: fx.Node) -> bool:
    """True if a kernel can compute each output element independently: a deterministic pointwise
    operation or a gather."""
    target = node.target
    if not isinstance(target, OpOverload) or not is_operation(node) or not is_recomputable(node):
        return False
    return torch.Tag.pointwise in target.tags or str(target) in _UNTAGGED_ELEMENTWISE


def is_cpu_transcendental(node: fx.Node) -> bool:
    """True for exponentials and similar functions on a CPU, where recomputing an element takes
    longer than reading it."""
    on_cpu = any(tensor.device.type == "cpu" for tensor in output_tensors(node))
    return on_cpu and str(node.target) in TRANSCENDENTAL


def samples_generator(node: fx.Node) -> bool:
    """True if the node samples a device's random generator, for its elements or for a seed. What it
    returns depends on how many such operations ran before."""
    return is_random(node) or str(node.target) in _SEED_GENERATORS


def is_seeded_random(node: fx.Node) -> bool:
    """True if the node samples random numbers from a seed: the same ones at each run."""
    return str(node.target) in _RANDOM


def is_seed_lookup(node: fx.Node) -> bool:
    """True if the node selects one seed from the step's tensor of seeds."""
    return str(node.target) == _SEED_LOOKUP


def is_reduction(node: fx.Node) -> bool:
    """True if the node reduces many elements to one, as a sum or a maximum."""
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.reduction in target.tags


def is_gather(node: fx.Node) -> bool:
    """True if the node reads the elements that an index tensor selects."""
    return str(node.target) in _GATHERS


def is_concatenated(node: fx.Node) -> bool:
    """True if a concatenation reads the node's output, directly or through views."""
    return any(
        str(user.target) == "aten.cat.default" or (is_view(user) and is_concatenated(user))
        for user in node.users
    )


def is_extern_convolution(node: fx.Node) -> bool:
    """True if Inductor computes the node with a single extern kernel that writes its output: a
    convolution. On a GPU a convolution with a bias is excluded; its bias is added separately."""
    if node.target is not torch.ops.aten.convolution.default:
        return False
    return node.args[2] is None or node.meta["val"].device.type == "cpu"


def is_matmul(node: fx.Node) -> bool:
    """True if the node is a matrix product or a batch of them."""
    return str(node.target) in _MATMULS


def is_fusible(node: fx.Node) -> bool:
    """True if Inductor may fuse the node with its neighbours: it is no extern kernel and mutates
    no argument."""
    from torch._inductor.fx_passes.fusion_regions import is_fusible_node

    return is_fusible_node(node) and not mutated_args(node)


def copy_fx_graph(graph: fx.Graph) -> fx.Graph:
    """Return a copy of an fx graph; `meta` of its nodes is copied, the fake tensors are not."""
    copied, nodes = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        nodes[node] = copied.node_copy(node, nodes.__getitem__)
    return copied


def module_path(node: fx.Node) -> str:
    """Return the module path of a node, "" where torch does not record one."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    return _MODEL_VARIABLE.sub("", str(list(stack.values())[-1][0]), count=1)
