"""The kernels that Inductor would generate for a graph, read from its scheduler.

The compilation is stopped before code generation.

Inductor's fusion of matrix products and additions is applied in advance. After the partition,
Inductor rewrites `add(mm(a, b), c)` to `addmm(c, a, b)`, an extern kernel. The gradient of a weight
that every step of a loop uses is a sum of products. With `addmm`, each product is added to the sum
as soon as it is computed. A plan on the graph before that rewrite would add all products in one
kernel, with all of them in memory. Where the other addend is computed after the product, the plan
keeps two kernels: Inductor's rewrite would delay the product, whose inputs then stay live.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import sympy
import torch
from torch import fx
from torch._inductor import config
from torch._inductor.pattern_matcher import is_match
from torch._inductor.virtualized import V

from remat.frontend.common.aliases import storage_base
from remat.frontend.compile.compat import SchedulerPass, cause_of_type, without_frames
from remat.frontend.compile.fx_utils import node_bytes
from remat.frontend.compile.inductor.buffer_reuse import (
    buffer_readers,
    cpu_reduction_buffers,
    in_place_candidates,
    internal_buffers,
)
from remat.frontend.compile.inductor.peak_check import (
    extern_workspace_bytes,
    in_inductor_order,
    layout_copy_bytes,
    live_peak_bytes,
)

_ADD = torch.ops.aten.add.Tensor
_ADDMM = torch.ops.aten.addmm.default

N = TypeVar("N")


@dataclass(frozen=True)
class Kernel(Generic[N]):
    """One of Inductor's kernels, in terms of FX nodes: of their names in the graph that Inductor
    schedules, or of the joint graph's nodes.

    `written` are the tensors that it writes, as far as Inductor reports them, and `origins` the
    operations that it was lowered from. `is_extern` marks extern kernels and templates.
    `workspace_bytes` are allocated only while it runs; None for an extern kernel that could not be
    measured. `in_place_pairs` are (output, input) pairs that may share memory if the input is dead
    after the kernel, in the order in which Inductor tries them.
    """

    written: tuple[N, ...]
    origins: tuple[N, ...]
    is_extern: bool = False
    workspace_bytes: int | None = None
    in_place_pairs: tuple[tuple[N, N], ...] = ()


@dataclass(frozen=True)
class ProbeResult:
    """A forward or backward graph as Inductor would run it.

    `kernels` are in the order of execution and `peak_bytes` is the peak of all inputs and buffers
    that are allocated or freed in the graph. `layout_copy_bytes` are the parameters and batch
    tensors that the graph saves as a copy in another layout. `output_strides` has the strides of
    each output by name, where they are constants.
    """

    kernels: tuple[Kernel[str], ...] = ()
    peak_bytes: int = 0
    layout_copy_bytes: int = 0
    output_strides: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict[str, tuple[int, ...]]
    )


@dataclass(frozen=True)
class InputLifetimes:
    """Which inputs of a forward or backward graph free their memory during the graph.

    `storages` has for each input the name of its storage base and the bytes that count for it: 0
    for parameters and the batch, which are allocated during the whole step. Inputs `overwritable`
    may be overwritten in place. `donated_bytes` are the tangents that are freed once they are read.
    Inputs `retained` stay allocated to the end: outputs of the forward that the caller references.
    """

    storages: Mapping[str, tuple[str, int]]
    overwritable: Collection[str]
    donated_bytes: Mapping[str, int]
    retained: Collection[str] = ()


def fuse_matmul_additions(gm: fx.GraphModule) -> None:
    """Rewrite the additions to matrix products in a forward or backward graph to `addmm`, as
    Inductor will, where that does not delay a product. Not if Inductor's pattern matcher is off.

    The new node has the name of the addition, by which the other graph of the step refers to it.
    """
    if not config.pattern_matcher:
        return
    graph = gm.graph
    position = {node: index for index, node in enumerate(graph.nodes)}
    for addition in reversed(graph.find_nodes(op="call_function", target=_ADD)):
        for product, addend in _fusible_products(addition):
            # An addition in another layout is not what `addmm` would write.
            if position[storage_base(addend)] < position[product] and _has_contiguous_output(
                addition
            ):
                _replace_with_addmm(graph, addition, product, addend)
                break
    gm.recompile()


def _fusible_products(addition: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (matrix product, other addend) for each of Inductor's patterns for `addmm` that matches
    an addition."""
    from torch._inductor.fx_passes import post_grad

    for pattern_pass in post_grad.pass_patterns:
        entries: list[Any] = pattern_pass.patterns.get(("call_function", _ADD), [])
        for entry in entries:
            if getattr(entry, "handler", None) is not post_grad.addmm:
                continue
            match = entry.pattern.match(addition)
            if is_match(match) and entry.extra_check(match):
                (product,) = (node for node in match.nodes if node is not addition)
                yield product, match.kwargs["inp"]


def _has_contiguous_output(node: fx.Node) -> bool:
    """True if the tensor that a node outputs is contiguous."""
    value = node.meta["val"]
    return bool(value.is_contiguous())


def _replace_with_addmm(
    graph: fx.Graph, addition: fx.Node, product: fx.Node, addend: fx.Node
) -> None:
    """Replace an addition and its matrix product by one `addmm` with the addition's name."""
    name = addition.name
    with graph.inserting_before(addition):
        fused = graph.call_function(_ADDMM, (addend, *product.args))
    fused.meta = dict(addition.meta)
    addition.replace_all_uses_with(fused)
    graph.erase_node(addition)
    graph.erase_node(product)
    fused.name = name


