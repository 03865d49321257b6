"""The kernels that Inductor makes of a graph: read off its scheduler, before code is generated."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx
from torch._inductor import config
from torch._inductor.memory import reorder_for_peak_memory
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from remat.frontend.compile.inductor.buffer_reuse import (
    inside_of,
    may_overwrite,
    passed_on,
    readers_of,
)
from remat.frontend.compile.inductor.compat import SchedulerPass, raised_inside
from remat.frontend.compile.inductor.extern_workspace import scratch_bytes
from remat.frontend.compile.inductor.peak_check import copied_bytes, live_peak_bytes
from remat.frontend.compile.joint.fx_utils import node_bytes


@dataclass(frozen=True)
class Kernel:
    """What one kernel writes, and all that it was made of, by the names of nodes. `is_call` where a
    library has it, or a template. It holds `scratch_bytes` while it runs; None for a library's call
    where that was not measured. `over` has what it writes and what it may write that over, in
    Inductor's order."""

    written: tuple[str, ...]
    parts: tuple[str, ...]
    is_call: bool = False
    scratch_bytes: int | None = None
    over: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Observation:
    """A forward or backward graph as Inductor would run it: kernels in their order, the peak of
    what lives in it, what of parameters it saves in another layout, and the strides of what it
    returns, by name, where they are numbers."""

    kernels: tuple[Kernel, ...] = ()
    live_bytes: int = 0
    copied_bytes: int = 0
    strides: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])


class _Seen(Exception):
    """Ends a compilation once the kernels are known."""

    def __init__(self, observation: Observation) -> None:
        super().__init__("the kernels are known")
        self.observation = observation


class _Observer(SchedulerPass):
    def __init__(
        self,
        storages: Mapping[str, tuple[str, int]],
        given: Collection[str],
        passing: Mapping[str, int],
    ) -> None:
        self.storages = storages
        self.given = given
        self.passing = passing

    def __call__(self, nodes: list[Any]) -> list[Any]:
        copied = 0 if V.graph.is_backward else copied_bytes()
        nodes = _as_run(nodes)
        kernels = tuple(kernels_of(nodes))
        peak_bytes = live_peak_bytes(
            nodes, storages=self.storages, given=self.given, passing=self.passing
        )
        raise _Seen(Observation(kernels, peak_bytes, copied, _strides()))

    def uuid(self) -> None:
        return None  # nothing is kept


def _strides() -> dict[str, tuple[int, ...]]:
    module: Any = V.graph.module
    returned = module.graph.output_node().args[0]
    found: dict[str, tuple[int, ...]] = {}
    for node, made in zip(returned, V.graph.graph_outputs, strict=True):
        if isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor):
            strides = made.get_stride()
            if all(isinstance(stride, (int, sympy.Integer)) for stride in strides):
                found[node.name] = tuple(map(int, strides))
    return found


def _as_run(nodes: list[Any]) -> list[Any]:
    """In the order that Inductor gives them by default, after fusion."""
    scheduler = V.graph.scheduler
    return reorder_for_peak_memory(
        nodes,
        scheduler.name_to_buf,
        scheduler.name_to_fused_node,
        OrderedSet(V.graph.graph_inputs.keys()),
        OrderedSet(V.graph.get_output_names()),
    )


def observed(
    half: fx.GraphModule,
    storages: Mapping[str, tuple[str, int]],
    given: Collection[str],
    passing: Mapping[str, int],
    forward: Observation | None,
) -> Observation:
    """What Inductor would make of it: of the backward, where the `forward` is known. `storages` has
    name and bytes of what each input shows; inputs `given` may be written over, those `passing` are
    freed once they are read."""
    from torch._inductor.compile_fx import compile_fx_inner

    placeholders = half.graph.find_nodes(op="placeholder")
    static = [i for i, n in enumerate(placeholders) if str(n.target).startswith("primals")]
    module = fx.GraphModule(half, copy.deepcopy(half.graph))
    settings: dict[str, Any] = {
        "_post_fusion_custom_pass": _Observer(storages, given, passing),
        "reorder_for_peak_memory": False,
        "fx_graph_cache": False,
    }
    module.graph.output_node().meta["user_visible_output_idxs"] = []
    try:
        with config.patch(settings):
            compile_fx_inner(
                module,
                [_laid_out(node, forward) for node in placeholders],
                static_input_idxs=static,
                is_backward=forward is not None,
            )
    except Exception as error:
        if (seen := raised_inside(error, _Seen)) is None:
            raise
        return seen.observation
    return Observation()  # a graph without a kernel


def _laid_out(placeholder: fx.Node, forward: Observation | None) -> Any:
    """An input; what the forward saves in the layout in which it does, as AOTAutograd has it."""
    value = placeholder.meta["val"]
    strides = None if forward is None else forward.strides.get(str(placeholder.target))
    if strides is None or strides == value.stride():
        return value
    return value.as_strided(value.size(), strides)


def kernels_of(nodes: Sequence[Any]) -> list[Kernel]:
    """Of a scheduled graph."""
    found: list[Kernel] = []
    readers = readers_of(nodes)
    for node in nodes:
        written: dict[str, None] = {}
        inside = inside_of(node)
        for buffer in node.get_outputs():
            if buffer.get_name() in inside:
                continue
            origin = buffer.node.get_origin_node()
            if origin is not None:
                written[origin.name] = None
        origins = (getattr(part.node, "origins", None) or () for part in node.get_nodes())
        parts = dict.fromkeys(origin.name for each in origins for origin in each)
        scratch = scratch_bytes(node.node) if node.is_extern() else _passed_on_bytes(node)
        over = tuple(
            (_origin(made), _origin(before)) for made, before, _ in may_overwrite(node, readers)
        )
        is_call = node.is_extern() or node.is_template()
        found.append(Kernel(tuple(written), tuple(parts), is_call, scratch, over))
    return found


def _passed_on_bytes(node: Any) -> int:
    names = passed_on(node)
    origins = (b.node.get_origin_node() for b in node.get_outputs() if b.get_name() in names)
    return sum(node_bytes(origin) for origin in origins if origin is not None)


def _origin(name: str) -> str:
    """The node that a buffer is of, "" where Inductor does not tell; an input has its name."""
    buffer = V.graph.scheduler.name_to_buf.get(name)
    if buffer is None:
        return name
    if (origin := buffer.node.get_origin_node()) is not None:
        return origin.name
    # Made in the layout that a library wants: of what it is made of, what the library reads.
    calls = (u.node.node for u in buffer.users if getattr(u.node, "is_extern", bool)())
    last = {n for call in calls for n in call.origins if call.origins.isdisjoint(n.users)}
    found = {n for call in last for n in call.all_input_nodes} & set(buffer.node.origins)
    return found.pop().name if len(found) == 1 else ""
