"""The kernels that Inductor makes of a graph: read off its scheduler, before code is generated."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch._inductor import config
from torch._inductor.memory import reorder_for_peak_memory
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from remat.frontend.compile.scratch import scratch_bytes
from remat.frontend.compile.verify import copied_bytes, is_inside_a_kernel, live_peak_bytes
from remat.frontend.compile.versions import SchedulerPass, raised_inside


@dataclass(frozen=True)
class Kernel:
    """What one kernel writes, and all that it was made of, by the names of nodes. A library's call
    holds `scratch_bytes` while it runs; None where that was not measured."""

    written: tuple[str, ...]
    parts: tuple[str, ...]
    scratch_bytes: int | None = None


@dataclass(frozen=True)
class Observation:
    """A forward or backward graph as Inductor would run it: kernels in their order, the peak of
    what lives in it, and what of parameters it saves in another layout."""

    kernels: tuple[Kernel, ...] = ()
    live_bytes: int = 0
    copied_bytes: int = 0


class _Seen(Exception):
    """Ends a compilation once the kernels are known."""

    def __init__(self, observation: Observation) -> None:
        super().__init__("the kernels are known")
        self.observation = observation


class _Observer(SchedulerPass):
    def __init__(self, storages: Mapping[str, tuple[str, int]]) -> None:
        self.storages = storages

    def __call__(self, nodes: list[Any]) -> list[Any]:
        copied = 0 if V.graph.is_backward else copied_bytes()
        nodes = _as_run(nodes)
        kernels = tuple(kernels_of(nodes))
        scratch = [kernel.scratch_bytes or 0 for kernel in kernels]
        peak_bytes = live_peak_bytes(nodes, storages=self.storages, scratch=scratch)
        raise _Seen(Observation(kernels, peak_bytes, copied))

    def uuid(self) -> None:
        return None  # nothing is kept


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
    half: fx.GraphModule, storages: Mapping[str, tuple[str, int]], *, is_backward: bool
) -> Observation:
    """What Inductor would make of it. `storages` has name and bytes of what each input shows."""
    from torch._inductor.compile_fx import compile_fx_inner

    placeholders = half.graph.find_nodes(op="placeholder")
    static = [i for i, n in enumerate(placeholders) if str(n.target).startswith("primals")]
    module = fx.GraphModule(half, copy.deepcopy(half.graph))
    settings: dict[str, Any] = {
        "_post_fusion_custom_pass": _Observer(storages),
        "reorder_for_peak_memory": False,
        "fx_graph_cache": False,
    }
    module.graph.output_node().meta["user_visible_output_idxs"] = []
    try:
        with config.patch(settings):
            compile_fx_inner(
                module,
                [node.meta["val"] for node in placeholders],
                static_input_idxs=static,
                is_backward=is_backward,
            )
    except Exception as error:
        if (seen := raised_inside(error, _Seen)) is None:
            raise
        return seen.observation
    return Observation()  # a graph without a kernel


def kernels_of(nodes: Sequence[Any]) -> list[Kernel]:
    """Of a scheduled graph."""
    found: list[Kernel] = []
    for step, node in enumerate(nodes):
        written: dict[str, None] = {}
        for buffer in node.get_outputs():
            if is_inside_a_kernel(buffer.get_name(), nodes, step):
                continue
            origin = buffer.node.get_origin_node()
            if origin is not None:
                written[origin.name] = None
        origins = (getattr(part.node, "origins", None) or () for part in node.get_nodes())
        parts = dict.fromkeys(origin.name for each in origins for origin in each)
        scratch = scratch_bytes(node.node) if node.is_extern() else None
        found.append(Kernel(tuple(written), tuple(parts), scratch))
    return found