def probe_kernels(
    gm: fx.GraphModule, inputs: InputLifetimes, forward: ProbeResult | None
) -> ProbeResult:
    """Return the kernels that Inductor would run for a forward or backward graph, and their peak;
    an empty result for a graph without a kernel. `inputs` are the lifetimes of its inputs.

    For the backward, `forward` is the result of the forward: it has the layouts of saved tensors.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    placeholders = gm.graph.find_nodes(op="placeholder")
    static = [i for i, n in enumerate(placeholders) if str(n.target).startswith("primals")]
    module = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    settings: dict[str, Any] = {
        "_post_fusion_custom_pass": _ProbePass(inputs),
        "reorder_for_peak_memory": False,
        "fx_graph_cache": False,
    }
    module.graph.output_node().meta["user_visible_output_idxs"] = []
    try:
        with config.patch(settings):
            compile_fx_inner(
                module,
                [_example_input(node, forward) for node in placeholders],
                static_input_idxs=static,
                is_backward=forward is not None,
            )
    except Exception as error:
        if (finished := cause_of_type(error, _ProbeFinished)) is None:
            raise
        return without_frames(finished).result
    return ProbeResult()  # a graph without a kernel


class _ProbeFinished(Exception):
    """Raised to stop the compilation once the kernels are scheduled."""

    def __init__(self, result: ProbeResult) -> None:
        super().__init__("the kernels are scheduled")
        self.result = result


class _ProbePass(SchedulerPass):
    """Scheduler pass, after fusion, that raises `_ProbeFinished` with the scheduled kernels."""

    def __init__(self, inputs: InputLifetimes) -> None:
        self._inputs = inputs

    def __call__(self, nodes: list[Any]) -> list[Any]:
        copy_bytes = 0 if V.graph.is_backward else layout_copy_bytes()
        nodes = in_inductor_order(nodes)
        kernels = tuple(_inductor_kernels(nodes))
        peak_bytes = live_peak_bytes(
            nodes,
            self._inputs.retained,
            storages=self._inputs.storages,
            overwritable=self._inputs.overwritable,
            donated_bytes=self._inputs.donated_bytes,
        )
        raise _ProbeFinished(ProbeResult(kernels, peak_bytes, copy_bytes, _output_strides()))

    def uuid(self) -> None:
        """Return None: graphs with this pass are not cached."""
        return


def _output_strides() -> dict[str, tuple[int, ...]]:
    """Return the strides of the graph's outputs by name, where they are constants."""
    module: Any = V.graph.module
    returned = module.graph.output_node().args[0]
    constant_strides: dict[str, tuple[int, ...]] = {}
    for node, output in zip(returned, V.graph.graph_outputs, strict=True):
        if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor):
            strides = output.get_stride()
            if all(isinstance(stride, (int, sympy.Integer)) for stride in strides):
                constant_strides[node.name] = tuple(map(int, strides))
    return constant_strides


def _example_input(placeholder: fx.Node, forward: ProbeResult | None) -> Any:
    """Return the fake value of an input of the probed graph. In the backward, a saved tensor has
    the layout in which `forward` saves it."""
    value = placeholder.meta["val"]
    strides = None if forward is None else forward.output_strides.get(str(placeholder.target))
    if strides is None or strides == value.stride():
        return value
    return value.as_strided(value.size(), strides)


def _inductor_kernels(nodes: Sequence[Any]) -> list[Kernel[str]]:
    """Return the scheduled kernels, in their order, in terms of the names of FX nodes."""
    kernels: list[Kernel[str]] = []
    readers = buffer_readers(nodes)
    for node in nodes:
        written: dict[str, None] = {}
        internal = internal_buffers(node)
        for buffer in node.get_outputs():
            if buffer.get_name() in internal:
                continue
            origin = buffer.node.get_origin_node()
            if origin is not None:
                written[origin.name] = None
        ir_nodes = (part.node for part in node.get_nodes())
        origin_sets = (getattr(ir_node, "origins", None) or () for ir_node in ir_nodes)
        origins = dict.fromkeys(origin.name for origins in origin_sets for origin in origins)
        workspace_bytes = (
            extern_workspace_bytes(node.node)
            if node.is_extern()
            else _cpu_reduction_buffer_bytes(node)
        )
        in_place_pairs = tuple(
            (_fx_node_name(output), _fx_node_name(read))
            for output, read, _ in in_place_candidates(node, readers)
        )
        is_extern = node.is_extern() or node.is_template()
        kernels.append(
            Kernel(tuple(written), tuple(origins), is_extern, workspace_bytes, in_place_pairs)
        )
    return kernels


def _cpu_reduction_buffer_bytes(kernel: Any) -> int:
    """Return the bytes of a kernel's internal buffers with results of reductions on the CPU."""
    names = cpu_reduction_buffers(kernel)
    origins = (b.node.get_origin_node() for b in kernel.get_outputs() if b.get_name() in names)
    return sum(node_bytes(origin) for origin in origins if origin is not None)


def _fx_node_name(buffer_name: str) -> str:
    """Return the name of the FX node that a buffer or graph input holds; "" if Inductor does not
    record it."""
    buffer = V.graph.scheduler.name_to_buf.get(buffer_name)
    if buffer is None:
        return buffer_name
    if (origin := buffer.node.get_origin_node()) is not None:
        return origin.name
    # A copy in the layout that an extern kernel requires has no origin node. It holds the one of
    # its origins that the extern kernel's last node reads.
    calls = [u.node.node for u in buffer.users if getattr(u.node, "is_extern", bool)()]
    last = {n for call in calls for n in call.origins if call.origins.isdisjoint(n.users)}
    names = {n for call in last for n in call.all_input_nodes} & set(buffer.node.origins)
    return names.pop().name if len(names) == 1 else ""
